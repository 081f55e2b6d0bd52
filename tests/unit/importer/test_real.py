"""Snapshots that others recorded on GPUs, and what must come out of them."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import ampmem_here
from support.snapshots import real

from ampmem.allocator.snapshot import read_snapshot
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.summary import summarize, summary_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.events import Action, Fact
from ampmem.importer.recording import import_snapshot, recording_of
from ampmem.importer.unpickle import load_plain
from ampmem.vocabulary import Precision, SourceKind

pytestmark = pytest.mark.slow

NAMES = (
    "cnn_small_fp32_10steps",
    "course_no_time",
    "lm2700m_ctx128_bf16_forward",
    "lm2700m_ctx128_fp32_forward",
    "lm2700m_ctx128_fp32_step",
    "lm2700m_ctx512_amp_fwdbwd",
    "lm2700m_ctx512_fp32_fwdbwd",
    "lm_medium_ctx128_fp32_step",
    "lm_medium_ctx512_bf16_inference",
    "lm_small_ctx200_amp_3steps",
    "lm_small_ctx200_fp32_3steps",
    "old_no_free_requested",
    "resnet50_fp32_3steps",
)


@cache
def analysis_of(name: str) -> Analysis:
    path = real(name)
    return analyse(recording_of(read_snapshot(load_plain(path)), path.name))


def language_model(width: int, layers: int, inner: int, vocabulary: int = 10_000) -> int:
    """Parameters of the course's model: attention, SwiGLU and two RMSNorms a layer; embedding, norm and head."""
    layer = 4 * width * width + 3 * width * inner + 2 * width
    return layers * layer + width + 2 * vocabulary * width


LARGE = language_model(2560, 32, 10_240)
MEDIUM = language_model(1024, 24, 4_096)
SMALL = language_model(512, 4, 1_344)
RESNET50 = 25_557_032


def within_a_percent(measured: int, expected: int) -> bool:
    return abs(measured - expected) <= expected / 100


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_imported_and_shown(name: str, tmp_path: Path) -> None:
    output = tmp_path / "run.ampmem"
    recording = import_snapshot(real(name), output)
    summary = summarize(recording)
    assert recording.run.source == SourceKind.SNAPSHOT
    assert summary.conservation.residual_bytes == 0
    assert all(part.residual_bytes == 0 for part in summary.static_model)
    code, stdout, stderr = ampmem_here(tmp_path, "show", "--all", str(output))
    assert (code, stderr) == (0, "")
    assert "residual 0 B" in stdout


def alive_at_the_end(analysis: Analysis) -> dict[str, int]:
    """Bytes by category, with the casts of what is no parameter apart."""
    facts, lives = analysis.facts, analysis.lifetimes
    live = analysis.timeline.breakdown(len(analysis.recording.events))
    others = facts.allocation[facts.fact == Fact.OTHER_CAST]
    casts = int(lives.bytes[others][lives.alive_at(len(analysis.recording.events))[others]].sum())
    terms = {str(category): size for category, size in live.items()}
    return terms | {"other casts": casts, "activations": terms["activations"] - casts}


def test_every_cast_of_a_forward_under_autocast_is_found() -> None:
    analysis = analysis_of("lm2700m_ctx128_bf16_forward")
    facts = analysis.facts
    assert int((facts.fact == Fact.CAST_COPY).sum()) == 32 * 9 + 2  # seven weights and two norms a layer, norm, head
    assert int((facts.fact == Fact.CAST_COPY).sum() + (facts.fact == Fact.OTHER_CAST).sum()) == 580
    copies = alive_at_the_end(analysis)["cast_copies"]
    assert copies == 2 * (LARGE - 10_000 * 2560)  # all but the embedding


def test_what_autocast_adds_to_a_forward_has_names() -> None:
    amp = alive_at_the_end(analysis_of("lm2700m_ctx128_bf16_forward"))
    fp32 = alive_at_the_end(analysis_of("lm2700m_ctx128_fp32_forward"))
    growth = sum(amp.values()) - sum(fp32.values())
    assert growth == 23_868_070_912 - 19_352_504_320  # the sums of the segments' requested sizes
    named = ("cast_copies", "other casts", "activations", "workspace")
    assert within_a_percent(sum(amp[term] - fp32[term] for term in named), growth)
    assert amp["cast_copies"] > growth  # the activations have shrunk, and the copies ate more than that
    assert amp["activations"] < fp32["activations"]
    for live in (amp, fp32):
        assert within_a_percent(live["parameters"], 4 * LARGE)
        assert live["temporaries"] == 0


