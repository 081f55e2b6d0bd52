import json
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from support.build import AMP, FP32, RUN, Story, predicted, small_run
from support.golden_sections import Golden

from ampmem.analysis.analyse import analyse
from ampmem.analysis.budgets.budget import budgets_of
from ampmem.analysis.budgets.check import Limit, check_run
from ampmem.analysis.budgets.run import run_of
from ampmem.analysis.comparison import compare, distinct, entry_of
from ampmem.analysis.difference.difference import difference
from ampmem.analysis.difference.sides import side_of
from ampmem.analysis.summary import PeakPlace, Summary, summarize, summary_of, summary_schema
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.events import OTHER_THREADS, Fact, Phase, Recording
from ampmem.reporters.base import Detail
from ampmem.reporters.text.check import render_check
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.difference import render_difference
from ampmem.reporters.text.layout import PLAIN
from ampmem.reporters.text.table import render
from ampmem.units import format_bytes


def as_json(recording: Recording) -> Any:
    return json.loads(summarize(recording).to_json())


@cache
def schema() -> Any:
    return jsonschema.Draft202012Validator(summary_schema())


def validate(value: object) -> None:
    schema().validate(value)


def test_the_summary_of_a_small_run_field_by_field(golden: Golden) -> None:
    summary = summarize(small_run().recording())
    golden(json.dumps(json.loads(summary.to_json()), indent=1))
    first = 64 + 600 + 32 + 200 + 1000 + 400 + 16
    assert [step.peak.bytes for step in summary.steps] == [first, first + 800]
    # One tensor of two times the parameter's bytes, where Adam keeps two of once those: that they cancel out is no
    # explanation.
    assert {(row.component, row.residual_bytes) for row in summary.static_model if not row.holds} == {
        ("optimizer_state", 0),
        ("total", 0),
    }


def test_the_json_is_as_the_schema_says() -> None:
    jsonschema.Draft202012Validator.check_schema(summary_schema())
    validate(as_json(small_run().recording()))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.update(extra=1),
        lambda value: value.pop("rank"),
        lambda value: value["peak"]["categories"].pop("other"),
        lambda value: value["steps"][0]["peak"].update(step=0),
        lambda value: value["peak"].pop("step"),
        lambda value: value.update(steps=[]),
        lambda value: value["top"][0].update(bytes=1.5),
        lambda value: value["allocator"].update(requested=None),
        lambda value: value["peak"].update(phase="lunch"),
    ],
)
def test_the_schema_is_strict(spoil: Any) -> None:
    value = as_json(small_run().recording())
    spoil(value)
    with pytest.raises(jsonschema.ValidationError):
        validate(value)


def test_the_schema_requires_all_it_names_everywhere() -> None:
    def objects(node: Any) -> Any:
        if isinstance(node, dict):
            if node.get("type") == "object":
                yield node
            for child in node.values():
                yield from objects(child)
        elif isinstance(node, list):
            for child in node:
                yield from objects(child)

    schema: Any = summary_schema()
    found = list(objects(schema))
    assert len(found) > 15
    for node in found:
        if "properties" not in node:  # a mapping: what its keys are, and that its values are of one kind
            assert node["propertyNames"]
            values = node["additionalProperties"]
            if "$ref" in values:
                values = schema["$defs"][values["$ref"].removeprefix("#/$defs/")]
            assert values["type"] in ("object", "integer")
            continue
        assert node["additionalProperties"] is False
        assert node["required"] == list(node["properties"])


def test_what_could_not_be_measured_is_null() -> None:
    story = small_run()
    story.totals_known = False
    story.begin(2)
    story.alloc(0xA000, 10**6)
    story.end(loss=None, skipped=True)
    recording = story.recording(precision=replace(AMP, name="fp32", dtype=None, cache=None))
    recording = replace(recording, events=replace(recording.events, allocated=recording.events.allocated * 0 - 1))
    result = as_json(recording)
    validate(result)
    assert result["parameters"]["cast_eligible"] is None
    assert result["conservation"]["residual_bytes"] is None
    assert result["steps"][2]["loss"] is None
    assert result["steps"][2]["skipped_update"] is True
    assert set(result["steps"][2]["marks"].values()) == {None}
    assert result["peak"]["step"] == 2
    assert result["modules"][0]["activations"] == 1000  # of step 1, the last with a backward


