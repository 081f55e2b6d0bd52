"""The types and shapes in a recording are those of the tensors, as the script itself knows them."""

from typing import Any

import pytest
import torch
from support import measure
from torch import Tensor, nn
from torch.nested import nested_tensor
from torch.testing._internal.two_tensor import TwoTensor

import ampmem
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.timeline.categories import Category
from ampmem.names import shape_of

WIDTH = 16

clean_start = measure.clean_start
pytestmark = pytest.mark.usefixtures("clean_start")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


def type_of(tensor: Tensor) -> tuple[str, tuple[int, ...] | None]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def found(analysis: Analysis) -> list[tuple[str, tuple[int, ...] | None]]:
    """The type and the shape of each allocation."""
    texts, tensors = analysis.recording.texts, analysis.tensors
    return [(texts[dtype], shape_of(texts[shape])) for dtype, shape in zip(tensors.dtype, tensors.shape, strict=True)]


def at_end(analysis: Analysis) -> dict[int, tuple[str, tuple[int, ...] | None]]:
    """The type and the shape of what lives in the end, by address."""
    alive = analysis.lifetimes.alive_at(len(analysis.recording.events))
    return {
        address: kind
        for address, kind, lives in zip(analysis.lifetimes.address.tolist(), found(analysis), alive, strict=True)
        if lives
    }


@pytest.mark.parametrize("autocast", [False, True])
def test_what_lives_has_the_types_and_shapes_of_its_tensors(autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda *called: kept.append(called[2]))
        if isinstance(module, nn.Linear):  # addmm makes it of two dimensions, and the layer a view of that of three
            module.register_forward_hook(lambda *called: kept.append(called[2].flatten(0, 1)))
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            kept.clear()
            batch = torch.randn(3, 5, WIDTH)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(batch).square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
    analysis = analyse(prof.recording())
    state = [value for kept_state in optimizer.state.values() for value in kept_state.values()]
    tensors = [*model.parameters(), *(each.grad for each in model.parameters()), *state, *kept, batch, loss]
    known = at_end(analysis)
    for tensor in tensors:
        assert known[tensor.untyped_storage().data_ptr()] == type_of(tensor)
    casts = analysis.classes.of(Category.CAST_COPIES).nonzero()[0].tolist()
    assert bool(casts) is autocast
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for cast in casts:
        name = analysis.recording.texts[analysis.classes.name[cast]]
        assert found(analysis)[cast] == ("bfloat16", shapes[name])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_slice_and_a_nested_tensor_have_no_shape_of_their_own() -> None:
    model, flat = nn.Linear(4, 2), torch.zeros(10)
    model.weight.data, model.bias.data = flat[:8].view(2, 4), flat[8:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ragged: list[Tensor] = []
    model.register_forward_hook(lambda *called: ragged.append(nested_tensor([called[2][:1], called[2]])))
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            part = torch.randn(9, 4)[:3]
            optimizer.zero_grad()
            model(part).sum().backward()
            optimizer.step()
    known = at_end(analyse(prof.recording()))
    assert known[flat.untyped_storage().data_ptr()] == ("float32", (10,))  # as the variable has it, not the parameters
    for tensor in (part, ragged[-1]):
        assert known[tensor.untyped_storage().data_ptr()] == ("float32", None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_an_input() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = nested_tensor([torch.ones(30, 4), torch.ones(50, 4)])
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            optimizer.zero_grad()
            torch.nested.to_padded_tensor(model(batch), 0.0).sum().backward()
            optimizer.step()
    assert (prof.summary().warnings, prof.recording().steps[-1].batch_size) == ((), 2)


def test_a_wrapper_gives_the_shapes_of_what_it_wraps() -> None:
    model = nn.Linear(4, 2, bias=False)
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    model.weight = nn.Parameter(TwoTensor(first, second))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile(model, optimizer) as prof:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    known = at_end(analyse(prof.recording()))
    assert [known[part.data_ptr()] for part in (first, second)] == [("float32", (2, 4))] * 2
