"""``ampmem top``: show the state of watched runs, until all of them have ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep

import click

from ampmem.analysis.watched import FullPart, WatchedSummary, watched_run
from ampmem.recording.watched_file import read_watched
from ampmem.reporters.text.layout import layout_for
from ampmem.reporters.text.watched import render_live

_HOME = "\x1b[H\x1b[J"
"""The terminal codes that move to the upper left corner and clear the screen."""


@click.command("top", short_help="Show what a watched run does now.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between two updates.",
)
@click.option("--once", is_flag=True, help="Show the state once, and exit.")
def top(files: tuple[Path, ...], interval: float, once: bool) -> None:
    """Show live what watched runs do: bars of the device's memory, categories of the last full recording, warnings.

    Several files are shown one below the other, such as the ranks of a job. The command ends when all runs have ended,
    or with Ctrl-C. If standard output is not a terminal, each update is printed below the last one.
    """
    screen = sys.stdout.isatty()
    looks = [_Look(path) for path in files]
    try:
        follow(looks, lambda text: click.echo(f"{_HOME}{text}" if screen else text), interval=interval, once=once)
    except KeyboardInterrupt:
        return


class _Look:
    """A watched file, and the summaries of its full recordings so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, FullPart] = {}

    def now(self) -> WatchedSummary:
        """The current summary of the run."""
        return watched_run(read_watched(self._path), known=self._known)


def follow(
    looks: Sequence[_Look],
    show: Callable[[str], None],
    *,
    interval: float,
    once: bool = False,
    wait: Callable[[float], None] = sleep,
) -> None:
    """Show the runs every ``interval`` seconds until all have ended."""
    while True:
        found = [look.now() for look in looks]
        show(render_live(found, layout_for(sys.stdout)))
        if once or not any(each.running for each in found):
            return
        wait(interval)
