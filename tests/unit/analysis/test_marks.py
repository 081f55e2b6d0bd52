from __future__ import annotations

from build import Story

from ampmem.analysis.timeline.marks import Instants, PhaseRows, instants, phase_at
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
    story = Story()
    story.begin(0)
    story.enter(Phase.FORWARD)
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
    story = Story()
    story.begin(0)
    story.enter(Phase.BACKWARD)
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
    story.begin(1)
    story.enter(Phase.FORWARD)
    story.end()
    recording = story.recording()
    first, second = (instants(PhaseRows(recording.phases), step) for step in recording.steps)
    assert first.after_forward == backward
    assert first.after_backward == end + 10  # when step 1 began
    assert first.after_optimizer is None
    assert second == Instants(after_forward=None, after_backward=None, after_optimizer=None)


def test_phase_at_an_instant() -> None:
    story = Story()
    forward = story.enter(Phase.FORWARD)
    backward = story.enter(Phase.BACKWARD)
    phases = story.recording().phases
    moments = (forward - 1, forward, backward - 1, backward, backward + 1000)
    assert [phase_at(phases, when).name for when in moments] == ["SETUP", "FORWARD", "FORWARD", "BACKWARD", "BACKWARD"]
