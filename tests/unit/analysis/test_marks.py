from dataclasses import replace

import pytest
from support.build import RUN, Story
from support.failures import ended

from ampmem.analysis.timeline.marks import Instants, PhaseRows, instants, marks_of, phase_at
from ampmem.events import Phase


def test_marks_are_around_the_last_backward_and_after_the_last_update() -> None:
    story = Story()
    story.begin(0)
    for _ in range(2):  # accumulation: two micro-batches
        story.enter(Phase.FORWARD)
        backward = story.enter(Phase.BACKWARD)
    done = story.enter(Phase.BETWEEN)
    story.enter(Phase.OPTIMIZER)
    story.enter(Phase.BETWEEN)
    story.enter(Phase.OPTIMIZER)
    updated = story.enter(Phase.BETWEEN)
    story.end()
    recording = story.recording()
    expected = Instants(after_forward=backward, after_backward=done, after_optimizer=updated)
    assert instants(PhaseRows(recording.phases), recording.steps[0]) == expected


def test_updates_inside_a_backward_do_not_end_it() -> None:
    story = Story(begins=Phase.FORWARD)
    backward = story.enter(Phase.BACKWARD)
    for _ in range(2):  # an optimizer for each of two parameters, stepped by hooks on their gradients
        story.enter(Phase.OPTIMIZER)
        updated = story.enter(Phase.BACKWARD)
    done = story.enter(Phase.BETWEEN)
    story.end()
    recording = story.recording()
    expected = Instants(after_forward=backward, after_backward=done, after_optimizer=updated)
    assert instants(PhaseRows(recording.phases), recording.steps[0]) == expected


def test_a_phase_that_nothing_follows_ends_with_the_step() -> None:
    story = Story(begins=Phase.BACKWARD)
    optimizer = story.enter(Phase.OPTIMIZER)
    end = story.end()
    recording = story.recording()
    marks = instants(PhaseRows(recording.phases), recording.steps[0])
    assert (marks.after_backward, marks.after_optimizer) == (optimizer, end)


def test_what_did_not_happen_has_no_mark() -> None:
    story = Story()
    story.begin(0)
    backward = story.enter(Phase.BACKWARD)
    end = story.end(skipped=True)
    story.begin(1, Phase.FORWARD)
    story.end()
    recording = story.recording()
    first, second = (instants(PhaseRows(recording.phases), step) for step in recording.steps)
    assert first.after_forward == backward
    assert first.after_backward == end + 10  # when step 1 began
    assert first.after_optimizer is None
    assert second == Instants(after_forward=None, after_backward=None, after_optimizer=None)


@pytest.mark.parametrize(
    ("step_on", "backward", "marked"),
    [
        ("", False, None),  # a step that trains and has no backward has no end of forward
        ("optimizer", False, None),
        ("forward", False, "last"),
        ("forward", True, "backward"),
        ("", True, "backward"),
    ],
)
def test_a_step_of_inference_is_marked_where_its_last_forward_ended(
    step_on: str, backward: bool, marked: str | None
) -> None:
    story = Story(begins=Phase.FORWARD)
    story.enter(Phase.BETWEEN)
    story.enter(Phase.FORWARD)
    ends = {"last": story.enter(Phase.BETWEEN)}
    if backward:
        ends["backward"] = story.enter(Phase.BACKWARD)
    story.end()
    (found,) = marks_of(story.recording(run=replace(RUN, step_on=step_on)))
    assert found.after_forward == (ends[marked] if marked else None)


def test_a_forward_that_goes_on_ends_with_its_step() -> None:
    story = Story(begins=Phase.FORWARD)
    end = story.end()
    story.enter(Phase.BETWEEN)
    (found,) = marks_of(story.recording(run=replace(RUN, step_on="forward")))
    assert found == Instants(after_forward=end, after_backward=None, after_optimizer=None)


@pytest.mark.parametrize(
    ("failed", "reached"),
    [(0, (True, True, True)), (-1, (True, True, False)), (-11, (True, False, False)), (-21, (False,) * 3)],
)
def test_of_a_step_that_failed_the_marks_before_that_count(failed: int, reached: tuple[bool, ...]) -> None:
    story = Story(weight=100, begins=Phase.FORWARD)
    instants = [story.enter(phase) for phase in (Phase.BACKWARD, Phase.OPTIMIZER, Phase.BETWEEN)]
    (found,) = marks_of(ended(story, instants[-1] + failed, (400,)))
    marks = (found.after_forward, found.after_backward, found.after_optimizer)
    assert marks == tuple(at if there else None for at, there in zip(instants, reached, strict=True))


def test_phase_at_an_instant() -> None:
    story = Story()
    forward = story.enter(Phase.FORWARD)
    backward = story.enter(Phase.BACKWARD)
    phases = story.recording().phases
    moments = (forward - 1, forward, backward - 1, backward, backward + 1000)
    assert [phase_at(phases, when).name for when in moments] == ["SETUP", "FORWARD", "FORWARD", "BACKWARD", "BACKWARD"]
