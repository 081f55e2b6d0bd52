import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.build import Story

from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, in_order, join_facts, pair
from ampmem.errors import RecordingError
from ampmem.events import Action, Fact, Phase, StepRecord


def test_an_address_used_twice_is_two_allocations() -> None:
    story = Story()
    story.alloc(0x10, 5, op="first", module="a", stack="s:1 f", block=8)
    story.begin(0)
    story.alloc(0x20, 7)
    died = story.free(0x10)
    story.enter(Phase.FORWARD)
    born = story.alloc(0x10, 9)
    recording = story.recording()
    lifetimes = pair(recording.events)
    assert lifetimes.born.tolist() == [0, 1, 3]
    assert lifetimes.died.tolist() == [2, ALIVE, ALIVE]
    assert lifetimes.bytes.tolist() == [5, 7, 9]
    assert lifetimes.block_bytes.tolist() == [8, 7, 9]
    assert lifetimes.address.tolist() == [0x10, 0x20, 0x10]
    assert lifetimes.born_ns[2] == born
    assert lifetimes.died_ns.tolist() == [died, FOREVER, FOREVER]
    assert lifetimes.step.tolist() == [-1, 0, 0]
    assert lifetimes.died_step.tolist() == [0, ALIVE, ALIVE]
    assert lifetimes.phase.tolist() == [Phase.SETUP, Phase.BETWEEN, Phase.FORWARD]
    named = [recording.texts[column[0]] for column in (lifetimes.op, lifetimes.module, lifetimes.stack)]
    assert named == ["first", "a", "s:1 f"]


def test_a_baseline_block_is_an_allocation() -> None:
    story = Story()
    story.alloc(0x10, 5, action=Action.BASELINE)
    story.free(0x10)
    assert pair(story.recording().events).died.tolist() == [1]


def test_no_events_are_no_allocations() -> None:
    recording = Story().recording()
    lifetimes = pair(recording.events)
    assert len(lifetimes) == 0
    assert len(join_facts(recording.events, lifetimes, recording.facts).allocation) == 0


def test_alive_at_a_position() -> None:
    story = Story()
    story.alloc(0x10, 5)
    story.alloc(0x20, 5)
    story.free(0x10)
    lifetimes = pair(story.recording().events)
    alive = [lifetimes.alive_at(position).tolist() for position in range(4)]
    assert alive == [[False, False], [True, False], [True, True], [False, True]]


@pytest.mark.parametrize("actions", ["F", "AA", "AFF", "AFBA", "BB"])
def test_events_that_contradict_each_other_are_refused(actions: str) -> None:
    story = Story()
    story.alloc(0x99, 1)
    for letter in actions:
        if letter == "F":
            story.free(0x10)
        else:
            story.alloc(0x10, 5, action=Action.ALLOC if letter == "A" else Action.BASELINE)
    with pytest.raises(RecordingError, match=r"damaged.*0x10"):
        pair(story.recording().events)


def test_a_fact_belongs_to_the_allocation_alive_then() -> None:
    story = Story()
    first = story.alloc(0x10, 5)
    freed = story.free(0x10)
    second = story.alloc(0x10, 6)
    story.alloc(0x20, 7)
    moments = [first - 1, first, freed - 1, freed, second - 1, second, second + 1000]
    for moment in moments:
        story.fact(Fact.SAVED, 0x10, f"at {moment}", at=moment)
    recording = story.recording()
    joined = join_facts(recording.events, pair(recording.events), recording.facts)
    found = {recording.texts[name]: owner for owner, name in zip(joined.allocation, joined.name, strict=True)}
    expected = {first: 0, freed - 1: 0, second: 1, second + 1000: 1}
    assert found == {f"at {moment}": owner for moment, owner in expected.items()}
    assert len(joined.allocation) == len(expected)


def test_facts_about_unknown_addresses_and_about_nothing_are_left_out() -> None:
    story = Story()
    story.alloc(0x10, 5)
    story.fact(Fact.SAVED, 0x11)
    story.fact(Fact.SAVED, 0xFFFF)
    story.fact(Fact.SAVED, 0x1)
    story.fact(Fact.SAVED, 0)
    recording = story.recording()
    joined = join_facts(recording.events, pair(recording.events), recording.facts)
    assert len(joined.allocation) == 0


def test_within_one_nanosecond_the_order_of_events_decides() -> None:
    story = Story()
    story.scratch(0x10, 5)
    story.alloc(0x10, 6)
    story.fact(Fact.SAVED, 0x10, at=50)
    recording = story.recording()
    events = dataclasses.replace(recording.events, time_ns=np.full(3, 50, dtype=np.int64))
    assert join_facts(events, pair(events), recording.facts).allocation.tolist() == [1]


def test_a_clock_that_steps_back_does_not_undo_the_order() -> None:
    story = Story()
    story.scratch(0x10, 5)
    recording = story.recording()
    events = dataclasses.replace(recording.events, time_ns=np.array([50, 40], dtype=np.int64))
    lifetimes = pair(events)
    assert lifetimes.died_ns.tolist() == [50]


@st.composite
def stories(draw: st.DrawFn) -> tuple[Story, list[int], list[int | None]]:
    """Allocations that come and go at a few addresses; for facts, whose each is, and in which order they are alive."""
    story, owners, alive, count = Story(), list[int | None](), dict[int, int](), 0
    places = st.sampled_from([0x10, 0x20, 0x30, 0x40])
    facts = list[int]()
    for what, address in draw(st.lists(st.tuples(st.booleans(), places), max_size=20)):
        if what and address in alive:
            story.free(address)
            del alive[address]
        elif what:
            story.alloc(address, 8)
            alive[address], count = count, count + 1
        else:
            facts.append(story.fact(Fact.SAVED, address))
            owners.append(alive.get(address))
    return story, facts, owners


@given(stories())
def test_each_fact_is_of_what_lives_at_its_address(made: tuple[Story, list[int], list[int | None]]) -> None:
    story, facts, owners = made
    recording = story.recording()
    joined = join_facts(recording.events, pair(recording.events), recording.facts)
    expected = [(when, owner) for when, owner in zip(facts, owners, strict=True) if owner is not None]
    assert list(zip(joined.time_ns.tolist(), joined.allocation.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(10, 20), (20, 30)], [(10, 20), (20, 30)]),
        ([(10, 25), (20, 30)], [(10, 25), (25, 30)]),
        ([(10, 40), (20, 30), (35, 50)], [(10, 40), (40, 40), (40, 50)]),
        ([(20, 10)], [(20, 20)]),
        ([], []),
    ],
)
def test_steps_follow_each_other(steps: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    step = StepRecord(index=0, start_ns=0, end_ns=0, skipped_update=False, loss=None, loss_scale=None)
    records = tuple(
        dataclasses.replace(step, index=index, start_ns=start, end_ns=end) for index, (start, end) in enumerate(steps)
    )
    found = in_order(dataclasses.replace(Story().recording(), steps=records)).steps
    assert [(step.start_ns, step.end_ns) for step in found] == expected
    kept = [was is step for was, step in zip(records, found, strict=True)]
    assert kept == [was == span for was, span in zip(steps, expected, strict=True)], "what is in order is left as it is"


def test_phases_follow_each_other() -> None:
    story = Story()
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        story.enter(phase)
    recording = story.recording()
    phases = dataclasses.replace(recording.phases, time_ns=np.array([10, 5, 30]))
    found = in_order(dataclasses.replace(recording, phases=phases)).phases
    assert (found.time_ns.tolist(), found.phase.tolist()) == ([10, 10, 30], phases.phase.tolist())