def test_who_holds_what_nothing_else_is_known_of() -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    for address, size, name in (
        (0x2000, 50, ""),
        (0x3000, 30, "Cache.layers[0].keys"),
        (0x4000, 40, "Cache.layers[1]"),
    ):
        story.alloc(address, size)
        if name:
            story.fact(Fact.HELD, address, name)
    story.alloc(OTHER_THREADS, 999)
    story.end()
    recording = story.recording(run=replace(RUN, step_on="forward"))
    assert as_json(recording)["held"] == [
        {"holder": "Cache", "bytes": 70, "tensors": 2, "category": "other", "place": ""},
        {"holder": None, "bytes": 50, "tensors": 1, "category": "other", "place": ""},
    ]
    assert [each["holder"] for each in as_json(recording)["holders"]] == ["Cache.layers", None]
    text = render(summarize(recording), [], details=frozenset({Detail.MARKS}))
    assert (
        "other at the end of step 0: 70 B held by Cache (2 tensors), 50 B whose holder is not known (1 tensor)"
        in " ".join(text.split())
    )


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_finite_number_is_named_beside_the_null(loss: str) -> None:
    story = small_run()
    story.begin(2)
    story.end(loss=float(loss))
    result = as_json(story.recording())
    validate(result)
    assert [step["loss_not_finite"] for step in result["steps"]] == [None, None, loss]
    assert result["steps"][2]["loss"] is None


def test_no_autocast_copies_under_autocast_are_a_zero() -> None:
    story = Story(weight=10, begins=Phase.BACKWARD)
    story.end()
    result = as_json(story.recording())
    assert result["parameters"]["cast_eligible"] == 0
    assert result["casts"]["peak_bytes"] == 0
    assert [module["name"] for module in result["modules"]] == ["(model)"]
    assert result["modules"][0]["parameters"] == 40


def test_the_residual_is_the_largest_difference_either_way() -> None:
    recording = small_run().recording()
    allocated = recording.events.allocated.copy()
    allocated[3] += 7
    allocated[9] -= 5
    assert summarize(replace(recording, events=replace(recording.events, allocated=allocated))).conservation == (
        summarize(recording).conservation.__class__(
            events=32, residual_bytes=7, reserved_residual_bytes=None, other_threads_bytes=0
        )
    )


def test_of_equal_peaks_the_last_step_is_named_that_reached_it_itself() -> None:
    story = Story(weight=10)
    for step in range(3):
        story.begin(step, Phase.BACKWARD)
        if step == 1:
            story.alloc(0x2000, 100)  # which the last step only begins with
            story.free(0x2000)
            story.alloc(0x2000, 100)
        elif step == 0:
            story.scratch(0x2000, 100)
        story.end(Phase.OPTIMIZER)
        if step == 2:
            story.free(0x2000)
    analysis = analyse(story.recording())
    summary = summary_of(analysis)
    assert [step.peak.bytes for step in summary.steps] == [140] * 3
    assert (analysis.top, summary.peak.step) == (1, 1)
    assert analysis.peak == analysis.peaks[1]


def test_a_peak_that_is_there_at_the_start_is_in_the_phase_of_the_start() -> None:
    story = Story(weight=10)
    story.begin(0)
    story.free(0x1000)
    story.end(Phase.BACKWARD)
    peak = summarize(story.recording()).peak
    assert (peak.bytes, peak.phase) == (40, "between")


def test_casts_are_sorted_by_size_then_name() -> None:
    story = Story(weight=10, name="b", begins=Phase.FORWARD)
    for number, (name, size) in enumerate([("b", 5), ("c", 5), ("a", 5), ("big", 9), ("a", 1)]):
        story.tensor(Fact.CAST_COPY, 0x2000 + number, size, name)
        if name == "b":
            story.free(0x2000)
    story.end(Phase.BACKWARD)
    casts = summarize(story.recording()).casts
    assert [(item.name, item.copies, item.bytes) for item in casts.by_parameter] == [
        ("big", 1, 9),
        ("a", 2, 6),
        ("b", 1, 5),
        ("c", 1, 5),
    ]
    assert (casts.copies, casts.bytes, casts.peak_bytes) == (5, 25, 20)


def test_modules_come_in_the_order_of_the_model_each_above_its_own() -> None:
    story = Story()
    story.alloc(0x4000, 1, module="dropout")  # named before the parameters, has none
    for number, name in enumerate(["wte.weight", "h.0.attn.weight", "h.1.attn.weight", "h.0.mlp.weight", "bias"]):
        story.parameter(0x1000 + number, name, 10**number)
    story.begin(0, Phase.FORWARD)
    story.alloc(0x5000, 7, module="h.1")
    story.alloc(0x5001, 1, module="(model)")
    story.alloc(0x5002, 500)
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x6000, 11, "h.0.attn.weight")
    story.end()
    rows = {row.name: row for row in summarize(story.recording()).modules}
    assert list(rows) == ["(model)", "dropout", "wte", "h", "h.0", "h.0.attn", "h.0.mlp", "h.1", "h.1.attn"]
    assert rows["(model)"].parameters == 4 * 11111
    assert rows["h"].parameters == 4 * 1110
    assert (rows["(model)"].activations, rows["h"].activations, rows["h.1.attn"].activations) == (8, 7, 0)
    assert (rows["h.0.attn"].gradients, rows["h.0"].gradients, rows["h.1"].gradients) == (11, 11, 0)


