"""Command lines that are run in this process: for what does not depend on the process."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from ampmem.cli.main import main


def ampmem_here(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """``ampmem`` with ``arguments`` in ``folder``: its exit code, standard output and standard error."""
    stdout, stderr = StringIO(), StringIO()
    with (
        chdir(folder),
        patch.object(sys, "argv", ["ampmem", *arguments]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return int(end.value.code or 0), stdout.getvalue(), stderr.getvalue()


def refused(folder: Path, *arguments: str) -> str:
    """What ``ampmem`` says of ``arguments`` that are wrong use."""
    code, stdout, stderr = ampmem_here(folder, *arguments)
    assert (code, stdout) == (2, ""), arguments
    return stderr


def transcript(folder: Path, *commands: Sequence[str]) -> str:
    """What each of these command lines of ``ampmem`` prints in ``folder``, and its exit code."""
    said = []
    for command in commands:
        code, stdout, stderr = ampmem_here(folder, *command)
        said += [f"$ ampmem {shlex.join(command)}", *filter(None, (stdout.rstrip("\n"), stderr.rstrip("\n")))]
        said += [f"(exit code {code})"] * bool(code)
    return "\n".join(said)
