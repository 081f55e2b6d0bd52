"""The Python of ``ready_python`` has imported no more than a bare ``ampmem profile`` has when its script starts."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import ampmem
from support.ready_python import BEFORE_THE_SCRIPT, BESIDE, PRELOADED, Kind, ready_python

pytestmark = pytest.mark.slow

SCRIPT = "import sys\nprint(*sorted(sys.modules))\n"


def imported_one_after_another(*groups: Sequence[str]) -> list[frozenset[str]]:
    """What a bare Python has imported after each of the groups of modules."""
    code = "".join(f"import {', '.join(group)}\n{SCRIPT}" for group in groups)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [frozenset(line.split()) for line in done.stdout.splitlines()]


def at_the_first_line(folder: Path, *options: str) -> frozenset[str]:
    """What a bare ``ampmem profile`` with ``options`` has imported when the first line of its script runs."""
    (folder / "first.py").write_text(SCRIPT)
    done = ampmem(folder, "profile", *options, "first.py", fresh=True)
    return frozenset(done.stdout.split())


def test_what_is_preloaded_is_there_when_a_script_starts(tmp_path: Path) -> None:
    there = at_the_first_line(tmp_path)
    assert [name for name in BEFORE_THE_SCRIPT if name not in there] == []
    assert [name for name in BESIDE if name in there] == []
    # Of torch nothing comes along but what the one exception of torch's brings.
    alone, all_of_it = imported_one_after_another(["torch._dynamo"], PRELOADED)
    assert sorted(name for name in all_of_it - alone - there if name.startswith("torch.")) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Kind.SIMULATED, ("--device", "sim")), (Kind.SIMULATED_RANKS, ("--device", "sim", "--world-size", "2"))],
    ids=str,
)
def test_a_python_for_simulated_runs_has_no_more_than_they_import_themselves(
    tmp_path: Path, kind: Kind, options: tuple[str, ...]
) -> None:
    (tmp_path / "first.py").write_text(SCRIPT)
    run = ["-m", "ampmem", "profile", *options, "first.py"]
    there = {of: words_of(tmp_path, ready_python(kind=of), "first.py") for of in (Kind.PLAIN, kind)}
    assert there[kind] - there[Kind.PLAIN] > {"ampmem.simulator.start"}
    assert sorted(there[kind] - words_of(tmp_path, ready_python(), *run)) == []


def words_of(folder: Path, *command: str) -> frozenset[str]:
    """The words that a command prints."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return frozenset(done.stdout.split())


def test_a_program_is_given_the_open_files_of_its_caller(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(20)]
    with ExitStack() as stack:
        numbers = [stack.enter_context((tmp_path / name).open("wb")).fileno() for name in names]
        code = "import os, sys\nfor number in sys.argv[1:]: os.write(int(number), number.encode())"
        subprocess.run([ready_python(), "-c", code, *map(str, numbers)], pass_fds=numbers, check=True)
    assert [(tmp_path / name).read_text() for name in names] == list(map(str, numbers))