def test_a_first_step_with_adam_is_sixteen_bytes_per_parameter() -> None:
    summary = summary_of(analysis_of("lm2700m_ctx128_fp32_step"))
    end = summary.steps[-1].marks.after_optimizer
    assert end[Category.PARAMETERS] == end[Category.GRADIENTS] == 4 * LARGE
    assert end[Category.OPTIMIZER_STATE] == 8 * LARGE
    assert end[Category.WORKSPACE] == 2 * 32 << 20  # the main thread's and the engine's
    assert summary.peak.phase == "optimizer"
    assert summary.optimizer[0].class_name == "AdamW"


def test_a_later_step_that_makes_its_state_anew() -> None:
    summary = summary_of(analysis_of("lm_medium_ctx128_fp32_step"))
    for mark in (summary.steps[0].marks.after_backward, summary.steps[0].marks.after_optimizer):
        assert mark[Category.PARAMETERS] == mark[Category.GRADIENTS] == 4 * MEDIUM
        assert mark[Category.OPTIMIZER_STATE] == 8 * MEDIUM
    # AccumulateGrad made those of the weights; the engine those of the norms and of the embedding.
    seen = summary.peak.categories[Category.GRADIENTS] - summary.inferred[Category.GRADIENTS]
    assert seen == 4 * (MEDIUM - 49 * 1024 - 10_000 * 1024)


def test_inference_under_autocast() -> None:
    analysis = analysis_of("lm_medium_ctx512_bf16_inference")
    summary = summary_of(analysis)
    assert within_a_percent(summary.parameters.bytes, 4 * MEDIUM)
    assert summary.casts.copies == 24 * 7 + 1
    assert summary.casts.bytes == 2 * (MEDIUM - 49 * 1024 - 10_000 * 1024)
    assert summary.casts.peak_bytes < summary.casts.bytes / 10  # none is kept: nothing needs gradients


def test_adapters_are_found_in_a_quantized_model() -> None:
    summary = summary_of(analysis_of("course_no_time"))
    # Rank 16 on the query and value projections of 22 layers: 2048 in, 2048 and 256 out.
    adapters = 22 * 16 * ((2048 + 2048) + (2048 + 256))
    assert summary.parameters.count == adapters
    assert summary.steps[0].marks.after_backward[Category.GRADIENTS] == 4 * adapters


@pytest.mark.parametrize("name", ["lm_small_ctx200_amp_3steps", "lm_small_ctx200_fp32_3steps"])
def test_steps_from_before_the_model_was_made(name: str) -> None:
    """Each update of its optimizer makes parameters and states anew."""
    summary = summary_of(analysis_of(name))
    assert summary.parameters.count == SMALL
    for step in summary.steps:
        end = step.marks.after_optimizer
        assert end[Category.PARAMETERS] == end[Category.GRADIENTS] == 4 * SMALL
        assert end[Category.OPTIMIZER_STATE] == 8 * SMALL


def test_copies_that_a_region_around_three_steps_keeps_in_its_cache() -> None:
    summary = summary_of(analysis_of("lm_small_ctx200_amp_3steps"))
    weights = SMALL - 10_000 * 512 - 9 * 512
    assert (summary.casts.copies, summary.casts.bytes) == (29, 2 * weights)
    assert [step.surviving.copies for step in summary.casts.steps] == [29, 29, 29]
    finding = next(each for each in summary.findings if each.code == "copies-survive")
    assert finding.bytes == 2 * weights
    assert "autocast stays open across the update" in finding.message
    problems = [term.why for part in summary.static_model for term in part.terms if part.component == "cast_copies"]
    assert not any("no cache served it" in why for why in problems)


COPIES = {
    "lm2700m_ctx128_bf16_forward": 32 * 9 + 2,
    "lm2700m_ctx512_amp_fwdbwd": 32 * 7 + 1,
    "lm_medium_ctx512_bf16_inference": 24 * 7 + 1,
    "lm_small_ctx200_amp_3steps": 4 * 7 + 1,
    "lm_medium_ctx128_fp32_step": 0,  # its activations have half the size of its weights
    "resnet50_fp32_3steps": 0,
}


def without_cpp_frames(data: Any) -> Any:
    """As ``stacks="python"`` records; stacks that events share stay shared."""
    kept: dict[int, list[Any]] = {}
    events = [event for trace in data["device_traces"] for event in trace if "frames" in event]
    for stack in [event["frames"] for event in events]:
        if id(stack) not in kept:
            kept[id(stack)] = [frame for frame in stack if frame["filename"].endswith((".py", ">"))]
    for event in events:
        event["frames"] = kept[id(event["frames"])]
    return data


