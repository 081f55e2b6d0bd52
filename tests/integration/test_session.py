"""A session from inside: what it keeps, what it lets go of, and what it does when something goes wrong."""

import gc
import io
import threading
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ampmem
from ampmem import patching
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.events import Action, Fact, Phase, Recording
from ampmem.recorder import session
from ampmem.recorder.options import Options
from ampmem.recording import RecordingWriter
from ampmem.vocabulary import Device, Precision


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def born(recording: Recording, phase: Phase) -> np.ndarray:
    events = recording.events
    return events.bytes[(events.action == Action.ALLOC) & (events.phase == phase)]


def test_steps_limits_and_skip_counts_in_code() -> None:
    model, optimizer = make()
    with ampmem.profile(model, optimizer, steps=2, skip=1) as prof:
        train(model, optimizer, 5)
    assert [step.index for step in prof.recording().steps] == [1, 2]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_recording_that_an_exception_stops_was_ended(error: type[BaseException], tmp_path: Path) -> None:
    model, optimizer = make()
    with pytest.raises(error), ampmem.profile(output=tmp_path / "run.ampmem"):
        train(model, optimizer)
        raise error
    assert ampmem.load(tmp_path / "run.ampmem").ended is True


def test_a_model_that_nobody_named_is_known_from_its_first_forward_on() -> None:
    model, optimizer = make()
    with ampmem.profile() as prof:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(2, 8)).sum()
        loss.backward()
        optimizer.step()
    casts = prof.summary().casts
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert {cast.name: cast.bytes for cast in casts.by_parameter} == {name: 2 * n for name, n in parameters.items()}


def test_what_existed_before_is_the_baseline_and_its_death_is_seen() -> None:
    model, optimizer = make()
    doomed = torch.zeros(1000)
    address = doomed.untyped_storage().data_ptr()
    with ampmem.profile() as prof:
        train(model, optimizer, 1)
        del doomed
        train(model, optimizer, 1)
    events = prof.recording().events
    mine = events.address == address
    assert events.action[mine][:2].tolist() == [Action.BASELINE, Action.FREE]
    assert events.bytes[mine][:2].tolist() == [4000, 4000]
    assert prof.summary().conservation.residual_bytes == 0


def test_optimizer_state_of_a_resumed_training_is_there_from_the_first_step_on() -> None:
    model, optimizer = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # nothing is temporary in its update
    train(model, optimizer)
    checkpoint = io.BytesIO()
    torch.save(optimizer.state_dict(), checkpoint)
    checkpoint.seek(0)
    resumed = torch.optim.AdamW(model.parameters(), fused=True)
    resumed.load_state_dict(torch.load(checkpoint))
    train(model, resumed)
    del optimizer
    with ampmem.profile(model, resumed) as prof:
        train(model, resumed)
    first, second = prof.summary().steps
    state = sum(tensor.nbytes for kept in resumed.state.values() for tensor in kept.values())
    assert first.peak.categories["optimizer_state"] == second.peak.categories["optimizer_state"] == state
    assert first.peak.bytes == second.peak.bytes


def test_batches_of_a_data_loader_are_inputs_born_in_data() -> None:
    model, optimizer = make()
    loader = DataLoader(TensorDataset(torch.randn(6, 8)), batch_size=2)
    with ampmem.profile() as prof:
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    recording = prof.recording()
    assert 2 * 8 * 4 in born(recording, Phase.DATA).tolist()
    assert prof.summary().steps[-1].marks.after_forward is not None
    assert prof.summary().steps[-1].marks.after_forward["inputs"] >= 2 * 8 * 4


def test_keyword_arguments_of_the_root_module_are_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, *, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(batch["x"])

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampmem.profile() as prof:
        x = torch.randn(2, 8)
        model(batch={"x": x}).sum().backward()
        optimizer.step()
    facts = prof.recording().facts
    assert x.untyped_storage().data_ptr() in facts.address[facts.fact == Fact.INPUT].tolist()


def test_nothing_is_kept_alive() -> None:
    model, optimizer = make()
    with ampmem.profile(model, optimizer) as prof:
        train(model, optimizer)
    references = [weakref.ref(item) for item in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert prof.summary().parameters.count == 8 * 16 + 16 + 16 * 4 + 4


def test_a_disk_that_refuses_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    append = RecordingWriter.append

    def refuse(writer: RecordingWriter, batch: object, *description: object) -> None:
        if batch.step is not None and batch.step.index == 1:  # type: ignore[attr-defined]
            raise RecordingError("the disk is full")
        append(writer, batch, *description)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordingWriter, "append", refuse)
    with ampmem.profile() as prof:
        train(model, optimizer, 4)
    assert [step.index for step in prof.recording().steps] == [0]


