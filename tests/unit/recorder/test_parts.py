"""Where the memory is of a tensor that has none, or not all, of its own."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

from ampmem.recorder.facts.addresses import bytes_of, dtype_of, elements_of, parts_of  # noqa: E402


def test_a_tensor_is_its_own_part() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    assert parts_of(weight) == (weight,)
    assert (elements_of(weight), bytes_of(weight), dtype_of(weight)) == (12, 48, torch.float32)


def test_a_wrapper_has_the_parts_of_what_it_wraps() -> None:
    inner = [torch.ones(3, 4) for _ in range(3)]
    wrapper = TwoTensor(inner[0], TwoTensor(inner[1], inner[2]))
    assert [part.data_ptr() for part in parts_of(wrapper)] == [tensor.data_ptr() for tensor in inner]
    assert (elements_of(wrapper), bytes_of(wrapper)) == (12, 3 * 48)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_has_indices_and_values(layout: torch.layout) -> None:
    tensor = torch.eye(5).to_sparse(layout=layout)
    *indices, values = parts_of(tensor)
    assert values.dtype == torch.float32
    assert {part.dtype for part in indices} == {torch.int64}
    assert bytes_of(tensor) == sum(part.numel() * part.element_size() for part in (*indices, values))


def test_four_bit_weights_stand_for_more_elements_than_they_have() -> None:
    """As bitsandbytes keeps them: two in a byte, with the scales of their blocks beside."""

    class Packed(nn.Parameter):
        quant_state: SimpleNamespace

    packed = Packed(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
    nested = SimpleNamespace(absmax=torch.ones(1), code=torch.ones(16))
    packed.quant_state = SimpleNamespace(shape=torch.Size([8, 16]), absmax=torch.ones(2), code=torch.ones(16))
    packed.quant_state.state2 = nested
    assert elements_of(packed) == 128
    assert bytes_of(packed) == 64 + 4 * (2 + 16 + 1 + 16)
    assert dtype_of(packed) == torch.uint8


def test_what_raises_is_taken_as_it_is() -> None:
    class Broken(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            raise RuntimeError("not now")

        @staticmethod
        def __tensor_unflatten__(*_: object) -> None:
            return None

    tensor = torch.ones(3).as_subclass(Broken)
    assert parts_of(tensor)[0] is tensor
