"""A whole recording of a model of a GPU: the session, the file, the summary and what is said of a failure."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import time_ns
from types import ModuleType

import pytest
import torch
from support import cuda_model
from support.build import RUN, Story, as_batches, small_run
from support.cuda_model import ModelCuda
from support.failures import oom_at
from support.ready_python import ready_python

import ampmem
from ampmem.allocator.oom import OutOfMemory, pack_segments
from ampmem.allocator.settings import MIB
from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.findings.whole_run import out_of_memory
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.marks import PhaseRows, instants
from ampmem.cli.main import run
from ampmem.errors import ModelElsewhere, UsageError
from ampmem.events import Fact, LayersRecord, Phase, Recording
from ampmem.recorder import session as session_module
from ampmem.recorder.models.live import live_at_start
from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.recorder.sources import choose
from ampmem.recorder.sources.cuda.device import TorchCuda
from ampmem.recorder.sources.cuda.oom import KEPT
from ampmem.recorder.sources.cuda.source import CudaSource
from ampmem.recorder.sources.storages import Storages
from ampmem.recording import RecordingWriter, read
from ampmem.reporters.text.table import render
from ampmem.vocabulary import SourceKind


class Net(torch.nn.Linear):
    """A layer that keeps memory of the modelled GPU from its forward to the step's end."""

    def __init__(self, gpu: ModelCuda, size: int) -> None:
        super().__init__(4, 2)
        self.gpu = gpu
        self.size = size
        self.held: list[object] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.held.append(self.gpu.malloc(self.size))
        except OutOfMemory as error:
            raise torch.OutOfMemoryError("CUDA out of memory") from error
        return super().forward(x)


def record(
    path: Path, monkeypatch: pytest.MonkeyPatch, gpu: ModelCuda, train: Callable[[Net], None], size: int = 3 * MIB
) -> Session:
    monkeypatch.setattr(session_module, "choose_source", lambda options, baseline: CudaSource(api=gpu))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", torch.cuda.memory._record_memory_history)
    session = Session(Options(path=path, script="train.py", baseline=False))
    session.start()
    try:
        train(Net(gpu, size))
    finally:
        session.close()
    return session


