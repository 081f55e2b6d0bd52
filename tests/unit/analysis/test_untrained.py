"""Whose parameters nothing trains, by what is known of each: an optimizer has it, a gradient, whether it ran."""

from dataclasses import replace

import pytest
from support.build import Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.classify import trained_in, untrained
from ampmem.events import Fact, ParameterRecord, Phase, Recording


def parameter(text: str) -> ParameterRecord:
    """One by its path, then what is known of it: ``held``, ``updated``, ``runs`` (or ``idle``), ``shares=OTHER``."""
    name, *known = text.split()
    shares = next((each.removeprefix("shares=") for each in known if each.startswith("shares=")), None)
    return ParameterRecord(
        name=name,
        elements=6,
        bytes=24,
        dtype="float32",
        trainable=True,
        shape=(3, 2) if "narrow" not in known else (6, 1),
        model=name.partition(".")[0] if "alone" not in known else "",
        held="held" in known,
        optimizer=0 if "updated" in known else None,
        in_graph=True if "runs" in known else False if "idle" in known else None,
        shares=shares,
    )


def recording(*parameters: str, gradients: tuple[str, ...] = ()) -> Recording:
    story = Story()
    story.begin(0)
    for place, name in enumerate(gradients):
        story.tensor(Fact.GRADIENT, 0x100 * (place + 1), 24, name)
    return replace(story.recording(), parameters=tuple(map(parameter, parameters)))


TRAINED = ("model.first.weight held runs", "model.last.weight held runs")
TEACHER = ("teacher.first.weight", "teacher.last.weight")


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ((), set()),
        (TEACHER, set()),  # nothing is trained at all
        (TRAINED, set()),
        ((*TRAINED, *TEACHER), set(TEACHER)),
        (("model.first.weight updated", *TEACHER), set(TEACHER)),
        (("model.first.weight alone held", *TEACHER), set(TEACHER)),
        # A frozen layer of a trained model is the model's own; several that never ran with gradients are not.
        ((*TRAINED, "model.frozen.weight idle"), set()),
        (
            (*TRAINED, "model.ema.first.weight idle", "model.ema.last.weight idle"),
            {"model.ema.first.weight", "model.ema.last.weight"},
        ),
        ((*TRAINED, "model.ema.first.weight idle", "model.ema.last.weight runs"), set()),
        ((*TRAINED, "model.ema.first.weight", "model.ema.last.weight held"), set()),
        # One that never ran counts only where it is the copy of what is trained, shape by shape.
        (
            ("model.net.a.weight held", "model.net.b.weight held", "model.copy.a.weight", "model.copy.b.weight"),
            {"model.copy.a.weight", "model.copy.b.weight"},
        ),
        (("model.net.a.weight held", "model.net.b.weight held", "model.head.a.weight", "model.head.c.weight"), set()),
        (
            ("model.net.a.weight held", "model.net.b.weight held", "model.copy.a.weight", "model.copy.b.weight narrow"),
            set(),
        ),
        (("model.net.a.weight held", "model.net.a.bias held", "model.copy.a.weight", "model.copy.a.bias"), set()),
    ],
)
def test_what_nothing_trains(parameters: tuple[str, ...], expected: set[str]) -> None:
    assert untrained(recording(*parameters)) == expected


def test_a_gradient_says_that_a_parameter_is_trained() -> None:
    run = recording(*(name.split()[0] for name in TRAINED), *TEACHER, gradients=("model.first.weight", "input"))
    assert trained_in(run) == {"model.first.weight"}
    assert untrained(run) == set(TEACHER)


def test_memory_that_is_shared_is_trained_with_the_parameter_that_has_it() -> None:
    run = recording("model.head.weight held shares=model.embedding.weight", "model.embedding.weight")
    assert trained_in(run) == {"model.head.weight", "model.embedding.weight"}
    other = recording("model.head.weight held", "teacher.head.weight shares=teacher.embedding.weight")
    assert trained_in(other) == {"model.head.weight"}


def with_copies(*, recorded: bool) -> Recording:
    """A trained parameter, a copy of it that was freed in the only step, and one that is alive at its end."""
    story = Story(weight=10, begins=Phase.FORWARD)
    for address, name in ((0x2000, "Copy.weight"), (0x3000, "Copy#2.weight")):
        story.tensor(Fact.PARAMETER, address, 40, name)
    story.free(0x2000)
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x4000, 40, "weight")
    story.end()
    told = story.recording()
    (weight,) = (replace(record, model="(model)") for record in told.parameters)
    copies = [replace(weight, name=f"{model}.weight", model=model) for model in ("Copy", "Copy#2")]
    return replace(told, parameters=(weight, *copies[not recorded :]))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_copy_that_was_freed_is_untrained_and_counts_no_more(recorded: bool) -> None:
    history = analyse(with_copies(recorded=recorded))
    copies = history.lifetimes.bytes[history.classes.of(Category.UNTRAINED)]
    assert copies.tolist() == [40, 40]
    assert summarize(history.recording).parameters.untrained_count == 10
    assert summarize(history.recording).parameters.untrained_bytes == 40
