"""What ``ampmem check`` prints: the answer first, every limit, and what grew with its line and stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked import MIB, result, run

from ampmem.analysis.budgets.check import not_judged
from ampmem.analysis.difference.sides import Moment
from ampmem.reporters.export.github import harmless
from ampmem.reporters.text.check import render_check, render_checks
from ampmem.reporters.text.layout import Layout

GREW = """\
run: broken: peak 4.0 MiB, 2.0 MiB more than the 2.0 MiB of main.ampmem, and 1 more limit

             source      limit  measured
-----------  --------  -------  --------  -----------------
activations  budget    5.0 MiB   3.0 MiB  kept
peak         baseline  2.0 MiB   4.0 MiB  BROKEN by 2.0 MiB
activations  baseline  1.0 MiB   3.0 MiB  BROKEN by 2.0 MiB

peak: what grew since main.ampmem, at the peak: 2.0 MiB more

  change         before    after  category     what
--------  ----  -------  -------  -----------  ---------------
+2.0 MiB  grew  1.0 MiB  3.0 MiB  activations  mm in encoder.0
    at /repo/net.py:7 Net.forward

the first row was allocated at
    /repo/train.py:3 main
    /repo/net.py:7 Net.forward

activations: what grew since main.ampmem, when activations are largest: 2.0 MiB more, the same as
  for peak"""

HELD = """\
run: broken: peak 4.0 MiB, 2.0 MiB over its budget of 2.0 MiB

      source    limit  measured
----  ------  -------  --------  -----------------
peak  budget  2.0 MiB   4.0 MiB  BROKEN by 2.0 MiB

peak: what is alive at the peak, largest first

  bytes  category     what
-------  -----------  ----------------
3.0 MiB  activations  mm in encoder.0
    at /repo/net.py:7 Net.forward
1.0 MiB  parameters   encoder.0.weight

the first row was allocated at
    /repo/train.py:3 main
    /repo/net.py:7 Net.forward"""

BY_MODULE = """\
activations: what grew since main.ampmem, when activations are largest: 2.0 MiB more

  change   before    after  category     module
--------  -------  -------  -----------  ---------
+2.0 MiB  1.0 MiB  3.0 MiB  activations  encoder.0

note: one of the two is a summary, so growth is shown by category and module, not by line"""


def test_what_grew_since_a_baseline() -> None:
    assert render_check(result(run(saved=3 * MIB), run(), activations="5MiB")) == GREW


def test_what_is_largest_where_there_is_no_before() -> None:
    assert render_check(result(run(saved=3 * MIB), peak="2MiB")) == HELD


def test_of_a_summary_modules_are_told_and_that_is_said() -> None:
    assert render_check(result(run(saved=3 * MIB), run(), summary=True)).endswith(BY_MODULE)


def test_a_budget_that_is_broken_though_nothing_grew() -> None:
    text = render_check(result(run(), run(), peak=1))
    assert "peak: what is alive at the peak, largest first; nothing grew since main.ampmem" in text


def test_what_is_only_at_another_instant_is_told_apart() -> None:
    found = result(run(saved=3 * MIB), run())
    (peak, _) = found.broken
    moments = (
        Moment(step=0, phase="optimizer", op="Optimizer.step#AdamW.step", module=None),
        Moment(step=0, phase="forward", op="aten::mm", module="encoder.0"),
    )
    moved = replace(peak, grew=(), moved=peak.grew, moment_before=moments[0], moment_after=moments[1])
    text = " ".join(render_check(replace(found, broken=(moved,))).split())
    assert "not explained by any line, as none has grown, 2.0 MiB were in the baseline at another instant" in text
    assert "The peak is at another instant: in forward of step 0, at mm in encoder.0; it was in the optimizer's" in text
    assert "but the baseline had most of it, too, at another instant: change" in text
    both = render_check(replace(found, broken=(replace(moved, grew=peak.grew),)))
    assert "at the peak: 2.0 MiB more, 2.0 MiB were in the baseline" in both


def test_what_is_kept_says_how_close_it_is() -> None:
    text = render_check(result(run(saved=3 * MIB), run(saved=3 * MIB), peak="8MiB", activations="4MiB"))
    answer = (
        "run: kept: 2 budgets, the closest is activations, 3.0 MiB of 4.0 MiB; all sizes equal those of main.ampmem"
    )
    assert " ".join(text.split()).startswith(answer)
    assert render_check(result(run(), peak="3MiB")).startswith("run: kept: peak, 2.0 MiB of 3.0 MiB\n")
    assert render_check(result(run(), growth=0)).startswith("run: kept: growth, 0 B of 0 B\n")


def test_less_is_told_in_one_line() -> None:
    text = render_check(result(run(), run(saved=3 * MIB)))
    assert text.startswith("run: kept: no size is larger than in main.ampmem\n")
    assert text.endswith("\n\nsmaller than in main.ampmem: peak -2.0 MiB, activations -2.0 MiB")


def test_growth_is_told_in_each_step() -> None:
    text = render_check(result(run(kept=MIB), growth="1KiB"))
    assert text.startswith("run: broken: growth 1.0 MiB in each step, 1023.0 KiB over its budget of 1.0 KiB\n")
    assert "growth: what grew from the end of step 0 to the end of step 1: 1.0 MiB more" in text
    assert "at /repo/net.py:9 Net.forward" in text


def test_a_byte_over_is_not_printed_as_equal() -> None:
    assert "peak 2.000000 MiB, 1 B over its budget of 1.999999 MiB" in render_check(result(run(), peak=2 * MIB - 1))


def test_what_could_not_be_judged_says_why_first() -> None:
    text = render_check(result(run(), reserved="1GiB", peak="1GiB"))
    assert text.startswith("run: not judged: reserved: the CPU's allocator reserves nothing")
    rows = [line.split() for line in text.splitlines()]
    assert ["reserved", "budget", "1.000", "GiB", "-", "not", "judged"] in rows


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