def two_steps(model: Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        scratch = model.gpu.malloc(700)
        model(torch.ones(3, 4)).sum().backward()
        model.gpu.free(scratch)
        optimizer.step()
        model.gpu.free(model.held.pop())  # type: ignore[arg-type]


def test_a_recording_has_layers_marks_and_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = ModelCuda(time_ns)
    kept = gpu.malloc(1000)
    session = record(tmp_path / "run.ampmem", monkeypatch, gpu, two_steps)
    with pytest.raises(ModelElsewhere, match="is on cpu: none of its 2 parameters was on cuda, whose memory was"):
        session.check()  # the GPU is modelled: the model's tensors are not on it
    recording = read(tmp_path / "run.ampmem")
    assert (recording.run.source, recording.run.device_type) == (SourceKind.CUDA, "cuda")
    assert recording.run.device_name == "Model 0"
    assert [(each.step, each.mark) for each in recording.layers] == [
        (step, mark) for step in range(2) for mark in ("after_forward", "after_backward", "after_optimizer", "peak")
    ]
    phases = recording.events.phase[recording.events.bytes == 3 * MIB].tolist()
    assert phases == [Phase.FORWARD, Phase.BETWEEN] * 2
    summary = summarize(recording)
    assert summary.conservation.residual_bytes == 0
    peak = 1000 + 700 + 3 * MIB
    blocks = 1024 + 1024 + 3 * MIB
    reserved = 2 * MIB + 20 * MIB
    assert summary.allocator.requested == summary.peak.bytes == peak
    assert summary.allocator.allocated == blocks
    assert (summary.allocator.reserved, summary.allocator.cached) == (reserved, reserved - blocks)
    assert summary.allocator.outside == 1 << 28
    assert not gpu.recording
    text = render(summary, recording.notes)
    assert "events, residual 0 B, residual of reserved memory 0 B\n" in text
    whole = "allocator at the peak: requested 3.0 MiB + rounding 348 B + cached 19.0 MiB = reserved 22.0 MiB"
    assert whole in text
    assert "outside 256.0 MiB" in text
    assert [step.peak_reserved for step in summary.steps] == [reserved] * 2
    assert kept.requested == 1000


def together(models: Sequence[Net], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Three steps of one loss, in each of which both optimizers update."""
    for _ in range(3):
        sum(model(torch.ones(3, 4)).sum() for model in models).backward()  # type: ignore[union-attr]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            model.gpu.free(model.held.pop())  # type: ignore[arg-type]


def in_turns(models: Sequence[Net], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Three steps, in each of which the second model goes through the first, too."""
    for _ in range(3):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = model(torch.ones(3, 4)).sum()
            if number:
                loss = loss + models[0](torch.ones(3, 4)).sum()
            loss.backward()
            optimizer.step()
        for model in models:
            while model.held:
                model.gpu.free(model.held.pop())  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("in_variables", [0, 1, 2])
@pytest.mark.parametrize("train", [in_turns, together])
def test_optimizers_are_found_as_if_all_objects_were_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[[Sequence[Net], Sequence[torch.optim.Optimizer]], None],
    in_variables: int,
    named: bool,
) -> None:
    """Two optimizers, of which the user named at most one, and some are in no variable of the script."""
    gpu = ModelCuda(time_ns)
    monkeypatch.setattr(session_module, "choose_source", lambda options, baseline: CudaSource(api=gpu))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", torch.cuda.memory._record_memory_history)
    found = []
    for searched in (True, False):
        models = [Net(gpu, size * MIB) for size in (3, 5)]
        library = ModuleType("library")  # modules that are variables are not searched
        library.optimizers = [torch.optim.Adam(model.parameters()) for model in models]  # type: ignore[attr-defined]
        variables = library.optimizers[:in_variables]
        if not searched:
            monkeypatch.setattr(session_module, "live_at_start", lambda _, tensors: live_at_start(tensors=tensors))
        path = tmp_path / f"{searched}.ampmem"
        session = Session(Options(path=path, script="train.py", steps=None))
        if named:
            session.add_optimizer(library.optimizers[0])
        session.start()
        train(models, library.optimizers)
        session.close()
        recording = read(path)
        texts, facts = recording.texts, recording.facts
        rows = zip(facts.fact, facts.name, facts.module, strict=True)
        names = sorted((fact, texts[name], texts[module]) for fact, name, module in rows if fact != Fact.VARIABLE)
        found.append(([step.backwards for step in recording.steps], names, recording.optimizers, recording.notes))
        del models, library, variables, session
    if in_variables == 1 and train is together:  # its first update is a step of its own
        steps, notes = [found[0][0][2:], found[1][0][1:]], [found[0][3], found[1][3]]
        assert found[0][0][:2] == [1, 0]
        assert (steps[0], notes[0]) == (steps[1], notes[1])
        assert found[0][2] == found[1][2]
    else:
        assert found[0] == found[1]


def test_a_count_of_the_allocator_that_differs_shows_as_a_residual() -> None:
    recording = small_run().recording()
    steps = recording.steps
    at = instants(PhaseRows(recording.phases), steps[1]).after_backward
    assert at is not None
    analysis = analyse(recording)
    live = int(analysis.timeline.total[analysis.timeline.position(at)])
    row = LayersRecord(
        step=1,
        mark="after_backward",
        requested=live,
        allocated=live,
        active=live,
        reserved=2 * MIB,
        device_used=None,
    )
    agreed = summarize(replace(recording, layers=(row,)))
    assert agreed.conservation.residual_bytes == 0
    assert agreed.allocator.outside is None
    other = replace(row, requested=live - 8)
    assert summarize(replace(recording, layers=(other,))).conservation.residual_bytes == 8


def test_layers_and_failures_survive_the_file(tmp_path: Path) -> None:
    (oom,) = out_of_memory_run().ooms
    row = LayersRecord(step=0, mark="peak", requested=1, allocated=2, active=3, reserved=4, device_used=None)
    path = tmp_path / "run.ampmem"
    writer = RecordingWriter(path, RUN)
    empty = as_batches(Story().recording())[0]
    writer.append(replace(empty, layers=(row, replace(row, device_used=5)), ooms=(oom,)))
    writer.close()
    assert read(path).layers == (row, replace(row, device_used=5))
    assert read(path).ooms == (oom,)


def dies(model: Net) -> None:
    model(torch.ones(3, 4)).sum().backward()
    model(torch.ones(3, 4))


def test_a_run_that_dies_in_its_first_step_has_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ampmem"
    failure: list[BaseException] = []
    gpu = ModelCuda(time_ns, total=64 * MIB)

    def train(model: Net) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        try:
            dies(model)
            optimizer.step()
        except torch.OutOfMemoryError as error:
            failure.append(error)

    session = record(path, monkeypatch, gpu, train, size=40 * MIB)
    session.check()
    assert (session.outcome.unfinished, session.outcome.recorded) == (0, 0)
    recording = read(path)
    assert [(step.index, step.finished) for step in recording.steps] == [(0, False)]
    (oom,) = recording.ooms
    assert (oom.asked, oom.module, oom.step) == (40 * MIB, "(model)", 0)
    assert "test_cuda_session.py" in oom.stack
    summary = summarize(recording)
    told = summary.out_of_memory
    assert (told.where, told.ended_the_run, told.residual_bytes) == ("forward of step 0", True, 0)
    assert sum(told.alive.values()) == 40 * MIB == summary.peak.bytes
    assert told.outside == 0 and told.reserved + told.device_free == 64 * MIB
    assert summary.steps[0].marks.after_backward is not None and summary.steps[0].marks.after_optimizer is None
    assert "out of memory in forward of step 0: the run ended here" in render(summary, recording.notes)


def test_of_many_failures_the_last_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(model: Net) -> None:
        for size in range(40, 40 + KEPT + 3):
            model.size = size * MIB
            with contextlib.suppress(torch.OutOfMemoryError):
                model(torch.ones(3, 4))

    record(tmp_path / "run.ampmem", monkeypatch, ModelCuda(time_ns, total=16 * MIB), train)
    recording = read(tmp_path / "run.ampmem")
    assert [oom.asked // MIB for oom in recording.ooms] == list(range(43, 43 + KEPT))


def out_of_memory_run(**changes: object) -> Recording:
    story = small_run()
    when = story.now
    gpu = ModelCuda(time_ns, total=64 * MIB)
    blocks = [gpu.malloc(12 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        gpu.free(block)
    oom = oom_at(
        when,
        (),
        step=1,
        asked=30 * MIB,
        segment=30 * MIB,
        total=64 * MIB,
        free=4 * MIB,
        module="layers.0",
        stack="train.py:9 main\nnet.py:3 forward",
        segments=pack_segments(gpu.allocator.snapshot()),
    )
    return replace(story.recording(), ooms=(replace(oom, **changes),))  # type: ignore[arg-type]


def test_the_finding_says_who_asked_what_lived_and_why_the_cache_did_not_serve() -> None:
    summary = summarize(out_of_memory_run())
    assert summary.out_of_memory.cached == 36 * MIB  # enough for the request, if it were one block
    finding = summary.findings[0]
    assert (finding.code, finding.severity, finding.bytes) == ("out-of-memory", "warning", 30 * MIB)
    assert "30.0 MiB were requested: there is enough free memory, but it is too fragmented" in finding.message
    assert finding.message.endswith("The script went on.")
    assert "expandable_segments:True" in finding.change
    assert finding.evidence == ("requested by aten::mm in layers.0 at net.py:3 forward",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"asked": 60 * MIB, "segment": 60 * MIB}, "all free memory together is not enough"),
        ({"stream": 5, "asked": 12 * MIB, "segment": 12 * MIB}, "belongs to another stream"),
        ({"pool": "0,1", "asked": 12 * MIB, "segment": 12 * MIB}, "belongs to another pool"),
        ({"asked": 12 * MIB, "segment": 12 * MIB}, "max_split_size_mb keeps it"),
        ({"limit": 62 * MIB, "free": 40 * MIB}, "the process may not take that much of it"),
    ],
)
def test_each_reason_is_told(changes: dict[str, object], words: str) -> None:
    assert words in summarize(out_of_memory_run(**changes)).findings[0].message


def test_no_failure_is_no_finding() -> None:
    assert out_of_memory(TrainingRun(analysis=analyse(Story().recording(run=RUN)))) is None


def test_a_script_that_records_history_itself_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ModelCuda(time_ns)
    called: list[object] = []
    monkeypatch.setattr(session_module, "choose_source", lambda options, baseline: CudaSource(api=gpu))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args: called.append(gpu.recording))
    session = Session(Options(path=tmp_path / "run.ampmem", script="train.py", baseline=False))
    session.start()
    torch.cuda.memory._record_memory_history("all")
    assert called == [False]
    assert "_record_memory_history" in (session.outcome.stopped_by or "")


