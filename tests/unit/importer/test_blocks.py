"""How large the blocks of a snapshot were: as the allocator handed them out, not as requests are rounded."""

from pathlib import Path

import pytest
from support.replayed import replay as modelled
from support.snapshots import ENGINE, FORWARD, KIB, MIB, Story, imported, op, real

from ampmem.allocator.settings import Settings
from ampmem.allocator.snapshot import read_snapshot
from ampmem.analysis.analyse import analyse
from ampmem.importer.recording import recording_of
from ampmem.importer.replay import block_sizes
from ampmem.importer.unpickle import load_plain

START = 1 << 40


def reused(gap: int, size: int) -> Story:
    """A block of ``size`` in the place of a freed one of ``gap``, between others, and freed as well."""
    story = Story(first=gap, second=16 * MIB)
    story.free("first")
    story.event("alloc", START, size, [op("mm"), *FORWARD])
    for action in ("free_requested", "free_completed"):
        story.event(action, START, size, ENGINE)
    return story


@pytest.mark.parametrize(
    ("gap", "size", "block"),
    [
        (6 * MIB, 5 * MIB, 6 * MIB),  # 1 MiB is not split off
        (6 * MIB, 5 * MIB - 512, 5 * MIB - 512),  # more is
        (6 * MIB, 5 * MIB + 100 * KIB + 1, 6 * MIB),
    ],
)
def test_what_is_left_of_a_block_belongs_to_it_up_to_a_mebibyte(
    gap: int, size: int, block: int, tmp_path: Path
) -> None:
    lives = imported(tmp_path, reused(gap, size).snapshot()).lifetimes
    assert [int(lives.block_bytes[index]) for index in range(len(lives)) if lives.bytes[index] == size] == [block]


def test_a_trace_that_contradicts_its_segments_has_no_sizes() -> None:
    story = reused(6 * MIB, 5 * MIB)
    data = story.snapshot()
    data["segments"][0]["blocks"][0]["size"] -= 512  # they fill their segment no more
    assert block_sizes(read_snapshot(data), Settings()) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm_small_ctx200_fp32_3steps", "lm_medium_ctx128_fp32_step", "resnet50_fp32_3steps"])
def test_the_peak_of_a_real_trace_is_that_of_its_blocks(name: str) -> None:
    snapshot = read_snapshot(load_plain(real(name)))
    analysis = analyse(recording_of(snapshot, name))
    alive = analysis.lifetimes.block_bytes
    births, deaths = analysis.lifetimes.born, analysis.lifetimes.died
    changes = sorted(
        [(int(born), int(size)) for born, size in zip(births, alive, strict=True)]
        + [(int(died), -int(size)) for died, size in zip(deaths, alive, strict=True) if died >= 0]
    )
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    # Another way there: the model of the allocator makes the trace's calls, and puts every block where it was.
    model = modelled(snapshot)
    assert model.moved == 0
    assert peak == model.counters.allocated_peak
