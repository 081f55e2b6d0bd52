"""``ampmem report``: write recordings to one HTML page."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import click

from ampmem.analysis.advised import read_advised
from ampmem.cli.options import advised_option
from ampmem.output import Terminal, claim, remove_empty, sized
from ampmem.recording import is_watched, without_journals
from ampmem.units import counted

SUFFIX = ".html"


@click.command("report", short_help="Write recordings to one HTML page that works offline.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="OUT.html",
    type=click.Path(path_type=Path),
    help="The page to write.  [default: next to the first file: run.html for run.ampmem; also run.html, the common "
    "part of the names, for run.fp32.ampmem and run.amp.ampmem; with the next free number if that exists: run.2.html]",
)
@click.option("--open", "opening", is_flag=True, help="Open the page in a browser, if there is one.")
@advised_option
@click.option("--force", is_flag=True, help="Replace the page if it exists.")
def report(files: tuple[Path, ...], output: Path | None, opening: bool, advised: Path | None, force: bool) -> None:
    """Write recordings to one HTML page that works offline.

    Several recordings are compared side by side. The recordings of one job's ranks are merged: the page shows which
    rank is the worst, and why; the pages of single ranks are a click away.

    The page of a watched run shows the whole run as a line; each full recording has its own page next to it.

    A FILE may also be JSON that ampmem printed, on any machine. The page of show --json or compare --json is the
    same, but without the timeline and other parts that need the events, and without the script's name and its
    failure, which the JSON does not have. The page of show --ranks --json has no pages of single ranks, and the page
    of diff --json no pages of the two runs; those of fit --json, advise --json and estimate --json are complete. These
    five cannot be combined with other files.
    """
    # Imports jinja2, which a shell's completion must not wait for.
    from ampmem.reporters.html import write
    from ampmem.reporters.html.watched_page import write_watched

    recordings = without_journals(files)
    proven = None if advised is None else read_advised(advised)
    wanted = output or page_beside(recordings)
    numbered = output is None and not force
    page = _page(wanted, claim(lambda number: [_page(wanted, number)])) if numbered else wanted
    others = 0
    try:
        if len(recordings) == 1 and is_watched(recordings[0]):
            others = len(write_watched(recordings[0], page, force=force or numbered)) - 1
        else:
            write(recordings, page, force=force or numbered, advised=proven)
    finally:
        remove_empty([page] if numbered else [])
    taken = "" if page == wanted else f"; {wanted} exists already (--force replaces it)"
    full = f", and next to it the pages of {counted(others, 'full recording')}" if others else ""
    Terminal(sys.stderr).say(f"wrote {sized(page)}{full}{taken}")
    if opening and not webbrowser.open(page.absolute().as_uri()):
        Terminal(sys.stderr).say(f"no browser could be started here; open {page} in one")


def _page(wanted: Path, number: int) -> Path:
    """``wanted``, with the ``number`` in its name from the second on: ``train.2.html``."""
    return wanted if number == 1 else wanted.with_name(f"{wanted.stem}.{number}{SUFFIX}")


def page_beside(files: Sequence[Path]) -> Path:
    """The default name for the page of ``files``: their common beginning, else the first one's name."""
    parts = zip(*(file.stem.split(".") for file in files), strict=False)
    common = ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, parts))
    return files[0].with_name(f"{common or files[0].stem}{SUFFIX}")
