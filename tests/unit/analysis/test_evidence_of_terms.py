"""A term needs evidence: what is not there is explained only where facts say what became of it."""

from dataclasses import replace

import pytest
from support.build import AMP, FP32, RUN, Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.static_model.verdict import StaticComponent, unknown_of
from ampmem.events import Fact, OptimizerRecord, Phase, Recording
from ampmem.names import NOT_KNOWN
from ampmem.vocabulary import SourceKind


def component(recording: Recording, mark: str, name: str) -> StaticComponent:
    verdict = analyse(recording).verdict
    (found,) = [part for part in verdict.components if (part.mark, part.component) == (mark, name)]
    return found


def reasons(recording: Recording, mark: str, name: str) -> dict[str, tuple[str, ...]]:
    """The names of the tensors, by reason."""
    return {term.why: term.names for term in component(recording, mark, name).terms}


def story_of(steps: int = 1, *, gradients_at: int = 0x5000) -> Story:
    """Two parameters, of which the facts of the gradients say that they lie at that address and after it."""
    story = Story(weight=100, name="up.weight")
    story.parameter(0x2000, "down.weight", 50)
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        story.enter(Phase.BACKWARD)
        story.alloc(0x5000, 400)
        story.alloc(0x6000, 200)
        story.fact(Fact.GRADIENT, gradients_at, "up.weight", dtype="float32")
        story.fact(Fact.GRADIENT, gradients_at + 0x1000, "down.weight", dtype="float32")
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
        story.free(0x5000, 0x6000)
    return story


def test_gradients_count_as_freed_only_where_their_memory_was_seen_to_die() -> None:
    freed = story_of(2).recording(precision=FP32)
    assert reasons(freed, "after_forward", "gradients") == {
        "gradients freed before this mark": ("up.weight", "down.weight")
    }
    # Nothing is known of the memory that these facts are about.
    lost = story_of(2, gradients_at=0xA000).recording(precision=FP32)
    for mark in ("after_forward", "after_backward"):
        found = component(lost, mark, "gradients")
        assert (found.terms, found.residual_bytes, found.explained) == ((), -600, False)


def test_a_parameter_is_not_there_yet_gone_or_not_explained() -> None:
    story = story_of()
    records = story.recording(precision=FP32).parameters
    late, never = (replace(records[1], name=name) for name in ("late", "never"))
    story.tensor(Fact.PARAMETER, 0x7000, 200, "late")
    recording = story.recording(precision=FP32)
    found = component(replace(recording, parameters=(*records, late)), "after_forward", "parameters")
    assert [(term.why, term.bytes, term.names) for term in found.terms] == [
        ("parameters made after this mark", -200, ("late",))
    ]
    found = component(replace(recording, parameters=(*records, never)), "after_forward", "parameters")
    assert (found.terms, found.residual_bytes, found.holds) == ((), -200, False)


@pytest.mark.parametrize(("before", "why"), [(True, None), (False, "parameters made after this mark")])
def test_what_the_next_event_makes_comes_after_the_mark(before: bool, why: str | None) -> None:
    story = Story(weight=100, name="a", begins=Phase.FORWARD)
    if before:
        story.parameter(0x2000, "late", 50)
    story.enter(Phase.BACKWARD)
    if not before:
        story.parameter(0x2000, "late", 50)
    story.end()
    expected = {why: ("late",)} if why else {}
    assert reasons(story.recording(precision=FP32), "after_forward", "parameters") == expected


def test_a_gradient_that_is_seen_at_the_instant_of_a_mark_came_later() -> None:
    story = Story(weight=100, name="a", begins=Phase.FORWARD)
    mark = story.enter(Phase.BACKWARD)
    story.alloc(0x2000, 400)
    story.fact(Fact.GRADIENT, 0x2000, "a", dtype="float32", at=mark)
    story.end(Phase.BETWEEN)
    why = "no gradient before this mark: the first came later"
    assert reasons(story.recording(precision=FP32), "after_forward", "gradients") == {why: ("a",)}


