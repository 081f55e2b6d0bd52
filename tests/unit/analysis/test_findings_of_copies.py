"""Findings about cast copies and casts of buffers: the bytes, what the change takes off the peak, what to change."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.build import NO_CACHE, Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings import findings
from ampmem.analysis.findings.base import Finding
from ampmem.events import Fact, Phase, Recording
from ampmem.vocabulary import Communication


def told(recording: Recording) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings(analyse(recording))}


# -- autocast around backward -----------------------------------------------------------------


def around_backward(activation: int, *, saves: int = 0) -> Recording:
    """Two steps whose cache holds a copy of 2,000 bytes through backward, where the peak is: 4,000 + 2,000 + 4,000."""
    story = Story(weight=1000)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.CAST_COPY, 0x2000, 2000, "weight", op="aten::_to_copy")
        for _ in range(saves):
            story.fact(Fact.SAVED, 0x2000, "aten::mm", dtype="bfloat16")
        story.tensor(Fact.SAVED, 0x3000, activation, "aten::relu", op="aten::mm")
        story.enter(Phase.BACKWARD)
        story.free(0x3000)
        story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
        story.enter(Phase.OPTIMIZER)
        story.enter(Phase.BETWEEN)
        story.fact(Fact.CACHED, 0x2000)
        story.free(0x2000, 0x4000)
        story.end()
    recording = story.recording()
    return replace(recording, steps=tuple(replace(step, autocast_in_backward=True) for step in recording.steps))


@pytest.mark.parametrize(
    ("activation", "saves", "size", "off_peak"),
    [
        (1500, 0, 2000, 2000),
        (3000, 0, 2000, 1000),  # at the end of forward there are 9,000 bytes, whatever comes later
        (1500, 1, None, None),  # autograd holds it, too
    ],
)
def test_the_copies_that_only_the_cache_holds_leave_at_the_end_of_forward(
    activation: int, saves: int, size: int | None, off_peak: int | None
) -> None:
    found = told(around_backward(activation, saves=saves))["autocast-in-backward"]
    assert (found.bytes, found.off_peak) == (size, off_peak)
    assert found.change.endswith("outside of it: loss.backward()")
    copies = ("cast copies are those of step 1",) if size else ()
    assert found.evidence == ("steps: 0, 1", *copies)


def test_a_pipeline_closes_autocast_in_the_forward_of_its_stages() -> None:
    story = Story()
    story.tensor(Fact.COMMUNICATION, 0x8000, 64, Communication.RECEIVE_BUFFERS)
    story.begin(0, Phase.FORWARD)
    story.end(Phase.BACKWARD)
    recording = story.recording()
    inside = replace(recording, steps=(replace(recording.steps[0], autocast_in_backward=True),))
    found = told(inside)["autocast-in-backward"]
    assert found.bytes is None
    assert found.change.startswith("enter torch.autocast(...) in the forward of the stages' modules")


def test_a_step_whose_forward_was_not_seen_has_no_copies_to_count() -> None:
    story = Story(weight=1000, begins=Phase.OPTIMIZER)
    story.end()
    recording = story.recording()
    found = told(replace(recording, steps=(replace(recording.steps[0], autocast_in_backward=True),)))
    assert found["autocast-in-backward"].bytes is None
    assert found["autocast-in-backward"].message == "backward runs inside the autocast region."


# -- the cache --------------------------------------------------------------------------------


def evaluating(idle: Sequence[int], saves: int, *, recast: int = 0) -> Recording:
    """Two steps with copies of which autograd saves none (``idle``), and one of 3,000 bytes that it saves.

    Backward makes copies of ``recast`` bytes, where it runs forward again.
    """
    story = Story(weight=1000)
    story.parameter(0x2000, "used", 1000)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        held = [0x10000 + 0x1000 * number for number in range(len(idle))]
        for address, size in zip(held, idle, strict=True):
            story.tensor(Fact.CAST_COPY, address, size, "weight", op="aten::_to_copy")
        story.tensor(Fact.CAST_COPY, 0x3000, 3000, "used", op="aten::_to_copy")
        for _ in range(saves):
            story.fact(Fact.SAVED, 0x3000, "aten::mm", dtype="bfloat16")
        for address in (*held, 0x3000):
            story.fact(Fact.CACHED, address)
        story.free(*held)
        story.enter(Phase.BACKWARD)
        story.free(0x3000)
        if recast:
            story.tensor(Fact.CAST_COPY, 0x5000, recast, "used", op="aten::_to_copy")
            story.free(0x5000)
        story.end(Phase.OPTIMIZER)
    return story.recording()


@pytest.mark.parametrize(
    ("idle", "saves", "recast", "size", "off_peak"),
    [
        ([5000] * 4, 1, 0, 15_000, 15_000),  # one of 5,000 stays
        ([5000, 9000, 6000], 1, 0, 11_000, 11_000),  # the largest stays
        ([5000] * 4, 2, 0, 12_000, 12_000),  # and 3,000 are a second copy of what autograd saves twice
        ([5000] * 4, 4, 0, 6000, 6000),
        ([5000] * 4, 1, 15_000, 8000, 8000),  # of 23,000 to the 15,000 in backward
        ([5000], 1, 0, None, None),
        ([5000, 1024], 1, 0, 1024, 1024),
        ([5000, 1023], 1, 0, None, None),
        ([5000] * 4, 6, 0, None, None),  # 15,000 more for five further copies
    ],
)
def test_without_the_cache_idle_copies_live_one_at_a_time_and_saved_ones_once_for_each_use(
    idle: list[int], saves: int, recast: int, size: int | None, off_peak: int | None
) -> None:
    recording = evaluating(idle, saves, recast=recast)
    found = told(recording).get("cache-off-saves")
    assert (found and found.bytes, found and found.off_peak) == (size, off_peak)
    if found is not None:
        assert found.evidence == (f"weight: {sum(idle) / 1024:.1f} KiB",)  # of one step
        assert found.message.startswith(f"{sum(idle) / 1024:.1f} KiB of cast copies stay alive only")
    assert "cache-off-saves" not in told(replace(recording, precision=NO_CACHE))


@pytest.mark.parametrize(
    ("copies", "frozen", "view", "size"),
    [
        ({"a": (2000, 2000, 2000)}, "", False, 4000),
        ({"a": (2000, 3000), "b": (5000,)}, "", False, 2000),  # the larger one of two stays
        ({"a": (2000, 2000), "b": (4000, 4000)}, "b", False, 2000),
        ({"a": (2000, 2000)}, "", True, None),
        ({"a": (2000,), "b": (2000,)}, "", False, None),
    ],
)
def test_the_cache_would_keep_one_copy_of_each_trained_parameter(
    copies: dict[str, tuple[int, ...]], frozen: str, view: bool, size: int | None
) -> None:
    story = Story()
    for number, name in enumerate(copies):
        story.parameter(0x1000 + number, name, 1000, trainable=name != frozen)
    story.begin(0, Phase.FORWARD)
    made = [(name, each) for name, sizes in copies.items() for each in sizes]
    for number, (name, each) in enumerate(made):
        story.tensor(Fact.CAST_COPY, 0x2000 + number, each, name, op="aten::_to_copy")
        story.fact(Fact.SAVED, 0x2000 + number, "aten::mm", dtype="bfloat16")
        if view:
            story.fact(Fact.VIEW_CAST, 0x2000 + number, name)
    story.enter(Phase.BACKWARD)
    story.free(*(0x2000 + number for number in range(len(made))))
    story.end()
    found = told(story.recording(precision=NO_CACHE)).get("cache-on-saves")
    assert (found and found.bytes, found and found.off_peak) == (size, size)
    assert "cache-on-saves" not in told(story.recording())


@pytest.mark.parametrize(
    ("uses", "size"), [({"a": (2000, 3)}, 4000), ({"a": (2000, 2), "b": (3000, 2)}, 5000), ({"a": (2000, 1)}, None)]
)
def test_each_further_use_of_a_cached_copy_would_be_a_copy(uses: dict[str, tuple[int, int]], size: int | None) -> None:
    story = Story()
    for number, name in enumerate(uses):
        story.parameter(0x1000 + number, name, 1000)
    story.begin(0, Phase.FORWARD)
    for number, (name, (each, saves)) in enumerate(uses.items()):
        story.tensor(Fact.CAST_COPY, 0x2000 + number, each, name, op="aten::_to_copy")
        for _ in range(saves):
            story.fact(Fact.SAVED, 0x2000 + number, "aten::mm", dtype="bfloat16")
        story.fact(Fact.CACHED, 0x2000 + number)
    story.enter(Phase.BACKWARD)
    story.free(*(0x2000 + number for number in range(len(uses))))
    story.end()
    found = told(story.recording()).get("cache-off-costs")
    assert (found and found.bytes) == size
    assert found is None or found.severity == "info"


@pytest.mark.parametrize(
    ("cached", "alive", "size"), [(True, True, 4000), (False, True, None), (True, False, None), (False, False, None)]
)
def test_only_cached_copies_that_backward_finds_would_be_more(cached: bool, alive: bool, size: int | None) -> None:
    story = Story(weight=1000, name="a", begins=Phase.FORWARD)
    story.tensor(Fact.CAST_COPY, 0x2000, 2000, "a", op="aten::_to_copy")
    for _ in range(3):
        story.fact(Fact.SAVED, 0x2000, "aten::mm", dtype="bfloat16")
    if cached:
        story.fact(Fact.CACHED, 0x2000)
    if not alive:
        story.free(0x2000)
    story.enter(Phase.BACKWARD)
    if alive:
        story.free(0x2000)
    story.end()
    found = told(story.recording()).get("cache-off-costs")
    assert (found and found.bytes) == size


# -- copies that stay -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "growth"),
    [
        ([1000, 10, 10], 20),  # a warning, at any size
        ([1000, 10, 0], None),
        ([1000, 10], None),  # two steps are no trend
        ([0, 10, 20, 30], 60),
    ],
)
def test_copies_that_become_more_with_every_step(made: list[int], growth: int | None) -> None:
    story = Story(weight=1000)
    for step, size in enumerate(made):
        story.begin(step, Phase.FORWARD)
        if size:
            story.tensor(Fact.CAST_COPY, 0x2000 + step, size, "weight", op="aten::_to_copy")
            story.fact(Fact.SAVED, 0x2000 + step, "aten::mm", dtype="bfloat16")
        story.end(Phase.BACKWARD)
    recording = story.recording()
    found = told(recording).get("copies-grow")
    assert (found and found.bytes) == growth
    if found is not None:
        assert found.severity == "warning"
        assert f"in {len(made)} steps" in found.message
        assert found.evidence[1] == f"weight: {sum(made)} B"
    wrong = recording.events.allocated.copy()
    wrong[-1] += 8
    breached = replace(recording, events=replace(recording.events, allocated=wrong))
    assert "copies-grow" not in told(breached), "where sums are wrong, what seems alive may be dead"


def outliving(*, cleared: bool, freed_in_forward: bool = True) -> Recording:
    """Three steps; a copy of 3,000 bytes of each lives until forward of the next one has begun."""
    story = Story(weight=1000)
    for step in range(3):
        story.begin(step, Phase.FORWARD)
        if step and freed_in_forward:
            story.free(0x2000 + step - 1)
        story.tensor(Fact.CAST_COPY, 0x2000 + step, 3000, "weight", op="aten::_to_copy")
        story.fact(Fact.SAVED, 0x2000 + step, "aten::mm", dtype="bfloat16")
        if cleared:
            story.fact(Fact.CACHED, 0x2000 + step)
        story.tensor(Fact.SAVED, 0x3000, 1000, "aten::relu")
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
        story.free(0x3000)
        story.enter(Phase.OPTIMIZER)
        story.alloc(0x5000, 1800)
        story.free(0x5000, 0x4000)
        story.end()
    return story.recording()


@pytest.mark.parametrize(
    ("cleared", "change"), [(False, "with torch.autocast(...): only around"), (True, "keep neither the graph")]
)
def test_copies_that_outlive_their_step(cleared: bool, change: str) -> None:
    """In the update, where the peak is, they have had their backward."""
    found = told(outliving(cleared=cleared, freed_in_forward=False))["copies-survive"]
    assert found.severity == "warning"
    assert found.bytes == 2 * 3000, "what the steps before the last forward made and nothing freed"
    assert found.evidence == ("copies: 2", "weight: 5.9 KiB")
    assert found.change.startswith(change)
    saved = 6000 if cleared else None
    assert found.off_peak == saved, "the peak is in the step after: only a cache would have made them again"
    found = told(outliving(cleared=cleared))["copies-survive"]
    assert (found.bytes, found.evidence[0]) == (3000, "copies: 1")
    assert found.off_peak == 800, "of 12,800 in the update; in backward, which needs the copies, there are 12,000"


def test_copies_that_are_gone_when_the_next_forward_starts_do_not_survive() -> None:
    story = Story(weight=1000)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.CAST_COPY, 0x2000, 3000, "weight", op="aten::_to_copy")
        story.fact(Fact.CACHED, 0x2000)
        story.end(Phase.BACKWARD)
        story.free(0x2000)  # the region around the whole step closes after it
    assert "copies-survive" not in told(story.recording())


def test_copies_that_backward_makes_are_those_of_the_last_step_that_has_any() -> None:
    story = Story(weight=1000, name="a")
    story.parameter(0x2000, "b", 1000)
    for step, again in enumerate([(4000, 4000), (2000, 1000), ()]):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.CAST_COPY, 0x3000, 3000, "a", op="aten::_to_copy")
        story.fact(Fact.SAVED, 0x3000, "aten::mm", dtype="bfloat16")
        story.enter(Phase.BACKWARD)
        for number, size in enumerate(again):
            story.tensor(Fact.CAST_COPY, 0x4000 + number, size, "ab"[number], op="aten::_to_copy")
        story.free(0x3000, *(0x4000 + number for number in range(len(again))))
        story.end()
    found = told(story.recording())["recompute-recasts"]
    assert (found.bytes, found.severity) == (3000, "info")
    assert "2 copies, 2.9 KiB per step" in found.message
    assert found.evidence == ("a: 2.0 KiB", "b: 1000 B")


def test_copies_that_compiled_code_keeps_can_be_made_again() -> None:
    story = Story()
    for number, name in enumerate("abc"):
        story.parameter(0x1000 + number, name, 5000)
    story.begin(0)
    story.enter(Phase.FORWARD)
    for number, (name, saved) in enumerate(zip("abca", (True, True, True, False), strict=True)):
        story.tensor(Fact.CAST_COPY, 0x2000 + number, 10_000, name, op="aten::_to_copy")
        story.fact(Fact.COMPILED, 0x2000 + number, name)
        if saved:
            story.fact(Fact.SAVED, 0x2000 + number, "aten::mm")
    story.free(0x2003)
    story.tensor(Fact.SAVED, 0x3000, 50_000, "aten::mm")
    story.enter(Phase.BACKWARD)
    story.free(0x3000, *(0x2000 + number for number in range(3)))
    story.end()
    found = told(story.recording())["compiled-casts"]
    assert (found.severity, found.bytes, found.off_peak) == ("advice", 30_000, 10_000)  # two at once
    assert found.saves.startswith("at least")
    assert "3 16-bit copies" in found.message


def test_copies_of_uncompiled_code_are_not_said_to_be_compiled() -> None:
    assert "compiled-casts" not in told(around_backward(1500, saves=1))


# -- casts of buffers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "of", "copy", "to", "named", "excess"),
    [
        # 1,000 elements: as a copy of the buffer itself 2,000 bytes in 16 bit, 4,000 in 32.
        (4000, "float32", 4000, "bfloat16", True, 2000),
        (4000, "float32", 3998, "bfloat16", True, None),
        (4000, "float32", 80_000, "float16", True, 78_000),
        (4000, "", 4000, "bfloat16", True, 2000),  # of an unknown type: as float32
        (2000, "bfloat16", 8000, "float32", True, 4000),
        (2000, "bfloat16", 7996, "float32", True, None),
        (8000, "float64", 16_000, "float32", True, 12_000),
        (2000, "float16", 16_000, "float64", True, 8000),
        (4000, "float32", 80_000, "float8_e4m3fn", True, None),
        (4000, "float32", 80_000, "bfloat16", False, None),  # of what is no buffer
    ],
)
def test_a_cast_of_an_expanded_buffer_takes_more_than_one_of_the_buffer(
    buffer: int, of: str, copy: int, to: str, named: bool, excess: int | None
) -> None:
    story = Story(weight=10)
    story.tensor(Fact.BUFFER, 0x2000, buffer, "mask", dtype=of)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.OTHER_CAST, 0x3000, copy, "mask" if named else "", op="aten::_to_copy", dtype=to)
        story.free(0x3000)
        story.end(Phase.BACKWARD)
    found = told(story.recording()).get("expanded-buffer-cast")
    assert (found and found.bytes, found and found.off_peak) == (excess, excess)
    if found is not None:
        assert len(found.evidence) == 1 and found.evidence[0].startswith(f"{copy / 1024:.1f} KiB: ")


def test_the_buffer_that_is_cast_is_the_one_that_is_there() -> None:
    """It moves to another memory, twice as large as before, and the casts of both are alive at once."""
    story = Story(weight=10, begins=Phase.FORWARD)
    story.tensor(Fact.BUFFER, 0x2000, 4000, "mask", dtype="float32")
    story.tensor(Fact.OTHER_CAST, 0x3000, 6000, "mask", op="aten::_to_copy", dtype="bfloat16")
    story.free(0x2000)
    story.tensor(Fact.BUFFER, 0x2000, 8000, "mask", dtype="float32")
    story.tensor(Fact.OTHER_CAST, 0x4000, 9000, "mask", op="aten::_to_copy", dtype="bfloat16")
    story.free(0x2000, 0x3000)
    story.alloc(0x5000, 90_000, op="aten::_to_copy")
    story.fact(Fact.OTHER_CAST, 0x5000, "mask", dtype="bfloat16")  # no buffer of that name is left
    story.free(0x4000, 0x5000)
    story.end(Phase.BACKWARD)
    found = told(story.recording())["expanded-buffer-cast"]
    assert found.bytes == (6000 - 2000) + (9000 - 4000)
    assert [line.partition(":")[0] for line in found.evidence] == ["8.8 KiB", "5.9 KiB"]