def test_fifty_allocations_are_listed_the_largest_and_all_like_the_last() -> None:
    story = small_run()
    story.begin(2)
    for number in range(49):
        story.alloc(0x10000 + number, 20_000 + number)
    for number in range(12):
        story.alloc(0x20000 + number, 10_000)
    story.alloc(0x30000, 5_000)
    story.end()
    top = summarize(story.recording()).top
    assert [item.bytes for item in top] == [*(20_048 - number for number in range(49)), *[10_000] * 12]


def test_no_step_is_an_error() -> None:
    story = Story(weight=10, begins=Phase.BACKWARD)
    with pytest.raises(NothingRecorded, match=r"no step ended.*optimizer\.step\(\)"):
        summarize(story.recording())


def test_no_backward_is_an_error() -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    story.end()
    with pytest.raises(NothingRecorded, match=r"no backward pass.*loss\.backward\(\)"):
        summarize(story.recording())


def test_no_model_is_an_error() -> None:
    story = Story(begins=Phase.BACKWARD)
    story.end()
    recording = story.recording()
    with pytest.raises(NothingRecorded, match=r"no model parameters.*torch\.nn\.Module"):
        summarize(recording)
    with pytest.raises(NothingRecorded):
        summary_of(analyse(recording))


def test_events_that_contradict_each_other_are_an_error() -> None:
    story = small_run()
    story.free(0xDEAD)
    with pytest.raises(RecordingError, match="damaged"):
        summarize(story.recording())


def test_summaries_of_one_recording_are_equal() -> None:
    recording = small_run().recording(run=replace(RUN, rank=3, world_size=4))
    first: Summary = summarize(recording)
    assert first == summarize(recording)
    assert (first.rank, first.world_size) == (3, 4)


@pytest.mark.parametrize("after", [False, True])
def test_the_headline_has_the_most_of_the_whole_recording_wherever_it_is(after: bool) -> None:
    """As of a model that is made before the first forward, and of an evaluation behind the last step."""

    def more(story: Story) -> None:
        story.scratch(0xA000, 40_000, op="aten::randn")

    story = Story()
    if not after:
        more(story)
    small_run(story)
    if after:
        story.enter(Phase.EVALUATION)
        more(story)
    summary = summarize(story.recording())
    text = render(summary, summary.notes)
    within = summarize(small_run().recording())
    assert (summary.peak, within.outside_steps) == (within.peak, None)
    # Before the run there is nothing else; after it what its last step has left.
    left = int(analyse(small_run().recording()).timeline.total[-1]) if after else 0
    assert summary.outside_steps.bytes == sum(summary.outside_steps.categories.values()) == 40_000 + left
    where = "after the last step, in evaluation" if after else "before the first step, in setup"
    flat = " ".join(text.split())
    assert flat.startswith("The peak of the recorded steps is 3.0 KiB, in backward of step 1")
    size = format_bytes(40_000 + left)
    assert f"The highest total of the whole recording is {size}, {where}, at randn (" in flat
    assert "; the tables cover the steps." in flat
    whole = summary.whole
    assert (whole.bytes, whole.step) == (summary.outside_steps.bytes, None)
    assert whole.where is (PeakPlace.AFTER_STEPS if after else PeakPlace.BEFORE_STEPS)
    validate(json.loads(summary.to_json()))


def rounded(first: int, then: int, *, small: int = 0) -> Story:
    """Two steps with as many tensors of one byte, in blocks of 512 B, and then a large one that is freed."""
    story = Story()
    story.segment(0x1000, 1 << 20)
    story.parameter(0x1000, "weight", 128)
    for step, many in enumerate((first, then)):
        story.begin(step, Phase.BACKWARD)
        tensors = [0x10000 + 512 * i for i in range(many)]
        for address in tensors:
            story.alloc(address, 1, block=512)
        story.free(*tensors)
        story.scratch(0x80000, 2048 + small * step, block=2048 + 512 * small)
        story.end()
    return story


