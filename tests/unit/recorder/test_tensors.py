"""Facts that the C++ extension logs anew are those that Python would log, whatever the script does between steps."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import ampmem
from ampmem.events import Fact, Recording
from ampmem.recorder.facts import tensors
from ampmem.recorder.facts.log import Repeated
from ampmem.recorder.facts.tensors import TensorReader, TensorsFound
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.storages import Storages

KINDS = (Fact.PARAMETER, Fact.BUFFER, Fact.GRADIENT, Fact.OPTIMIZER_STATE, Fact.MASTER_COPY)
STEPS = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 24)
        self.first = nn.Linear(24, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 3)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.first(self.words(words).to(self.first.weight.dtype))
        return self.last(self.norm(hidden).to(next(self.last.parameters()).dtype))


class Training:
    """A model that trains step by step, and what it has had in memory: facts, names and addresses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model().to(DEVICE)
        self.optimizer: Optimizer = AdamW(self.model.parameters())
        self.batch = torch.arange(8, device=DEVICE)
        self.before_update: Callable[[], object] = lambda: None
        self.in_memory: set[tuple[Fact, str, int]] = set()

    def forward(self) -> Tensor:
        for fact, named in (
            (Fact.PARAMETER, self.model.named_parameters()),
            (Fact.BUFFER, self.model.named_buffers()),
        ):
            self.in_memory |= {(fact, name, address(tensor)) for name, tensor in named}
        return self.model(self.batch).float().square().mean()

    def step(self) -> None:
        self.forward().backward()  # type: ignore[no-untyped-call]
        self.before_update()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self.in_memory.add((Fact.GRADIENT, name, address(parameter.grad)))
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                if isinstance(tensor, Tensor):
                    self.in_memory.add((Fact.OPTIMIZER_STATE, f"{key} of {name}", address(tensor)))
        self.optimizer.zero_grad()


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


Change = Callable[[Training, int], object]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@change
def nothing(training: Training, step: int) -> None:
    """Each step is like the one before."""


@change
def data_moves(training: Training, step: int) -> None:
    weight = training.model.first.weight
    if step in (2, 3):
        weight.data = weight.data.clone()
    if step == 4:  # it may be back where it was
        weight.data = weight.data.clone()
        weight.data = weight.data.clone()


@change
def a_parameter_is_frozen_for_a_while(training: Training, step: int) -> None:
    training.model.first.weight.requires_grad_(step not in (2, 3))
    if step == 2:
        training.model.first.weight.grad = None


@change
def a_parameter_is_thawed(training: Training, step: int) -> None:
    training.model.first.weight.requires_grad_(step > 2)


@change
def a_parameter_is_replaced(training: Training, step: int) -> None:
    if step == 3:
        training.model.first.weight = nn.Parameter(training.model.first.weight.detach().clone())
        training.optimizer = AdamW(training.model.parameters())


@change
def a_parameter_is_replaced_unseen(training: Training, step: int) -> None:
    if step == 3:
        own = training.model.first._parameters
        own["weight"] = nn.Parameter(training.model.first.weight.detach().clone())
        group = training.optimizer.param_groups[0]
        group["params"] = list(training.model.parameters())


@change
def a_buffer_is_replaced(training: Training, step: int) -> None:
    if step in (2, 4):
        training.model.norm.running_mean = torch.zeros(40, device=DEVICE)
    if step == 5:
        training.model.norm._buffers["running_var"] = torch.ones(40, device=DEVICE)


@change
def a_module_is_added(training: Training, step: int) -> None:
    if step == 3:
        training.model.last = nn.Sequential(training.model.last, nn.Linear(3, 2).to(DEVICE))  # type: ignore[assignment]
        training.optimizer.add_param_group({"params": list(training.model.last[1].parameters())})  # type: ignore[index]


@change
def modules_trade_parameters(training: Training, step: int) -> None:
    if step == 3:
        first, second = training.model.first._parameters, training.model.norm._parameters
        first["bias"], second["bias"] = second["bias"], first["bias"]


@change
def gradients_stay(training: Training, step: int) -> None:
    training.optimizer.zero_grad = lambda: None  # type: ignore[assignment, misc]


