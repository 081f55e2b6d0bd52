"""Which of the copies that autocast made are taken for copies of parameters."""

from __future__ import annotations

from pathlib import Path

from snapshots import ACCUMULATE, ENGINE, FORWARD, MIB, SCRIPT, Frames, Story, imported, native, op, python

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.summary import Summary, summary_of
from ampmem.reporters.text.common.layout import Layout
from ampmem.reporters.text.sections.activations import render_activations

_MODULE = "/env/torch/nn/modules/module.py"
TO_COPY: Frames = [op("empty_strided"), op("_to_copy")]
CAST = native("at::autocast::cached_cast(c10::ScalarType, at::Tensor const&)")
EXIT: Frames = [python("__exit__", "/env/torch/amp/autocast_mode.py"), SCRIPT]


def asked_by(file: str, line: int, block: int) -> Frames:
    """A cast for an op in a module, which a block calls on one of its lines."""
    call = python("_call_impl", _MODULE)
    return [
        *TO_COPY,
        CAST,
        op("linear"),
        python("forward", file, line),
        call,
        python("forward", "/b.py", block),
        *FORWARD,
    ]


LINEAR, ATTENTION = "/home/linear.py", "/home/attention.py"


def layer(story: Story, number: int) -> None:
    """Two projections, and two products as large as the second: 2 MiB and 8 MiB of weights, 8 MiB of input."""

    def cast(name: str, size: int, frames: Frames) -> None:
        story.alloc(f"{name}@{number}", size, frames)

    narrow, wide, scores = asked_by(LINEAR, 22, 60), asked_by(LINEAR, 22, 61), asked_by(ATTENTION, 24, 62)
    cast("narrow input", 8 * MIB, narrow)
    cast("narrow weight", 2 * MIB, narrow)
    cast("narrow out", 8 * MIB, [op("mm"), *FORWARD])
    cast("query", 8 * MIB, scores)
    cast("key", 8 * MIB, scores)
    cast("scores", 1 * MIB, [op("bmm"), *FORWARD])
    cast("wide input", 8 * MIB, wide)
    cast("wide weight", 8 * MIB, wide)
    cast("wide out", 8 * MIB, [op("mm"), *FORWARD])


def model(layers: int) -> Story:
    story = Story()
    story.before(**{f"narrow {number}": 4 * MIB for number in range(layers)})
    story.before(**{f"wide {number}": 16 * MIB for number in range(layers)})
    return story


def casts_of(analysis: Analysis) -> Summary:
    return summary_of(analysis)


def notes_on_casts(analysis: Analysis) -> list[str]:
    return [note for note in analysis.recording.notes if " casts of a pass " in note]


def test_activations_as_large_as_the_copies_of_weights_are_none(tmp_path: Path) -> None:
    story = model(3)
    for number in range(3):
        layer(story, number)
    for number in range(3):
        story.alloc(f"narrow gradient {number}", 4 * MIB, ACCUMULATE)
        story.alloc(f"wide gradient {number}", 16 * MIB, ACCUMULATE)
    analysis = imported(tmp_path, story.snapshot())
    casts = summary_of(analysis).casts
    assert (casts.copies, casts.bytes) == (6, 3 * (2 + 8) * MIB)
    assert casts.steps[0].others.bytes == 3 * 4 * 8 * MIB
    assert notes_on_casts(analysis) == [
        "15 casts of a pass have half the size of the 3 parameters of 16.0 MiB, so other tensors of that size were "
        "cast as well: by the code that asked, 3 are of parameters"
    ]


