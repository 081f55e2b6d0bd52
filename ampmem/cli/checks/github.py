"""Under GitHub Actions: a table in the summary of the job, and annotations in its log."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ampmem.analysis.budgets.check import CheckResult
from ampmem.output.terminal import Terminal
from ampmem.reporters.export.github import commands, markdown


def on_github() -> bool:
    """Whether this is a step of a workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def tell_github(results: Sequence[CheckResult]) -> None:
    """Append the table to the summary, and print the annotations on standard error; elsewhere nothing."""
    if not on_github():
        return
    terminal = Terminal(sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(f"{markdown(results, workspace)}\n")
        except OSError as error:  # the check itself is done
            terminal.say(f"cannot write the summary of the job, {summary}: {error.strerror}")
    for command in commands(results, workspace):
        terminal.show(command)
