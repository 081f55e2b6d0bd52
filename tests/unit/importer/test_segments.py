"""What was reserved when, out of snapshots: real ones against the allocator's replay, and made ones."""

from pathlib import Path
from typing import Any

import pytest
from support.replayed import replay
from support.snapshots import FORWARD, MIB, Story, imported, real

from ampmem.allocator.snapshot import read_snapshot
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.layers import AllocatorLayers, address_map, segments_at
from ampmem.analysis.summary import summarize
from ampmem.events import SegmentAction
from ampmem.importer.recording import recording_of
from ampmem.importer.unpickle import load_plain

REPLAYED = (
    "course_no_time",
    "lm2700m_ctx128_bf16_forward",
    "lm2700m_ctx128_fp32_forward",
    "lm2700m_ctx128_fp32_step",
    "lm_medium_ctx128_fp32_step",
    "lm_medium_ctx512_bf16_inference",
)


def layers_in(analysis: Analysis) -> AllocatorLayers:
    return analysis.layers


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_what_was_reserved_is_what_the_replay_finds(name: str) -> None:
    snapshot = read_snapshot(load_plain(real(name)))
    analysis = analyse(recording_of(snapshot, name))
    layers = layers_in(analysis)
    assert layers.level.max() == replay(snapshot).recorded_peak_reserved
    assert layers.level[-1] == sum(segment.size for segment in snapshot.segments)
    assert layers.cached.min() >= 0
    found = [(each.extent.address, each.extent.size) for each in address_map(analysis, None)]
    assert found == sorted((segment.address, segment.size) for segment in snapshot.segments)
    summary = summarize(analysis.recording)
    assert max(step.peak_reserved or 0 for step in summary.steps) == layers.level.max()


def test_segments_that_do_not_fit_the_trace_are_not_made_up() -> None:
    recording = recording_of(read_snapshot(load_plain(real("old_no_free_requested"))), "old")
    assert len(recording.segments) == 0
    assert any("so the reserved memory is unknown" in note for note in recording.notes)
    summary = summarize(recording)
    assert (summary.allocator.reserved, summary.steps[0].peak_reserved) == (None, None)


def story() -> Story:
    story = Story(old=700)
    story.alloc("new", 1000, FORWARD)
    return story


def test_segments_come_and_go(tmp_path: Path) -> None:
    one = story()
    one.event("segment_free", 3 << 50, 20 * MIB, [])
    one.event("segment_alloc", 1 << 50, 2 * MIB, [])
    one.alloc("more", 3000, FORWARD)
    one.event("segment_free", 1 << 50, 2 * MIB, [])
    data = one.snapshot()
    final = data["segments"][0]["total_size"]
    analysis = imported(tmp_path, data)
    segments, layers = analysis.recording.segments, layers_in(analysis)
    assert segments.action.tolist() == [
        *[SegmentAction.BASELINE] * 2,
        *[SegmentAction.RELEASE, SegmentAction.RESERVE] * 1,
        3,
    ]
    assert segments.position.tolist() == [0, 0, 2, 2, 3]
    assert layers.reserved.tolist() == [final + 20 * MIB] * 3 + [final + 2 * MIB]
    assert layers.level.tolist()[-1] == final
    assert summarize(analysis.recording).steps[0].peak_reserved == final + 20 * MIB


def test_pages_of_an_expandable_segment_that_leave_in_one_call(tmp_path: Path) -> None:
    one = story()
    for page in range(3):
        one.event("segment_map", (1 << 50) + page * 2 * MIB, 2 * MIB, [])
    one.alloc("more", 3000, FORWARD)
    one.event("segment_unmap", (1 << 50) + 2 * MIB, 4 * MIB, [])
    data = one.snapshot()
    page = {"address": 1 << 50, "total_size": 2 * MIB, "segment_type": "small", "is_expandable": True, "blocks": []}
    data["segments"].append({**data["segments"][0], **page})
    segments = imported(tmp_path, data).recording.segments
    assert segments.bytes.tolist()[1:] == [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB]
    assert segments.expandable.tolist() == [0, 1, 1, 1, 1]
    assert [each.size for each in segments_at(segments, 3)][1:] == [6 * MIB]
    assert [(each.address, each.size) for each in segments_at(segments, None)][1:] == [(1 << 50, 2 * MIB)]


def _cannot_be(data: dict[str, Any]) -> None:
    row = {"action": "segment_alloc", "addr": 1 << 50, "size": 2 * MIB, "stream": 0, "time_us": 1, "frames": []}
    data["device_traces"][0].insert(0, row)


def _nowhere(data: dict[str, Any]) -> None:
    data["segments"][0] |= {"address": 5 << 50}


@pytest.mark.parametrize("spoil", [_cannot_be, _nowhere])
def test_a_contradiction_is_told(spoil: Any, tmp_path: Path) -> None:
    data = story().snapshot()
    spoil(data)
    recording = imported(tmp_path, data).recording
    assert len(recording.segments) == 0
    assert any("so the reserved memory is unknown" in note for note in recording.notes)
