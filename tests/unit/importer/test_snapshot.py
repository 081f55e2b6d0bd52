"""Reading snapshots: versions of torch, what is refused, and what lived when."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from support.golden_sections import Golden
from support.snapshots import FORWARD, KIB, MIB, SCRIPT, Story, dump, imported, op, python, training_step, without

from ampmem.analysis.summary import summarize
from ampmem.errors import AmpmemError, RecordingError, UsageError
from ampmem.events import UNKNOWN, Action
from ampmem.importer.recording import import_snapshot
from ampmem.names import has_times
from ampmem.recording import RecordingWriter, read
from ampmem.reporters.text.table import render
from ampmem.units import format_bytes
from ampmem.vocabulary import SourceKind


def small() -> dict[str, Any]:
    """One block from before, one that comes and goes, one that comes and stays."""
    story = Story(old=700, gone=600)
    story.alloc("new", 1000, FORWARD)
    story.alloc("short", 2000, FORWARD)
    story.free("short", "gone")
    return story.snapshot()


def refused(tmp_path: Path, data: object, kind: type[AmpmemError] = RecordingError, device: int | None = None) -> str:
    """What is said of ``data``, in one line, and nothing is left."""
    output = tmp_path / "out.ampmem"
    with pytest.raises(kind) as caught:
        import_snapshot(dump(tmp_path / "bad.pickle", data), output, device=device)
    assert "\n" not in str(caught.value)
    assert "bad.pickle" in str(caught.value)
    assert not output.exists()
    return str(caught.value)


def test_the_blocks_from_before_come_first_and_the_totals_agree(tmp_path: Path) -> None:
    analysis = imported(tmp_path, small())
    events = analysis.recording.events
    actions = [Action.BASELINE] * 2 + [Action.ALLOC] * 2 + [Action.FREE] * 2
    assert events.action.tolist() == actions
    assert events.bytes.tolist() == [700, 600, 1000, 2000, 2000, 600]
    assert events.block_bytes.tolist() == [1024, 1024, 1024, 2048, 2048, 1024]
    assert events.allocated.tolist() == [700, 1300, 2300, 4300, 2300, 1700]
    assert (events.time_ns[1:] >= events.time_ns[:-1]).all()
    assert analysis.recording.run.source == SourceKind.SNAPSHOT
    assert summarize(analysis.recording).conservation.residual_bytes == 0
    assert any("2 blocks of 1.3 KiB were alive before" in note for note in analysis.recording.notes)


OLDER: dict[str, Any] = {
    "no times": lambda data: without_in_trace(data, "time_us"),
    "no stacks": lambda data: without_in_trace(data, "frames"),
    "no streams": lambda data: without_in_trace(data, "stream"),
    "no free_requested": lambda data: only(data, lambda event: event["action"] != "free_requested"),
    "no addresses of blocks": lambda data: without_in_blocks(data, "address"),
    "no frames of blocks": lambda data: without_in_blocks(data, "frames"),
    "no annotations": lambda data: data.pop("external_annotations"),
    "metadata": lambda data: [event.update(user_metadata="x", compile_context="0/0") for event in trace_of(data)],
    "a pool": lambda data: [event.update(pool_id=(0, 1)) for event in trace_of(data)],
    "other devices": lambda data: data["device_traces"].append([]),
    "sizes as history": lambda data: as_history(data),
    "snapshot and oom": lambda data: trace_of(data).extend(
        [{"action": "snapshot"}, {"action": "oom", "size": 9, "device_free": 1}]
    ),
    "actions of tomorrow": lambda data: trace_of(data).append({"action": "workspace_moved", "by": 3}),
    "settings": lambda data: data.update(allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    "settings of tomorrow": lambda data: data.update(allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "sparkle:1"}),
}


def trace_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    trace: list[dict[str, Any]] = data["device_traces"][0]
    return trace


def without_in_trace(data: dict[str, Any], key: str) -> None:
    data["device_traces"][0] = without(trace_of(data), key)


def without_in_blocks(data: dict[str, Any], key: str) -> None:
    for segment in data["segments"]:
        segment["blocks"] = without(segment["blocks"], key)


def only(data: dict[str, Any], keep: Any) -> None:
    data["device_traces"][0] = [event for event in trace_of(data) if keep(event)]


def as_history(data: dict[str, Any]) -> None:
    for segment in data["segments"]:
        for block in segment["blocks"]:
            size = block.pop("requested_size")
            block["history"] = [{"real_size": size, "frames": []}]


@pytest.mark.parametrize("name", OLDER)
def test_what_differs_between_versions_changes_no_total(name: str, tmp_path: Path) -> None:
    data = small()
    OLDER[name](data)
    events = imported(tmp_path, data).recording.events
    assert events.bytes.tolist() == [700, 600, 1000, 2000, 2000, 600]
    assert events.allocated.tolist() == [700, 1300, 2300, 4300, 2300, 1700]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    source = dump(tmp_path / "snapshot.pickle", small(), protocol)
    assert len(import_snapshot(source, tmp_path / "run.ampmem").events) == 6


def test_without_times_events_are_a_microsecond_apart(tmp_path: Path) -> None:
    data = small()
    without_in_trace(data, "time_us")
    recording = imported(tmp_path, data).recording
    assert recording.events.time_ns.tolist() == [999, 999, 1000, 2000, 3000, 5000]
    assert "the snapshot has no times: events are a microsecond apart" in recording.notes
    assert not has_times(recording.notes)


def test_sizes_that_only_blocks_have(tmp_path: Path) -> None:
    data = small()
    without_in_blocks(data, "requested_size")
    events = imported(tmp_path, data).recording.events
    assert events.bytes.tolist()[0] == 1024
    assert events.allocated.tolist()[0] == UNKNOWN  # the trace ends elsewhere than the segments


def test_recording_that_was_stopped_early(tmp_path: Path) -> None:
    data = small()
    del trace_of(data)[-4:]
    recording = imported(tmp_path, data).recording
    assert (recording.events.allocated == UNKNOWN).all()
    assert any("recording was stopped before" in note for note in recording.notes)
    assert summarize(recording).conservation.residual_bytes is None


def test_segments_give_the_peak_of_what_was_reserved(tmp_path: Path) -> None:
    data = small()
    size = data["segments"][0]["total_size"]
    reserve = {"addr": 1 << 50, "size": 3 * MIB, "stream": 0, "time_us": 1_700_000_000_000_000, "frames": []}
    trace_of(data)[:0] = [{"action": "segment_alloc", **reserve}, {"action": "segment_free", **reserve}]
    assert summarize(imported(tmp_path, data).recording).steps[0].peak_reserved == size + 3 * MIB


def test_an_allocation_that_failed(tmp_path: Path) -> None:
    data = small()
    frames = [op("mm"), python("linear", "/env/site-packages/torch/nn/functional.py"), *FORWARD]
    trace_of(data).append({"action": "oom", "size": 3 * MIB, "device_free": MIB, "stream": 0, "frames": frames})
    notes = imported(tmp_path, data).recording.notes
    assert (
        "there was no memory for 1 allocation; it asked for 3.0 MiB while the device had 1.0 MiB free, "
        "in aten::mm, at /home/net.py:9 forward"
    ) in notes


def test_a_trace_that_ends_with_a_failure_has_the_record_of_it(tmp_path: Path) -> None:
    story = Story(weight=16 * MIB)
    story.alloc("out", 1 * MIB, FORWARD)
    data = deepcopy(story.snapshot())
    oom = {"action": "oom", "size": 30 * MIB, "device_free": 7 * MIB, "stream": 0, "frames": [op("mm"), *FORWARD]}
    trace_of(data).append(oom)
    summary = summarize(imported(tmp_path, data).recording)
    failed = summary.out_of_memory
    assert failed is not None and summary.ended_by is failed
    assert (failed.asked, failed.device_free, failed.lacking) == (30 * MIB, 7 * MIB, 23 * MIB)
    assert (failed.device_total, failed.outside, failed.residual_bytes) == (None, None, 0)
    assert (failed.op, failed.where, failed.next_commands) == ("aten::mm", "forward of step 0", ())
    text = " ".join(render(summary, ()).split())
    assert "out of memory in forward of step 0: the snapshot ends here" in text
    # What follows the failure has changed the segments, so of that only the note tells.
    later = story.snapshot()
    trace_of(later).insert(len(trace_of(later)) - 1, oom)
    assert summarize(imported(tmp_path, later).recording).out_of_memory is None


def test_an_allocation_that_failed_on_another_device(tmp_path: Path) -> None:
    """As a model that is spread over several devices dies; the device may have no other events."""
    oom = {"action": "oom", "size": 3 * MIB, "stream": 0, "frames": [SCRIPT]}
    data, other = small(), small()
    data["device_traces"] += [[], [oom, {**oom, "size": 2 * MIB, "device_free": MIB}]]
    data["segments"] += [{**segment, "device": 2} for segment in other["segments"]]
    held = format_bytes(other["segments"][0]["total_size"])
    blocks = [block for block in other["segments"][0]["blocks"] if block["state"] == "active_allocated"]
    tensors = format_bytes(sum(block["requested_size"] for block in blocks))
    said = (
        "there was no memory for 2 allocations on device 2, which is not the one shown; the last of them asked for 2.0 "
        "MiB while the device had 1.0 MiB free, at /home/train.py:40 <module>; on device 2 the allocator has "
        f"reserved {held} at the end, {tensors} of it for tensors"
    )
    recording = imported(tmp_path, data).recording
    assert recording.run.device_name == "device 0 of a snapshot"
    assert said in recording.notes
    data["device_traces"][2] += trace_of(other)
    assert "choose one with --device (out of memory: device 2)" in refused(tmp_path, data, UsageError)
    assert f"{said}; --device 2 imports that device" in imported(tmp_path, data, device=0).recording.notes


def test_the_start_that_the_ring_lost(tmp_path: Path) -> None:
    story = Story(weight=4 * KIB)
    story.alloc("lost", 3 * KIB, FORWARD)
    story.alloc("kept", 2 * KIB, FORWARD)
    story.free("lost", "kept")
    data = story.snapshot()
    del trace_of(data)[0]
    events = imported(tmp_path, data).recording.events
    assert events.action.tolist() == [1, 1, 2, 3, 3]
    assert events.allocated.tolist() == [4096, 7168, 9216, 6144, 4096]


def test_one_of_several_devices(tmp_path: Path) -> None:
    data, other = small(), small()
    data["segments"] += [{**segment, "device": 1} for segment in other["segments"]]
    data["device_traces"].append(other["device_traces"][0])
    assert "devices 0, 1; choose one with --device" in refused(tmp_path, data, UsageError)
    assert "no trace of device 7, only of 0, 1" in refused(tmp_path, data, UsageError, device=7)
    recording = imported(tmp_path, data, device=1).recording
    assert len(recording.events) == 6
    assert recording.run.device_name == "device 1 of a snapshot"


UNPLACED = [{"size": 512, "state": "inactive"}]


def segments(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``data`` with another first segment."""
    return {**data, "segments": [data["segments"][0] | changes]}


