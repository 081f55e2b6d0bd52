"""Which of the copies that autocast made are taken for copies of parameters."""

from pathlib import Path

from support.snapshots import ACCUMULATE, ENGINE, FORWARD, KIB, MIB, SCRIPT, Frames, Story, imported, native, op, python

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.summary import Summary, summary_of
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.memory import render_activations, render_casts

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
    story = Story(**{f"narrow {number}": 4 * MIB for number in range(layers)})
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
    # A snapshot does not say who used and kept them: that is not 0.
    assert casts.cache_hits is None and casts.steps[0].phases["forward"].cache_hits is None
    held = casts.steps[0].after_forward
    assert held is not None and held.autograd is held.both is held.neither is casts.steps[0].views is None
    assert {(row.cache_hits, row.held_by_autograd, row.held_by_both) for row in casts.by_parameter} == {(None,) * 3}
    assert notes_on_casts(analysis) == [
        "15 casts of a pass have half the size of the 3 parameters of 16.0 MiB, so other tensors of that size were "
        "cast, too: judged by the allocating code, 3 are of parameters"
    ]


def test_what_no_code_tells_apart_is_not_counted_and_has_a_range(tmp_path: Path) -> None:
    story = Story(weight=16 * MIB, other=16 * MIB)
    for number in range(3):
        story.alloc(f"copy {number}", 8 * MIB, asked_by(LINEAR, 22, 60))
        story.alloc(f"out {number}", 1 * MIB, [op("mm"), *FORWARD])
    for name in ("weight", "other"):
        story.alloc(f"gradient of {name}", 16 * MIB, ACCUMULATE)
    analysis = imported(tmp_path, story.snapshot())
    assert summary_of(analysis).casts.copies == 0
    assert notes_on_casts(analysis) == [
        "3 casts of a pass have half the size of the 2 parameters of 16.0 MiB, so other tensors of that size were "
        "cast, too: judged by the allocating code, none is certainly of parameters; there may be up to 2 (16.0 MiB), "
        "if each parameter is cast once; more than these are not counted as weights' copies"
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
    assert analysis.recording.precision.name == "amp"


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


def python_only(file: str, line: int) -> Frames:
    """The stack of an op in a module, as a snapshot without C++ frames has it."""
    return [python("forward", file, line), python("_call_impl", _MODULE), *FORWARD]


def without_cpp(story: Story, layers: int, *, copies: bool) -> Story:
    """A forward of the model on 8 MiB of input, and its backward; with ``copies`` the weights are cast."""
    for number in range(layers):
        for name, size, line in (("narrow", 2 * MIB, 22), ("wide", 8 * MIB, 23)):
            if copies:
                story.alloc(f"{name} copy {number}", size, python_only(LINEAR, line))
            story.alloc(f"{name} out {number}", 3 * MIB if copies else size, python_only(LINEAR, line))
        story.alloc(f"scores {number}", 5 * MIB, python_only(ATTENTION, 24))
    story.alloc("seed", 4, [python("backward", "/env/torch/_tensor.py"), SCRIPT])
    for number in range(layers):
        story.alloc(f"narrow gradient {number}", 4 * MIB, [])
        story.alloc(f"wide gradient {number}", 16 * MIB, [])
    return story


def test_without_cpp_frames_copies_are_told_by_their_sizes_and_lines(tmp_path: Path) -> None:
    analysis = imported(tmp_path, without_cpp(model(3), 3, copies=True).snapshot())
    casts, recording = summary_of(analysis).casts, analysis.recording
    assert (casts.copies, casts.bytes, len(casts.by_parameter)) == (6, 3 * (2 + 8) * MIB, 6)
    assert (recording.precision.name, recording.precision.dtype) == ("amp", "16-bit")
    assert sum(record.elements for record in recording.parameters) == 3 * (4 + 16) * MIB // 4
    assert summary_of(analysis).inferred["cast_copies"] == summary_of(analysis).peak.categories["cast_copies"]
    assert any(note.startswith("blocks of half a parameter's size") for note in recording.notes)


def test_results_of_half_a_weights_size_are_no_copies(tmp_path: Path) -> None:
    """In FP32, half as many tokens as the width give results of half the weights' sizes, each as often."""
    analysis = imported(tmp_path, without_cpp(model(3), 3, copies=False).snapshot())
    assert (summary_of(analysis).casts.copies, analysis.recording.precision.name) == (0, "as-is")
    assert analysis.timeline.series(Category.ACTIVATIONS).max() == 3 * (2 + 8 + 5) * MIB


def test_one_size_is_enough_where_autocasts_own_code_calls(tmp_path: Path) -> None:
    decorated = [*python_only(LINEAR, 22), python("decorate_autocast", "/env/torch/amp/autocast_mode.py")]
    for frames, copies in ((python_only(LINEAR, 22), 0), (decorated, 2)):
        story = Story(weight=4 * MIB, other=4 * MIB)
        for number in range(2):
            story.alloc(f"copy {number}", 2 * MIB, frames)
            story.alloc(f"out {number}", 1 * MIB, frames)
        assert summary_of(imported(tmp_path, story.snapshot())).casts.copies == copies


def test_that_autocasts_code_was_there_is_not_that_it_was_on(tmp_path: Path) -> None:
    story = Story(weight=4 * MIB)
    story.alloc("out", 1 * MIB, [*FORWARD, python("decorate_autocast", "/env/torch/amp/autocast_mode.py")])
    recording = imported(tmp_path, story.snapshot()).recording
    assert recording.precision.name == "as-is"
    assert any(note.endswith("unknown whether autocast was on") for note in recording.notes)


def test_copies_from_before_the_trace_that_leaving_autocast_frees(tmp_path: Path) -> None:
    story = model(1)
    story.before(copy=8 * MIB, same_size=8 * MIB)
    story.alloc("out", 1 * MIB, FORWARD)
    story.alloc("narrow gradient", 4 * MIB, ACCUMULATE)
    story.alloc("wide gradient", 16 * MIB, ACCUMULATE)
    story.free("copy", frames=EXIT)
    analysis = imported(tmp_path, story.snapshot())
    (copy,) = summary_of(analysis).casts.by_parameter
    assert (copy.bytes, copy.held_by_cache) == (8 * MIB, 1)
    assert analysis.timeline.series(Category.CAST_COPIES).max() == 8 * MIB
    assert analysis.recording.precision.name == "amp"


def test_who_uses_and_holds_a_copy_is_not_said_to_be_nobody(tmp_path: Path) -> None:
    text = render_casts(summary_of(imported(tmp_path, without_cpp(model(3), 3, copies=True).snapshot())), Layout())
    assert "cast copies: 6 made, 30.0 MiB; at most 30.0 MiB at once" in text
    assert not any(word in text for word in ("served", "hits", "neither", "autograd"))


def test_copies_from_before_the_trace_that_backward_frees(tmp_path: Path) -> None:
    """The ring has lost the forward; the backward of each cast makes a gradient in the weight's own type."""
    cast_back: Frames = [*TO_COPY, native("torch::autograd::generated::ToCopyBackward0::apply(...)"), *ENGINE]
    for frames, halves in ((cast_back, 2), (cast_back, 4), ([op("mm"), *ENGINE], 2)):
        story = model(2)
        blocks = {f"half {number}": 8 * MIB for number in range(halves)} | {"activation": 8 * KIB}
        story.before(**blocks)
        story.alloc("seed", 4, [python("backward", "/env/torch/_tensor.py"), SCRIPT])
        for number in range(2):
            story.alloc(f"gradient {number}", 16 * MIB, frames)
        story.free(*blocks, frames=ENGINE)
        analysis = imported(tmp_path, story.snapshot())
        expected = 2 * 8 * MIB if frames is cast_back and halves == 2 else 0
        assert analysis.timeline.series(Category.CAST_COPIES).max() == expected
        assert analysis.timeline.series(Category.ACTIVATIONS).max() == halves * 8 * MIB + 8 * KIB - expected
