"""What a program finds when it starts is what Python gives it, attribute by attribute."""

import re
import sys
import zipapp
import zipfile
from pathlib import Path

import pytest
from support.commands import ampmem, python
from support.guest import PROGRAMS, beside
from support.ready_python import ready_python

pytestmark = pytest.mark.slow

CANNOT_BE = {
    "frames below": "ampmem's calls lie below the program's: debuggers, faulthandler and inspect.stack() show them. "
    "Python runs nothing in its first thread without what started it below",
}
"""What is not as without ampmem, and why."""


@pytest.mark.parametrize("target", [["_surroundings.py", "-x"], ["-m", "_surroundings", "--steps", "3"]])
def test_what_python_sets_is_as_without_ampmem(tmp_path: Path, target: list[str]) -> None:
    plain = python(PROGRAMS, *target, fresh=True)
    options = ("--run-to-end", "-o", str(tmp_path / "run.ampmem"))
    recorded = ampmem(PROGRAMS, "profile", *options, *target, fresh=True)
    assert (plain.returncode, plain.stderr, recorded.returncode) == (0, "", 0)
    pairs = list(zip(plain.stdout.splitlines(), recorded.stdout.splitlines(), strict=True))
    assert len(pairs) > 50
    assert {before.partition(":")[0] for before, after in pairs if before != after} == CANNOT_BE.keys()


@pytest.mark.parametrize(
    "name", ["./_surroundings.py", "../programs/_surroundings.py", str(PROGRAMS / "_surroundings.py")]
)
def test_a_program_is_called_what_it_was_called(tmp_path: Path, name: str) -> None:
    def named(lines: str) -> list[str]:
        keys = ("__file__", "__loader__", "sys.argv", "sys.path", "orig_argv", "code", "traceback")
        return [line for line in lines.splitlines() if line.startswith(keys)]

    program = (name, "--without-torch")  # which takes seconds to import, and changes nothing of these
    plain = python(PROGRAMS, *program, fresh=True)
    # Once as a user's Python starts; the other names in one that has torch imported.
    bare = name.startswith("./")
    recorded = ampmem(PROGRAMS, "profile", "--run-to-end", "-o", str(tmp_path / "run.ampmem"), *program, fresh=bare)
    assert len(named(plain.stdout)) == 7
    assert named(recorded.stdout) == [
        line if bare else line.replace(sys.executable, ready_python()) for line in named(plain.stdout)
    ]


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


LOOKS = """
import sys
print(__name__, globals().get("__file__"), __package__, type(__loader__), __spec__ and __spec__.origin)
print(sys.argv, sys.path[0], sys.orig_argv[1:], sorted(globals()))
raise ValueError(1)
"""
RUNPY = re.compile(r"  File \"<frozen runpy>.*\n")


@pytest.mark.parametrize("what", ["app", "./app", "app.pyz", "-"])
def test_a_folder_a_zip_file_and_standard_input_run_as_python_runs_them(tmp_path: Path, what: str) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "__main__.py").write_text(LOOKS)
    zipapp.create_archive(app, tmp_path / "app.pyz")
    plain = python(tmp_path, what, "-x", "1", fresh=True, given=LOOKS)
    recorded = ampmem(tmp_path, "profile", what, "-x", "1", fresh=what == "app", given=LOOKS)
    ours = "".join(line for line in recorded.stderr.splitlines(True) if not line.startswith("ampmem: "))
    assert (recorded.returncode, ours) == (1, RUNPY.sub("", plain.stderr))
    assert recorded.stdout.replace("'-m', 'ampmem', 'profile', ", "") == plain.stdout


TRAINS = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_compare_gives_each_process_the_script_of_standard_input(tmp_path: Path) -> None:
    done = ampmem(tmp_path, "compare", "--precision", "fp32,amp", "--steps", "1", "--no-times", "-", given=TRAINS)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.ampmem")} == {"stdin.fp32.ampmem", "stdin.amp.ampmem"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--nproc-per-node", "2", "-"),
            "several processes cannot read one script from standard input; save it to a file",
        ),
        (("empty",), "empty is a directory without a __main__.py; name the script in it, or use -m for a package"),
        (
            ("empty.zip",),
            "empty.zip is a zip file without a __main__.py; name the script in it, or use -m for a package",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    done = ampmem(tmp_path, "profile", *arguments, given="")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"ampmem: {message}")
