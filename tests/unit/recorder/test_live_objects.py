"""Looking at all objects, beside other threads."""

import copy
import functools
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from ampmem.recorder.models import live
from ampmem.recorder.models.live import (
    dictionaries_with,
    live_at_start,
    live_modules,
    live_tensors,
)

ROUNDS = 20


def test_modules_and_tensors_are_found() -> None:
    class Own(nn.Linear):
        pass

    model = Own(2, 2)
    assert any(each is model for each in live_modules())
    assert any(each is model.weight for each in live_tensors())


def test_dictionaries_that_have_an_object_are_found() -> None:
    class Own(dict[str, object]):
        pass

    item = nn.Linear(2, 2)
    plain, own, other = {"item": item}, Own(item=item), {"others": [item]}
    found = {id(each) for each in dictionaries_with(item)}
    assert found >= {id(plain), id(own)}
    assert id(other) not in found


def test_at_the_start_optimizers_and_what_may_have_memory_are_found() -> None:
    class OwnOptimizer(torch.optim.SGD):
        pass

    class OwnTensor(torch.Tensor):
        pass

    class Wrapper(torch.Tensor):
        def __torch_dispatch__(self, *_: object) -> None:
            """Takes ops itself, as classes do that wrap tensors; not torch's, so it may have memory."""

    model = nn.Linear(2, 2)
    optimizers = [OwnOptimizer(model.parameters()), torch.optim.AdamW(model.parameters())]
    own = [torch.zeros(2).as_subclass(kind) for kind in (OwnTensor, Wrapper)]
    found_optimizers, found = live_at_start()
    for optimizer in optimizers:  # in no order: what the collector has looked at before comes later
        assert any(each is optimizer for each in found_optimizers)
    for tensor in (model.weight, *own):
        assert any(each is tensor for each in found)
    assert {id(each) for each in live_tensors()} == {id(each) for each in found}
    only_optimizers, nothing = live_at_start(tensors=False)
    assert {id(each) for each in only_optimizers} == {id(each) for each in found_optimizers}
    assert nothing == []


def test_an_optimizer_is_found_however_it_came_about(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.optim.Rprop(nn.Linear(2, 2).parameters())
    copies = [copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    monkeypatch.setattr(live, "never_made", lambda _: False)  # of a torch that does not mark them
    unmarked = live_at_start()[0]
    monkeypatch.undo()
    found = live_at_start()[0]
    assert {id(each) for each in found} == {id(each) for each in unmarked} >= {id(each) for each in (made, *copies)}


def test_an_optimizer_is_found_where_the_step_of_its_class_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.optim.Rprop.step  # which torch may not have wrapped yet

    @functools.wraps(original)
    def step(self: torch.optim.Rprop, closure: None = None) -> None:
        original(self, closure)

    vars(step).pop("hooked", None)
    monkeypatch.setattr(torch.optim.Rprop, "step", original)
    made = torch.optim.Rprop(nn.Linear(2, 2).parameters())
    torch.optim.Rprop.step = step  # type: ignore[method-assign]
    assert any(each is made for each in live_at_start()[0])


class Trainer:
    """Has an optimizer in one of the places that scripts have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.strategy = {"optimizers": [optimizer]}

    def fit(self) -> None:
        """A method."""


class Slotted:
    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattribute__(self, name: str) -> object:
        raise AssertionError("code of the script runs")


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    return lambda: optimizer.step()


def loop_of(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    def loop() -> Iterator[None]:
        mine = [optimizer]
        while mine:
            yield

    running = loop()
    next(running)
    return running


@pytest.mark.parametrize(
    "put",
    [
        lambda optimizer: optimizer,
        lambda optimizer: [{"generator": (optimizer,)}],
        lambda optimizer: Trainer(optimizer),
        lambda optimizer: Trainer(optimizer).fit,
        lambda optimizer: Slotted(optimizer),
        step_of,
        loop_of,
    ],
)
def test_optimizers_in_variables_are_found_without_looking_at_all_objects(
    monkeypatch: pytest.MonkeyPatch, put: Callable[[torch.optim.Optimizer], object]
) -> None:
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("that walks through all objects"))
    one, other = (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    found, _ = live_at_start([torch, 1, put(one), [other]], tensors=False)
    assert {id(each) for each in found} == {id(one), id(other)}
    assert len(found) == 2


def test_all_objects_are_looked_at_if_no_optimizer_is_in_variables() -> None:
    hidden, other = (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    large = [*range(live._MOST_ITEMS), hidden]
    assert any(each is hidden for each in live_at_start([large])[0])
    assert [id(each) for each in live_at_start([large, other])[0]] == [id(other)]


def test_nothing_is_looked_at_if_no_optimizer_was_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "never_made", lambda _: True)
    monkeypatch.setattr(live, "_qualified", lambda _: "torch.optim.SGD")  # tests have classes of their own
    for look in ("get_referrers", "get_referents"):
        monkeypatch.setattr(gc, look, lambda *_: pytest.fail("there is nothing to find"))
    assert live_at_start([{"variable": 1}], tensors=False) == ([], [])


def test_at_the_start_classes_of_torch_that_wrap_tensors_are_left_out() -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    assert not any(each is fake for each in live_at_start()[1])


@pytest.mark.slow
@pytest.mark.parametrize("look", [live_modules, live_tensors, live_at_start])
def test_a_tuple_that_another_thread_is_making_is_not_held(look: Callable[[], object]) -> None:
    errors: list[BaseException] = []
    over = threading.Event()

    def make_tuples() -> None:
        try:
            while not over.is_set():
                # Of unknown length: it is enlarged, which only its one owner can do.
                assert len(tuple(each for each in range(20))) == 20
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=make_tuples) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(ROUNDS):
            look()
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []


def test_classes_of_torch_without_memory_are_classes_of_torch() -> None:
    names = {live._qualified(kind) for kind in live._with_subclasses(torch.Tensor).values()}
    assert names >= live._NO_MEMORY