def test_a_disk_that_refuses_at_the_end_raises_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    append = RecordingWriter.append

    def refuse(writer: RecordingWriter, batch: object, *description: object) -> None:
        if batch.step is None:  # type: ignore[attr-defined]
            raise RecordingError("the disk is full")
        append(writer, batch, *description)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordingWriter, "append", refuse)
    with ampmem.profile(steps=2) as prof:
        train(model, optimizer, 3)
    assert [step.index for step in prof.recording().steps] == [0, 1]


@pytest.mark.parametrize("precision", [Precision.AS_IS, Precision.AMP])
def test_an_install_that_fails_leaves_nothing_behind(
    precision: Precision, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The patches and hooks are put in place one by one: each of them fails once."""
    options = Options(path=tmp_path / "run.ampmem", script="train.py", device=Device.CPU, precision=precision)
    enter, before = patching._enter, patching.in_place()
    running = session.Session(options)
    running.start()
    installed = len(patching.in_place()) - len(before)
    running.close()
    options.path.unlink()
    assert installed > 10
    for failing in range(1, installed + 1):
        calls = count(1)

        def refuse(entry: Any, remove: Callable[[], object]) -> patching.Undo:
            if next(calls) == failing:  # noqa: B023
                if entry.owner is None:
                    remove()
                else:
                    setattr(entry.owner, entry.what.name, entry.former)
                raise AttributeError("not in this torch")
            return enter(entry, remove)

        monkeypatch.setattr(patching, "_enter", refuse)
        with pytest.raises(AttributeError, match="not in this torch"):
            session.Session(options).start()
        assert patching.in_place() == before, failing
        assert session.active() is None
        assert list(tmp_path.iterdir()) == []


def test_what_is_registered_below_a_root_stays_below_it() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1  # registers the buffer anew
            return x * self.scale

    torch.manual_seed(0)
    with ampmem.profile() as prof:
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Sequential(Counter())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 3)
        assert len(prof._running().models._roots) == 1
    recording = prof.recording()
    modules = {recording.texts[index] for index in recording.facts.module[recording.facts.fact == Fact.BUFFER]}
    assert modules == {"0.1.0"}
    assert [parameter.name for parameter in recording.parameters] == ["0.0.weight", "0.0.bias", "0.1.0.scale"]


def test_skipping_more_steps_than_there_are_says_so() -> None:
    model, optimizer = make()
    with pytest.warns(RuntimeWarning, match="the script made 2 steps and --skip is 9"), ampmem.profile(skip=9):
        train(model, optimizer, 2)


def test_a_block_without_a_step_warns_and_has_no_summary() -> None:
    model, _ = make()
    with pytest.warns(RuntimeWarning, match="no step ended"), ampmem.profile() as prof:
        model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(NothingRecorded, match="no step ended"):
        prof.summary()


def test_inside_torch_profiler_it_says_why_it_cannot_start() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(UsageError, match="only one profiler at a time"):
        ampmem.profile().__enter__()


def test_an_output_that_exists_is_refused_before_anything_is_hooked(tmp_path: Path) -> None:
    output = tmp_path / "there.ampmem"
    output.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        ampmem.profile(output=output).__enter__()
    assert output.read_text() == "precious"


def test_modules_of_another_thread_are_left_alone() -> None:
    model, optimizer = make()
    other, _ = make()

    def run() -> None:
        other(torch.randn(2, 8)).sum().backward()

    with ampmem.profile(model, optimizer) as prof:
        train(model, optimizer, 1)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        train(model, optimizer, 1)
    assert len(prof.recording().steps) == 2
    assert prof.summary().conservation.residual_bytes == 0


def test_the_sql_views_are_as_promised(tmp_path: Path) -> None:
    import sqlite3

    model, optimizer = make()
    output = tmp_path / "run.ampmem"
    with ampmem.profile(output=output):
        train(model, optimizer)
    with sqlite3.connect(output) as database:
        events = database.execute("SELECT * FROM allocator_event LIMIT 1")
        assert [column[0] for column in events.description] == (
            ["id", "time_ns", "step", "phase", "action", "address", "bytes", "block_bytes", "stream", "op", "stack"]
        )
        facts = database.execute("SELECT * FROM storage_fact LIMIT 1")
        columns = ["time_ns", "address", "fact", "name", "module", "dtype", "shape"]
        assert [column[0] for column in facts.description] == columns
        names = database.execute("SELECT DISTINCT name FROM storage_fact WHERE fact = 'gradient'")
        assert {row[0] for row in names} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_recording_that_is_over_is_held_by_nobody() -> None:
    model, optimizer = make()
    with ampmem.profile(model, optimizer) as prof:
        train(model, optimizer, 2)
    ended, trained = weakref.ref(prof._session), weakref.ref(model)
    del prof, model, optimizer
    gc.collect()
    assert (ended(), trained()) == (None, None)


def test_a_recording_that_is_full_ends_and_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_STEPS", 2)
    model, optimizer = make()
    with ampmem.profile(model, optimizer) as prof:
        train(model, optimizer, 4)
        assert session.active() is None
    assert [step.index for step in prof.recording().steps] == [0, 1]
