"""What the page opens with: bars that are as long as their bytes, and nothing that needs a script."""

import re
from dataclasses import replace

import pytest
from support.build import AMP, FP32, NO_CACHE, RUN, Story

from ampmem.analysis.answer import Verdict, verdict_of, verdict_of_one
from ampmem.analysis.comparison import Entry, compare, entry_of
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Fact, Phase, PrecisionRecord, Recording
from ampmem.reporters.html.safety import filled_template
from ampmem.reporters.html.verdict import End, VerdictView, verdict_view, waterfall


def run(precision: PrecisionRecord, activations: int, copies: int = 0) -> Recording:
    """A parameter of 4,000 bytes, so much of activations and of copies of weights, and the gradient."""
    story = Story(weight=1000, begins=Phase.FORWARD)
    if copies:
        story.tensor(Fact.CAST_COPY, 0x2000, copies, "weight")
    story.tensor(Fact.SAVED, 0x3000, activations, "aten::mm")
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
    story.end(Phase.OPTIMIZER)
    return story.recording(run=RUN, precision=precision)


THREE = run(FP32, 12_000), run(AMP, 6000, 2000), run(NO_CACHE, 6000, 2000)


def verdict(*recordings: Recording) -> Verdict:
    return verdict_of(compare([entry_of(recording) for recording in recordings]))


@pytest.fixture(scope="module")
def view() -> VerdictView:
    return verdict_view(verdict(*THREE))


def test_bars_are_as_long_as_their_bytes(view: VerdictView) -> None:
    fp32, amp, _ = view.bars
    assert [(piece.left, piece.width) for piece in fp32.pieces] == [(0, 20), (20, 20), (40, 60)]
    assert [(piece.left, piece.width) for piece in amp.pieces] == [(0, 20), (20, 20), (40, 10), (50, 30)]
    assert [piece.title.split(":")[0] for piece in amp.pieces] == [entry.label for entry in view.legend]
    assert (fp32.value, fp32.change, amp.value, amp.change) == ("19.5 KiB", "", "15.6 KiB", "-3.9 KiB")


def test_equal_recordings_are_one_bar(view: VerdictView) -> None:
    last = view.bars[-1]
    assert (last.label, last.note, last.pieces) == ("amp-nocache", "the same as amp", ())


def test_each_step_of_the_waterfall_begins_where_the_last_ended(view: VerdictView) -> None:
    fall = view.waterfall
    start, *steps, end = fall.rows
    now = start.pieces[0].width
    for step in steps:
        (piece,) = step.pieces
        before, after = (
            (piece.left + piece.width, piece.left)
            if piece.name == "less"
            else (
                piece.left,
                piece.left + piece.width,
            )
        )
        assert before == pytest.approx(now)
        now = after
    assert now == pytest.approx(end.pieces[0].width)
    assert [step.label for step in steps] == ["Cast copies", "Activations"]
    assert fall.when == "at the peaks, both in backward"
    assert fall.unchanged == "Parameters and gradients: no change, 7.8 KiB."


def test_what_rounding_changes_is_a_step_of_the_waterfall() -> None:
    before = End(label="fp32", bytes=3000, parts={Category.PARAMETERS: 1000, Category.ACTIVATIONS: 1500})
    after = End(label="amp", bytes=2000, parts={Category.PARAMETERS: 1000, Category.ACTIVATIONS: 900})
    fall = waterfall(before, after, "at the peaks")
    assert [(row.label, row.value) for row in fall.rows] == [
        ("fp32", "2.9 KiB"),
        ("Activations", "-600 B"),
        ("Rounding of blocks", "-400 B"),
        ("amp", "2.0 KiB"),
    ]
    assert fall.unchanged == "Parameters: no change, 1000 B."


def test_a_single_recording_has_its_sizes_in_the_legend() -> None:
    shown = verdict_view(verdict_of_one(entry_of(THREE[1]).summary))
    assert [(entry.label, entry.value) for entry in shown.legend] == [
        ("Parameters", "3.9 KiB"),
        ("Gradients", "3.9 KiB"),
        ("Cast copies", "2.0 KiB"),
        ("Activations", "5.9 KiB"),
    ]
    assert shown.waterfall is None
    assert shown.headline == "The peak is 15.6 KiB, in backward of step 0."


def test_a_recording_of_nothing_has_no_bar() -> None:
    nothing = Entry(label="amp", summary=None, failure="killed by SIGKILL")
    shown = verdict_view(verdict_of(compare([entry_of(THREE[0]), nothing])))
    assert [(bar.label, bar.note) for bar in shown.bars] == [("fp32", ""), ("amp", "nothing was recorded")]


def test_names_are_text() -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e"
    recordings = [replace(entry_of(recording), label=f"{hostile}{i}") for i, recording in enumerate(THREE)]
    html = filled_template("verdict.html", verdict=verdict_view(verdict_of(compare(recordings))))
    assert "<img" not in html
    assert "\u202e" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;\\u202e0" in html


def test_it_is_whole_without_a_script(view: VerdictView) -> None:
    html = filled_template("verdict.html", verdict=view)
    assert "<script" not in html
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"</?span[^>]*>", "", html)))
    for said in ("Mixed precision lowers the peak from 19.5 to 15.6 KiB, -20 %, not to half.", "the same as amp"):
        assert said in words
