"""Handlers of the script's that raise while ampmem is at work wait, and come out where the script can catch them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from guest import beside
from torch import nn

import ampmem
from ampmem.patching import in_place
from ampmem.recorder.process.signals import HELD, Held
from ampmem.recorder.sources.cpu import ProfilerSource
from ampmem.recording import RecordingWriter


class Timeout(Exception):
    """What the handler raises."""


def handle(number: int, frame: FrameType | None) -> None:
    raise Timeout(number, frame.f_code.co_name if frame is not None else "")


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handle)
    yield
    assert signal.getsignal(signal.SIGALRM) is handle
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGALRM, before)


def sends(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Have ``owner.name`` send the signal in its middle, once; what is returned is empty before and after that."""
    original, armed = getattr(owner, name), ["now"]

    def sending(*args: Any, **kwargs: Any) -> Any:
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGALRM)
        return original(*args, **kwargs)

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
        sends(monkeypatch, ProfilerSource, "_events")
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


@pytest.mark.parametrize("place", ["stop", "_events"])
def test_at_the_end(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model, optimizer = make()
    prof = ampmem.profile()
    with pytest.raises(Timeout), prof:
        step(model, optimizer)
        sends(monkeypatch, ProfilerSource, place)
    summary = prof.summary()
    assert (len(summary.steps), summary.conservation.residual_bytes) == (1, 0)


@pytest.mark.parametrize("place", ["_begin_forward", "_observe_forward", "backward_started", "updated"])
def test_in_what_follows_the_script(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    from ampmem.recorder.follower import Follower

    model, optimizer = make()
    with ampmem.profile() as prof:
        step(model, optimizer)
        sends(monkeypatch, Follower, place)
        with pytest.raises(Timeout):
            step(model, optimizer)
        step(model, optimizer)
        step(model, optimizer)
    summary = prof.summary()
    assert len(summary.steps) >= 3
    assert summary.conservation.residual_bytes == 0


def test_handlers_run_in_order_after_what_is_held_and_are_told_where_the_script_was() -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        ran.append((number, frame.f_code.co_name))

    before = [(number, signal.signal(number, note)) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        with HELD:
            with HELD:
                signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
            assert ran == []
        name = "test_handlers_run_in_order_after_what_is_held_and_are_told_where_the_script_was"
        assert ran == [(signal.SIGUSR2, name), (signal.SIGUSR1, name)]
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_each_handler_runs_whatever_the_one_before_has_raised() -> None:
    ran = []
    before = signal.signal(signal.SIGUSR1, lambda *_: ran.append(1))
    try:
        with pytest.raises(Timeout), HELD:
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGUSR1)
        assert ran == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, handle)
    try:
        with HELD:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_before_anything_is_held_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    sends(monkeypatch, Held, "_put_in_place")
    with pytest.raises(Timeout), held:
        raise AssertionError("it was held")


def test_a_program_that_a_timer_interrupts_anywhere_ends_as_without_ampmem(tmp_path: Path) -> None:
    run = beside(tmp_path, "signal_often")
    assert run.differences() == []
    assert run.recorded.said[-1].startswith("ampmem: recorded 2 steps in run.ampmem, ")
