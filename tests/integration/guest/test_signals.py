"""Handlers of the script's that raise while ampmem is at work wait, and come out where the script can catch them."""

import _signal
import gc
import signal
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from support.guest import beside
from torch import nn
from torch._dynamo.utils import ExactWeakKeyDictionary

import ampmem
from ampmem.own_code import RECORDING_CODE
from ampmem.patching import in_place
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.forward import ForwardMode, SavedByNodes
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.script_listener import ScriptListener
from ampmem.recorder.sources import extension, storages
from ampmem.recorder.sources.cpu import ProfilerSource
from ampmem.recorder.sources.storages import Storages
from ampmem.recording import RecordingWriter
from ampmem.signals import SIGNALS
from ampmem.simulator.device import SimulatedDevice

pytestmark = pytest.mark.slow


class Timeout(Exception):
    """What the handler raises."""


def handle(number: int, frame: FrameType | None) -> None:
    raise Timeout(number, frame.f_code.co_name if frame is not None else "")


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()  # Hypothesis has one, and Python only prints what a handler raises in it
    before = signal.signal(signal.SIGALRM, handle)
    yield
    gc.callbacks.extend(callbacks)
    assert signal.getsignal(signal.SIGALRM) is handle
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGALRM, before)


def sends(monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str) -> list[str]:
    """Have ``owner.name`` send the signal in its middle, once; what is returned is empty before and after that."""
    original, armed = getattr(owner, name), ["now"]

    def sending(*args: Any, **kwargs: Any) -> Any:
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGALRM)
        return original(*args, **kwargs)

    ours = RECORDING_CODE[0] + "some.py"  # else the callback of a weak reference would be the test's
    sending.__code__ = sending.__code__.replace(co_filename=ours)
    monkeypatch.setattr(owner, name, sending)
    return armed


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


@pytest.mark.parametrize("place", ["_insert_records", "_replace_description", "_write_meta"])
def test_inside_a_transaction(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model, optimizer = make()
    with ampmem.profile() as prof:
        sends(monkeypatch, RecordingWriter, place)
        with pytest.raises(Timeout) as raised:
            step(model, optimizer)
        assert raised.value.args[0] == signal.SIGALRM
        step(model, optimizer)
    summary = prof.summary()
    assert (len(summary.steps), summary.conservation.residual_bytes) == (2, 0)


def test_between_the_profiles_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    with ampmem.profile(steps=2) as prof:
        sends(monkeypatch, ProfilerSource, "_settle")
        with pytest.raises(Timeout):
            step(model, optimizer)
        for _ in range(3):
            step(model, optimizer)
        assert in_place() == []
    summary = prof.summary()
    assert (len(summary.steps), summary.conservation.residual_bytes) == (2, 0)


def test_at_the_last_step_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    with ampmem.profile(steps=1) as prof:
        sends(monkeypatch, RecordingWriter, "append")
        with pytest.raises(Timeout):
            step(model, optimizer)
        assert in_place() == []
        step(model, optimizer)
    assert len(prof.summary().steps) == 1


@pytest.mark.parametrize("place", ["install", "start", "check"])
def test_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    sends(monkeypatch, ProfilerSource, place)
    path = tmp_path / "run.ampmem"
    with pytest.raises(Timeout), ampmem.profile(output=path):
        raise AssertionError("the block was entered")
    assert in_place() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["stop", "_settle"])
