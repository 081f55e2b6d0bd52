"""The Python of ``ready_python`` has imported no more than a bare ``ampmem profile`` has when its script starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import ampmem
from ready_python import BEFORE_THE_SCRIPT, BESIDE, PRELOADED

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
