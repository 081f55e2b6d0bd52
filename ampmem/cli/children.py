"""What the commands share that run a script in several child processes: their arms, and what they say meanwhile."""

from __future__ import annotations

import shutil
import sys
from threading import Lock

from ampmem.cli import launch
from ampmem.cli.options import ARMS
from ampmem.errors import UsageError
from ampmem.reporters.text.plain_text import shorten

AS_IS = "as-is"

_one_at_a_time = Lock()
"""Children may be followed by threads."""


def chosen_arms(text: str, dtype: str | None) -> tuple[str, ...]:
    """The arms that ``--arms`` lists. Raises :class:`UsageError`, also for a ``dtype`` that none of them uses."""
    arms = tuple(arm.strip() for arm in text.split(","))
    for i, arm in enumerate(arms):
        if arm not in (AS_IS, *ARMS):
            raise UsageError(f"--arms: there is no arm {arm!r}; there are {', '.join((AS_IS, *ARMS))}")
        if arm in arms[:i]:
            raise UsageError(f"--arms: {arm} is there twice")
    if dtype is not None and not any(map(is_amp, arms)):
        raise UsageError(f"--dtype is what autocast casts to, so it needs the arm amp or amp-nocache, not {text}")
    return arms


def is_amp(arm: str) -> bool:
    """Whether autocast is on in ``arm``."""
    return arm.startswith("amp")


def progress_line(text: str, *, last: bool = False) -> None:
    """Show ``text`` on stderr: on a terminal over the line before, unless that was the last; else only the last."""
    with _one_at_a_time:
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            shown = text if last else shorten(text, width)
            print(f"\r\x1b[K{shown}", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last:
            print(text, file=sys.stderr, flush=True)


def say_tail(ended: launch.Ended) -> None:
    """The last lines that a child printed, below the line that names it."""
    for line in ended.tail:
        print(f"    {shorten(line.expandtabs(), len(line) * 8)}", file=sys.stderr)
