"""Which bytes of a parameter are its own, whatever its strides are."""

import torch

from ampmem.recorder.models.models import Covered


def overlaps(*tensors: torch.Tensor) -> list[int]:
    covered = Covered(torch.Tensor.data_ptr)
    return [covered.overlap(covered.place(t), t.numel() * t.element_size()) for t in tensors]


def test_rows_columns_and_what_lies_in_between() -> None:
    whole = torch.zeros(8, 16)
    assert overlaps(whole, whole[:4], whole[:, :3], whole[2:5, 4:8]) == [0, 4 * 64, 4 * 24, 4 * 12]
    assert overlaps(whole[:4], whole[2:6], whole[6:], whole) == [0, 4 * 32, 0, 4 * 16 * 8]
    assert overlaps(whole[:, :3], whole[:, 2:5], whole) == [0, 4 * 8, 4 * 8 * 5]


def test_transposed_and_expanded() -> None:
    whole = torch.zeros(8, 16)
    assert overlaps(whole, whole.T) == [0, 4 * 128]
    assert overlaps(torch.zeros(1).expand(10)) == [36]
    assert overlaps(torch.zeros(0), torch.zeros(())) == [0, 0]


def test_the_same_place_is_that_of_the_same_elements() -> None:
    whole = torch.zeros(8, 16)
    covered = Covered(torch.Tensor.data_ptr)
    assert covered.place(whole) == covered.place(whole.T) == covered.place(whole.view(-1))
    assert covered.place(whole[:, :8]) != covered.place(whole[:4])