@change
def gradients_are_taken_away(training: Training, step: int) -> None:
    def take() -> None:
        if step in (2, 3, 5):
            training.model.first.weight.grad = None

    training.before_update = take


@change
def state_is_replaced(training: Training, step: int) -> None:
    states = training.optimizer.state
    if step == 3:
        states[training.model.first.weight]["exp_avg"] = states[training.model.first.weight]["exp_avg"].clone()
    if step == 4:
        states[training.model.last.weight]["more"] = [torch.ones(5, device=DEVICE)]
    if step == 5:
        states.clear()


@change
def state_is_numbers(training: Training, step: int) -> None:
    training.optimizer.state[training.model.first.weight]["count"] = step  # type: ignore[index]
    training.optimizer.state[training.model.first.weight].setdefault("step", torch.tensor(0.0))
    for key in ("exp_avg", "exp_avg_sq"):
        training.optimizer.state[training.model.first.weight].setdefault(
            key, torch.zeros_like(training.model.first.weight)
        )


@change
def state_becomes_a_master_copy(training: Training, step: int) -> None:
    weight = training.model.first.weight
    if step == 0:
        training.model.first.bfloat16()
        training.optimizer = SGD(training.model.parameters(), lr=0.0)
        training.optimizer.state[weight] = {"copy": torch.zeros(weight.shape, device=DEVICE)}
    if step == 4:
        training.optimizer.state[weight]["copy"].copy_(weight.detach())


@change
def no_state(training: Training, step: int) -> None:
    if step == 0:
        training.optimizer = SGD(training.model.parameters(), lr=0.1)


@change
def precision_changes(training: Training, step: int) -> None:
    if step in (2, 4):
        training.model.to(torch.bfloat16 if step == 2 else torch.float32)
        training.optimizer.state.clear()


@change
def updates_are_wider_than_forwards(training: Training, step: int) -> None:
    def widen() -> None:
        for parameter in training.model.first.parameters():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if gradient is None else gradient.float()

    for parameter in training.model.first.parameters():
        parameter.data = parameter.data.bfloat16()
    training.before_update = widen


def moves(training: Training, dtype: torch.dtype) -> None:
    """The parameters of a layer move to where they were before in this precision."""
    places = training.__dict__.setdefault("places", {})
    for parameter in training.model.first.parameters():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = places.setdefault((parameter, dtype), parameter.data.to(dtype, copy=True))
        parameter.grad = None if gradient is None else gradient.to(dtype)


@change
def updates_are_wider_in_places_of_their_own(training: Training, step: int) -> None:
    moves(training, torch.bfloat16)
    training.before_update = lambda: moves(training, torch.float32)


@change
def forwards_go_back_to_the_places_of_an_evaluation(training: Training, step: int) -> None:
    if step:
        moves(training, torch.bfloat16)
    if step == 1:
        evaluation_before_each_step(training, step)
        moves(training, torch.float32)
    if step > 1:
        training.before_update = lambda: moves(training, torch.float32)


@change
def wider_updates_after_an_evaluation(training: Training, step: int) -> None:
    if step >= 2:
        updates_are_wider_than_forwards(training, step)
        evaluation_before_each_step(training, step)


@change
def evaluation_before_each_step(training: Training, step: int) -> None:
    with torch.no_grad():
        training.forward()


@change
def evaluation_in_another_precision(training: Training, step: int) -> None:
    training.model.bfloat16()
    with torch.no_grad():
        training.forward()
    training.model.float()


@change
def sparse_gradients(training: Training, step: int) -> None:
    if step == 0:
        training.model.words.sparse = True
        training.optimizer = SGD(training.model.parameters(), lr=0.1)
    training.model.words.sparse = step != 3


@change
def tensors_are_swapped(training: Training, step: int) -> None:
    if step in (2, 3):
        weight = training.model.first.weight
        weight.grad = None
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))


@change
def a_tied_parameter(training: Training, step: int) -> None:
    if step == 2:
        training.model.norm.bias = training.model.first.bias
    if step == 4:
        training.model.norm.bias = nn.Parameter(torch.ones(40, device=DEVICE))


