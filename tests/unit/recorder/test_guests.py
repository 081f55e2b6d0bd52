"""Objects of the script's are looked at past their own code, and what goes wrong stays in the hook."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ampmem.recorder.facts import log
from ampmem.recorder.facts.guests import attributes_of, gradient_of, is_nn_parameter, is_tensor
from ampmem.recorder.facts.log import Misses
from ampmem.recorder.models.anatomy import children, has_parameters, held_tensors, named_parameters, tree
from ampmem.recorder.torch_private.general import BUFFERS, PARAMETERS


class Refusing:
    """Answers nothing."""

    def __init__(self) -> None:
        self.inside = 1

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    __bool__ = __eq__ = __hash__ = __len__ = __repr__ = __getattribute__  # type: ignore[assignment]


def test_an_object_is_looked_at_past_its_own_code() -> None:
    refusing = Refusing.__new__(Refusing)
    attributes_of(refusing)["inside"] = 1
    assert attributes_of(refusing) == {"inside": 1}
    assert attributes_of(ModuleType("script"))["__name__"] == "script"
    assert attributes_of(3) == {}
    assert not is_tensor(refusing)
    assert not is_nn_parameter(refusing)
    assert is_nn_parameter(nn.Parameter(torch.ones(1)))
    assert is_tensor(nn.Parameter(torch.ones(1)))
    assert not is_nn_parameter(torch.ones(1))


@pytest.mark.filterwarnings("error")
def test_the_gradient_of_what_is_no_leaf_is_not_asked_for() -> None:
    leaf = torch.ones(2, requires_grad=True)
    computed, kept = leaf * 2, leaf * 3
    kept.retain_grad()
    (computed + kept).sum().backward()
    assert gradient_of(computed) is None
    assert gradient_of(leaf) is leaf.grad
    assert gradient_of(kept) is kept.grad


def named(module: nn.Module) -> list[str]:
    return [name for name, _ in named_parameters(module)]


def test_a_tree_of_modules_is_as_torch_has_it() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.ModuleList([shared, nn.BatchNorm1d(2)])})
    assert list(tree(model, "")) == list(model.named_modules())
    assert list(tree(model, "root")) == list(model.named_modules(prefix="root"))
    assert named(model) == [name for name, _ in model.named_parameters()]
    assert children(model).keys() == {"a", "b"}
    assert held_tensors(model["b"][1], BUFFERS).keys() == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_torch_made_otherwise() -> None:
    lazy, layer = nn.LazyLinear(3), nn.Linear(2, 2)
    assert has_parameters(lazy)
    assert held_tensors(lazy, PARAMETERS) == {}
    for compiled in (torch.jit.script(layer), torch.jit.trace(layer, torch.ones(1, 2))):
        (weight, bias) = (parameter for _, parameter in named_parameters(compiled))
        assert weight is layer.weight
        assert bias is layer.bias
    bare = nn.Module.__new__(nn.Module)
    assert not has_parameters(bare)
    assert list(tree(bare, "")) == [("", bare)]


@pytest.fixture
def expected() -> Iterator[None]:
    """The test is about misses."""
    yield
    log.seen.clear()


@pytest.mark.usefixtures("expected")
def test_what_fails_in_a_hook_is_noted_once_and_does_not_come_out() -> None:
    said: list[str] = []
    missed = Misses()
    missed.note = said.append

    def look(value: int) -> float:
        return 1 / value

    guarded = missed.guarded(look)
    assert guarded(2) == 0.5
    assert [guarded(0), guarded(0)] == [None, None]
    (note,) = said
    assert "ZeroDivisionError at log.py" in note
    assert "test_guests.py" in note
    assert missed.why().startswith(" (ZeroDivisionError")
    assert log.seen


def test_what_stops_the_script_comes_out() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Misses().guarded(stop)()
    assert Misses().why() == ""
