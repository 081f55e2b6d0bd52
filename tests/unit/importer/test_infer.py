"""What the blocks of a snapshot are taken for, and how much of that was seen."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.snapshots import (
    ACCUMULATE,
    BACKWARD,
    CAST,
    ENGINE,
    FORWARD,
    KIB,
    MIB,
    PARAMETERS,
    REDUCTION,
    SCRIPT,
    STEP,
    WORKSPACE,
    ZERO,
    Frames,
    Story,
    imported,
    native,
    op,
    python,
    training_step,
)

from ampmem.allocator.snapshot import Frame
from ampmem.analysis.analyse import Analysis
from ampmem.analysis.summary import summarize, summary_of, summary_schema
from ampmem.analysis.timeline.categories import CATEGORIES, CODES, Category
from ampmem.events import Fact, Phase
from ampmem.importer.infer import CUBLAS_WORKSPACE, LARGE_CUBLAS_WORKSPACE
from ampmem.importer.trace import CallSite, Purpose, StackReading, read_stack
from ampmem.names import LEFT_OVER
from ampmem.reporters.base import Detail
from ampmem.reporters.text.run import (
    describe_allocator,
    describe_optimizers,
    parameters_in_short,
    versions_and_model,
)
from ampmem.reporters.text.static_model import render_static_model
from ampmem.reporters.text.table import render
from ampmem.vocabulary import SourceKind

ALL = sum(PARAMETERS.values())
CAST_BYTES = (PARAMETERS["weight"] + PARAMETERS["other"]) // 2


def born(analysis: Analysis, category: Category) -> int:
    """Bytes of all allocations of a category, whenever they lived."""
    return int(analysis.lifetimes.bytes[analysis.classes.of(category)].sum())


def names(analysis: Analysis, category: Category) -> list[str]:
    mine = analysis.classes.of(category)
    return [analysis.recording.texts[name] for name in analysis.classes.name[mine]]


def inferred(analysis: Analysis) -> set[str]:
    """The categories in which anything was concluded."""
    facts = analysis.facts
    rows = facts.allocation[facts.fact == Fact.INFERRED]
    return {str(CATEGORIES[code]) for code in np.unique(analysis.classes.category[rows])}


def first_step() -> Story:
    story = Story(**PARAMETERS, buffer=7 * KIB)
    training_step(story, state=True)
    return story


def test_a_first_step_to_the_byte(tmp_path: Path) -> None:
    analysis = imported(tmp_path, first_step().snapshot())
    assert born(analysis, Category.PARAMETERS) == ALL
    assert born(analysis, Category.GRADIENTS) == ALL
    assert born(analysis, Category.OPTIMIZER_STATE) == 2 * ALL
    assert born(analysis, Category.CAST_COPIES) == CAST_BYTES
    assert born(analysis, Category.ACTIVATIONS) == 2 * (3 + 1) * MIB + 4
    assert born(analysis, Category.OTHER) == 7 * KIB
    assert sum(record.elements for record in analysis.recording.parameters) == ALL // 4
    assert all(record.trainable and record.optimizer == 0 for record in analysis.recording.parameters)
    assert analysis.recording.precision.name == "amp"


def test_every_part_of_a_parameter_has_its_name(tmp_path: Path) -> None:
    analysis = imported(tmp_path, first_step().snapshot())
    known = {record.name for record in analysis.recording.parameters}
    assert f"parameter {4 * MIB} B #2" in known
    assert set(names(analysis, Category.PARAMETERS)) == known
    assert sorted(names(analysis, Category.GRADIENTS)) == sorted(known)
    assert sorted(names(analysis, Category.CAST_COPIES)) == [f"parameter {4 * MIB} B #{number}" for number in (1, 2)]
    states = names(analysis, Category.OPTIMIZER_STATE)
    assert sorted(states) == sorted(f"state {number} of {name}" for number in (1, 2) for name in known)


def test_what_was_seen_is_not_called_inferred(tmp_path: Path) -> None:
    analysis = imported(tmp_path, first_step().snapshot())
    assert inferred(analysis) == {"parameters", "gradients", "optimizer_state", "cast_copies"}
    facts, sizes = analysis.facts, analysis.lifetimes.bytes
    concluded = set(facts.allocation[facts.fact == Fact.INFERRED].tolist())
    gradients = np.flatnonzero(analysis.classes.of(Category.GRADIENTS)).tolist()
    assert [int(sizes[index]) for index in gradients if index not in concluded] == [PARAMETERS["norm"]]


def test_the_summary_says_how_much_of_the_peak_is_inferred(tmp_path: Path) -> None:
    summary = summarize(imported(tmp_path, first_step().snapshot()).recording)
    assert set(summary.inferred) == set(CATEGORIES)
    assert summary.inferred[Category.PARAMETERS] == ALL
    assert summary.inferred[Category.GRADIENTS] == summary.peak.categories[Category.GRADIENTS] - PARAMETERS["norm"]
    assert summary.inferred[Category.TEMPORARIES] == 0
    assert summary.conservation.residual_bytes == 0
    jsonschema.Draft202012Validator(summary_schema()).validate(json.loads(summary.to_json()))


def test_the_static_model_holds(tmp_path: Path) -> None:
    spans = [
        {"stage": stage, "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": time}
        for stage, time in (("START", 1), ("END", 2))
    ]
    story = first_step()
    for span, time in zip(spans, _update_of(story), strict=True):
        span["time_us"] = time
    summary = summarize(imported(tmp_path, story.snapshot(external_annotations=spans)).recording)
    held = {(part.mark, part.component): part.holds for part in summary.static_model}
    assert held["after_optimizer", "optimizer_state"]
    assert held["after_backward", "gradients"]
    assert {part.residual_bytes for part in summary.static_model} == {0}


def test_without_casts_and_an_optimizer_there_is_no_rule_of_thumb(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, buffer=7 * KIB)
    story.alloc("out", 3 * MIB, [op("mm"), *FORWARD])
    story.alloc("grad", 4 * MIB, ACCUMULATE)
    story.free("out", frames=ENGINE)
    summary = summarize(imported(tmp_path, story.snapshot()).recording)
    assert summary.steps[-1].marks.after_backward is not None
    assert (summary.static_recipe, summary.static_model, summary.static_problem) == (None, (), None)
    assert render_static_model(summary) == "static memory: no rule of thumb, as precision and optimizer are not known"


def test_what_may_be_more_parameters_is_said_and_no_bytes_are_divided_by_it(tmp_path: Path) -> None:
    analysis = imported(tmp_path, first_step().snapshot())  # its buffer may be a frozen parameter
    summary = summary_of(analysis)
    assert summary.parameters.count == ALL // 4
    assert (summary.parameters.exact, summary.parameters.bound, summary.parameters.known_count) == (
        False,
        "at least",
        0,
    )
    text = render(summary, analysis.recording.notes, details=frozenset({Detail.MARKS}))
    assert re.search(r"^parameters +at least 16\.0 MiB recognized$", text, re.MULTILINE)
    assert "param\n" not in text
    assert parameters_in_short(summary) == "at least 16.0 MiB of parameters recognized"


def test_an_optimizer_without_a_name_is_called_so(tmp_path: Path) -> None:
    summary = summary_of(imported(tmp_path, first_step().snapshot()))
    assert describe_optimizers(summary).startswith("not known (")


def test_that_no_update_was_seen_is_not_said_to_be_none(tmp_path: Path) -> None:
    """An update in place allocates nothing, and a snapshot has allocations alone."""
    summary = summary_of(imported(tmp_path, first_step().snapshot()))
    unseen = replace(summary, optimizer=())
    assert dict(versions_and_model(unseen))["optimizer"] == "not known"
    assert dict(versions_and_model(replace(unseen, source=SourceKind.CPU)))["optimizer"] == "none stepped"


def _update_of(story: Story) -> tuple[int, int]:
    times = [event["time_us"] for event in story.events if event["frames"] is STEP or STEP[0] in event["frames"]]
    return times[0], times[-1]


def test_state_from_before_the_trace_is_told_from_parameters_by_number(tmp_path: Path) -> None:
    story = Story(**PARAMETERS)
    story.before(**{f"exp_avg {name}": size for name, size in PARAMETERS.items()})
    story.before(**{f"exp_avg_sq {name}": size for name, size in PARAMETERS.items()}, odd=3 * KIB)
    training_step(story, state=False)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.PARAMETERS) == ALL
    assert born(analysis, Category.OPTIMIZER_STATE) == 2 * ALL
    assert born(analysis, Category.OTHER) == 3 * KIB
    assert any("which 3 of the equal blocks belong together" in note for note in analysis.recording.notes)


def test_state_that_each_update_makes_anew(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, momentum=4 * MIB)
    story.alloc("a", 1 * MIB, [op("mm"), *FORWARD])
    story.alloc("gradient", 4 * MIB, ACCUMULATE)
    story.free("a", frames=ENGINE)
    story.alloc("new momentum", 4 * MIB, [op("mul_Tensor"), *STEP])
    story.free("momentum", frames=STEP)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.PARAMETERS) == 4 * MIB
    assert names(analysis, Category.OPTIMIZER_STATE) == [f"state 1 of parameter {4 * MIB} B #1"] * 2


def test_gradients_of_earlier_that_zero_grad_frees(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, gradient=4 * MIB)
    story.free("gradient", frames=ZERO)
    story.alloc("a", 1 * MIB, [op("mm"), *FORWARD])
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.PARAMETERS) == born(analysis, Category.GRADIENTS) == 4 * MIB


def test_two_steps_share_their_parameters(tmp_path: Path) -> None:
    story = first_step()
    training_step(story, state=False, number=1)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.PARAMETERS) == ALL
    assert born(analysis, Category.GRADIENTS) == 2 * ALL
    assert born(analysis, Category.OPTIMIZER_STATE) == 2 * ALL
    assert len(summarize(analysis.recording).steps) == 2


def test_a_forward_under_autocast_alone(tmp_path: Path) -> None:
    story = Story(**PARAMETERS)
    story.alloc("copy", 2 * MIB, CAST)
    story.alloc("copy of the other", 2 * MIB, CAST)
    story.alloc("input", 1 * MIB, CAST)
    story.alloc("kept", 3 * MIB, [op("mm"), *FORWARD])
    story.alloc("gone", 5 * MIB, [op("mm"), *FORWARD])
    story.free("gone")
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.CAST_COPIES) == 4 * MIB
    assert born(analysis, Category.PARAMETERS) == 8 * MIB  # those as large as what was cast
    assert born(analysis, Category.ACTIVATIONS) == 4 * MIB
    assert born(analysis, Category.TEMPORARIES) == 5 * MIB
    summary = summary_of(analysis)
    assert len(summary.steps) == 1
    assert summary.inferred[Category.ACTIVATIONS] == 4 * MIB
    assert summary.casts.steps[0].others.bytes == 1 * MIB
    assert any("no optimizer update" in note for note in analysis.recording.notes)


def test_a_forward_alone_without_casts(tmp_path: Path) -> None:
    story = Story(**PARAMETERS, workspace=CUBLAS_WORKSPACE)
    story.alloc("kept", 3 * MIB, [op("mm"), *FORWARD])
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.PARAMETERS) == ALL
    assert born(analysis, Category.WORKSPACE) == CUBLAS_WORKSPACE
    assert any("neither gradients nor casts: all 4 blocks" in note for note in analysis.recording.notes)


def test_nothing_to_go_by_stays_other(tmp_path: Path) -> None:
    story = Story(**PARAMETERS)
    story.alloc("a", 1 * MIB, [])
    recording = imported(tmp_path, story.snapshot()).recording
    summary = summarize(recording)
    assert summary.parameters.count == 0
    assert summary.peak.categories[Category.OTHER] == ALL + 1 * MIB
    assert set(summary.inferred.values()) == {0}
    assert 'the snapshot has no stacks, so phases are not known; record with stacks="all"' in recording.notes


def test_workspaces_of_both_threads(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB)
    story.alloc("main", 32 * MIB, WORKSPACE)
    story.alloc("engine", 32 * MIB, [WORKSPACE[0], *ENGINE])
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.WORKSPACE) == 64 * MIB
    assert inferred(analysis) == set()


def test_activations_whose_birth_the_ring_lost(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, activation=3 * MIB)
    story.alloc("gradient", 4 * MIB, [op("mm"), *ENGINE])
    story.free("activation", frames=ENGINE)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.ACTIVATIONS) == 3 * MIB
    assert inferred(analysis) == {"parameters", "gradients", "activations"}


def test_python_stacks_alone_show_backward_by_its_lack_of_frames(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB)
    story.alloc("a", 3 * MIB, FORWARD)
    story.alloc("seed", 4, BACKWARD)
    story.alloc("gradient", 4 * MIB, [])
    story.free("a")
    story.alloc("state", 4 * MIB, STEP)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.GRADIENTS) == born(analysis, Category.OPTIMIZER_STATE) == 4 * MIB
    assert born(analysis, Category.ACTIVATIONS) == 3 * MIB
    assert any("has no C++ frames" in note for note in analysis.recording.notes)


def read_frames(frames: Frames) -> StackReading:
    return read_stack(tuple(Frame(frame["name"], frame["filename"], frame["line"]) for frame in frames))


def test_places() -> None:
    loader = [python("fetch", "/env/torch/utils/data/_utils/fetch.py"), SCRIPT]
    scheduler = [python("step", "/env/torch/optim/lr_scheduler.py"), SCRIPT]
    own = [python("step", "/home/my_optimizers.py"), SCRIPT]
    places = {
        CallSite.FORWARD: [FORWARD, CAST, WORKSPACE],
        CallSite.BACKWARD: [BACKWARD, ENGINE, [*ENGINE, *FORWARD], ACCUMULATE],
        CallSite.OPTIMIZER: [STEP, own],
        CallSite.BETWEEN: [ZERO],
        CallSite.DATA: [loader],
        None: [[], [SCRIPT], scheduler],
    }
    for place, stacks in places.items():
        assert [read_frames(stack).place for stack in stacks] == [place] * len(stacks)


def test_purposes_and_ops() -> None:
    assert read_frames(CAST).purpose is Purpose.CAST
    assert read_frames(CAST).op == "aten::_to_copy"
    assert read_frames(ACCUMULATE).purpose is Purpose.GRADIENT
    assert read_frames(WORKSPACE).purpose is Purpose.WORKSPACE
    assert read_frames(REDUCTION).op == "aten::sum (scratch)"
    assert read_frames([op("resize_"), op("where_ScalarOther"), *FORWARD]).op == "aten::where"
    assert read_frames([op("empty_memory_format")]).op == "aten::empty"
    assert read_frames([op("_foreach_sqrt")]).op == "aten::_foreach_sqrt"
    assert read_frames([op("nll_loss_forward")]).op == "aten::nll_loss_forward"
    assert read_frames(FORWARD).text.splitlines()[0] == "/home/train.py:40 <module>"


def test_a_reduction_inside_a_gradient_stays_scratch(tmp_path: Path) -> None:
    analysis = imported(tmp_path, first_step().snapshot())
    texts, lives = analysis.recording.texts, analysis.lifetimes
    scratch = [index for index, text in enumerate(lives.op) if texts[text].endswith("(scratch)")]
    assert scratch
    assert set(analysis.classes.category[scratch]) == {CODES[Category.TEMPORARIES]}
    assert set(lives.phase[scratch]) == {Phase.BACKWARD}


def test_a_step_counter_is_no_sign_of_new_state(tmp_path: Path) -> None:
    story = Story(**PARAMETERS)
    story.before(**{f"momentum {name}": size for name, size in PARAMETERS.items()})
    training_step(story, state=False)
    story.alloc("counter", 4, [op("add"), *STEP])
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.PARAMETERS) == ALL
    assert born(analysis, Category.OPTIMIZER_STATE) == ALL + 4


def test_frozen_weights_are_known_by_their_casts(tmp_path: Path) -> None:
    story = Story(base=16 * MIB, adapter=64 * KIB)
    story.alloc("copy", 8 * MIB, CAST)
    story.alloc("small copy", 32 * KIB, CAST)
    story.alloc("gradient", 64 * KIB, ACCUMULATE)
    recording = imported(tmp_path, story.snapshot()).recording
    assert [(record.bytes, record.trainable) for record in recording.parameters] == [
        (16 * MIB, False),
        (64 * KIB, True),
    ]


def test_what_was_there_before_the_trace_and_dies_is_no_temporary(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, unknown=5 * MIB)
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    story.free("unknown", frames=FORWARD)
    story.alloc("gradient", 4 * MIB, ACCUMULATE)
    story.free("out", frames=ENGINE)
    analysis = imported(tmp_path, story.snapshot())
    assert (born(analysis, Category.TEMPORARIES), born(analysis, Category.OTHER)) == (0, 5 * MIB)


def test_without_a_phase_nothing_is_a_temporary(tmp_path: Path) -> None:
    for frames, said in (
        ([], "the snapshot has no stacks"),
        ([python("foo", "/path/to/bar.py")], "no stack in the trace"),
    ):
        story = Story(weight=4 * MIB)
        story.alloc("born", 3 * MIB, frames)
        story.free("born", frames=frames)
        analysis = imported(tmp_path, story.snapshot())
        assert (born(analysis, Category.TEMPORARIES), born(analysis, Category.OTHER)) == (0, 7 * MIB)
        assert any(note.startswith(said) and "so phases are not known" in note for note in analysis.recording.notes)


def test_the_engine_is_known_where_frees_alone_have_stacks(tmp_path: Path) -> None:
    """A ring that lost the forward: Python frees the loss and the gradients, the engine has no Python frames."""
    story = Story(weight=4 * MIB, activation=3 * MIB)
    story.alloc("gradient", 4 * MIB, [])
    story.free("activation")
    story.free("gradient", frames=ZERO)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.GRADIENTS) == born(analysis, Category.PARAMETERS) == 4 * MIB
    assert born(analysis, Category.ACTIVATIONS) == 3 * MIB


@pytest.mark.parametrize("rebound", [True, False])
def test_the_logits_of_the_step_before(rebound: bool, tmp_path: Path) -> None:
    """The script gives them up when the variable gets its next value, or keeps them to the end."""
    story = Story(weight=4 * MIB, logits=2 * MIB, mask=7 * KIB)
    story.alloc("activation", 3 * MIB, [op("mm"), *FORWARD])
    story.alloc("logits of now", 2 * MIB, [op("mm"), *FORWARD])
    if rebound:
        story.free("logits", frames=[SCRIPT])
    story.alloc("gradient", 4 * MIB, ACCUMULATE)
    story.free("activation", frames=ENGINE)
    story.free("gradient", frames=ZERO)
    analysis = imported(tmp_path, story.snapshot())
    assert born(analysis, Category.ACTIVATIONS) == (2 + 3 + 2) * MIB
    assert (born(analysis, Category.TEMPORARIES), born(analysis, Category.OTHER)) == (0, 7 * KIB)
    assert any(note.startswith("1 blocks of 7.0 KiB are alive throughout") for note in analysis.recording.notes)


def test_what_is_left_over_may_be_a_result_of_an_earlier_forward() -> None:
    assert "or results of an earlier forward that a variable holds, such as logits" in LEFT_OVER


def product(dtype: str, *frames: dict[str, Any]) -> Frames:
    return [native(f"void at::cuda::blas::gemm_internal_cublas<{dtype}>(char, long)"), *frames]


FLOAT_BACKWARD = product("float", op("mm"), *ENGINE)
HALF_FORWARD = product("c10::BFloat16", op("mm"), *FORWARD)
POSITIONS = product("float", op("bmm"), *FORWARD)


@pytest.mark.parametrize(
    ("asked", "precision", "dtype", "weights"),
    [
        ([FLOAT_BACKWARD], "fp32", None, "float32"),
        ([product("float", op("addmm"), *FORWARD)], "fp32", None, "float32"),
        ([POSITIONS], "as-is", None, "float32"),  # the first product of a model in bfloat16 may be such
        ([POSITIONS, HALF_FORWARD], "as-is", None, "float32"),
        ([HALF_FORWARD], "as-is", None, "bfloat16"),
        ([product("c10::Half", op("mm"), *ENGINE)], "as-is", None, "float16"),
        ([CAST], "amp", "16-bit", "float32"),
        ([CAST, HALF_FORWARD, POSITIONS], "amp", "bfloat16", "float32"),
        ([CAST, product("c10::Half", op("mm"), *FORWARD)], "amp", "float16", "float32"),
        ([CAST, HALF_FORWARD, product("c10::Half", op("mm"), *FORWARD)], "amp", "16-bit", "float32"),
    ],
)
def test_the_precision_that_frames_show(
    asked: list[Frames], precision: str, dtype: str | None, weights: str, tmp_path: Path
) -> None:
    story = Story(weight=4 * MIB)
    for number, frames in enumerate(asked):
        story.alloc(f"asked {number}", 2 * MIB, frames)
    story.alloc("gradient", 4 * MIB, ACCUMULATE)
    recording = imported(tmp_path, story.snapshot()).recording
    assert (recording.precision.name, recording.precision.dtype) == (precision, dtype)
    (parameter,) = recording.parameters
    assert (parameter.dtype, parameter.elements) == (weights, 4 * MIB // (4 if weights == "float32" else 2))
    told = f"parameters were counted as {weights}"
    assert any(note.endswith(told) for note in recording.notes) == (precision == "as-is")


def test_a_scaler_is_seen_in_the_stacks(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB)
    story.alloc("scaled", 4, [op("mul_Tensor"), python("scale", "/env/torch/amp/grad_scaler.py"), SCRIPT])
    assert imported(tmp_path, story.snapshot()).recording.precision.scaler


@pytest.mark.parametrize("size", [CUBLAS_WORKSPACE, LARGE_CUBLAS_WORKSPACE])
def test_workspaces_of_cublas_without_cpp_frames(size: int, tmp_path: Path) -> None:
    story = Story(weight=4 * MIB, older=CUBLAS_WORKSPACE if size == CUBLAS_WORKSPACE else KIB)
    story.alloc("main", size, FORWARD)
    story.alloc("out", 1 * MIB, FORWARD)
    story.alloc("seed", 4, BACKWARD)
    story.alloc("engine", size, [])
    story.alloc("gradient", 4 * MIB, [])
    story.free("out")
    analysis = imported(tmp_path, story.snapshot())
    older = CUBLAS_WORKSPACE if size == CUBLAS_WORKSPACE else 0
    assert born(analysis, Category.WORKSPACE) == 2 * size + older
    assert born(analysis, Category.GRADIENTS) == 4 * MIB
    assert inferred(analysis) == {"parameters", "gradients", "workspace"}


def test_settings_that_a_snapshot_does_not_have_are_not_called_the_default(tmp_path: Path) -> None:
    story = Story()
    story.alloc("out", 1 * MIB, FORWARD)
    for more, said in (
        ({}, "settings not known, allocated on 1 stream"),
        ({"allocator_settings": {}}, "default settings, allocated on 1 stream"),
    ):
        allocator = imported(tmp_path, story.snapshot(**more)).recording.allocator
        assert allocator is not None
        assert describe_allocator(allocator) == said
