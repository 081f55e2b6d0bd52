"""A recording by the C++ extension has the content that torch.profiler gives it."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import ampmem
from support.compiled import compiled

from ampmem.analysis.summary import summarize
from ampmem.events import Columns, Fact, OomRecord, Recording
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.cuda.device import TorchCuda
from ampmem.recorder.sources.cuda.trace import KINDS
from ampmem.recorder.sources.cuda.tracker import Tracked, Tracker, tracker_of
from ampmem.recording import read
from ampmem.vocabulary import SourceKind

pytestmark = pytest.mark.slow
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NEEDS_CUDA = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device, or the emulated one")
UNLIKE = ("time_ns", "address")
"""Columns that differ between any two runs."""
SCALAR = 16
"""Bytes of the blocks on the CPU in which a dispatch mode wraps numbers."""
TEXTS = ("op", "module", "stack", "name", "dtype", "shape")


def rows(recording: Recording, columns: Columns, *others: str) -> list[tuple[Any, ...]]:
    """The rows of ``columns`` but ``others``, with texts in place of their ids."""
    texts = np.array(recording.texts, dtype=object)
    streams: dict[int, int] = {}  # a stream is known by an address

    def told(name: str) -> list[object]:
        column = getattr(columns, name)
        if name == "stream":
            return [streams.setdefault(each, len(streams)) for each in column.tolist()]
        return list((texts[column] if name in TEXTS else column).tolist())

    return list(zip(*(told(name) for name in columns.names() if name not in (*UNLIKE, *others)), strict=True))


def content(file: Path) -> dict[str, Any]:
    """The content of a recording, without times and addresses.

    What a node has saved is sorted, and each but once: it is read in an order of its own. On the CPU wrappers of
    numbers, which only a dispatch mode makes, are left out, and so is the total, which includes them.
    """
    recording = read(file)
    on_cpu = recording.run.source == SourceKind.CPU
    events = rows(recording, recording.events, *(["allocated"] if on_cpu else []))
    facts = []
    for _, group in groupby(rows(recording, recording.facts), lambda row: row[0] == Fact.SAVED):
        found = list(group)
        facts += sorted(set(found)) if found[0][0] == Fact.SAVED else found
    return {
        "events": [
            row for row, size in zip(events, recording.events.bytes, strict=True) if size > SCALAR or not on_cpu
        ],
        "facts": facts,
        "segments": rows(recording, recording.segments),
        "layers": [asdict(each) for each in recording.layers],
        "ooms": list(map(failure, recording.ooms)),
        "allocator": recording.allocator,
        "notes": recording.notes,
    }


def failure(record: OomRecord) -> OomRecord:
    """``record`` without what differs between any two runs; the addresses are in its segments."""
    return replace(record, time_ns=0, segments=b"")


def both(folder: Path, cache: Path, patch: pytest.MonkeyPatch, device: str, *run: str) -> list[dict[str, Any]]:
    """The content of a recording of ``run`` with the extension, and of one without."""
    patch.setenv("XDG_CACHE_HOME", str(cache))
    found = []
    for value in ("on", "off"):
        patch.setenv(extension.VARIABLE, value)
        result = ampmem(folder, "profile", "--device", device, "-o", f"{value}.ampmem", *run)
        assert result.returncode == 0, result.stderr
        found.append(content(folder / f"{value}.ampmem"))
    return found


def agree(found: list[dict[str, Any]]) -> None:
    """Assert that both have the same content, part by part."""
    observed, profiled = found
    assert observed.keys() == profiled.keys()
    for name, part in observed.items():
        assert part == profiled[name], name


WORKLOADS = [
    "gpt --precision amp-nocache",  # the autocast cache frees its copies in any order
    "resnet --precision amp-nocache",
    "reuse --precision amp-nocache",
    "accumulate",
    "bert",
    "checkpointed",
    "gan",
    "lm",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_content_is_the_same(
    tmp_path: Path, compiled_extension: Path, monkeypatch: pytest.MonkeyPatch, workload: str, device: str
) -> None:
    name, *options = workload.split()  # without the autocast cache, which frees its copies in any order
    preset = "tiny" if device == "cpu" else "small"  # on the CPU the larger one only computes longer
    run = ("-m", f"ampmem.workloads.{name}", "--preset", preset, "--device", device, *options)
    found = both(tmp_path, compiled_extension, monkeypatch, device, *run)
    assert len(found[0]["events"]) > 300
    agree(found)


HEAD = """
import threading
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.LayerNorm(700), nn.Linear(700, 300)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step(x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
def batch(rows=64):
    return torch.randn(rows, 300, device="cuda")
def elsewhere(action):
    thread = threading.Thread(target=lambda: found.append(action()))
    found = []
    thread.start()
    thread.join()
    return found[0]
"""
PROGRAMS = {
    "a second thread allocates": """
kept = []
for i in range(4):
    step(elsewhere(batch))
    kept.append(elsewhere(lambda: torch.empty(11 << 20, device="cuda")))
    elsewhere(lambda: batch(1024).sum())
    if i == 2:
        kept.clear()
""",
    "a second thread trains": """
for _ in range(2):
    step(batch())
elsewhere(lambda: step(batch()) or True)
step(batch())
""",
    "a side stream": """
side = torch.cuda.Stream()
for _ in range(4):
    with torch.cuda.stream(side):
        x = batch(4096)
    torch.cuda.current_stream().wait_stream(side)
    x.record_stream(torch.cuda.current_stream())
    step(x)
    del x
""",
    "out of memory": """
for i in range(4):
    try:
        torch.empty(1 << 50, device="cuda")
    except torch.OutOfMemoryError:
        pass
    step(batch(64 << i))
    torch.cuda.empty_cache()
""",
    "a captured step, and a pool": """
static = batch()
pool = torch.cuda.MemPool()
step(static)
graph = torch.cuda.CUDAGraph()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    step(static)
torch.cuda.current_stream().wait_stream(side)
with torch.cuda.graph(graph):
    y = model(static).sum()
for _ in range(2):
    graph.replay()
    with torch.cuda.use_mem_pool(pool):
        x = batch()
    step(x)
""",
    "peaks that are reset": """
for i in range(4):
    step(batch(64 << (4 - i)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
""",
    "settings that change": """
torch.cuda.memory._set_allocator_settings("roundup_power2_divisions:4")
for i in range(3):
    step(batch(70 << i))
""",
    "a forked child": """
import os
for i in range(4):
    loss = model(batch()).square().mean()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a function of the script's in backward": """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2
    @staticmethod
    def backward(context, gradient):
        return (gradient * 2).contiguous() + torch.ones_like(gradient)
for _ in range(3):
    step(Scaled.apply(batch().requires_grad_()))
""",
}


@NEEDS_CUDA
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tracker_has_what_the_history_has(
    tmp_path: Path, compiled_extension: Path, monkeypatch: pytest.MonkeyPatch, name: str, expandable: bool
) -> None:
    if expandable:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (tmp_path / "program.py").write_text(HEAD + PROGRAMS[name], encoding="utf-8")
    options = ("--run-to-end", "--steps", "99", "program.py")
    found = both(tmp_path, compiled_extension, monkeypatch, "cuda", *options)
    assert len(found[0]["events"]) > 100
    agree(found)


@pytest.fixture
def tracker(compiled_extension: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracker]:
    """The extension's tracker, which traces; this thread is recorded, and the allocator gathers stacks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    found = extension.find()
    tracker = tracker_of(found)
    assert found is not None
    assert tracker is not None
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1)
    found.start()
    assert tracker.start()
    tracker.take()
    yield tracker
    tracker.stop()
    found.abandon()
    torch.cuda.memory._record_memory_history(None)


def taken(tracker: Tracker) -> list[tuple[str, int, int, int]]:
    """Action, requested bytes, block bytes and stack of each row."""
    rows = Tracked(*tracker.take()[0].T)
    kinds = [KINDS[kind] for kind in rows.kind.tolist()]
    return list(zip(kinds, rows.size.tolist(), rows.block.tolist(), rows.stack.tolist(), strict=True))


def on_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@NEEDS_CUDA
def test_a_row_has_the_block_and_the_stack(tracker: Tracker) -> None:
    kept = torch.empty(5, dtype=torch.uint8, device="cuda")  # from now on there is a segment
    tracker.take()
    first = len(tracker.new_stacks())
    for _ in range(2):
        block = torch.empty(700, dtype=torch.uint8, device="cuda")
        del block
    freed = [("free_requested", 700, 1024, 0), ("free_completed", 700, 0, 0)]
    number = first + 1
    assert taken(tracker) == [("alloc", 700, 1024, number), *freed] * 2
    (stack,) = tracker.new_stacks()
    assert (stack[0][0], stack[0][2]) == (__file__, "test_a_row_has_the_block_and_the_stack")
    assert tracker.new_stacks() == []
    block = torch.empty(700, dtype=torch.uint8, device="cuda")  # another line
    assert taken(tracker) == [("alloc", 700, 1024, number + 1)]
    assert tracker.new_stacks()[0][0][1] == stack[0][1] + 8
    del block, kept


@NEEDS_CUDA
def test_another_thread_has_rows_without_blocks(tracker: Tracker) -> None:
    on_a_thread(lambda: torch.empty(700, dtype=torch.uint8, device="cuda"))
    rows = [row[:3] for row in taken(tracker) if not row[0].startswith("segment")]
    assert rows == [("alloc", 700, 0), ("free_requested", 700, 0), ("free_completed", 700, 0)]


@NEEDS_CUDA
def test_without_a_history_there_are_rows_without_stacks(tracker: Tracker) -> None:
    torch.cuda.memory._record_memory_history(None)
    block = torch.empty(700, dtype=torch.uint8, device="cuda")
    assert taken(tracker)[-1] == ("alloc", 700, 1024, 0)
    del block


@NEEDS_CUDA
def test_the_statistics_are_torchs_own(tracker: Tracker) -> None:
    block = torch.empty(700, dtype=torch.uint8, device="cuda")
    reading = tracker.read(0)
    assert reading.stats == TorchCuda().stats(0)
    assert reading.rows is not None
    table, lost, stats = tracker.take_counted(0)
    assert (len(table) > 0, lost, stats) == (True, False, reading.stats)
    del block


@NEEDS_CUDA
def test_a_stopped_tracker_is_inert_and_starts_anew(tracker: Tracker) -> None:
    tracker.stop()
    torch.empty(700, dtype=torch.uint8, device="cuda")
    assert taken(tracker) == []
    assert tracker.start()
    assert taken(tracker) == []
    assert tracker.new_stacks() == []
    block = torch.empty(700, dtype=torch.uint8, device="cuda")
    assert [row[0] for row in taken(tracker)] == ["alloc"]
    del block


@NEEDS_CUDA
def test_a_forked_child_traces_nothing_and_waits_for_nobody(tracker: Tracker) -> None:
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(700, dtype=torch.uint8, device="cuda")

    thread = threading.Thread(target=allocate)  # it may hold the mutex when the process forks
    thread.start()
    codes = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(3 + len(tracker.take()[0]) + len(tracker.new_stacks()))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    thread.join()
    assert codes == [3] * 20
    assert len(tracker.take()[0]) > 0


@NEEDS_CUDA
def test_the_workspaces_of_cublas_are_blocks_that_no_tensor_has(
    compiled_extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    found = extension.find()
    assert found is not None
    factor = torch.ones(8, 8, device="cuda", requires_grad=True)
    (factor @ factor).sum().backward()
    blocks = {block["address"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]}
    assert found.workspaces() & blocks
    assert not found.workspaces() & {factor.data_ptr(), factor.grad.data_ptr()}  # type: ignore[union-attr]


@NEEDS_CUDA
def test_the_workspaces_of_before_an_evaluation_are_known(
    tmp_path: Path, compiled_extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    monkeypatch.setenv(extension.VARIABLE, "on")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # 8 MiB for each thread that multiplies matrices
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(256, 256, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(64, 256, device='cuda')).sum().backward()\n"
        "optimizer.step()\n"
        "with torch.no_grad():\n"
        "    for _ in range(3):\n"
        "        model.eval()(torch.ones(64, 256, device='cuda'))\n"
    )
    result = ampmem(tmp_path, "profile", "--quiet", "--phase", "evaluation", "-o", "run.ampmem", "train.py")
    assert result.returncode == 0, result.stderr
    categories = summarize(read(tmp_path / "run.ampmem")).peak.categories
    assert (categories["workspace"], categories.get("other", 0)) == (2 * 8 << 20, 0)


@NEEDS_CUDA
def test_without_the_part_for_cuda_the_recording_is_the_same(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    compiled_extension: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "program.py").write_text(HEAD + PROGRAMS["a side stream"], encoding="utf-8")
    options = ("--run-to-end", "--steps", "99", "program.py")
    whole = both(tmp_path, compiled_extension, monkeypatch, "cuda", *options)[0]
    monkeypatch.setattr(extension, "cuda_headers", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled(tmp_path_factory, "without CUDA")))
    monkeypatch.setenv(extension.VARIABLE, "on")
    assert extension.find() is not None
    assert tracker_of(extension.find()) is None
    result = ampmem(tmp_path, "profile", "--device", "cuda", "-o", "part.ampmem", *options)
    assert result.returncode == 0, result.stderr
    agree([content(tmp_path / "part.ampmem"), whole])
