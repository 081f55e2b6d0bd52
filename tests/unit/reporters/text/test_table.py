import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.build import Story, small_run, write
from support.failures import late_zero_grad
from support.golden_texts import encoder

from ampmem.analysis.comparison import Entry
from ampmem.analysis.ops import user_frame
from ampmem.analysis.summary import Summary, summarize
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.cli.show import show
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.events import Fact, Phase
from ampmem.names import NO_TIMES
from ampmem.recording import read
from ampmem.reporters.base import EVERYTHING, Detail
from ampmem.reporters.text.compare import render_static_models
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.memory import MODULES, bar_of, render_categories
from ampmem.reporters.text.plain_text import WIDTH, per_parameter, shorten
from ampmem.reporters.text.static_model import render_static_model
from ampmem.reporters.text.table import render


def small() -> Summary:
    return summarize(small_run().recording())


def test_the_widest_figures_fit() -> None:
    summary = small()
    widest = dict.fromkeys(summary.peak.categories, 1023 * 2**40 + 900 * 2**30)
    step = summary.steps[0]
    marks = replace(step.marks, after_forward=widest, after_backward=widest, after_optimizer=widest)
    step = replace(step, marks=marks, peak=replace(step.peak, categories=widest))
    lines = render(replace(summary, steps=(step,)), [], details=EVERYTHING).splitlines()
    assert any(line.count("1023.9 TiB") == 4 for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_every_step_is_broken_down_when_asked_for() -> None:
    few = render(small(), [], details=frozenset({Detail.MARKS}))
    all_steps = render(small(), [], all_steps=True)
    heading = "step {} at its marks, peak in backward"
    assert [few.count(heading.format(index)) for index in (0, 1)] == [0, 1]
    assert [all_steps.count(heading.format(index)) for index in (0, 1)] == [1, 1]
    assert "at its marks" not in render(small(), [])


def test_a_missing_mark_is_no_zero() -> None:
    story = small_run()
    story.begin(2)
    story.end(skipped=True, loss=None, scale=1024.0)
    text = render(summarize(story.recording()), [], details=EVERYTHING)
    assert ["parameters", *["-"] * 6, "600", "B", "4.00"] in [line.split() for line in text.splitlines()]
    assert ["2", "-", "1024", "skipped"] in [line.split()[:4] for line in text.splitlines()]


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_finite_number_is_shown(loss: str, tmp_path: Path) -> None:
    story = small_run()
    story.begin(2)
    story.end(loss=float(loss))
    text = render(summarize(read(write(tmp_path / "run.ampmem", story.recording()))), [])
    assert ["2", loss, "none"] in [line.split()[:3] for line in text.splitlines()]


@pytest.mark.parametrize("name", [f"encoder.layers.{'0.' * 40}in_proj_weight", f"a-{'b-' * 15}c", "w" * 38])
def test_names_in_the_static_model_are_shortened_and_never_broken(name: str) -> None:
    story = Story()
    story.parameter(0x1000, name, 10)
    story.parameter(0x2000, f"{name}.too", 20)
    story.begin(0, Phase.FORWARD)
    story.enter(Phase.BACKWARD)
    story.fact(Fact.GRADIENT, 0x9000, "another")
    story.end()
    summary = summarize(story.recording())
    (term,) = next(row for row in summary.static_model if row.component == "gradients").terms
    assert term.names == (f"{name}.too", name)
    several = render_static_models([Entry(label=label, summary=summary) for label in ("one", "other")])
    for width, text in ((38, render_static_model(summary)), (60, several)):
        words = [word.strip("(),;:") for word in text.split()]
        assert [words.count(shorten(each, width)) > 0 for each in term.names] == [True, True]
        assert max(map(len, text.splitlines())) <= WIDTH


def test_precision_copies_are_shown_even_when_there_are_none() -> None:
    story = Story(weight=10, begins=Phase.BACKWARD)
    story.end()
    text = render(summarize(story.recording()), [], details=frozenset({Detail.MARKS}))
    assert "precision_copies" in text
    breakdown = text.split("at its marks")[1].split("conservation")[0]
    assert "cast_copies" not in breakdown
    assert "gradients  " not in breakdown


def test_modules_left_out_are_counted() -> None:
    story = Story()
    for number in range(20):
        story.parameter(0x1000 + number, f"layer{number}.weight", 10 + number)
    story.begin(0, Phase.BACKWARD)
    story.end()
    text = render(summarize(story.recording()), [], details=EVERYTHING)
    assert f"… and {21 - MODULES} smaller modules" in text
    assert "layer19" in text.split("largest")[0]
    assert "layer0 " not in text.split("largest")[0]


def test_a_layer_that_differs_stands_beside_the_others() -> None:
    story = Story()
    for number in range(4):
        story.parameter(0x1000 + 0x10 * number, f"blocks.{number}.up.weight", 900 if number == 3 else 100)
    story.begin(0, Phase.BACKWARD)
    story.end()
    modules = render(summarize(story.recording()), [], details=EVERYTHING).split("modules\n")[1]
    names = [line.split("  ")[0] for line in modules.splitlines() if line.startswith("blocks.")]
    assert names == ["blocks.* (3)", "blocks.3", "blocks.*.up (3)", "blocks.3.up"]


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcd…ghijk"
    assert shorten("a\nb\x1bc\ud800", 10) == "a?b?c?"


@pytest.mark.parametrize(
    ("size", "parameters", "text"),
    [
        (0, 10, "0.00"),
        (1, 1000, "<0.01"),
        (40, 10, "4.00"),
        (99999, 10, "9999.90"),
        (100_000, 10, "10000"),
        (99_999_989, 10, "9999999"),
        (10**9, 10, "1.0e+08"),
        (5, 0, "-"),
    ],
)
def test_bytes_per_parameter(size: int, parameters: int, text: str) -> None:
    assert per_parameter(size, parameters) == text
    assert len(text) <= 7


def test_the_users_frame_is_the_innermost_outside_the_libraries() -> None:
    library = "/usr/lib/python3/site-packages/torch/nn/functional.py:1 linear"
    assert user_frame(["a.py:1 main", "b.py:2 forward", library]) == "b.py:2 forward"
    installed = "/env/site-packages/my_project/model.py:5 forward"
    assert user_frame([installed, library]) == installed
    assert user_frame([library]) == library
    assert user_frame([]) is None


def test_show_prints_several_recordings_in_turn(tmp_path: Path) -> None:
    notes = ["something was not seen"]
    path = write(tmp_path / "a.ampmem", small_run().recording(notes=notes))
    expected = render(small(), notes, title="train.py --epochs 1", file=str(path))
    once = CliRunner().invoke(show, [str(path)], catch_exceptions=False)
    assert (once.exit_code, once.output) == (0, expected + "\n")
    twice = CliRunner().invoke(show, ["--each", str(path), str(path)], catch_exceptions=False)
    assert twice.output.endswith(f"\n\n{'=' * WIDTH}\n\n{expected}\n\n{'=' * WIDTH}\n\n{expected}\n")
    steps = CliRunner().invoke(show, ["--steps", str(path)], catch_exceptions=False)
    assert "step 0 at its marks, peak in" in steps.output


def test_show_json_is_an_object_or_an_array(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ampmem", small_run().recording())
    expected = json.loads(small().to_json())
    one = CliRunner().invoke(show, ["--json", str(path)], catch_exceptions=False)
    assert json.loads(one.output) == expected
    two = CliRunner().invoke(show, ["--json", str(path), str(path)], catch_exceptions=False)
    assert json.loads(two.output) == [expected, expected]


def test_show_names_the_file_that_is_at_fault(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.ampmem", Story().recording())
    with pytest.raises(NothingRecorded, match=r"empty\.ampmem: .*no step ended"):
        CliRunner().invoke(show, [str(empty)], catch_exceptions=False)
    story = small_run()
    story.free(0xDEAD)
    bad = write(tmp_path / "bad.ampmem", story.recording())
    with pytest.raises(RecordingError, match=r"bad\.ampmem: .*damaged"):
        CliRunner().invoke(show, [str(bad)], catch_exceptions=False)


def heads(text: str, section: str) -> list[str]:
    """The words over the columns of a section's table, from both its lines."""
    table = text.split(f"\n{section}", 1)[1].split("\n\n")[1]
    return table[: table.index("\n--")].split()


def test_what_is_not_known_has_no_column() -> None:
    summary = small()
    shown = ["category", "bytes", "share", "B/param"]
    assert heads(render(summary, []), "the peak by category") == shown
    nameless = replace(summary, parameters=replace(summary.parameters, count=0))
    text = render(nameless, [], details=EVERYTHING)
    assert heads(text, "the peak by category") == shown[:-1]
    assert "param\n" not in text and "parameters  not known" in text
    assert heads(render(summary, []), "steps") == ["step", "loss", "update", "peak", "in", "took"]
    assert heads(render(summary, [NO_TIMES]), "steps") == ["step", "loss", "update", "peak", "in"]
    story = Story(weight=10, begins=Phase.BACKWARD)
    story.end(loss=None)
    assert heads(render(summarize(story.recording()), []), "steps") == ["step", "peak", "in", "took"]


def test_what_to_change_is_said_once_where_memory_ran_out() -> None:
    summary = summarize(late_zero_grad())
    _, below = render(summary, []).split("\n\n", 1)  # the verdict names the largest saving
    assert " ".join(below.split()).count("right after optimizer.step()") == 1
    with_evidence = render(summary, [], details=frozenset({Detail.EVIDENCE}))
    assert "gradients-through-forward" in with_evidence.split("\nfindings (")[1]


def test_a_model_that_is_explained_says_so_once_and_of_no_row() -> None:
    text = render(summarize(encoder()), [], details=EVERYTHING)
    held = "the rule of thumb plus the named differences equals what was measured, to the byte"
    assert " ".join(text.split()).count(held) == 1
    assert "told" not in text
    broken = render(small(), [], details=EVERYTHING)
    assert "\noptimizer_state: NOT EXPLAINED: more in some tensors and as much less in others\n" in broken


def test_a_terminal_has_a_bar_for_each_share_where_there_is_room() -> None:
    live = dict.fromkeys(CATEGORIES, 0) | {Category.PARAMETERS: 300, Category.GRADIENTS: 100}

    def bars(**layout: Any) -> list[str]:
        lines = render_categories(live, {}, 100, Layout(**layout)).splitlines()[2:]
        return [line.partition("█")[1] + line.partition("█")[2] for line in lines]

    assert bars(screen=True) == ["█" * 15, "█" * 5, ""]  # of 20 characters
    assert bars(screen=True, width=40) == bars() == ["", "", ""]
    assert [bar_of(size, 160) for size in (0, 1, 8, 9, 159, 160)] == ["", "▏", "█", "█▏", "█" * 19 + "▉", "█" * 20]