def test_an_update_that_ends_at_its_mark_is_done() -> None:
    """Of two parameters only the first has a gradient, and states after the update."""
    story = Story(weight=100, name="a")
    story.parameter(0x2000, "b", 100)
    story.begin(0, Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x3000, 400, "a", dtype="float32")
    story.enter(Phase.OPTIMIZER)
    for address, key in ((0x4000, "exp_avg"), (0x5000, "exp_avg_sq")):
        story.tensor(Fact.OPTIMIZER_STATE, address, 400, f"{key} of a")
    story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    recording = replace(recording, parameters=tuple(replace(each, optimizer=0) for each in recording.parameters))
    before, after = (reasons(recording, mark, "optimizer_state") for mark in ("after_backward", "after_optimizer"))
    assert before == {"no optimizer state before the first update": ("a", "b")}
    assert after == {"no optimizer state: these parameters have had no gradient": ("b",)}
    skipped = replace(recording, steps=(replace(recording.steps[0], skipped_update=True),))
    assert reasons(skipped, "after_optimizer", "optimizer_state") == {
        "no optimizer state yet: the loss scaler skipped the updates": ("b",)
    }


def test_copies_of_the_model_are_told_while_they_are_alive() -> None:
    story = Story(weight=100)
    for address, name in ((0x2000, "ema.weight"), (0x3000, "teacher.weight")):
        story.tensor(Fact.PARAMETER_COPY, address, 400, name)
    story.begin(0, Phase.FORWARD)
    story.free(0x3000)
    story.end(Phase.BACKWARD)
    found = component(story.recording(precision=FP32), "after_forward", "parameters")
    why = "parameters of modules that did not run, such as copies of the model"
    assert [(term.why, term.bytes, term.names) for term in found.terms] == [(why, 400, ("ema.weight",))]


@pytest.mark.parametrize(("together", "several"), [(True, 0), (False, 200)])
def test_what_is_seen_in_two_parts_at_one_instant_is_one_gradient(together: bool, several: int) -> None:
    """As of a sparse gradient, or of a tensor that wraps two."""
    story = Story(weight=100, begins=Phase.FORWARD)
    story.enter(Phase.BACKWARD)
    story.alloc(0x2000, 200)
    story.alloc(0x3000, 200)
    when = story.fact(Fact.GRADIENT, 0x2000, "weight")
    story.fact(Fact.GRADIENT, 0x3000, "weight", at=when if together else None)
    story.end(Phase.BETWEEN)
    found = component(story.recording(precision=FP32), "after_backward", "gradients")
    why = "more than one gradient of a parameter is alive"
    assert sum(term.bytes for term in found.terms if term.why == why) == several
    assert found.explained


@pytest.mark.parametrize(
    ("precision", "parameters", "optimizer", "unknown"),
    [
        ("amp", True, "AdamW", ()),
        ("as-is", True, "AdamW", ("precision",)),
        ("amp", False, "AdamW", ("parameters",)),
        ("amp", True, NOT_KNOWN, ("optimizer",)),
        ("as-is", False, "", ("precision", "parameters", "optimizer")),
    ],
)
def test_a_snapshot_is_judged_only_where_all_of_a_recipe_is_known(
    precision: str, parameters: bool, optimizer: str, unknown: tuple[str, ...]
) -> None:
    recording = story_of().recording(
        run=replace(RUN, source=SourceKind.SNAPSHOT), precision=replace(AMP, name=precision)
    )
    recording = replace(
        recording,
        parameters=recording.parameters if parameters else (),
        optimizers=(OptimizerRecord(class_name=optimizer, implementation="foreach"),) if optimizer else (),
    )
    assert unknown_of(recording) == unknown
    assert unknown_of(replace(recording, run=RUN)) == (), "a run that was recorded has said it"


def test_overlapping_parameters_are_told_with_their_own_bytes() -> None:
    recording = story_of().recording(precision=FP32)
    up, down = recording.parameters
    # ``down`` lies in the memory of ``up`` but for 20 of its bytes: then 20 are all that it may add.
    overlapping = replace(recording, parameters=(up, replace(down, overlap=180)))
    assert component(overlapping, "after_backward", "parameters").model_bytes == 420
    gradients = component(overlapping, "after_backward", "gradients")
    assert (gradients.model_bytes, gradients.measured_bytes, gradients.explained) == (420, 600, True)
    why = "parameters that share part of another's memory: a whole tensor for each"
    assert [(term.why, term.bytes, term.names) for term in gradients.terms] == [(why, 180, ("down.weight",))]


def test_copies_of_an_earlier_step_are_not_made_again() -> None:
    story = Story(weight=100)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.alloc(0x3000 + step, 200)  # the first is never freed
        story.fact(Fact.CAST_COPY, 0x3000 + step, "weight", dtype="bfloat16")
        story.end(Phase.BACKWARD)
    assert reasons(story.recording(), "after_forward", "cast_copies") == {
        "copies of an earlier step that are still alive": ("weight",)
    }


