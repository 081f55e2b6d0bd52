"""The verdict on crafted recordings: what no evidence explains is a residual, never a term."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.build import FP32, Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.static_model.verdict import StaticComponent, StaticVerdict, judge, state_to_come
from ampmem.events import Fact, OptimizerRecord, ParameterRecord, Phase, Recording

FREED = "copies freed before this mark: nothing kept them"
Extra = Callable[[Story], None]


def gradients(story: Story, **elements: int) -> None:
    """A float32 gradient for each parameter."""
    for number, (name, count) in enumerate(elements.items()):
        story.tensor(Fact.GRADIENT, 0x20000 + number, 4 * count, name, dtype="float32")


def nothing(story: Story) -> None:
    """Nothing out of the ordinary."""


def told(extra: Extra = nothing, *, optimizer: str = "AdamW", half: bool = False) -> Recording:
    """One step that is as the model tells, but for ``extra`` at the end of forward, and small tensors besides."""
    story = Story(weight=100, name="up.weight")
    story.parameter(0x2000, "down.weight", 50)
    story.begin(0, Phase.FORWARD)
    for address, name, size in ((0x3000, "up.weight", 200), (0x4000, "down.weight", 100)):
        story.tensor(Fact.CAST_COPY, address, size, name, dtype="bfloat16")
        story.fact(Fact.SAVED, address, "aten::mm")
    extra(story)
    story.enter(Phase.BACKWARD)
    for address, name, size in ((0x5000, "up.weight", 400), (0x6000, "down.weight", 200)):
        story.tensor(Fact.GRADIENT, address, size, name, dtype="float32")
    story.free(0x3000, 0x4000)
    story.enter(Phase.OPTIMIZER)
    for address, name, size in ((0x7000, "up.weight", 400), (0x8000, "down.weight", 200)):
        for number, key in enumerate(("exp_avg", "exp_avg_sq")):
            story.tensor(Fact.OPTIMIZER_STATE, address + number, size, f"{key} of {name}")
    story.end(Phase.BETWEEN)
    recording = story.recording()
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    record = OptimizerRecord(class_name=optimizer, implementation="for-loop")
    return replace(recording, parameters=parameters, optimizers=(record,))


def verdict(recording: Recording) -> StaticVerdict:
    return analyse(recording).verdict


def residuals(recording: Recording) -> dict[tuple[str, str], int]:
    return {
        (part.mark, part.component): part.residual_bytes for part in verdict(recording).components if not part.holds
    }


def component(recording: Recording, mark: str, name: str) -> StaticComponent:
    (found,) = [part for part in verdict(recording).components if (part.mark, part.component) == (mark, name)]
    return found


def terms(recording: Recording, mark: str, name: str) -> dict[str, int]:
    return {term.why: term.bytes for term in component(recording, mark, name).terms}


def test_a_run_that_is_as_told_has_no_terms_where_all_is_there() -> None:
    recording = told()
    assert residuals(recording) == {}
    assert terms(recording, "after_optimizer", "total") == {}
    assert component(recording, "after_optimizer", "total").measured_bytes == 16 * 150
    assert terms(recording, "after_forward", "cast_copies") == {}
    total = component(recording, "after_optimizer", "total")
    assert (total.model_bytes_per_param, total.measured_bytes_per_param) == (16, 16)
    recipe = verdict(recording).recipe
    assert (recipe.bytes_per_param, recipe.peak_bytes_per_param) == (16, 18)


def test_two_optimizers_keep_of_each_element_what_they_keep_of_all() -> None:
    """Adam has 100 elements and SGD without momentum 50."""
    recording = told()
    up, down = (replace(each, optimizer=number) for number, each in enumerate(recording.parameters))
    facts = recording.facts
    names = [recording.texts.index(f"{key} of down.weight") for key in ("exp_avg", "exp_avg_sq")]
    others = replace(facts, fact=np.where(np.isin(facts.name, names), int(Fact.OUTPUT), facts.fact))
    sgd = replace(recording.optimizers[0], class_name="SGD")
    recording = replace(recording, parameters=(up, down), optimizers=(*recording.optimizers, sgd), facts=others)
    found = verdict(recording)
    assert found.recipe.optimizer == ("AdamW", "SGD")
    assert found.recipe.bytes_per_param == pytest.approx(8 + 8 * 100 / 150)
    assert component(recording, "after_optimizer", "optimizer_state").model_bytes == 800
    assert component(recording, "after_optimizer", "optimizer_state").model_bytes_per_param == pytest.approx(800 / 150)


@pytest.mark.parametrize(
    ("elements", "gradients", "masters", "precision"),
    [
        ((90, 10), ((2,), (2,)), True, "half-master"),
        ((90, 10), ((4,), (4,)), True, "half-master-fp32-gradients"),
        ((90, 10), ((2, 4), (2, 4)), True, "half-master-fp32-accumulation"),
        ((90, 10), ((2,), (2, 4)), True, "half-master-fp32-accumulation"),
        ((91, 9), ((2,), (2, 4)), True, "half-master"),  # so few may be held by a variable
        ((91, 9), ((2,), (4,)), True, "half-master"),
        ((90, 10), ((), (4,)), True, "half-master-fp32-gradients"),
        ((90, 10), ((), ()), True, "half-master"),
        ((90, 10), ((2,), (2,)), False, "pure-half"),
    ],
)
def test_half_weights_by_their_masters_and_gradients(
    elements: tuple[int, ...], gradients: tuple[tuple[int, ...], ...], masters: bool, precision: str
) -> None:
    """A gradient is said by the bytes of its elements."""
    story = Story()
    for number, count in enumerate(elements):
        story.tensor(Fact.PARAMETER, 0x1000 + number, 2 * count, "ab"[number], dtype="bfloat16")
        if masters:
            story.tensor(Fact.MASTER_COPY, 0x2000 + number, 4 * count, "ab"[number], dtype="float32")
    story.begin(0, Phase.BACKWARD)
    for number, sizes in enumerate(gradients):
        for size in sizes:
            address = 0x3000 + 0x100 * size + number
            story.tensor(
                Fact.GRADIENT, address, size * elements[number], "ab"[number], dtype={2: "bfloat16", 4: "float32"}[size]
            )
    story.end(Phase.BETWEEN)
    parameters = tuple(
        ParameterRecord(name=name, elements=count, bytes=2 * count, dtype="bfloat16", trainable=True)
        for name, count in zip("ab", elements, strict=True)
    )
    assert verdict(replace(story.recording(), parameters=parameters)).recipe.precision == precision


def test_a_model_without_elements_has_no_bytes_for_each() -> None:
    story = Story(weight=0, name="empty", begins=Phase.BACKWARD)
    story.end()
    found = verdict(story.recording())
    assert (found.recipe.bytes_per_param, found.recipe.peak_bytes_per_param) == (16, 18), "what the recipe says"
    assert {(each.model_bytes_per_param, each.measured_bytes_per_param) for each in found.components} == {(0, 0)}


@pytest.mark.parametrize(
    ("itemsize", "master", "state", "title"),
    [
        (4, "float64", 8, "AdamW"),  # the states have the type of the master copy
        (4, "float64", 4, "AdamW"),  # or of the parameter
        (4, "float64", 2, "AdamW, as seen"),
        (2, "float32", 4, "AdamW"),
        (2, "", 4, "AdamW"),  # of an unknown type, which is taken for float32
        (2, "", 8, "AdamW, as seen"),
        (2, "float32", 2, "AdamW"),
    ],
)
def test_states_are_in_the_type_of_what_the_optimizer_updates(
    itemsize: int, master: str, state: int, title: str
) -> None:
    story = Story(weight=100, name="a", begins=Phase.BACKWARD)
    gradients(story, a=100)
    story.enter(Phase.OPTIMIZER)
    story.tensor(Fact.MASTER_COPY, 0x2000, 800, "a", dtype=master)
    for number, key in enumerate(("exp_avg", "exp_avg_sq")):
        story.tensor(Fact.OPTIMIZER_STATE, 0x3000 + number, 100 * state, f"{key} of a")
    story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    (record,) = recording.parameters
    parameters = (replace(record, optimizer=0, bytes=100 * itemsize),)
    optimizers = (OptimizerRecord(class_name="AdamW", implementation="for-loop"),)
    assert verdict(replace(recording, parameters=parameters, optimizers=optimizers)).recipe.optimizer == (title,)


@pytest.mark.parametrize(
    ("optimizer", "shape", "size"),
    [
        ("Adam", (10, 10), 800),
        ("SGD", (10, 10), 0),
        ("Adafactor", (10, 10), 4 * (10 + 10)),
        ("Adafactor", (100,), 400),
        ("AdamW8bit", (10, 10), 8 * 100),  # so few elements keep float32 states
        ("Mine", (10, 10), None),
    ],
)
def test_state_that_is_to_come_is_that_of_the_whole_parameter(
    optimizer: str, shape: tuple[int, ...], size: int | None
) -> None:
    story = Story(weight=100, name="a", begins=Phase.BACKWARD)
    story.end()
    recording = story.recording(precision=FP32)
    (record,) = recording.parameters
    bases = ("Optimizer2State", "Optimizer8bit") if "8bit" in optimizer else ("Optimizer",)
    waiting = OptimizerRecord(class_name=optimizer, implementation="for-loop", bases=bases, stepped=False)
    tied = replace(record, name="b", shares="a", shape=shape, optimizer=0)
    parameters = (replace(record, shape=shape, optimizer=0), tied)
    history = analyse(replace(recording, parameters=parameters, optimizers=(), waiting=(waiting,)))
    assert state_to_come(history, 1, {"a", "b"}) == size
    assert state_to_come(history, 1, {"b"}) == (0 if size is not None else None), "it lies in the memory of the other"
    assert state_to_come(history, 1, ()) == 0
    nothing = analyse(replace(recording, parameters=parameters, optimizers=()))
    assert state_to_come(nothing, 1, {"a"}) is None


def extra(fact: Fact, size: int, name: str, dtype: str = "") -> Extra:
    def add(story: Story) -> None:
        story.tensor(fact, 0x9000, size, name, dtype=dtype)

    return add


UNEXPLAINED: list[tuple[Extra, str, int]] = [
    (extra(Fact.PARAMETER, 400, "ghost"), "parameters", 400),
    (extra(Fact.PARAMETER, 400, ""), "parameters", 400),
    (extra(Fact.GRADIENT, 400, ""), "gradients", 400),
    (extra(Fact.GRADIENT, 400, "ghost"), "gradients", 400),
    (extra(Fact.GRADIENT, 100, "up.weight", "float32"), "gradients", -300),
    (extra(Fact.MASTER_COPY, 400, "ghost"), "master_copies", 400),
    (extra(Fact.OPTIMIZER_STATE, 400, "exp_avg of ghost"), "optimizer_state", 400),
    (extra(Fact.OPTIMIZER_STATE, 4, "step of ghost"), "optimizer_state", 4),
    # The model has one such state of that parameter, and that is another tensor.
    (extra(Fact.OPTIMIZER_STATE, 400, "exp_avg of up.weight"), "optimizer_state", 400),
    (extra(Fact.CAST_COPY, 200, "ghost"), "cast_copies", 200),
    (extra(Fact.CAST_COPY, 200, ""), "cast_copies", 200),
    # No copy of 100 elements has so many bytes.
    (extra(Fact.CAST_COPY, 333, "up.weight"), "cast_copies", 333),
]


@pytest.mark.parametrize(("add", "name", "size"), UNEXPLAINED)
def test_what_no_evidence_explains_is_a_residual(add: Extra, name: str, size: int) -> None:
    found = residuals(told(add))
    assert found
    # Before, it could be the only one of its parameter.
    assert found["after_optimizer", name] == found["after_optimizer", "total"] == size
    assert {key[1] for key in found} == {name, "total"}


def test_a_state_of_another_size_than_the_model_tells_is_a_residual() -> None:
    recording = told()
    sizes = recording.events.bytes.copy()
    born = recording.facts.address[recording.facts.fact == Fact.OPTIMIZER_STATE][0]
    sizes[recording.events.address == born] += 40
    changed = replace(recording, events=replace(recording.events, bytes=sizes))
    assert residuals(changed)["after_optimizer", "optimizer_state"] == 40


def test_a_parameter_of_another_size_than_its_record_is_not_as_told() -> None:
    recording = told()
    parameters = (replace(recording.parameters[0], elements=90, bytes=360), recording.parameters[1])
    assert residuals(replace(recording, parameters=parameters))


CACHED = "copies that the cache still holds: the autocast region has not ended"
EXPLAINED: list[tuple[Fact, int, str, str, str]] = [
    (Fact.OPTIMIZER_STATE, 4, "step of up.weight", "optimizer_state", "scalars of the optimizer: step"),
    (Fact.OPTIMIZER_STATE, 64, "rows of up.weight", "optimizer_state", "state that the rule does not have: rows"),
    (Fact.OPTIMIZER_STATE, 64, "table", "optimizer_state", "state that the rule does not have: table"),
    (Fact.MASTER_COPY, 400, "up.weight", "master_copies", "more master copies than the rule expects"),
    (Fact.GRADIENT, 200, "up.weight", "gradients", "more than one gradient of a parameter is alive"),
    (Fact.CAST_COPY, 200, "up.weight", "cast_copies", CACHED),
]


@pytest.mark.parametrize(("fact", "size", "memory", "name", "why"), EXPLAINED)
def test_what_evidence_explains_is_named(fact: Fact, size: int, memory: str, name: str, why: str) -> None:
    recording = told(extra(fact, size, memory))
    assert residuals(recording) == {}
    assert terms(recording, "after_optimizer", name) == {why: size}
    (term,) = component(recording, "after_optimizer", name).terms
    assert term.tensors == 1


def test_an_earlier_memory_of_a_parameter() -> None:
    def moved(story: Story) -> None:
        story.tensor(Fact.PARAMETER, 0x9000, 400, "up.weight", dtype="float32")

    why = "earlier memory of a parameter that is still alive"
    assert terms(told(moved), "after_forward", "parameters") == {why: 400}


def test_gradients_in_one_bucket() -> None:
    def bucket(story: Story) -> None:
        story.alloc(0x9000, 700)
        for name in ("up.weight", "down.weight"):
            story.fact(Fact.GRADIENT, 0x9000, name, dtype="float32")

    recording = told(bucket)
    assert residuals(recording) == {}
    why = "memory around gradients that are views of a larger buffer"
    assert terms(recording, "after_forward", "gradients") == {why: 100}


def test_states_in_one_flat_buffer() -> None:
    story = Story()
    for address, name, elements in ((0x1000, "a", 100), (0x2000, "b", 50)):
        story.parameter(address, name, elements)
    story.begin(0, Phase.BACKWARD)
    gradients(story, a=100, b=50)
    story.enter(Phase.OPTIMIZER)
    story.alloc(0x3000, 1250)
    for key in ("exp_avg", "exp_avg_sq"):
        for name in ("a", "b"):
            story.fact(Fact.OPTIMIZER_STATE, 0x3000, f"{key} of {name}")
    story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    assert residuals(recording) == {}
    why = "memory around states that are views of a larger buffer"
    assert terms(recording, "after_optimizer", "optimizer_state") == {why: 50}


def test_copies_made_again_and_copies_of_views() -> None:
    def again(story: Story) -> None:
        story.tensor(Fact.CAST_COPY, 0x9000, 200, "up.weight")
        story.tensor(Fact.CAST_COPY, 0xA000, 60, "down.weight")
        story.fact(Fact.VIEW_CAST, 0xA000, "down.weight")

    assert terms(told(again), "after_forward", "cast_copies") == {
        "copies made again for another use, without the cache": 200,
        "copies of views of a parameter, besides the whole": 60,
    }


def test_copies_that_died_are_named_by_whether_autograd_had_saved_them() -> None:
    def free(story: Story) -> None:
        story.free(0x3000)
        story.alloc(0x3000, 8)  # something else, for backward to free

    assert terms(told(free), "after_forward", "cast_copies") == {
        "copies freed before this mark, with the graph that had saved them": -200
    }
    recording = told(free)
    unsaved = recording.facts.fact.copy()
    unsaved[unsaved == Fact.SAVED] = Fact.OUTPUT
    recording = replace(recording, facts=replace(recording.facts, fact=unsaved))
    assert terms(recording, "after_forward", "cast_copies") == {FREED: -200}


def test_casts_without_autocast_are_the_scripts_own() -> None:
    recording = replace(told(), precision=FP32)
    assert residuals(recording) == {}
    assert terms(recording, "after_forward", "cast_copies") == {"casts that are not autocast's": 300}


def test_rounding_is_a_term_of_the_total_only() -> None:
    recording = told()
    blocks = recording.events.block_bytes.copy()
    born = recording.events.address == 0x1000
    blocks[born] += 112
    recording = replace(recording, events=replace(recording.events, block_bytes=blocks))
    assert residuals(recording) == {}
    assert terms(recording, "after_optimizer", "total") == {"rounding up to the allocator's blocks": 112}
    assert terms(recording, "after_optimizer", "parameters") == {}


@pytest.mark.parametrize("sizes", [(400, 200), (100, 50), (800, 400)])
def test_an_unknown_optimizer_is_taken_as_it_is_seen(sizes: tuple[int, int]) -> None:
    story = Story()
    for address, name, elements in ((0x1000, "a", 100), (0x2000, "b", 50), (0x2500, "tiny", 2)):
        story.parameter(address, name, elements)
    story.begin(0, Phase.BACKWARD)
    gradients(story, a=100, b=50, tiny=2)
    story.enter(Phase.OPTIMIZER)
    per_element = sizes[0] // 100
    for number, (name, size) in enumerate((("a", sizes[0]), ("b", sizes[1]), ("tiny", 2 * per_element))):
        story.tensor(Fact.OPTIMIZER_STATE, 0x3000 + number, size, f"m of {name}")
        story.tensor(Fact.OPTIMIZER_STATE, 0x4000 + number, 4, f"step of {name}")
    story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    record = OptimizerRecord(class_name="Mine", implementation="for-loop")
    recording = replace(recording, parameters=parameters, optimizers=(record,))
    assert residuals(recording) == {}
    recipe = verdict(recording).recipe
    assert recipe.optimizer == ("Mine, as seen",)
    assert recipe.bytes_per_param == 8 + per_element  # float32 parameters and gradients
    assert terms(recording, "after_optimizer", "optimizer_state") == {"scalars of the optimizer: step": 12}


def test_there_is_no_verdict_without_a_backward() -> None:
    story = Story(weight=100, name="a", begins=Phase.FORWARD)
    story.end()
    assert analyse(story.recording()).verdict is None


def test_the_last_step_with_a_backward_is_judged_by_default() -> None:
    story = Story(weight=100, name="a")
    for step in range(3):
        story.begin(step)
        if step < 2:
            story.enter(Phase.BACKWARD)
            story.enter(Phase.BETWEEN)
        story.end()
    analysis = analyse(story.recording())
    found = analysis.verdict
    assert found.step == 1
    assert {part.mark for part in found.components} == {"after_forward", "after_backward"}
    assert judge(analysis, analysis.ledger, 2).components == ()