@change
def one_storage_for_two(training: Training, step: int) -> None:
    if step == 2:
        flat = torch.ones(80, device=DEVICE)
        training.model.first.bias.data, training.model.norm.bias.data = flat[:40], flat[40:]
    if step == 4:
        training.model.first.bias.data = torch.ones(40, device=DEVICE)


@change
def two_optimizers(training: Training, step: int) -> None:
    if step == 0:
        training.optimizer = AdamW(training.model.first.parameters())
        training.other = SGD(training.model.last.parameters(), lr=0.1, momentum=0.9)  # type: ignore[attr-defined]
    training.before_update = training.other.step  # type: ignore[attr-defined]


@change
def an_optimizer_with_its_own_parameters(training: Training, step: int) -> None:
    if step == 3:
        training.own = nn.Parameter(torch.ones(7, device=DEVICE))  # type: ignore[attr-defined]
        training.optimizer.add_param_group({"params": [training.own]})  # type: ignore[attr-defined]
    if step >= 3:
        training.own.grad = torch.ones_like(training.own)  # type: ignore[attr-defined]


@change
def a_subclass_of_parameters(training: Training, step: int) -> None:
    class Named(nn.Parameter):
        pass

    if step == 3:
        training.model.last.weight = Named(training.model.last.weight.detach())
        training.optimizer = AdamW(training.model.parameters())


@change
def backward_on_another_thread(training: Training, step: int) -> None:
    if step == 3:
        loss = training.forward()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()


@change
def a_hook_of_the_scripts(training: Training, step: int) -> None:
    if step == 2:
        training.model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    if step == 4:
        training.model.last.weight.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", None)
        )


def record(change: Change) -> tuple[Recording, Training]:
    training = Training()
    with ampmem.profile(training.model, training.optimizer, device=DEVICE, steps=None) as prof:
        for step in range(STEPS):
            change(training, step)
            training.step()
    return prof.recording(), training


def facts(recording: Recording) -> list[tuple[str, ...]]:
    """What was logged about tensors of the kinds above, in order, as words."""
    columns = recording.facts
    rows = zip(columns.fact, columns.name, columns.module, columns.dtype, columns.shape, strict=True)
    return [(Fact(fact).name, *(recording.texts[each] for each in texts)) for fact, *texts in rows if fact in KINDS]


