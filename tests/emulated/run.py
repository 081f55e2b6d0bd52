"""Runs tests, or any program, with PyTorch's own CUDA build on the emulated CUDA runtime, without a GPU.

    python tests/emulated/run.py [--torch 2.14.1] [--set NAME=VALUE]... [--quick] [PYTEST-ARGUMENTS]
    python tests/emulated/run.py [--torch 2.14.1] [--set NAME=VALUE]... --python SCRIPT [ARGUMENTS]

The first runs pytest, in the environment that emulation.py made, over tests/emulated and the tests of tests/gpu that
make sense here, or over what the arguments name. --quick leaves out what compiles models, what starts ampmem in fresh
processes, and what a CPU build of torch does alike: it takes less than five minutes on two cores. The second gives what
follows to that environment's Python: train.py, or -m ampmem profile train.py. ampmem is that of this checkout. --set
CC=80 is the setting EMULATED_CUDA_CC of runtime.c; tests have two devices unless it is said otherwise. The library is
built where there is none of these sources.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import emulation

ROOT = emulation.HERE.parents[1]
TESTS = (
    "tests/emulated",
    "tests/integration/test_compiled.py",
    "tests/integration/test_extension.py",
    "tests/integration/test_forward_ops.py",
    "tests/gpu/test_laws.py",
    "tests/gpu/test_processes.py",
)
QUICK = (*TESTS[:-1], "-k", "not compiled and not (test_the_content_is_the_same and cpu)")
MARK = "EMULATED_CUDA"
"""The variable that says that this process runs on the emulation; its value is the library."""


def checkout_first() -> dict[str, str]:
    """The environment of a program that runs on what this machine has: the checkout is found, and what was before."""
    path = os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH", "")) if each)
    return os.environ | {"PYTHONPATH": path}


def variables(where: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is to run on the library in ``where``."""
    folder = emulation.folder_of(where)
    library = folder / emulation.LIBRARY
    if not library.exists():
        emulation.build(where)
    libraries = os.pathsep.join(each for each in (str(folder), os.environ.get("LD_LIBRARY_PATH", "")) if each)
    return (
        checkout_first()
        | {f"EMULATED_CUDA_{name}": value for name, value in settings.items()}
        | {
            MARK: str(library),
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": libraries,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; its exit code."""
    left = list(sys.argv[1:] if arguments is None else arguments)
    version, settings, python, tests = emulation.TORCH, {}, False, TESTS
    while left and left[0] in ("--torch", "--set", "--quick", "--python", "--help", "-h"):
        option = left.pop(0)
        if option == "--quick":
            tests = QUICK
            continue
        if option == "--python":
            python = True
            break
        if option in ("--help", "-h"):
            print(__doc__)
            return 0
        if not left:
            sys.exit(f"{option} needs a value; --help says more")
        value = left.pop(0)
        if option == "--torch":
            version = value
        elif "=" in value:
            name, _, settings[name] = value.partition("=")
        else:
            sys.exit(f"--set needs NAME=VALUE, not {value!r}")
    where = emulation.environment(version)
    if not (where / "bin/python").exists():
        sys.exit(f"{where} is not there; python tests/emulated/emulation.py --torch {version} --install makes it")
    command = [str(where / "bin/python")]
    if not python:
        named = any(not each.startswith("-") and Path(each.partition("::")[0]).exists() for each in left)
        command += [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *left,
            *(() if named else (str(ROOT / each) if each.startswith("tests/") else each for each in tests)),
        ]
    else:
        command += left
    chosen = settings if python else {"DEVICES": "2"} | settings  # some tests need two
    return subprocess.run(command, env=variables(where, chosen), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
