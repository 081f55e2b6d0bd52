"""Findings about how a script trains: the bytes, what the change takes off the peak, and what to change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.build import FP32, Story
from support.failures import ended

from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings import findings
from ampmem.analysis.findings.base import Finding, TrainingRun
from ampmem.events import Action, Fact, OptimizerRecord, Phase, Recording

Settings = Mapping[str, bool | float | None]
Made = tuple[Story, list[tuple[int, int, int]]]


def told(recording: Recording) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings(analyse(recording))}


# -- what a change takes off the peak ---------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> Made:
    """A run of two or three steps, with events between the steps too; and every event: when, whose, how many bytes."""
    story, events, alive = Story(), list[tuple[int, int, int]](), list[tuple[int, int]]()

    def some(most: int) -> None:
        for size in draw(st.lists(st.integers(-3, 9), max_size=most)):
            if size > 0:
                number = sum(bytes_ > 0 for _, _, bytes_ in events)
                events.append((story.alloc(0x1000 + number, 1000 * size), number, 1000 * size))
                alive.append((number, 1000 * size))
            elif alive:
                number, was = alive.pop(size % len(alive))
                events.append((story.free(0x1000 + number), number, -was))

    for step in range(draw(st.integers(1, 3))):
        story.begin(step, Phase.FORWARD)
        some(4)
        story.enter(Phase.BACKWARD)
        some(4)
        story.end()
        story.enter(Phase.BETWEEN)
        some(2)
    return story, events


@given(runs(), st.data())
def test_off_peak_is_the_difference_of_two_replays(made: Made, data: st.DataObject) -> None:
    """Of the last step that reaches 99.5 % of the run's peak, once as it was and once with smaller allocations."""
    story, events = made
    recording = story.recording(precision=FP32)
    run = TrainingRun(analysis=analyse(recording))
    count = len(run.analysis.lifetimes)
    less = np.array(data.draw(st.lists(st.sampled_from([0, 0, 500, 1000]), min_size=count, max_size=count)), np.int64)

    def highest(start: int, end: int, factor: int) -> int:
        """The most from the state at ``start`` to that at ``end``, without what is ``less``, times ``factor``."""
        totals = [(0, 0)]
        for when, number, size in events:
            smaller = int(less[number]) * factor * (1 if size > 0 else -1)
            totals.append((when, totals[-1][1] + size - smaller))
        before = [total for when, total in totals if when <= start][-1]
        return max(before, *(total for when, total in totals if start < when <= end), 0)

    spans = [(step.start_ns, step.end_ns) for step in recording.steps]
    peak = max(highest(*span, 0) for span in spans)
    span = [span for span in spans if highest(*span, 0) >= 0.995 * peak][-1]
    expected = highest(*span, 0) - highest(*span, 1)
    assert run.off_peak(less) == (expected if expected > 0 else None)


# -- foreach ----------------------------------------------------------------------------------


