"""The cast ledger on crafted recordings."""

from dataclasses import replace

from support.build import AMP, Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.casts import CopyCount, cast_eligible
from ampmem.events import Fact, Phase, PrecisionRecord, Recording

NONE = CopyCount(copies=0, bytes=0)


def copy(story: Story, address: int, name: str, size: int, *, uses: int = 1, saved: bool = False) -> None:
    story.tensor(Fact.CAST_COPY, address, size, name)
    for _ in range(uses):
        story.fact(Fact.CAST_USE, address, "aten::mm")
    if saved:
        story.fact(Fact.SAVED, address, "aten::mm")


def run() -> Story:
    """One step: a cached and saved copy, a cached one, a saved one, one that nobody holds; then a backward."""
    story = Story()
    for address, name in ((0x100, "both"), (0x200, "cache"), (0x300, "autograd"), (0x400, "neither")):
        story.parameter(address, name, 10)
    story.begin(0, Phase.FORWARD)
    copy(story, 0x1000, "both", 20, uses=3, saved=True)
    copy(story, 0x2000, "cache", 20, uses=2)
    copy(story, 0x3000, "autograd", 20, uses=2, saved=True)
    copy(story, 0x4000, "neither", 20)
    return story


def finished(story: Story) -> Recording:
    story.enter(Phase.BACKWARD)
    story.free(0x1000, 0x2000, 0x3000, 0x4000)
    cleared = story.enter(Phase.BETWEEN)
    story.end()
    assert cleared
    return story.recording()


def clear(story: Story, *addresses: int) -> None:
    for address in addresses:
        story.fact(Fact.CACHED, address)


def test_hits_are_the_uses_after_the_first_of_what_the_cache_held() -> None:
    story = run()
    clear(story, 0x1000, 0x2000)
    found = analyse(finished(story)).casts
    assert {row.name: row.cache_hits for row in found.by_parameter} == {
        "both": 2,
        "cache": 1,
        "autograd": 0,
        "neither": 0,
    }
    assert found.cache_hits == 3
    assert found.steps[0].phases["forward"].cache_hits == 3


def test_holders_of_each_parameter_and_at_the_end_of_forward() -> None:
    story = run()
    story.enter(Phase.BACKWARD)  # inside the region: the cache is cleared after
    clear(story, 0x1000, 0x2000)
    story.free(0x1000, 0x2000, 0x3000, 0x4000)
    story.end()
    found = analyse(story.recording()).casts
    assert {row.name: (row.held_by_cache, row.held_by_autograd, row.held_by_both) for row in found.by_parameter} == {
        "both": (0, 0, 1),
        "cache": (1, 0, 0),
        "autograd": (0, 1, 0),
        "neither": (0, 0, 0),
    }
    holders = found.steps[0].after_forward
    one = CopyCount(copies=1, bytes=20)
    assert (holders.cache, holders.autograd, holders.both, holders.neither) == (one, one, one, one)


def test_what_the_cache_let_go_of_before_the_mark_is_not_held_by_it_then() -> None:
    story = run()
    clear(story, 0x1000, 0x2000)
    holders = analyse(finished(story)).casts.steps[0].after_forward
    assert (holders.cache, holders.both) == (NONE, NONE)
    assert (holders.autograd.copies, holders.neither.copies) == (2, 2)


def open_region(precision: PrecisionRecord = AMP) -> Recording:
    """A first copy that a clear left alone, then one of each kind; the recording ends with all of them alive."""
    story = Story()
    story.parameter(0x100, "weight", 10)
    story.parameter(0x200, "frozen", 10, trainable=False)
    story.begin(0, Phase.FORWARD)
    copy(story, 0x1000, "weight", 20, uses=2)
    copy(story, 0x2000, "weight", 20, uses=2)
    story.fact(Fact.CACHED, 0x2000)
    copy(story, 0x3000, "weight", 20, uses=2)
    copy(story, 0x4000, "frozen", 20, uses=2)
    copy(story, 0x5000, "weight", 10, uses=2)
    story.fact(Fact.VIEW_CAST, 0x5000, "weight")
    story.end(Phase.BACKWARD)
    return story.recording(precision=precision)