@pytest.mark.parametrize(
    ("cast_in", "why"),
    [
        ((0, Phase.FORWARD), "other parameters that were not cast"),  # in the step before
        ((1, Phase.FORWARD), "copies freed before this mark: nothing kept them"),
        ((1, Phase.BACKWARD), "other parameters that were not cast"),  # after the mark
    ],
)
def test_a_copy_is_freed_only_where_this_step_has_made_it_by_then(cast_in: tuple[int, Phase], why: str) -> None:
    story = Story(weight=100)
    for step in range(2):
        story.begin(step)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            story.enter(phase)
            if (step, phase) == cast_in:
                story.tensor(Fact.CAST_COPY, 0x3000, 200, "weight", dtype="bfloat16")
                story.free(0x3000)
        story.end()
    assert reasons(story.recording(), "after_forward", "cast_copies") == {why: ("weight",)}


@pytest.mark.parametrize(
    ("step_on", "backward", "recipe"),
    [
        ("forward", False, "inference-autocast"),
        ("forward", True, "autocast"),
        ("", True, "autocast"),
        ("", False, None),  # no step came far enough
    ],
)
def test_without_a_backward_a_run_whose_steps_are_forwards_is_inference(
    step_on: str, backward: bool, recipe: str | None
) -> None:
    story = Story(weight=100, begins=Phase.FORWARD)
    if backward:
        story.enter(Phase.BACKWARD)
    story.end(Phase.BETWEEN)
    verdict = analyse(story.recording(run=replace(RUN, step_on=step_on))).verdict
    assert (verdict and verdict.recipe.precision) == recipe


def test_where_no_cast_was_ever_seen_none_is_said_not_to_have_been_made() -> None:
    found = component(story_of().recording(), "after_forward", "cast_copies")
    assert (found.terms, found.residual_bytes, found.explained) == ((), -300, False)


def with_states(*keys: str, class_name: str = "AdamW", settings: dict[str, float] | None = None) -> Recording:
    """One update that keeps those states of the first parameter, each of its size."""
    story = story_of()
    story.begin(1, Phase.BACKWARD)
    story.enter(Phase.OPTIMIZER)
    for number, key in enumerate(keys):
        story.tensor(Fact.OPTIMIZER_STATE, 0x8000 + number, 400, f"{key} of up.weight")
    story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    record = OptimizerRecord(class_name=class_name, implementation="for-loop", settings=settings or {})
    parameters = tuple(replace(each, optimizer=0) for each in recording.parameters)
    return replace(recording, parameters=parameters[:1], optimizers=(record,))


def titles(recording: Recording) -> tuple[str, ...]:
    return analyse(recording).verdict.recipe.optimizer


def test_a_name_is_no_proof_of_what_an_optimizer_keeps() -> None:
    assert titles(with_states("exp_avg", "exp_avg_sq")) == ("AdamW",)
    assert titles(with_states("exp_avg", "exp_avg_sq", "max_exp_avg_sq")) == ("Adam or AdamW with amsgrad",)
    assert titles(with_states("m", "v")) == ("AdamW, as seen",)
    assert component(with_states("m", "v"), "after_optimizer", "optimizer_state").explained
    assert titles(with_states("exp_avg")) == ("AdamW, as seen",)


def test_a_group_with_other_settings_than_the_first_has_the_model_of_its_states() -> None:
    assert titles(with_states("momentum_buffer", class_name="SGD")) == ("SGD with momentum",)
    # It had a gradient, an update was made, and there is no state: its momentum is 0, whatever the first group says.
    assert titles(with_states(class_name="SGD", settings={"momentum": 0.9})) == ("SGD",)
    # An Adam without state after an update is nothing that is known.
    adam = component(with_states(), "after_optimizer", "optimizer_state")
    assert (adam.terms, adam.residual_bytes) == ((), -800)


def test_the_eight_bits_of_another_library_are_not_bitsandbytes() -> None:
    recording = with_states(class_name="AdamW8bit")
    assert titles(recording) == ("AdamW8bit, as seen",)
    (torchao,) = recording.optimizers
    theirs = replace(torchao, bases=("Optimizer2State", "Optimizer8bit", "Optimizer"))
    assert titles(replace(recording, optimizers=(theirs,))) == ("8-bit Adam or AdamW of bitsandbytes",)
