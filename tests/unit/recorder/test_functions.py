"""Which Function a tensor is saved for, however Functions and ops lie inside one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from ampmem.recorder.hooks.functions import FunctionSaves


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
    """Runs something; for whom each tensor was saved, an op is empty."""
    functions = FunctionSaves()
    names: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        names.append(functions.next_saved())
        return tensor.detach()

    def run(something: Callable[[], Any]) -> list[str]:
        names.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            something()
        return list(names)

    Kept.contexts = []
    undo = functions.install(lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
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
        (Outer, ["", "", "Inner", "Outer"]),
        (Separate, ["Separate", "Separate"]),
        (Twice, ["Twice"]),
        (Kept, ["Kept"]),
    ],
)
def test_a_function_is_named_and_the_ops_around_it_are_not(
    saved: Run, x: Tensor, function: type[Function], names: list[str]
) -> None:
    graphs = []

    def run() -> None:
        graphs.append(x * x)
        graphs.append(function.apply(x))
        graphs.append(x * x)

    assert saved(run) == ["", "", *names, "", ""]


def test_a_name_that_ends_like_a_nodes_stays_whole(saved: Run, x: Tensor) -> None:
    class OddBackward(Doubled):
        pass

    assert saved(lambda: OddBackward.apply(x)) == ["OddBackward"]


def test_one_that_saves_nothing_names_no_one_elses(saved: Run, x: Tensor) -> None:
    def without_gradients() -> None:
        with torch.no_grad():
            Kept.apply(x)
        Kept.apply(x.detach())
        x * x

    assert saved(without_gradients) == ["", ""]
    assert len(Kept.contexts) == 2


def test_one_that_failed_names_no_one_elses(saved: Run, x: Tensor) -> None:
    def failing() -> None:
        with pytest.raises(ValueError, match="as it should"):
            Failing.apply(x)
        graph = x * x
        Inner.apply(graph)

    assert saved(failing) == ["", "", "Inner"]
    assert len(Kept.contexts) == 1


def test_what_is_saved_where_others_hold_the_hooks_is_not_waited_for(x: Tensor) -> None:
    functions = FunctionSaves()
    undo = functions.install(lambda: False)
    try:
        graph = Inner.apply(x)
    finally:
        undo()
    assert functions.next_saved() == ""
    del graph