def test_a_cache_that_was_not_cleared_yet_holds_what_it_can_hold() -> None:
    """What it left alone, parameters without gradients and views were never in it."""
    assert analyse(open_region()).ledger.cached.tolist() == [False, True, True, False, False]
    found = analyse(open_region()).casts
    assert found.steps[0].surviving == CopyCount(copies=5, bytes=90)
    assert found.steps[0].views == CopyCount(copies=1, bytes=10)


def test_without_a_cache_only_what_was_seen_in_one_counts() -> None:
    precision = replace(AMP, name="amp-nocache", cache=False)
    assert analyse(open_region(precision)).ledger.cached.tolist() == [False, True, False, False, False]


def test_recomputed_and_other_copies_and_phases_of_each_step() -> None:
    story = run()
    story.enter(Phase.BACKWARD)
    copy(story, 0x5000, "both", 20, uses=2)
    story.fact(Fact.CACHED, 0x5000)
    story.free(0x5000)
    story.tensor(Fact.OTHER_CAST, 0x6000, 30, "table")
    found = analyse(finished(story)).casts
    (step,) = found.steps
    assert step.recomputed == CopyCount(copies=1, bytes=20)
    assert step.others == CopyCount(copies=1, bytes=30)
    assert {name: (row.copies, row.bytes, row.cache_hits) for name, row in step.phases.items()} == {
        "forward": (4, 80, 0),
        "backward": (1, 20, 1),
    }
    assert (found.copies, found.bytes, found.peak_bytes) == (5, 100, 100)


def test_a_parameter_in_the_memory_of_another_is_not_eligible_twice() -> None:
    recording = finished(run())
    twin = replace(recording.parameters[1], shares="both")
    assert cast_eligible(analyse(recording)) == 40
    assert cast_eligible(analyse(replace(recording, parameters=(recording.parameters[0], twin)))) == 10
    assert cast_eligible(analyse(replace(recording, precision=replace(AMP, name="fp32")))) is None


def test_thousands_of_parameters() -> None:
    story = Story()
    for number in range(3000):
        story.parameter(0x10000 + number, f"p{number:04}", 4)
    story.begin(0, Phase.FORWARD)
    for number in range(3000):
        copy(story, 0x20000 + number, f"p{number:04}", 8)
        copy(story, 0x30000 + number, f"p{number:04}", 8)
    story.end(Phase.BACKWARD)
    rows = analyse(story.recording()).casts.by_parameter
    assert [row.name for row in rows] == [f"p{number:04}" for number in range(3000)]
    assert {(row.copies, row.bytes) for row in rows} == {(2, 16)}


def test_a_buffer_with_copies_of_several_parameters_is_one_copy_of_each() -> None:
    story = Story()
    for address, name, elements in ((0x100, "weight", 12), (0x200, "bias", 3)):
        story.parameter(address, name, elements)
    story.begin(0, Phase.FORWARD)
    story.alloc(0x1000, 32)  # a piece of it is nobody's
    story.fact(Fact.CAST_COPY, 0x1000, "weight", dtype="float16", shape="[3, 4]")
    story.fact(Fact.CAST_COPY, 0x1000, "bias", dtype="float16", shape="[3]")
    story.fact(Fact.SAVED, 0x1000, "aten::_cudnn_rnn")
    story.end(Phase.BACKWARD)
    found = analyse(story.recording()).casts
    assert [(row.name, row.copies, row.bytes, row.held_by_autograd) for row in found.by_parameter] == [
        ("weight", 1, 24, 1),
        ("bias", 1, 6, 1),
    ]
    assert (found.copies, found.bytes, found.peak_bytes) == (2, 30, 32)