def event(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``data`` with its first event alone, and that changed."""
    return {**data, "device_traces": [[trace_of(data)[0] | changes]]}


BROKEN: dict[str, Any] = {
    "a list of segments": lambda data: data["segments"],
    "a number": lambda _: 7,
    "other data": lambda _: {"state_dict": {}},
    "segments that are none": lambda data: {**data, "segments": 3},
    "traces that are none": lambda data: {**data, "device_traces": {}},
    "no trace": lambda data: {**data, "device_traces": [[], []]},
    "an event that is none": lambda data: {**data, "device_traces": [[1]]},
    "an event without an action": lambda data: {**data, "device_traces": [[{}]]},
    "an event without an address": lambda data: {**data, "device_traces": [[{"action": "alloc"}]]},
    "a segment that is none": lambda data: {**data, "segments": ["x"]},
    "a segment twice": lambda data: {**data, "segments": data["segments"] * 2},
    "blocks that segments share": lambda data: {
        **data,
        "segments": [{**data["segments"][0], "address": at, "blocks": UNPLACED} for at in (0, 1)],
    },
    "a pool that is none": lambda data: segments(data, segment_pool_id=(1, 2, 3)),
    "a segment of no type": lambda data: segments(data, segment_type=None),
    "settings that cannot be": lambda data: {**data, "allocator_settings": {"max_split_size": "much"}},
    "a size that is no number": lambda data: event(data, size="9"),
    "sizes beyond all sums": lambda data: {**data, "device_traces": [alternating(data, 2**61)]},
    "a block twice": lambda data: segments(data, blocks=data["segments"][0]["blocks"] * 2),
    "an alloc twice": lambda data: {**data, "device_traces": [trace_of(data)[:1] * 2]},
    "a free twice": lambda data: {**data, "device_traces": [trace_of(data)[2:3] * 2]},
    "a negative size": lambda data: event(data, size=-1),
    "a time that cannot be": lambda data: event(data, time_us=2**61),
}


def alternating(data: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Allocs and frees of one block."""
    event = trace_of(data)[0] | {"size": size, "addr": 0}
    return [event | {"action": action} for action in ("alloc", "free_requested", "free_completed")] * 9


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_snapshot_is_refused(name: str, tmp_path: Path, golden: Golden) -> None:
    golden(refused(tmp_path, BROKEN[name](deepcopy(small()))))


@pytest.mark.slow
def test_lists_that_hold_each_other_many_times_are_refused_soon(tmp_path: Path) -> None:
    data = small()
    many = [data["segments"][0]] * 100_000
    assert "listed twice" in refused(tmp_path, {**data, "segments": many})
    blocks = data["segments"][0]["blocks"] * 100_000
    segments = [{**data["segments"][0], "address": index, "blocks": blocks} for index in range(100)]
    assert "a block twice" in refused(tmp_path, {**data, "segments": segments})
    traces = [trace_of(data) * 10_000] * 10_000
    assert "choose one with --device" in refused(tmp_path, {**data, "device_traces": traces}, UsageError)
    frame = {"name": "n" * 50_000, "filename": "f" * 50_000 + ".py", "line": 1}
    data["device_traces"] = [
        [event | {"frames": [frame] * (index + 1000)} for index, event in enumerate(small_trace())]
    ]
    texts = imported(tmp_path, data).recording.texts
    assert max(map(len, texts)) < 64 * 700


def small_trace() -> list[dict[str, Any]]:
    return trace_of(small())


def test_odd_texts_get_into_the_file(tmp_path: Path) -> None:
    data = small()
    for event in trace_of(data):
        event["frames"] = [{"name": "a\0b\ud800", "filename": "ü\n.py", "line": 3}]
    assert any("a?b?" in text for text in imported(tmp_path, data).recording.texts)


def test_steps_and_phases(tmp_path: Path) -> None:
    story = Story(embedding=8 * MIB, weight=4 * MIB, other=4 * MIB, norm=3 * KIB)
    training_step(story, state=True)
    training_step(story, state=False, number=1)
    story.alloc("more", 1 * MIB, FORWARD)
    recording = imported(tmp_path, story.snapshot()).recording
    assert [step.index for step in recording.steps] == [0, 1, 2]
    assert [optimizer.implementation for optimizer in recording.optimizers] == ["foreach"]
    assert "the trace ends before the update of step 2" in recording.notes
    phases = list(zip(recording.phases.phase.tolist(), recording.phases.step.tolist(), strict=True))
    # forward, backward, optimizer; zero_grad comes after the update, so in the next step
    assert phases == [(3, 0), (4, 0), (5, 0), (6, 1), (3, 1), (4, 1), (5, 1), (6, 2), (3, 2)]


def test_an_update_that_allocates_nothing_is_known_by_its_annotation(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB)
    story.alloc("a", 1 * MIB, FORWARD)
    start = story.now
    story.now += 100
    story.alloc("b", 1 * MIB, FORWARD)
    spans = [
        {"stage": stage, "name": "Optimizer.step#Lion.step", "device": 0, "time_us": start + offset}
        for stage, offset in (("START", 10), ("END", 20))
    ]
    recording = imported(tmp_path, story.snapshot(external_annotations=spans)).recording
    assert [optimizer.class_name for optimizer in recording.optimizers] == ["Lion"]
    assert [step.end_ns for step in recording.steps] == [(start + 21) * 1000, recording.events.time_ns[-1] + 1]


def test_the_command(tmp_path: Path) -> None:
    dump(tmp_path / "s.pickle", small())
    code, said = ampmem(tmp_path, "import", "s.pickle", "-o", "r.ampmem")
    assert (code, said) == (0, f"ampmem: wrote r.ampmem, {format_bytes((tmp_path / 'r.ampmem').stat().st_size)}\n")
    assert len(read(tmp_path / "r.ampmem").events) == 6
    code, said = ampmem(tmp_path, "import", "s.pickle", "-o", "r.ampmem")
    assert code == 2 and "exists already" in said
    assert ampmem(tmp_path, "import", "s.pickle", "-o", "r.ampmem", "--force")[0] == 0
    assert ampmem(tmp_path, "show", "r.ampmem") == (0, "")


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(b"cos\nsystem\n(S'touch it-ran'\ntR.")
    code, said = ampmem(tmp_path, "import", "s.pickle", "-o", "r.ampmem")
    assert (code, len(said.splitlines())) == (1, 1)
    assert said.startswith("ampmem: s.pickle is not a memory snapshot")
    assert ampmem(tmp_path, "import", "gone", "-o", "r.ampmem") == (2, "ampmem: gone does not exist\n")
    assert [path.name for path in tmp_path.iterdir()] == ["s.pickle"]


def ampmem(cwd: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ampmem", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)
    return done.returncode, done.stderr


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    source = dump(tmp_path / "s.pickle", small())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="it is not a file"):
        import_snapshot(source, pipe, force=True)
    assert pipe.is_fifo()


def test_a_recording_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RecordingError("the disk is full")

    source = dump(tmp_path / "s.pickle", small())
    (tmp_path / "r.ampmem").write_text("old")
    monkeypatch.setattr(RecordingWriter, "append", fail)
    with pytest.raises(RecordingError, match="disk is full"):
        import_snapshot(source, tmp_path / "r.ampmem", force=True)
    assert (tmp_path / "r.ampmem").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.ampmem", "s.pickle"]


def test_torch_is_not_needed(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from pathlib import Path\nfrom ampmem.importer.recording import import_snapshot\n"
        "import_snapshot(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    source = dump(tmp_path / "s.pickle", small())
    subprocess.run([sys.executable, "-c", code, source, tmp_path / "r.ampmem"], check=True, timeout=120)