@pytest.fixture
def repeated(compiled_extension: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The extension is used; what was to be logged, and whether it was known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    found: list[tuple[str, bool]] = []
    log = Repeated.log

    def noted(self: Repeated, key: int, read: object, look: Callable[[], None]) -> bool:
        known = log(self, key, read, look)  # type: ignore[arg-type]
        found.append((look.__qualname__.split(".")[1], known))
        return known

    monkeypatch.setattr(Repeated, "log", noted)
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_the_facts_are_those_of_python(
    repeated: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with_extension, training = record(CHANGES[name])
    columns = with_extension.facts
    texts = np.array(with_extension.texts, dtype=object)
    logged = set(zip(columns.fact.tolist(), texts[columns.name].tolist(), columns.address.tolist(), strict=True))
    assert training.in_memory - logged == set()
    monkeypatch.setenv(extension.VARIABLE, "off")
    without, _ = record(CHANGES[name])
    assert facts(with_extension) == facts(without)


def test_what_is_the_same_is_logged_by_the_extension(repeated: list[tuple[str, bool]]) -> None:
    record(CHANGES["nothing"])
    known = defaultdict(list)
    for name, again in repeated:
        known[name].append(again)
    assert known == {
        "_note": [False] + [True] * STEPS,  # the last is at the recording's end
        "note_gradients": [False] + [True] * (STEPS - 1),
        "note_state": [False] * 2 + [True] * (STEPS - 2),  # the first makes the state
    }


def test_storages_are_known_until_they_are_freed() -> None:
    storages = Storages()
    kept, freed = torch.ones(5), torch.ones(6)
    both = frozenset({address(kept), address(freed)})
    assert storages.knows(frozenset())
    assert not storages.knows(both)
    storages.see(kept, kept=True)
    storages.see(freed, kept=True)
    assert storages.knows(both)
    del freed
    assert not storages.knows(both)
    assert storages.knows(frozenset({address(kept)}))


def test_python_tells_the_source_of_what_it_does_not_know(
    repeated: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storages, "knows", lambda self, addresses: not addresses)
    training = Training()
    with ampmem.profile(training.model.cpu(), training.optimizer, device="cpu", steps=None):
        training.batch = torch.arange(8)
        for _ in range(STEPS):
            training.step()
    assert {known for _, known in repeated} == {False}


def test_no_reference_to_anything_of_the_scripts_is_kept_or_lost(repeated: list[tuple[str, bool]]) -> None:
    training = Training()
    training.step()
    training.optimizer.zero_grad = lambda: None  # type: ignore[assignment, misc]

    def references() -> list[int]:
        states = training.optimizer.state
        held: list[object] = [states, *states.values(), training.optimizer.param_groups[0]["params"]]
        for module in training.model.modules():
            held += [module, module.__dict__, module._parameters, module._buffers]
        for parameter in training.model.parameters():
            held += [parameter, parameter.grad, *states[parameter].values()]
        return [sys.getrefcount(each) for each in held]

    training.step()
    before = references()
    counted = []
    with ampmem.profile(training.model, training.optimizer, device=DEVICE, steps=None):
        for _ in range(STEPS):
            training.step()
            counted.append(references())
    assert counted[2:] == [counted[1]] * (STEPS - 2)
    assert references() == before


def test_without_tensors_as_it_assumes_python_logs_all(
    repeated: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "implementation_of", lambda tensor: 0)
    recording, _ = record(CHANGES["nothing"])
    assert {known for _, known in repeated} == {False}
    monkeypatch.undo()
    assert facts(recording) == facts(record(CHANGES["nothing"])[0])


def test_only_plain_tensors_are_read(compiled_extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    found = extension.find()
    reader = TensorReader.find(found.with_gil, lambda text: 1)

    class Shaped(Tensor):
        pass

    parameter = nn.Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=0.1)

    def read(state: object) -> int:
        optimizer.state[parameter] = state  # type: ignore[assignment]
        return reader.state(1, 0, optimizer)

    plain = (torch.ones(3), torch.ones(()), torch.ones(2, 2).t(), torch.ones(4)[1:], torch.ones(0))
    for state in ({}, {"a": 1, "b": 1.0, "c": True, "d": None, "e": "text"}, *({"a": each} for each in plain)):
        assert read(state) == TensorsFound.READ
    others = (
        torch.ones(3).as_subclass(Shaped),
        torch.ones(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
        [torch.ones(3)],
        (1, 2),
        object(),
    )
    for state in (None, [torch.ones(3)], {1: torch.ones(3)}, *({"a": each} for each in others)):
        assert read(state) == TensorsFound.UNREADABLE
    optimizer.state = {parameter: {"a": torch.ones(3)}}  # type: ignore[assignment]
    assert reader.state(1, 0, optimizer) == TensorsFound.READ

    class Kept(dict):  # type: ignore[type-arg]
        pass

    optimizer.state = Kept(optimizer.state)  # type: ignore[assignment]
    assert reader.state(1, 0, optimizer) == TensorsFound.UNREADABLE


def test_facts_that_come_between_the_count_and_the_take_are_taken_later(
    compiled_extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread accumulates gradients while Python makes room for those that it has counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    found = extension.find()
    reader = TensorReader.find(found.with_gil, lambda text: 1)
    parameters = [nn.Parameter(torch.ones(size)) for size in (3, 4000)]
    for name, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(reader.gradient_hook(lambda _: None, name, 0))
    empty = np.empty

    def interrupted(*arguments: Any) -> Any:
        parameters[1].sum().backward()
        return empty(*arguments)

    parameters[0].sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(tensors.np, "empty", interrupted)
        first = reader.take()
    assert first[:, 3].tolist() == [0]
    assert reader.take()[:, 3].tolist() == [1]
    assert reader.take() is None
