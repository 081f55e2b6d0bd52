from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.build import Story, small_run

from ampmem.analysis.analyse import analyse
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.timeline import largest_positions, most_of
from ampmem.events import Action, Fact, Phase, Recording, StepRecord

MOVES = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.integers(0, 2**40),
        st.sampled_from([None, *Fact]),
        st.sampled_from([None, None, None, *Phase]),
        st.booleans(),
    ),
    min_size=1,
    max_size=60,
)


def play(moves: list[tuple[int, int, Fact | None, Phase | None, bool]]) -> Recording:
    """Each move toggles one address; some are seen by a hook, some change the phase or begin a step."""
    story = Story()
    alive: set[int] = set()
    steps = 0
    for address, size, fact, phase, begins in moves:
        if begins:
            if steps:
                story.end()
            story.begin(steps)
            steps += 1
        if phase is not None:
            story.enter(phase)
        if address in alive:
            story.free(address)
            alive.remove(address)
        else:
            story.alloc(address, size)
            alive.add(address)
            if fact is not None:
                story.fact(fact, address)
    return story.recording()


@given(MOVES)
def test_categories_add_up_to_the_running_sum_at_every_event(
    moves: list[tuple[int, int, Fact | None, Phase | None, bool]],
) -> None:
    recording = play(moves)
    analysis = analyse(recording)
    events, timeline = recording.events, analysis.timeline
    category_of_birth = dict(zip(analysis.lifetimes.born.tolist(), analysis.classes.category.tolist(), strict=True))
    alive: dict[int, int] = {}
    for index in range(len(events)):
        address = int(events.address[index])
        if events.action[index] == Action.FREE:
            del alive[address]
        else:
            alive[address] = index
        expected = dict.fromkeys(CATEGORIES, 0)
        by_phase = {phase.name.lower(): 0 for phase in Phase}
        for birth in alive.values():
            category = CATEGORIES[category_of_birth[birth]]
            expected[category] += int(events.bytes[birth])
            if category == Category.TEMPORARIES:
                by_phase[Phase(int(events.phase[birth])).name.lower()] += int(events.bytes[birth])
        position = index + 1
        assert timeline.breakdown(position) == expected
        assert timeline.temporaries_by_phase(position) == by_phase
        assert timeline.total[position] == sum(expected.values()) == events.allocated[index]
        mask = analysis.lifetimes.alive_at(position)
        assert sorted(analysis.lifetimes.born[mask].tolist()) == sorted(alive.values())
    assert not timeline.live[:, 0].any()


def test_the_state_at_an_instant_is_that_before_the_events_of_that_instant() -> None:
    story = Story()
    first = story.alloc(0x10, 5)
    second = story.alloc(0x20, 7)
    timeline = analyse(story.recording()).timeline
    assert [timeline.position(when) for when in (first, first + 1, second, second + 1)] == [0, 1, 1, 2]


def test_the_peak_of_a_step_is_within_it_and_counts_its_start() -> None:
    story = Story()
    story.alloc(0x10, 100)
    story.scratch(0x20, 900)
    start = story.begin(0)
    story.alloc(0x20, 50)
    middle = story.now
    story.free(0x20, 0x10)
    end = story.end()
    story.alloc(0x30, 5000)
    recording = story.recording()
    timeline = analyse(recording).timeline

    def peak_between(start_ns: int, end_ns: int) -> int:
        step = replace(recording.steps[0], start_ns=start_ns, end_ns=end_ns)
        return analyse(replace(recording, steps=(step,))).peak

    assert timeline.total[peak_between(start, end)] == 150
    falling = peak_between(middle + 1, end)
    assert (falling, timeline.total[falling]) == (timeline.position(middle + 1), 150)
    assert timeline.total[peak_between(start, start)] == 100


@given(MOVES, st.lists(st.tuples(st.integers(0, 800), st.integers(0, 200)), min_size=1, max_size=4))
def test_the_most_of_a_category_is_the_most_within_any_step(
    moves: list[tuple[int, int, Fact | None, Phase | None, bool]], spans: list[tuple[int, int]]
) -> None:
    """Steps may overlap, and be in any order, as a damaged file may have them."""
    timeline = analyse(play(moves)).timeline
    step = StepRecord(index=0, start_ns=0, end_ns=0, skipped_update=False, loss=None, loss_scale=None)
    steps = [replace(step, start_ns=start, end_ns=start + length) for start, length in spans]
    edges = [(timeline.position(each.start_ns), timeline.position(each.end_ns)) for each in steps]
    inside = sorted({place for first, last in edges for place in range(first, last + 1)})
    positions, most = largest_positions(timeline, steps), most_of(timeline, steps)
    for category in CATEGORIES:
        series = timeline.series(category)
        assert most[category] == max(int(series[place]) for place in inside)
        assert positions[category] == next(place for place in inside if series[place] == most[category])


def test_what_was_concluded_is_what_a_fact_says_so_of() -> None:
    story = Story()
    story.parameter(0x10, "seen", 10)
    story.parameter(0x20, "concluded", 5)
    story.fact(Fact.INFERRED, 0x20)
    story.tensor(Fact.INFERRED, 0x30, 7)
    story.free(0x30)
    story.alloc(0x40, 3)
    history = analyse(story.recording())
    found = [history.inferred_at(position) for position in (1, 3, 5)]
    assert [each[Category.PARAMETERS] for each in found] == [0, 20, 20]
    assert [sum(each.values()) for each in found] == [0, 27, 20]


def test_series_are_the_rows_of_the_breakdown() -> None:
    timeline = analyse(small_run().recording()).timeline
    position = int(np.argmax(timeline.total))
    for category in CATEGORIES:
        assert timeline.series(category)[position] == timeline.breakdown(position)[category]
