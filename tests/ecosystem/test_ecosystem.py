"""The quick ones of the programs in ``programs/``; ``check.py`` runs all."""

from pathlib import Path

import pytest
from against_cpu import SAME, differences
from check import PROGRAMS, missing
from program import Program
from runs import Recorded, outcome
from support.ready_python import ready_python

QUICK = [program for program in PROGRAMS if program.quick]


@pytest.mark.slow
@pytest.mark.parametrize("program", QUICK, ids=[program.name for program in QUICK])
def test_what_people_train_with_is_as_the_list_says(tmp_path: Path, program: Program) -> None:
    if lacks := missing(program):
        pytest.skip(f"{', '.join(lacks)} is not installed: pip install '.[ecosystem]'")
    found = outcome(program, tmp_path, python=ready_python())
    assert (found.found, found.problems) == (program.expected, ())


def test_every_program_is_there_once_and_has_a_script() -> None:
    folder = Path(__file__).parent / "programs"
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all((folder / program.file).is_file() for program in PROGRAMS)


def recorded(*sizes: int, elsewhere: int = 0) -> Recorded:
    measured = dict(zip(SAME, sizes, strict=True)) | {"cast_copies": 0}
    return Recorded(
        precision="amp", exit_code=0, said="", measured=measured, sums=measured | {"state_elsewhere": elsewhere}
    )


def test_what_the_cpu_says_is_the_same_but_for_the_state_that_is_there_anyway() -> None:
    simulated = recorded(400, 400, 800, elsewhere=16)
    assert differences(recorded(400, 400, 816), simulated) == []
    assert differences(recorded(400, 400, 800), simulated) == ["optimizer_state: 800 B, simulated 816 B"]
    assert differences(recorded(400, 404, 816), simulated) == ["gradients: 404 B, simulated 400 B"]
