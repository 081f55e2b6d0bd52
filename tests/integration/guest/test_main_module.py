"""What a program finds when it starts is what Python gives it, attribute by attribute."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ampmem, python
from guest import PROGRAMS, beside

CANNOT_BE = {
    "frames below": "ampmem's calls lie below the program's: debuggers, faulthandler and inspect.stack() show them. "
    "Python runs nothing in its first thread without what started it below",
}
"""What is not as without ampmem, and why."""


@pytest.mark.slow
@pytest.mark.parametrize("target", [["_surroundings.py", "-x"], ["-m", "_surroundings", "--steps", "3"]])
def test_what_python_sets_is_as_without_ampmem(tmp_path: Path, target: list[str]) -> None:
    plain = python(PROGRAMS, *target, fresh=True)
    options = ("--run-to-end", "-o", str(tmp_path / "run.ampmem"))
    recorded = ampmem(PROGRAMS, "profile", *options, *target, fresh=True)
    assert (plain.returncode, plain.stderr, recorded.returncode) == (0, "", 0)
    pairs = list(zip(plain.stdout.splitlines(), recorded.stdout.splitlines(), strict=True))
    assert len(pairs) > 50
    assert {before.partition(":")[0] for before, after in pairs if before != after} == CANNOT_BE.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["./_surroundings.py", "../programs/_surroundings.py", str(PROGRAMS / "_surroundings.py")]
)
def test_a_program_is_called_what_it_was_called(tmp_path: Path, name: str) -> None:
    def named(lines: str) -> list[str]:
        keys = ("__file__", "__loader__", "sys.argv", "sys.path", "orig_argv", "code", "traceback")
        return [line for line in lines.splitlines() if line.startswith(keys)]

    program = (name, "--without-torch")  # which takes seconds to import, and changes nothing of these
    plain = python(PROGRAMS, *program, fresh=True)
    recorded = ampmem(PROGRAMS, "profile", "--run-to-end", "-o", str(tmp_path / "run.ampmem"), *program, fresh=True)
    assert len(named(plain.stdout)) == 7
    assert named(recorded.stdout) == named(plain.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goes_deep", "warns_its_caller"])
def test_the_stack_and_its_depth_are_the_programs(tmp_path: Path, name: str) -> None:
    both = beside(tmp_path, name)
    assert both.differences() == []
    assert both.plain.code == 0


@pytest.mark.parametrize("name", ["breaks", "reads_itself"])
def test_a_debugger_and_inspect_see_the_program(tmp_path: Path, name: str) -> None:
    both = beside(tmp_path, name)
    assert both.differences() == []
    assert f"{name}.py" in both.recorded.out


PACKAGE = """
import sys
print("package", sys.argv)
"""
MODULE = """
import sys
print("module", sys.argv, __package__, __spec__.name, __cached__ == __spec__.cached)
"""


def test_a_package_sees_the_programs_arguments_when_it_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "__main__.py").write_text(MODULE)
    done = ampmem(tmp_path, "profile", "--run-to-end", "-m", "pkg", "--steps", "9")
    main = str(package / "__main__.py")
    assert done.stdout.splitlines() == [
        "package ['-m', '--steps', '9']",
        f"module {[main, '--steps', '9']} pkg pkg.__main__ True",
    ]