def test_a_history_of_pinned_memory_alone_is_the_scripts_own_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ModelCuda(time_ns)
    monkeypatch.setattr(session_module, "choose_source", lambda options, baseline: CudaSource(api=gpu))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **kwargs: None)
    session = Session(Options(path=tmp_path / "run.ampmem", script="train.py", baseline=False))
    session.start()
    torch.cuda.memory._record_memory_history("all", record_pinned_host_memory=True, record_cuda=False)
    assert gpu.recording and session.outcome.stopped_by is None
    session.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "run.ampmem"
    with pytest.raises(UsageError, match=r"^cuda cannot be recorded: .*--device cpu \(device='cpu' in Python\)$"):
        Session(Options(path=path, script="train.py", device="cuda"))
    assert not path.exists()
    with pytest.raises(UsageError, match="unknown device 'tpu'"), ampmem.profile(output=path, device="tpu"):
        pytest.fail("entered")
    assert not path.exists()


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_other_allocators_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    assert backend in (TorchCuda().problem() or "")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "cuda_available", lambda: True)
    monkeypatch.setattr(TorchCuda, "problem", lambda self: None)
    options = Options(path=tmp_path / "run.ampmem", script="train.py")
    assert isinstance(choose.choose_source(options, Storages()), CudaSource)
    assert choose.choose_source(replace(options, device="cpu"), Storages()).device_type == "cpu"


