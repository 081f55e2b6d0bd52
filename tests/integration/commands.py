"""Command lines, run as a user runs them: in a process and a directory of their own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from ready_python import ready_python

from ampmem.cli.main import main

TIMEOUT_S = 600


def python(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """``python`` with ``arguments``; ``fresh`` where it must start from nothing, which takes seconds longer."""
    command = [sys.executable if fresh else ready_python(), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def ampmem(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """``ampmem`` with ``arguments``, in the same way."""
    return python(folder, "-m", "ampmem", *arguments, fresh=fresh)


def refused(folder: Path, *arguments: str) -> str:
    """What ``ampmem`` says of ``arguments`` that are wrong use. It runs in this process, and comes to nothing more."""
    stdout, stderr = StringIO(), StringIO()
    with (
        chdir(folder),
        patch.object(sys, "argv", ["ampmem", *arguments]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        pytest.raises(SystemExit) as end,
    ):
        main()
    assert end.value.code == 2, arguments
    assert stdout.getvalue() == "", arguments
    return stderr.getvalue()
