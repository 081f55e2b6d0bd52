"""What ``tests/field_programs.py`` takes for the same output, and what it finds in two runs; no program is run."""

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "field_programs.py"
sys.path.append(str(SCRIPT.parent))

import field_programs  # noqa: E402


def ran(exit_code: int | None, stdout: str) -> Any:
    return field_programs.Ran(exit_code=exit_code, stdout=stdout, stderr="")


def outcome(plain: Any, profiled: Any, *, steps: int = 2, residual: int = 0, **rest: Any) -> Any:
    program = field_programs.Program(name="p", folder="p", arguments="-x", steps=r"^step ", **rest)
    summary = {
        "steps": [{"finished": True}] * steps + [{"finished": False}],
        "peak": {"bytes": 1000, "categories": {"other": 5}},
        "conservation": {"residual_bytes": residual},
        "findings": [{}],
    }
    return field_programs.Outcome(program=program, plain=plain, profiled=profiled, summaries=(summary,))


PRINTED = ran(0, "step 1: loss 2.5, 17.2ms\nstep 2: loss 2.4, 1.25s\n")


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("step 1: loss 2.5, 3ms\nstep 2: loss 2.4, 11.0 s\n", True),
        ("step 1: loss 2.5, 3ms\nstep 2: loss 2.3, 11.0 s\n", False),
        ("step 1: loss 2.5, 3ms\n", False),
        ("step 1: loss 2.5, 3ms\nstep 2: loss 2.4, 11.0 s\nmore\n", False),
    ],
)
def test_output_is_the_same_but_for_times(printed: str, same: bool) -> None:
    found = outcome(PRINTED, ran(0, printed))
    assert found.same_output == found.holds == same
    assert bool(found.differences) != same


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("| ms/batch  4.21 | loss 3.0", "| # | loss 3.0"),
        ("iter 3: time 1.23ms, mfu -100.00%", "iter 3: time #, #"),
        ("Time  9.123 ( 9.123)\tLoss 7.1", "#\tLoss 7.1"),
        ("Epoch: 1 (0.0123s)", "Epoch: 1 (#)"),
    ],
)
def test_every_way_to_print_a_time(line: str, masked: str) -> None:
    assert field_programs.comparable(outcome(PRINTED, PRINTED).program, line) == [masked]


def test_what_differs_by_chance_may_come_in_any_order() -> None:
    printed = ran(0, "step 2: loss 7.4, 1.25s\nstep 1: loss 7.5, 17.2ms\n")
    assert not outcome(PRINTED, printed).same_output
    assert outcome(PRINTED, printed, by_chance=(r"\d+\.\d+",)).same_output


def test_of_an_endless_program_the_beginning_counts() -> None:
    stopped = ran(0, "step 1: loss 2.5, 17.2ms\n")
    assert outcome(PRINTED, stopped, endless=True).same_output
    assert not outcome(PRINTED, ran(0, "else\n"), endless=True).same_output


def test_what_has_to_hold() -> None:
    good = outcome(PRINTED, PRINTED)
    assert good.holds
    assert field_programs.row(good) == ("p", "`-x`", "yes", "yes", "2 of 2", "1,000", "0.50 %", "0", "1")
    assert not outcome(PRINTED, PRINTED, steps=1).holds
    assert not outcome(PRINTED, PRINTED, residual=-8).holds
    failed = outcome(PRINTED, ran(1, PRINTED.stdout))
    assert not failed.holds and "no: 1, not 0" in field_programs.row(failed)
    both = ran(1, PRINTED.stdout)
    assert outcome(both, both).same_exit and not outcome(both, both).holds