DYING = """
import torch
from support.cuda_model import SHARED

class Net(torch.nn.Linear):
    def forward(self, x):
        try:
            self.held = SHARED[0].malloc(40 << 20)
        except Exception as error:
            raise torch.OutOfMemoryError("CUDA out of memory") from error
        return super().forward(x)

model = Net(4, 2)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(3, 4)).sum().backward()
model(torch.ones(3, 4))
"""


def test_profile_keeps_what_a_run_died_of_and_show_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = ModelCuda(time_ns, total=64 * MIB)
    monkeypatch.setattr(cuda_model, "SHARED", [gpu])
    monkeypatch.setattr(session_module, "choose_source", lambda options, baseline: CudaSource(api=gpu))
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text(DYING)
    with pytest.raises(SystemExit) as ended:
        run(["profile", "--device", "cuda", "train.py"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "OutOfMemory" in said
    assert "out of memory in forward of step 0: the run ended here" in said
    assert "the script failed: out of memory; what was recorded until then is in train.ampmem, " in said
    assert run(["show", "train.ampmem"]) == 0
    assert "by          an unknown op in (model)" in capsys.readouterr().out
    assert run(["show", "--json", "train.ampmem"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [step["finished"] for step in shown["steps"]] == [False]
    assert shown["out_of_memory"]["alive"]["activations"] == 40 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", ["profile", "compare"])
def test_the_command_line_refuses_a_gpu_that_is_not_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", ready_python())
    (tmp_path / "train.py").write_text("")
    arguments = [command, "--device", "cuda", "--no-sync", "train.py"]
    if command == "profile":
        with pytest.raises(UsageError, match="record on the CPU with --device cpu"):
            run(arguments)
    else:
        assert run([command, "--precision", "fp32", *arguments[1:]]) == 1
        assert "record on the CPU with --device cpu" in capsys.readouterr().err
    assert list(tmp_path.glob("*.ampmem")) == []
