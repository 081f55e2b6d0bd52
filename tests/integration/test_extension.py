"""A recording by the C++ extension has the content that torch.profiler gives it."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ampmem

from ampmem.events import Column, EventColumns, Fact, FactColumns, OomRecord, Recording, SegmentColumns
from ampmem.recorder.sources import extension
from ampmem.recording import read

pytestmark = pytest.mark.slow
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
UNLIKE = ("time_ns", "address", "allocated")
"""Columns that differ between any two runs, or with the events that are left out."""
SCALAR = 16
"""Bytes of the wrappers that a dispatch mode makes of numbers."""
Row = tuple[object, ...]


def rows(recording: Recording, columns: EventColumns | FactColumns | SegmentColumns) -> list[Row]:
    """The rows of ``columns``, with texts in place of their ids, without times and addresses."""
    texts = np.array(recording.texts, dtype=object)
    streams: dict[int, int] = {}  # a stream is known by an address

    def told(name: str, column: Column) -> list[object]:
        if name == "stream":
            return [streams.setdefault(each, len(streams)) for each in column.tolist()]
        found = texts[column] if name in ("op", "module", "stack", "name", "dtype", "shape") else column
        return list(found.tolist())

    return list(
        zip(*(told(name, getattr(columns, name)) for name in columns.names() if name not in UNLIKE), strict=True)
    )


def content(file: Path) -> dict[str, Any]:
    """The content of a recording.

    Nodes are read in the order of their own or that of their attributes' names, so what one has saved is sorted.
    """
    recording = read(file)
    sizes = recording.events.bytes.tolist()
    facts: list[Row] = []
    for is_saved, group in groupby(rows(recording, recording.facts), lambda row: row[0] == Fact.SAVED):
        together = list(group)
        facts += sorted(set(together), key=str) if is_saved else together
    return {
        "events": [row for row, size in zip(rows(recording, recording.events), sizes, strict=True) if size > SCALAR],
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
    name, *options = workload.split()
    run = ("-m", f"ampmem.workloads.{name}", "--preset", "small", "--device", device, *options)
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


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device, or the emulated one")
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
