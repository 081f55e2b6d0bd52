"""What ``ampmem check`` prints: the answer first, every limit, and what grew with its line and stack."""

from dataclasses import replace

import pytest
from support.checked import MIB, result, run
from support.golden_sections import Golden

from ampmem.analysis.budgets.check import not_judged
from ampmem.analysis.difference.sides import Moment
from ampmem.reporters.export.github import harmless
from ampmem.reporters.text.check import render_check, render_checks
from ampmem.reporters.text.layout import Layout

RESULTS = {
    "grew": lambda: result(run(saved=3 * MIB), run(), activations="5MiB"),
    "largest, without a baseline": lambda: result(run(saved=3 * MIB), peak="2MiB"),
    "modules of a summary": lambda: result(run(saved=3 * MIB), run(), summary=True),
    "broken though nothing grew": lambda: result(run(), run(), peak=1),
    "kept as in the baseline": lambda: result(run(saved=3 * MIB), run(saved=3 * MIB), peak="8MiB", activations="4MiB"),
    "kept": lambda: result(run(), peak="3MiB"),
    "no growth": lambda: result(run(), growth=0),
    "less": lambda: result(run(), run(saved=3 * MIB)),
    "growth in each step": lambda: result(run(kept=MIB), growth="1KiB"),
    "a byte over is not printed as equal": lambda: result(run(), peak=2 * MIB - 1),
    "not judged": lambda: result(run(), reserved="1GiB", peak="1GiB"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_check_says(name: str, golden: Golden) -> None:
    golden(render_check(RESULTS[name]()))


def test_what_is_only_at_another_instant_is_told_apart(golden: Golden) -> None:
    found = result(run(saved=3 * MIB), run())
    (peak, _) = found.broken
    moments = (
        Moment(step=0, phase="optimizer", op="Optimizer.step#AdamW.step", module=None),
        Moment(step=0, phase="forward", op="aten::mm", module="encoder.0"),
    )
    moved = replace(peak, grew=(), moved=peak.grew, moment_before=moments[0], moment_after=moments[1])
    golden(render_check(replace(found, broken=(moved,))))
    golden(render_check(replace(found, broken=(replace(moved, grew=peak.grew),))), "and grew")


def test_of_several_the_worst_comes_first() -> None:
    results = [
        result(run(), label="rank 0", peak="3MiB"),
        result(run(saved=3 * MIB), label="rank 1", peak="3MiB"),
        result(run(saved=5 * MIB), label="rank 2", peak="3MiB"),
    ]
    text = render_checks(results)
    assert text.startswith("2 of 3 fail; the worst is rank 2.\n\nrank 2: broken: ")
    assert text.index("rank 2: broken") < text.index("rank 1: broken") < text.index("rank 0: kept")
    assert render_checks([*results, not_judged("rank 3", "no step ended")]).startswith(
        "3 of 4 fail; the worst is rank 3"
    )
    assert render_checks(results[:1]) == render_check(results[0])
    assert render_checks([results[0], results[0]]).count("kept: peak") == 2


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_line_is_wider_than_there_is_room(width: int) -> None:
    long = "a.very.long.module.name.of.many.parts." * 5
    texts = [
        render_check(result(run(saved=3 * MIB, module=long), run(module=long), activations=1), Layout(width=width)),
        render_check(result(run(saved=3 * MIB, module=long), peak=1, growth=0), Layout(width=width)),
    ]
    assert max(len(line) for text in texts for line in text.split("\n")) <= width


def test_hostile_names_do_nothing_on_a_terminal() -> None:
    hostile = "a\x1b[2J\n::error::b\r\x07"
    text = render_check(result(run(saved=3 * MIB, module=hostile, file=hostile), run(), peak=1), Layout(colour=False))
    assert not [character for character in text.replace("\n", "") if not character.isprintable()]
    assert not [line for line in harmless(text).split("\n") if line.lstrip().startswith("::")]