def test_what_no_code_tells_apart_is_not_counted_and_has_a_range(tmp_path: Path) -> None:
    story = Story()
    story.before(weight=16 * MIB, other=16 * MIB)
    for number in range(3):
        story.alloc(f"copy {number}", 8 * MIB, asked_by(LINEAR, 22, 60))
        story.alloc(f"out {number}", 1 * MIB, [op("mm"), *FORWARD])
    for name in ("weight", "other"):
        story.alloc(f"gradient of {name}", 16 * MIB, ACCUMULATE)
    analysis = imported(tmp_path, story.snapshot())
    assert summary_of(analysis).casts.copies == 0
    assert notes_on_casts(analysis) == [
        "3 casts of a pass have half the size of the 2 parameters of 16.0 MiB, so other tensors of that size were cast "
        "as well: by the code that asked, none is surely of parameters; there may be up to 2 (16.0 MiB), where each "
        "parameter is cast once; more than these are not counted as weights' copies"
    ]
    verdict = summary_of(analysis).static_problem, summary_of(analysis).static_model
    assert not any("no cast was made" in term.why for part in verdict[1] for term in part.terms)


def test_every_forward_of_a_step_casts_the_weights_anew(tmp_path: Path) -> None:
    story = model(2)
    for micro in range(2):  # accumulation: a backward lies between
        for number in range(2):
            story.alloc(f"narrow {micro} {number}", 2 * MIB, asked_by(LINEAR, 22, 60))
            story.alloc(f"wide {micro} {number}", 8 * MIB, asked_by(LINEAR, 22, 61))
        story.alloc(f"part {micro}", 1 * MIB, [op("mm"), *ENGINE])
        story.free(f"part {micro}", frames=ENGINE)
    analysis = imported(tmp_path, story.snapshot())
    assert summary_of(analysis).casts.bytes == 2 * 2 * (2 + 8) * MIB
    assert notes_on_casts(analysis) == []


def test_forwards_without_a_backward_cast_all_weights_as_often(tmp_path: Path) -> None:
    story = model(2)
    for batch in range(3):
        for number in range(2):
            for name, size in (("narrow", 2 * MIB), ("wide", 8 * MIB)):
                story.alloc(f"{name} {batch} {number}", size, asked_by(LINEAR, 22, 60))
                story.alloc(f"out of {name} {batch} {number}", 1 * MIB, [op("mm"), *FORWARD])
    analysis = imported(tmp_path, story.snapshot())
    assert summary_of(analysis).casts.bytes == 3 * 2 * (2 + 8) * MIB
    assert notes_on_casts(analysis) == []


def test_a_copy_in_full_precision_is_never_a_weights(tmp_path: Path) -> None:
    policy = "at::autocast::WrapFunction_<(at::autocast::CastPolicy){}, (c10::DeviceType)1>::call"
    low, full = ([*TO_COPY, CAST, native(policy.format(number)), *FORWARD] for number in (0, 1))
    story = model(1)
    story.alloc("copy", 8 * MIB, low)
    story.alloc("exp", 2 * MIB, full)
    analysis = imported(tmp_path, story.snapshot())
    assert summary_of(analysis).casts.bytes == 8 * MIB
    assert summary_of(analysis).casts.steps[0].others.bytes == 2 * MIB
    assert analysis.recording.arm.name == "amp"


def test_what_leaving_autocast_frees_was_in_its_cache(tmp_path: Path) -> None:
    story = model(1)
    story.alloc("wide", 8 * MIB, asked_by(LINEAR, 22, 60))
    story.alloc("input", 8 * MIB, asked_by(LINEAR, 22, 61))  # one more than there are parameters
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    story.free("input", frames=ENGINE)
    story.free("wide", frames=EXIT)
    analysis = imported(tmp_path, story.snapshot())
    (copy,) = summary_of(analysis).casts.by_parameter
    assert (copy.bytes, copy.held_by_cache) == (8 * MIB, 1)


def test_types_that_are_not_known_are_said_to_be_unknown(tmp_path: Path) -> None:
    story = model(1)
    story.alloc("wide", 8 * MIB, asked_by(LINEAR, 22, 60))
    story.alloc("out", 1 * MIB, [op("mm"), *FORWARD])
    story.alloc("part", 1 * MIB, [op("mm"), *ENGINE])
    story.free("part", "out", frames=ENGINE)
    text = render_activations(summary_of(imported(tmp_path, story.snapshot())), Layout(width=80))
    assert "their types are unknown" in text
    assert "low precision" not in text
