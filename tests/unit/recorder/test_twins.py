"""Which parameters a tensor of an optimizer's is a copy of: by elements and values, not by name."""

import pytest

torch = pytest.importorskip("torch")

from ampmem.recorder.models.optimizers import chosen_from, is_master, partition_of, twins_of  # noqa: E402


def parameters(*sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).bfloat16() for size in sizes]


def slices(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """What each rank has of all ``tensors`` laid side by side in float32, zeros at the end."""
    flat = torch.cat([tensor.float().view(-1) for tensor in tensors])
    padded = torch.cat([flat, torch.zeros(-len(flat) % ranks)])
    return [piece.clone() for piece in padded.chunk(ranks)]


@pytest.mark.parametrize(("ranks", "expected"), [(2, [(0, 1), (1, 2)]), (3, [(0, 1), (1, 1), (1, 2)])])
def test_a_slice_of_all_parameters_is_known_by_its_values(ranks: int, expected: list[tuple[int, int]]) -> None:
    mine = parameters(100, 130, 71)
    found = [partition_of(piece, mine) for piece in slices(mine, ranks)]
    assert [(places[0], places[-1]) for places in found] == expected
    assert [list(twins_of(piece, mine)) for piece in slices(mine, ranks)][-1] == []


def test_other_values_and_other_sizes_are_no_slice() -> None:
    mine = parameters(100, 130, 70)
    assert not partition_of(torch.randn(150), mine)
    assert not partition_of(slices(mine, 2)[0][:-30].clone(), mine)  # no whole number of them makes up all
    assert not partition_of(slices(mine, 2)[0].bfloat16(), mine)  # of the same type


def test_a_slice_that_could_be_two_is_none() -> None:
    same = [torch.zeros(64).bfloat16(), torch.zeros(64).bfloat16()]
    assert not partition_of(torch.zeros(64), same)


def test_a_flat_copy_of_some_parameters_is_known_by_its_values() -> None:
    mine = parameters(100, 30, 70, 30, 50)
    mine[1] = mine[3] = torch.zeros(30).bfloat16()
    for places in ([0, 2], [1, 4], [0, 1, 3, 4], [0, 2, 3]):
        flat = torch.cat([mine[place].float() for place in places])
        assert [mine[place].numel() for place in chosen_from(flat, mine)] == [mine[place].numel() for place in places]
        assert not chosen_from(flat + 1, mine)
    assert chosen_from(torch.cat([mine[0].float(), mine[2].float(), torch.zeros(2)]), mine) == [0, 2]
    assert not chosen_from(torch.zeros(60), [mine[1], mine[0], mine[3]])  # nothing is told by zeros


def test_on_a_device_a_flat_copy_of_all_matrices_is_known_by_its_size() -> None:
    mine = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((4, 5), (5,), (5, 6), (6,))]
    assert chosen_from(torch.empty(50, device="meta"), mine) == [0, 2]
    assert chosen_from(torch.empty(11, device="meta"), mine) == [1, 3]
    assert chosen_from(torch.empty(26, device="meta"), mine) == []


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1), (2, -1)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_of_several_parameters_may_have_any_shape(shape: tuple[int, ...], device: str) -> None:
    mine = [each.to(device) for each in parameters(100, 30, 70)]
    copy = torch.cat([each.float() for each in mine]).view(shape)
    assert list(twins_of(copy, mine)) == [0, 1, 2]
    padded = torch.cat([copy.reshape(-1), torch.zeros(8, device=device)]).view(shape)
    assert list(twins_of(padded, mine)) == ([] if shape == (2, -1) else [0, 1, 2])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_master_copy_may_contain_parameters_that_are_in_float32_themselves(device: str) -> None:
    first, norm, last = parameters(100, 30, 70)
    mine = [each.to(device) for each in (first, norm.float(), last)]
    assert list(twins_of(torch.cat([each.float() for each in mine]), mine)) == [0, 1, 2]
    matrices = [torch.randn(4, 5).bfloat16().to(device), torch.randn(3, 7).to(device)]
    some = [matrices[0], mine[1], matrices[1]]
    assert chosen_from(torch.cat([each.float().view(-1) for each in matrices]).view(1, -1), some) == [0, 2]
    # What has the values of float32 parameters alone is another parameter, or a copy in the same precision.
    assert not twins_of(mine[1].clone(), mine)
    assert not chosen_from(mine[1].clone(), mine)
    if device == "cpu":
        assert not twins_of(torch.cat([first.float(), norm.float() * 1.001, last.float()]), mine)


def test_a_master_copy_in_the_state_is_known_by_its_name_or_by_its_values() -> None:
    (half,) = parameters(50)
    master = half.float() * (1 + 2**-10)
    assert is_master("master_param", torch.zeros(50), half)
    assert is_master("fp32", master, half)
    assert not is_master("exp_avg", torch.randn(50), half)
    assert not is_master("exp_avg", torch.zeros(50), torch.zeros(50).bfloat16())  # nothing is told by zeros
    assert not is_master("master_param", half.clone(), half)  # of the same type
    assert not is_master("master_param", torch.zeros(49), half)