def test_the_peak_is_where_the_most_is_allocated_and_all_of_it_is_of_that_instant() -> None:
    """Five blocks of 512 B with a byte in each are more than 2048 B, though 2048 B were requested at once, too."""
    summary = summarize(rounded(5, 1).recording())
    first, second = (step.peak for step in summary.steps)
    assert (first.bytes, first.allocated) == (512 + 5, 512 + 5 * 512)
    assert (second.bytes, second.allocated) == (512 + 2048, 512 + 2048)
    assert (summary.peak.step, summary.peak.bytes, summary.peak.allocated) == (0, 517, 3072)
    layers = summary.allocator
    assert (layers.requested, layers.rounding, layers.allocated) == (517, 2555, 3072)
    whole = summary.whole
    assert (whole.bytes, whole.at_most, whole.requested, whole.where, whole.step) == (3072, 3072, 517, "step", 0)


def test_a_simulated_run_that_goes_on_has_the_peak_that_its_device_saw() -> None:
    """As with ``--run-to-end``: what came after the recorded steps is in the prediction alone."""
    terms = replace(predicted(5000).allocated, rounding=120)
    most = {"highest_allocated": 6144, "highest_reserved": 6144, "bounds": {"workspaces": 1024}}
    later = predicted(5000, allocated=terms, reserved=terms, **most)
    summary = summarize(replace(rounded(5, 1).recording(), prediction=later))
    assert (summary.peak.step, summary.peak.said) == (0, 3072)
    whole = summary.whole
    assert (whole.bytes, whole.at_most, whole.requested) == (5120, 6144, 5000)
    assert (whole.where, whole.step) == (PeakPlace.NOT_RECORDED, None)
    flat = " ".join(render(summary, summary.notes).split())
    assert flat.startswith("The peak of the recorded steps is 3.0 KiB allocated, 517 B of it requested, in backward of")
    assert "The peak of the whole run is 5.0 KiB, outside the recorded steps; the tables and the findings cover" in flat
    assert "peak 5.0 KiB to 6.0 KiB allocated outside the recorded steps, " in flat
    # Every command that limits or compares a peak takes that number.
    run = run_of(replace(rounded(5, 1).recording(), prediction=later), "run")
    before = side_of(rounded(5, 1).recording(), "before")
    found = check_run(run, budgets_of({"peak": "5.5KiB", "allocated": "5.5KiB"}), before)
    sizes = {(each.key, each.limit_of): (each.before, each.after, each.least, each.kept) for each in found.judged}
    assert sizes["peak", Limit.BUDGET] == (3072, 6144, 5120, False)
    assert sizes["allocated", Limit.BUDGET][1] == 6144
    assert sizes["peak", Limit.BASELINE] == (3072, 5120, None, False)
    told = " ".join(render_check(found).split())
    assert "note: the peak of the whole run is 5.0 KiB, outside the recorded steps; the peak of the recorded" in told
    changed = difference(before, side_of(replace(rounded(5, 1).recording(), prediction=later), "after"))
    assert (changed.before, changed.after, changed.peaks) == (517, 517, (3072, 3072))
    assert changed.elsewhere_in_run == ("the peak of the whole run of after is 5.0 KiB, outside the recorded steps",)


def test_a_difference_is_that_of_the_peaks_with_the_rounding_of_blocks() -> None:
    found = difference(side_of(rounded(5, 1).recording(), "before"), side_of(rounded(7, 1).recording(), "after"))
    assert (found.peaks, found.grown, found.rounding) == ((3072, 4096), 1024, 1022)
    assert found.residual == 0 and sum(change.grown for change in found.changes) == 2
    told = render_difference(found, PLAIN)
    assert told.startswith("The peak grew from 3.0 KiB to 4.0 KiB, +1.0 KiB, nearly all of it rounding of blocks.")
    assert "allocated    3.0 KiB  4.0 KiB  +1.0 KiB" in told


def test_recordings_side_by_side_name_the_step_and_their_own_peaks() -> None:
    """The last common step is compared, and the first of one of them needed more."""
    entries = distinct([entry_of(rounded(*many).recording(precision=FP32)) for many in ((9, 1), (5, 5))], ["a", "b"])
    comparison = compare(entries)
    assert [column.peak for column in comparison.columns] == [2560, 3072]
    told = render_comparison(comparison)
    assert told.startswith("Peaks of step 1: fp32 a 2.5 KiB, fp32 b 3.0 KiB.")
    own = "the peak of each whole run: fp32 a 5.0 KiB in step 0, fp32 b 3.0 KiB in step 1."
    assert f"The comparison uses step 1 of each, as it needs a common step; {own}" in " ".join(told.split())
    rows = [line.split("  ")[0] for line in told.splitlines()]
    assert "peak of step 1" in rows and "peak of the whole run" in rows