def updating(
    *optimizers: OptimizerRecord,
    temporaries: Mapping[str, Sequence[int]],
    of: Sequence[int | None] = (0, 0),
    frozen: int = 0,
    phase: Phase = Phase.OPTIMIZER,
) -> Recording:
    """Two steps of parameters with 4,000 and 2,000 bytes; each update has ``temporaries`` by its optimizer's class.

    Outside of the updates there are at most 12,000 bytes, those of a frozen parameter besides.
    """
    story = Story(weight=1000, name="up")
    if frozen:
        story.parameter(0x3000, "frozen", frozen // 4, trainable=False)
    story.parameter(0x2000, "down", 500)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.enter(Phase.BACKWARD)
        for address, name, size in ((0x4000, "up", 4000), (0x5000, "down", 2000)):
            story.tensor(Fact.GRADIENT, address, size, name)
        for name, sizes in temporaries.items():
            story.enter(phase)
            addresses = [0x10000 + number for number in range(len(sizes))]
            for address, size in zip(addresses, sizes, strict=True):
                story.alloc(address, size, op=f"{name}.step")
            story.free(*addresses)
        story.enter(Phase.BETWEEN)
        story.free(0x4000, 0x5000)
        story.end()
    recording = story.recording(precision=FP32)
    owners = iter(of)
    parameters = tuple(
        replace(each, optimizer=next(owners) if each.trainable else None) for each in recording.parameters
    )
    return replace(recording, parameters=parameters, optimizers=optimizers)


def optimizer(name: str = "Adam", settings: Settings | None = None, **changes: object) -> OptimizerRecord:
    record = OptimizerRecord(class_name=name, implementation="foreach", bases=("Optimizer",), settings=settings or {})
    return replace(record, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings", "bases", "most"),
    [
        # Two copies of 4,000 bytes; of the smaller one two, too, and what the larger one has left.
        ("Adam", {}, ("Optimizer",), 8000),
        ("AdamW", {"weight_decay": 0.01}, ("Adam", "Optimizer"), 8000),  # it decays in place
        ("Adam", {"weight_decay": 0.01}, ("Optimizer",), 12_000),
        ("Adam", {"weight_decay": 0.0}, ("Optimizer",), 8000),
        ("Adam", {"weight_decay": 0.01, "decoupled_weight_decay": True}, ("Optimizer",), 8000),
        ("Adam", {"maximize": True}, ("Optimizer",), 12_000),
        ("AdamW", {"maximize": True}, ("Adam", "Optimizer"), 12_000),
        ("Adam", {"weight_decay": 0.01, "maximize": True}, ("Optimizer",), 16_000),
        ("Adam", {}, ("Theirs",), None),  # of another library
        ("RMSprop", {}, ("Optimizer",), None),
    ],
)
def test_one_parameter_at_a_time_has_the_copies_of_the_largest(
    name: str, settings: Settings, bases: tuple[str, ...], most: int | None
) -> None:
    recording = updating(optimizer(name, settings, bases=bases), temporaries={name: (6000, 6000, 6000)})
    found = told(recording)["foreach-temporaries"]
    assert (found.bytes, found.change) == (18_000, f"{name}(..., foreach=False)")
    assert found.off_peak == (18_000 - most if most else None)
    assert found.evidence[:2] == ("peak, in the update: 29.3 KiB", "largest total outside of updates: 11.7 KiB")
    assert len(found.evidence) == (3 if most else 2)


@pytest.mark.parametrize(
    ("parameters", "of", "frozen", "most"),
    [
        ((1000, 500), (0, 0), 0, 8000),
        ((1000, 500), (0, 0), 80_000, 8000),  # a frozen one is not updated
        ((1000, 500), (1, 0), 0, 4000),  # the larger one has another optimizer
        ((1000, 500), (None, None), 0, 8000),  # the recording does not say who updates what
    ],
)
def test_only_what_the_optimizer_updates_is_copied(
    parameters: tuple[int, ...], of: tuple[int | None, ...], frozen: int, most: int
) -> None:
    recording = updating(optimizer(), temporaries={"Adam": (9000, 9000)}, of=of, frozen=frozen)
    found = told(recording)["foreach-temporaries"]
    assert found.off_peak == 18_000 - most
    assert found.severity == "advice"


@pytest.mark.parametrize(("sizes", "most"), [((4000, 2000), 8000), ((4000, 5000), 14_000), ((2000, 5000), 12_000)])
def test_one_copy_of_the_parameter_before_is_there_too(sizes: tuple[int, ...], most: int) -> None:
    recording = updating(optimizer(), temporaries={"Adam": (9000, 9000)})
    parameters = tuple(replace(each, bytes=size) for each, size in zip(recording.parameters, sizes, strict=True))
    found = told(replace(recording, parameters=parameters))["foreach-temporaries"]
    assert found.off_peak == 18_000 - most


@pytest.mark.parametrize(
    ("temporaries", "settings", "change", "off_peak", "effects"),
    [
        (
            (18_000,),
            {"fused": None},
            "fused=True",
            18_000,
            ("fused=True: 17.6 KiB less", "foreach=False: 9.8 KiB less"),
        ),
        ((18_000,), {}, "foreach=False", 10_000, ("foreach=False: 9.8 KiB less",)),
        ((8000,), {}, "foreach=False", None, ("foreach=False: the same peak",)),
        ((9023,), {}, "foreach=False", 1023, ("foreach=False: the same peak",)),
        ((9024,), {}, "foreach=False", 1024, ("foreach=False: 1.0 KiB less at the peak",)),
        ((4000,), {}, "foreach=False", None, ("foreach=False: 3.9 KiB more at the peak",)),
        ((4000,), {"fused": False}, "fused=True", 4000, ("fused=True: 3.9 KiB less", "foreach=False: 3.9 KiB more")),
    ],
)
def test_the_change_is_the_one_that_saves_more(
    temporaries: tuple[int, ...], settings: Settings, change: str, off_peak: int | None, effects: tuple[str, ...]
) -> None:
    found = told(updating(optimizer(settings=settings), temporaries={"Adam": temporaries}))["foreach-temporaries"]
    assert (found.change, found.off_peak) == (f"Adam(..., {change})", off_peak)
    assert found.severity == ("advice" if off_peak else "info")
    assert len(found.evidence) == 2 + len(effects)
    assert all(line.startswith(effect) for line, effect in zip(found.evidence[2:], effects, strict=True))


def test_temporaries_are_told_only_of_a_foreach_update_at_the_peak() -> None:
    sizes = {"Adam": (9000, 9000)}
    assert "foreach-temporaries" in told(updating(optimizer(), temporaries=sizes))
    assert "foreach-temporaries" not in told(updating(optimizer(implementation="for-loop"), temporaries=sizes))
    assert "foreach-temporaries" not in told(updating(optimizer(), temporaries=sizes, phase=Phase.BACKWARD))
    assert "foreach-temporaries" not in told(updating(optimizer(), temporaries={"Adam": (1023,)}))
    assert told(updating(optimizer(), temporaries={"Adam": (1024,)}))["foreach-temporaries"].bytes == 1024
    both = (optimizer(), optimizer("SGD", implementation="fused"))
    assert "foreach-temporaries" in told(updating(*both, temporaries=sizes)), "the op says whose they are"
    unnamed = updating(*both, temporaries={"multi_tensor": (9000, 9000)})
    assert "foreach-temporaries" not in told(unnamed), "they may be of the one that has none"


@pytest.mark.parametrize(
    ("adam", "sgd", "off_peak"),
    [
        ((9000, 9000), (10_000,), 8000),  # then the peak is in the other update
        ((9000, 9000), (1000,), 17_000),
        ((9000, 9000), (17_500,), 500),
    ],
)
def test_what_one_of_two_optimizers_saves_ends_at_the_update_of_the_other(
    adam: tuple[int, ...], sgd: tuple[int, ...], off_peak: int
) -> None:
    optimizers = (optimizer(settings={"fused": None}), optimizer("SGD", implementation="foreach"))
    found = told(updating(*optimizers, temporaries={"Adam": adam, "SGD": sgd}))["foreach-temporaries"]
    assert (found.change, found.off_peak) == ("Adam(..., fused=True)", off_peak)


@pytest.mark.parametrize(("size", "off_failure"), [(8000, None), (8001, 1), (20_000, 12_000)])
def test_temporaries_when_a_request_failed(size: int, off_failure: int | None) -> None:
    story = Story(weight=1000, name="up", begins=Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x4000, 4000, "up")
    story.enter(Phase.OPTIMIZER)
    for address, key in ((0x5000, "exp_avg"), (0x6000, "exp_avg_sq")):
        story.tensor(Fact.OPTIMIZER_STATE, address, 4000, f"{key} of up")
    story.alloc(0x8000, size, op="Adam.step")
    story.now += 10
    recording = ended(story, story.now, (4000,) * 4 + (size,))
    parameters = tuple(replace(each, optimizer=0) for each in recording.parameters)
    found = told(replace(recording, parameters=parameters, optimizers=(optimizer(),)))["foreach-temporaries"]
    assert (found.bytes, found.off_failure, found.off_peak) == (size, off_failure, None)
    assert found.severity == ("info" if off_failure is None else "advice")
    assert len(found.evidence) == (1 if off_failure else 0)


# -- gradients through forward ----------------------------------------------------------------


def zeroed_in_place(
    of: Sequence[int | None], shares: Mapping[str, str] | None = None, *, backwards: int = 1
) -> Recording:
    """Three steps; the gradients of ``a`` and ``b``, 4,000 bytes each, stay. The peak is in forward."""
    story = Story()
    for number, name in enumerate("ab"):
        story.parameter(0x1000 * (number + 1), name, 1000)
    for step in range(3):
        story.begin(step, Phase.FORWARD)
        story.scratch(0x8000, 30_000)
        for backward in range(backwards):
            story.enter(Phase.BACKWARD)
            for number, name in enumerate("ab"):
                if step == 0 and backward == 0:
                    story.alloc(0x4000 + number, 4000)
                story.fact(Fact.GRADIENT, 0x4000 + number, name)
            story.enter(Phase.FORWARD)
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    records = zip(recording.parameters, of, strict=True)
    parameters = tuple(replace(each, optimizer=by, shares=(shares or {}).get(each.name)) for each, by in records)
    return replace(recording, parameters=parameters)


@pytest.mark.parametrize(
    ("of", "shares", "whose"),
    [
        ((None, None), {}, "optimizer"),  # the recording does not say who updates what
        ((0, 0), {}, "optimizer"),
        ((0, 1), {}, "optimizer"),
        ((0, None), {}, "model"),  # no optimizer drops what none has
        ((0, None), {"b": "a"}, "optimizer"),  # its gradient is that of a
    ],
)
def test_the_one_that_drops_gradients_has_all_of_them(
    of: tuple[int | None, ...], shares: dict[str, str], whose: str
) -> None:
    found = told(zeroed_in_place(of, shares))["gradients-through-forward"]
    assert found.change == f"{whose}.zero_grad(set_to_none=True) before forward"
    assert (found.bytes, found.off_peak, found.evidence[0]) == (8000, 8000, "gradients: 2")


def test_gradients_that_two_backwards_add_up_are_needed() -> None:
    assert "gradients-through-forward" not in told(zeroed_in_place((0, 0), backwards=2))


def zeroed_late(*, optimizers: int = 1) -> Recording:
    """Three steps; the gradient of 4,000 bytes goes when forward, in which the peak is, has ended."""
    story = Story(weight=1000)
    for step in range(3):
        story.begin(step, Phase.FORWARD)
        story.scratch(0x8000, 30_000)
        if step:
            story.free(0x4000)
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
    recording = story.recording(precision=FP32)
    return replace(recording, optimizers=recording.optimizers * optimizers)


def test_gradients_that_are_freed_in_forward_could_go_after_the_update() -> None:
    found = told(zeroed_late())["gradients-through-forward"]
    assert (found.bytes, found.off_peak) == (4000, 4000)
    assert found.change.endswith(": optimizer.zero_grad() right after optimizer.step()")
    found = told(zeroed_late(optimizers=2))["gradients-through-forward"]
    assert found.off_peak == 4000
    assert found.change.endswith("zero_grad() of every optimizer at the end of the step, after the last update")


def test_gradients_from_before_the_recording_that_go_in_forward_were_used_before() -> None:
    """Each step adds two backwards up; the peak is in the first forward, with gradients of which no update is known."""
    story = Story()
    story.alloc(0x4000, 4000, action=Action.BASELINE)
    story.parameter(0x1000, "weight", 1000)
    story.fact(Fact.GRADIENT, 0x4000, "weight")
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.alloc(0x8000, 50_000 - 10_000 * step)
        story.free(0x8000, 0x4000)
        for backward in range(2):
            story.enter(Phase.BACKWARD)
            if backward == 0:
                story.alloc(0x4000, 4000)
            story.fact(Fact.GRADIENT, 0x4000, "weight")
            story.enter(Phase.FORWARD)
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
    found = told(story.recording(precision=FP32))["gradients-through-forward"]
    assert (found.bytes, found.off_peak) == (4000, 4000)


# -- outputs ----------------------------------------------------------------------------------


def holding(
    *sizes: int, variables: Sequence[tuple[int, str]] = (), in_update: bool = False, steps: int = 2
) -> Recording:
    """Steps with outputs of ``sizes`` bytes that live to the end of their step, and who holds each.

    At the peak, in backward or in the update, there are 5,000 bytes more than in forward.
    """
    story = Story(weight=10)
    addresses = [0x2000 + number for number in range(len(sizes))]
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        for address, size in zip(addresses, sizes, strict=True):
            story.tensor(Fact.OUTPUT, address, size, "aten::mm", op="aten::mm")
        for number, name in variables:  # the script is looked at once
            story.fact(Fact.VARIABLE, addresses[number], name, "/home/train.py:42 train", at=story.now)
        story.enter(Phase.BACKWARD)
        if in_update:
            story.enter(Phase.OPTIMIZER)
        story.scratch(0x4000, 5000)
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
        story.free(*addresses)
    return story.recording(precision=FP32)


@pytest.mark.parametrize(
    ("sizes", "in_update", "size"),
    [
        ((4000, 6000), False, 10_000),
        ((4000, 1024), False, 5024),
        ((4000, 1023), False, 4000),  # in backward a loss, which is as small, is still in use
        ((4000, 1023), True, 5023),
        ((1023,), True, None),
    ],
)
def test_outputs_that_backward_has_no_use_for(sizes: tuple[int, ...], in_update: bool, size: int | None) -> None:
    found = told(holding(*sizes, in_update=in_update)).get("outputs-kept")
    assert (found and found.bytes, found and found.off_peak) == (size, min(size, 5000) if size else None)


@pytest.mark.parametrize(
    ("phase", "told_of"), [(Phase.FORWARD, True), (Phase.BACKWARD, False), (Phase.EVALUATION, False)]
)
def test_only_what_forward_made_is_an_output(phase: Phase, told_of: bool) -> None:
    story = Story(weight=10)
    for step in range(2):
        story.begin(step, phase)
        story.tensor(Fact.OUTPUT, 0x2000, 6000, "aten::mm", op="aten::mm")
        story.enter(Phase.BACKWARD)
        story.enter(Phase.OPTIMIZER)
        story.scratch(0x4000, 5000)
        story.end(Phase.BETWEEN)
        story.free(0x2000)
    assert ("outputs-kept" in told(story.recording(precision=FP32))) == told_of


def test_the_outputs_of_the_only_step_are_told() -> None:
    found = told(holding(4000, 6000, steps=1))["outputs-kept"]
    assert (found.bytes, found.off_peak) == (10_000, 5000)


def test_what_a_variable_holds_that_is_not_named_stays() -> None:
    """Three are named; of 6,000 bytes that a fourth one holds, too, nothing is let go."""
    variables = [(0, "a"), (1, "a"), (0, "b"), (0, "c"), (0, "d")]
    found = told(holding(6000, 4000, variables=variables))["outputs-kept"]
    assert (found.bytes, found.off_peak) == (10_000, 4000)
    assert found.change == "del a, b, c after the loss, if nothing reads them later"
    assert found.message.endswith(
        "`a` of train (train.py:42), the local variable `b` of train (train.py:42), "
        "the local variable `c` of train (train.py:42) and others."
    )
    assert [line.partition(":")[0] for line in found.evidence[:3]] == ["9.8 KiB", "5.9 KiB", "5.9 KiB"]
    three = told(holding(6000, 4000, variables=variables[:4]))["outputs-kept"]
    assert three.off_peak == 5000
    assert "others" not in three.message
