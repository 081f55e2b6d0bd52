"""The segments of an exported snapshot: those that were recorded."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from support.build import gpu_run

from ampmem.allocator.snapshot import read_snapshot
from ampmem.analysis.analyse import analyse
from ampmem.events import Recording, SegmentAction
from ampmem.importer.recording import recording_of
from ampmem.reporters.export.snapshot import write_snapshot


def exported(tmp_path: Path, recording: Recording) -> Any:
    write_snapshot(analyse(recording), tmp_path / "out.pickle", force=True)
    return pickle.loads((tmp_path / "out.pickle").read_bytes())


def test_the_trace_has_the_segments_where_they_came_and_went(tmp_path: Path) -> None:
    recording = gpu_run().recording()
    trace = exported(tmp_path, recording)["device_traces"][0]
    calls = [(each["action"], each["addr"], each["size"]) for each in trace if each["action"].startswith("segment_")]
    rows = recording.segments
    words = {
        (0, False): "segment_alloc",
        (0, True): "segment_free",
        (1, False): "segment_map",
        (1, True): "segment_unmap",
    }
    assert calls == [
        (words[expandable, action == SegmentAction.RELEASE], address, size)
        for expandable, action, address, size in zip(
            *(getattr(rows, name).tolist() for name in ("expandable", "action", "address", "bytes")), strict=True
        )
    ]
    first = [each["action"] for each in trace[:7]]
    assert first == ["snapshot", *["segment_alloc"] * 3, "alloc", "segment_alloc", "alloc"]


def test_the_segments_at_the_end_are_filled(tmp_path: Path) -> None:
    data = exported(tmp_path, gpu_run().recording())
    found = [(each["address"], each["total_size"], each["segment_type"]) for each in data["segments"]]
    assert found == [(0x8000 + n * 0x800, 0x800, "small") for n in range(3)] + [(0x10000, 0x1000, "small")]
    assert [each["allocated_size"] for each in data["segments"]] == [512, 0, 0, 600]
    for segment in data["segments"]:
        ends = [segment["address"]] + [block["address"] + block["size"] for block in segment["blocks"]]
        assert [block["address"] for block in segment["blocks"]] == ends[:-1]
        assert ends[-1] == segment["address"] + segment["total_size"]


def test_an_import_finds_the_same_layers(tmp_path: Path) -> None:
    recording = gpu_run().recording()
    again = recording_of(read_snapshot(exported(tmp_path, recording)), "again")
    before, after = analyse(recording).layers, analyse(again).layers
    assert before is not None and after is not None
    assert after.reserved[1:].tolist() == before.reserved[1:].tolist()
    assert after.level.tolist() == before.level.tolist()


def test_torchs_own_code_reads_it(tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    recording = gpu_run().recording()
    data = exported(tmp_path, recording)
    summary = viz.segsum(data)
    assert "segments: 4\ntotal_reserved: 10.0KiB\n" in summary
    text = viz.trace(data)
    reserved = int((recording.segments.action != SegmentAction.RELEASE).sum())
    assert sum("cudaMalloc" in line or "segment_map" in line for line in text.splitlines()) == reserved
    for page in (viz.trace_plot(data), viz.segment_plot(data)):
        assert "MemoryViz.js" in page
