"""Snapshots of newer torch: what torch 2.15 writes, by its sources, and what no torch writes yet."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from support.snapshots import FORWARD, KIB, Story, dump, imported, python

from ampmem.analysis.summary import summarize
from ampmem.errors import RecordingError
from ampmem.events import UNKNOWN
from ampmem.importer.recording import import_snapshot


def story() -> Story:
    """One block from before, one that comes and goes, one that stays."""
    told = Story(old=7 * KIB)
    told.alloc("short", 2 * KIB, FORWARD)
    told.alloc("new", 3 * KIB, FORWARD)
    told.free("short")
    return told


def of_2_15(snapshot: dict[str, Any]) -> dict[str, Any]:
    """``snapshot`` with all that ``_cuda_memorySnapshot`` of 2.15 has beside it."""
    trace = snapshot["device_traces"][0]
    block = trace[1]
    annotated = []
    for entry in trace:
        entry |= {"pool_id": (0, 0), "user_metadata": '{"step":1}', "compile_context": "0/0"}
        annotated.append(entry)
        if entry is block:
            note = {"action": "annotate", "user_metadata": "saved for backward", "frames": FORWARD}
            annotated.append({**block, **note})
    prefix = {**block, "addr": block["addr"] + (1 << 30), "size": 512, "internal_metadata": "mallocWithAddress"}
    kinds = ("alloc", "free_requested", "free_completed")
    annotated += [{**prefix, "action": action, "time_us": trace[-1]["time_us"]} for action in kinds]
    snapshot["device_traces"][0] = annotated
    host = {"action": "alloc", "addr": 4096, "size": 1 << 20, "stream": 0, "time_us": 1, "frames": []}
    return snapshot | {
        "host_segments": [{"address": 4096, "total_size": 1 << 20, "blocks": []}],
        "host_traces": [host, host | {"action": "host_register"}],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "per_process_memory_fraction": 1.0, "new": None},
    }


def test_what_2_15_adds_changes_no_total_and_is_said(tmp_path: Path) -> None:
    plain = imported(tmp_path, story().snapshot()).recording
    recording = imported(tmp_path, of_2_15(story().snapshot())).recording
    events = recording.events
    assert events.bytes.tolist()[:4] == plain.events.bytes.tolist()
    assert events.bytes.tolist()[4:] == [512, 512]  # the block before an address that was asked for comes and goes
    assert events.allocated.tolist()[-1] == plain.events.allocated.tolist()[-1]
    assert summarize(recording).conservation.residual_bytes == 0
    assert "events of these kinds were left out, because ampmem does not read them: annotate (1)" in recording.notes
    assert "the snapshot also has 2 events of pinned host memory, not shown" in recording.notes


def test_metadata_may_be_anything(tmp_path: Path) -> None:
    data = story().snapshot()
    for entry, metadata in zip(data["device_traces"][0], ({"step": 1}, None, ["a"], 3.5), strict=True):
        entry |= {"user_metadata": metadata, "internal_metadata": metadata, "unheard_of": metadata}
        entry["frames"] = [
            {**python("forward", "/net.py", 3), "fx_node_op": "call", "fx_original_trace": None, "column": 4}
        ]
    assert imported(tmp_path, data).recording.events.allocated.tolist() == [7168, 9216, 12288, 10240]


def test_a_snapshot_of_pinned_memory_alone_says_so(tmp_path: Path) -> None:
    data = of_2_15(story().snapshot())
    data["device_traces"] = [[]]
    with pytest.raises(RecordingError, match="only has a trace of pinned host memory"):
        import_snapshot(dump(tmp_path / "host.pickle", data), tmp_path / "run.ampmem")


def strange(action: str, **rest: Any) -> dict[str, Any]:
    return {"action": action, "addr": 1, "size": 1, "stream": 0, "time_us": 1_700_000_000_000_000, "frames": []} | rest


def test_times_are_those_of_the_known_events(tmp_path: Path) -> None:
    data = story().snapshot()
    data["device_traces"][0].insert(0, {"action": "began"})
    recording = imported(tmp_path, data).recording
    assert recording.events.time_ns.tolist()[-1] > 10**18
    assert "events of these kinds were left out, because ampmem does not read them: began (1)" in recording.notes


def test_blocks_that_an_unknown_event_made_and_ended_are_no_error(tmp_path: Path) -> None:
    """The memory of ``short`` is handed out and given back again by events of tomorrow."""
    data = story().snapshot()
    trace = data["device_traces"][0]
    freed = [entry for entry in trace if entry["action"].startswith("free")]
    trace += [freed[0] | {"action": "lend"}, *deepcopy(freed), trace[1] | {"action": "move"}, trace[1]]
    recording = imported(tmp_path, data).recording
    assert recording.events.bytes.tolist() == [7168, 2048, 3072, 2048]
    assert (recording.events.allocated == UNKNOWN).all()  # nothing is left to check against
    assert (
        "the trace and the segments disagree, perhaps because events were left out; the totals cannot be checked"
    ) in recording.notes
    assert summarize(recording).conservation.residual_bytes is None


def test_contradictions_that_no_unknown_event_explains_are_still_refused(tmp_path: Path) -> None:
    data = story().snapshot()
    trace = data["device_traces"][0]
    trace += [trace[1], strange("annotate")]
    with pytest.raises(RecordingError, match="allocated twice"):
        imported(tmp_path, data)


def test_many_kinds_with_odd_names_are_named_shortly(tmp_path: Path) -> None:
    data = story().snapshot()
    data["device_traces"][0] += [strange(f"<b>{number}\n{'x' * 500}") for number in range(9)]
    (note,) = [note for note in imported(tmp_path, data).recording.notes if "left out, because" in note]
    assert len(note) < 400
    assert "\n" not in note
    assert note.endswith(" and 4 other kinds")