@pytest.mark.parametrize(("name", "copies"), COPIES.items())
def test_without_cpp_frames_the_same_is_found(name: str, copies: int) -> None:
    """But for workspaces of cuBLAS from before the trace and of cuDNN, which only C++ frames tell."""
    snapshot = read_snapshot(without_cpp_frames(load_plain(real(name))))
    summary, known = summarize(recording_of(snapshot, name)), summary_of(analysis_of(name))
    assert (summary.casts.copies, summary.casts.bytes) == (copies, known.casts.bytes)
    assert summary.conservation.residual_bytes == 0
    peak, expected = summary.peak.categories, known.peak.categories
    for category in (*CATEGORIES[:6], Category.CAST_COPIES, Category.ACTIVATIONS):
        assert peak[category] == expected[category]
    lost = {
        "lm2700m_ctx512_amp_fwdbwd": 2 * 32 << 20,
        "resnet50_fp32_3steps": expected[Category.WORKSPACE] - 2 * 8_519_680,
    }
    assert expected[Category.WORKSPACE] - peak[Category.WORKSPACE] == lost.get(name, 0)


@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [
        ("lm2700m_ctx128_bf16_forward", Precision.AMP, "bfloat16"),
        ("lm_small_ctx200_amp_3steps", Precision.AMP, "bfloat16"),
        ("lm2700m_ctx512_amp_fwdbwd", Precision.AMP, "16-bit"),
        ("lm2700m_ctx128_fp32_step", Precision.FP32, None),
        ("resnet50_fp32_3steps", Precision.FP32, None),
        ("lm_medium_ctx128_fp32_step", Precision.AS_IS, None),
    ],
)
def test_the_precision_that_frames_show(name: str, precision: Precision, dtype: str | None) -> None:
    recording = analysis_of(name).recording
    assert (recording.precision.name, recording.precision.dtype) == (precision, dtype)


@pytest.mark.parametrize(("name", "itemsize"), [("lm2700m_ctx512_amp_fwdbwd", 2), ("lm2700m_ctx512_fp32_fwdbwd", 4)])
def test_the_logits_of_the_step_before(name: str, itemsize: int) -> None:
    analysis = analysis_of(name)
    before = np.flatnonzero((analysis.recording.events.action == Action.BASELINE)[analysis.lifetimes.born])
    logits = before[analysis.lifetimes.bytes[before] == 4 * 512 * 10_000 * itemsize]
    assert [CATEGORIES[code] for code in analysis.classes.category[logits]] == [Category.ACTIVATIONS]


def test_a_trace_without_phases_has_no_temporaries() -> None:
    peak = summary_of(analysis_of("old_no_free_requested")).peak
    assert peak.categories[Category.OTHER] == peak.bytes


@pytest.mark.parametrize("name", ["lm2700m_ctx512_amp_fwdbwd", "lm2700m_ctx512_fp32_fwdbwd"])
def test_a_backward_on_hopper(name: str) -> None:
    summary = summary_of(analysis_of(name))
    end = summary.steps[0].marks.after_backward
    assert end[Category.PARAMETERS] == end[Category.GRADIENTS] == 4 * LARGE
    assert end[Category.WORKSPACE] == 2 * 32 << 20
    assert summary.casts.bytes == (2 * (LARGE - 10_000 * 2560 - 65 * 2560) if "amp" in name else 0)


def test_momentum_and_the_workspaces_of_convolutions() -> None:
    summary = summary_of(analysis_of("resnet50_fp32_3steps"))
    peak = summary.peak.categories
    assert summary.parameters.count == RESNET50
    assert peak[Category.PARAMETERS] == peak[Category.OPTIMIZER_STATE] == 4 * RESNET50
    assert peak[Category.WORKSPACE] >= 128 << 20
    assert peak[Category.TEMPORARIES] < 4 << 20
    assert summary.inferred[Category.OPTIMIZER_STATE] == 4 * RESNET50


def test_a_picture_is_trained_through_a_frozen_network() -> None:
    summary = summary_of(analysis_of("cnn_small_fp32_10steps"))
    picture = 7_864_320
    end = summary.last_step.marks.after_backward
    assert end[Category.PARAMETERS] == end[Category.GRADIENTS] == picture
    assert end[Category.OPTIMIZER_STATE] == 2 * picture