def test_at_the_end(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model, optimizer = make()
    prof = ampmem.profile()
    with pytest.raises(Timeout), prof:
        step(model, optimizer)
        sends(monkeypatch, ProfilerSource, place)
    summary = prof.summary()
    assert (len(summary.steps), summary.conservation.residual_bytes) == (1, 0)


@pytest.mark.parametrize("place", ["_note_models", "act", "backward_started", "updated"])
def test_in_what_follows_the_script(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model, optimizer = make()
    with ampmem.profile() as prof:
        step(model, optimizer)
        sends(monkeypatch, ScriptListener, place)
        with pytest.raises(Timeout):
            step(model, optimizer)
        step(model, optimizer)
        step(model, optimizer)
    summary = prof.summary()
    assert len(summary.steps) >= 3
    assert summary.conservation.residual_bytes == 0


SWALLOWING = (
    (Log, "about"),
    (storages, "cpu_storage"),
    (Storages, "_note_death"),
    (ForwardMode, "_before"),
    (ForwardMode, "_note"),
    (SavedByNodes, "read"),
    (OptimizerHooks, "note_gradients"),
    (ScriptListener, "optimizer_started"),
)
"""What runs where an ``Exception`` is kept from the script, or where Python only prints it."""


@pytest.mark.parametrize(("owner", "name"), SWALLOWING)
def test_where_errors_are_kept_from_the_script(
    monkeypatch: pytest.MonkeyPatch, owner: type | ModuleType, name: str
) -> None:
    monkeypatch.setenv(extension.VARIABLE, "off")  # without a mode there is nothing to interrupt in one
    sends(monkeypatch, owner, name).clear()
    model, optimizer = make()
    with ampmem.profile() as prof:
        step(model, optimizer)
        armed = sends(monkeypatch, owner, name)
        with pytest.raises(Timeout):
            step(model, optimizer)
            gc.collect()
        assert armed == []
        step(model, optimizer)
    assert prof.summary().conservation.residual_bytes == 0


def test_where_dynamo_follows_what_ampmem_follows() -> None:
    class Kept:
        pass

    def died(_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    died.__code__ = died.__code__.replace(co_filename=RECORDING_CODE[0] + "some.py")
    before, after = ExactWeakKeyDictionary(), ExactWeakKeyDictionary()  # on either side, whichever is called first
    undo = SIGNALS.hold()
    try:
        with pytest.raises(Timeout) as raised:
            kept = Kept()
            before[kept] = None
            reference = weakref.ref(kept, died)
            after[kept] = None
            del kept
            assert reference() is None
    finally:
        undo()
    assert raised.value.args[1] == "test_where_dynamo_follows_what_ampmem_follows"


@pytest.mark.filterwarnings("ignore:ampmem. no backward was seen")
@pytest.mark.parametrize("name", ["storage_address", "_died"])
def test_where_errors_are_kept_from_a_script_on_a_simulated_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gc.collect()  # what earlier tests left has callbacks of its own
    with ampmem.profile(device="sim", gpu="h100"):
        model = nn.Linear(8, 8).cuda()
        armed = sends(monkeypatch, SimulatedDevice, name)
        with pytest.raises(Timeout):
            model(torch.ones(2, 8, device="cuda"))
            gc.collect()
        assert armed == []


def test_a_handler_runs_at_once_in_what_the_script_does_inside_a_backward_and_sees_no_frame_of_ampmems() -> None:
    model, optimizer = make()
    seen = []

    def hook(gradient: torch.Tensor) -> None:
        with pytest.raises(Timeout) as raised:
            signal.raise_signal(signal.SIGALRM)
        frames = [entry.name for entry in traceback.extract_tb(raised.value.__traceback__)]
        seen.append((raised.value.args[1], frames))

    model.weight.register_hook(hook)
    with ampmem.profile():
        step(model, optimizer)
    assert seen == [("hook", ["hook", "handle"])]


def test_the_script_sees_its_own_handlers_while_it_is_recorded() -> None:
    model, optimizer = make()
    ran = []
    before = signal.getsignal(signal.SIGUSR1)
    with ampmem.profile():
        assert signal.getsignal(signal.SIGALRM) is handle
        assert signal.getsignal(signal.SIGUSR1) == before
        mine = lambda *_: ran.append(1)  # noqa: E731
        assert signal.signal(signal.SIGUSR1, mine) == before
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.signal(signal.SIGINT, signal.SIG_IGN) is signal.default_int_handler
        step(model, optimizer)
        signal.raise_signal(signal.SIGUSR1)
    assert ran == [1]
    assert _signal.getsignal(signal.SIGUSR1) is mine
    assert _signal.getsignal(signal.SIGALRM) is handle
    assert signal.signal(signal.SIGINT, signal.default_int_handler) == signal.SIG_IGN
    assert signal.signal(signal.SIGUSR1, before) is mine


def test_a_program_that_a_timer_interrupts_anywhere_ends_as_without_ampmem(tmp_path: Path) -> None:
    run = beside(tmp_path, "signal_often")
    assert run.differences() == []
    assert run.recorded.said[-1].startswith("ampmem: recorded 2 steps in run.ampmem, ")
