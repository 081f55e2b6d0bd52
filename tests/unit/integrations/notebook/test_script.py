"""Cells as a script: run in a process of their own, without a recording."""

import subprocess
from pathlib import Path

import pytest
from support.ready_python import ready_python

import ampmem
from ampmem.errors import UsageError
from ampmem.integrations.notebook.cells import script_of_cell
from ampmem.integrations.notebook.recorded import _check_steps, _once


def ran(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = folder / "cell.py"
    path.write_text(script, encoding="utf-8")
    environment = {"PYTHONPATH": str(Path(ampmem.__file__).parents[1])}
    return subprocess.run([ready_python(), path], capture_output=True, text=True, env=environment, check=False)


def test_cells_run_in_order_and_errors_name_the_cells_own_line(tmp_path: Path) -> None:
    before = {
        2: "x = 1\nget_ipython().run_line_magic('env', 'A')\ndef f():\n    return 1 / (x - 2)",
        3: "x = 2\n1 / 0\nx = 3",
    }
    ended = ran(tmp_path, script_of_cell("display(x)\nf()", "In [7]", before, Path(f"{tmp_path}.reached"), failed={3}))
    assert ended.stdout == "2\n"
    assert 'File "In [7]", line 3, in <module>\n    f()\n' in ended.stderr
    assert 'File "In [2]", line 4, in f\n    return 1 / (x - 2)\n' in ended.stderr
    assert Path(f"{tmp_path}.reached").read_text(encoding="ascii") == "0"


def test_a_cell_that_did_not_fail_must_not_fail_here(tmp_path: Path) -> None:
    ended = ran(tmp_path, script_of_cell("print(1)", "In [7]", {3: "1 / 0"}, Path(f"{tmp_path}.reached")))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert not Path(f"{tmp_path}.reached").exists()


def test_what_no_script_can_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="where magics do not work"):
        script_of_cell("get_ipython().system('ls')", "In [1]", {}, tmp_path)
    with pytest.raises(SyntaxError):
        script_of_cell("await x", "In [1]", {}, tmp_path)


def test_steps_of_the_cells_before_are_not_taken_for_the_cells(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    with pytest.raises(
        UsageError, match=r"In \[2\] and In \[5\]\): the recorded steps are theirs. Train in a separate cell"
    ):
        _check_steps(reached, 0, [2, 5])
    reached.write_text("2", encoding="ascii")
    with pytest.raises(UsageError, match="They make 2 steps: --skip 2 skips them"):
        _check_steps(reached, 1, [2])
    _check_steps(reached, 2, [2])


def test_what_is_the_same_of_all_precisions_is_said_once() -> None:
    said = "1 of 3: fp32: failed: NameError: x, about 14 s left\n    File\n2 of 3: amp: failed: NameError: x"
    assert _once(f"{said}, about 7 s left\n    File\n3 of 3: amp-nocache: failed: NameError: y\n    File\n") == (
        "fp32 and amp: failed: NameError: x\n    File\namp-nocache: failed: NameError: y\n    File"
    )
    assert _once("no GPU") == "no GPU"
