"""Which Function a tensor is saved for, however Functions and ops lie inside one another."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from ampmem.events import Fact
from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.forward import SavedByNodes


class Doubled(Function):
    """Base of those below: what it computes is of no matter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Inner(Doubled):
    """One that others call."""


class Outer(Doubled):
    """Saves first, then runs a Function without gradients, and an op and a Function with them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        Inner.apply(x)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            Inner.apply(leaf * leaf)
        return x * 2


class Separate(Doubled):
    """Says in ``setup_context`` what it saves, and one of it is nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], None, output)


class Twice(Doubled):
    """Changes its mind: what it said last counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x, x)
        ctx.save_for_backward(x)
        return x * 2


class Kept(Doubled):
    """Its context lives on."""

    contexts: list[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Kept.contexts.append(ctx)
        return Doubled.forward(ctx, x)


class Failing(Kept):
    """Its forward fails after it has said what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Kept.forward(ctx, x)
        raise ValueError("as it should")


Run = Callable[[Callable[[], Any]], list[str]]


@pytest.fixture
def saved(x: Tensor) -> Iterator[Run]:
    """Runs something; the names of the Functions for which tensors were saved, in order."""
    log = Log(RealAddresses())
    texts = log.texts
    nodes = SavedByNodes(log)

    def run(something: Callable[[], Any]) -> list[str]:
        log.take_facts()
        something()
        nodes.read()
        facts = log.take_facts()
        assert set(facts.fact.tolist()) <= {Fact.SAVED}
        return [texts.value(name) for name in facts.name.tolist()]

    Kept.contexts = []
    undo = nodes.install(lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None)
    try:
        yield run
    finally:
        undo()


@pytest.fixture
def x() -> Tensor:
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Inner, ["Inner"]),
        (Outer, ["Outer"]),  # the graph that it makes inside is gone
        (Separate, ["Separate", "Separate"]),
        (Twice, ["Twice"]),
        (Kept, ["Kept"]),
    ],
)
def test_a_function_is_named(saved: Run, x: Tensor, function: type[Function], names: list[str]) -> None:
    graphs = []
    assert saved(lambda: graphs.append(function.apply(x))) == names


def test_a_name_that_ends_like_a_nodes_stays_whole(saved: Run, x: Tensor) -> None:
    class OddBackward(Doubled):
        pass

    graphs = []
    assert saved(lambda: graphs.append(OddBackward.apply(x))) == ["OddBackward"]


def test_one_that_saves_nothing_names_no_one_elses(saved: Run, x: Tensor) -> None:
    def without_gradients() -> None:
        with torch.no_grad():
            Kept.apply(x)
        Kept.apply(x.detach())

    assert saved(without_gradients) == []
    assert len(Kept.contexts) == 2


def test_one_that_failed_names_no_one_elses(saved: Run, x: Tensor) -> None:
    def failing() -> None:
        with pytest.raises(ValueError, match="as it should"):
            Failing.apply(x)
        graphs.append(Inner.apply(x))

    graphs: list[Tensor] = []
    assert saved(failing) == ["Inner"]
    assert len(Kept.contexts) == 1


def test_what_hooks_of_others_keep_is_not_looked_at(saved: Run, x: Tensor) -> None:
    def hooked() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda kept: kept):
            graphs.append(Inner.apply(x))

    graphs: list[Tensor] = []
    assert saved(hooked) == []
