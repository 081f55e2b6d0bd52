"""``ampmem diff``: where the memory of two runs of changed code differs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ampmem.analysis.difference.difference import difference, difference_schema
from ampmem.analysis.difference.sides import read_side
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.cli.options import layout_option, schema_option
from ampmem.errors import UsageError
from ampmem.output import Terminal, check_output, sized
from ampmem.recording import without_journals
from ampmem.reporters.text.difference import CHANGES, render_difference
from ampmem.reporters.text.layout import Layout


@click.command("diff", short_help="Say where the memory of two runs of changed code differs.")
@click.argument("files", nargs=-1, required=True, metavar="BEFORE AFTER", type=click.Path(path_type=Path))
@click.option(
    "--category",
    metavar="NAME",
    type=click.Choice([str(category) for category in CATEGORIES]),
    help="Compare only this category, such as activations, in each run at the instant when it is largest.",
)
@click.option(
    "--top",
    "most",
    metavar="N",
    type=click.IntRange(min=1),
    default=CHANGES,
    show_default=True,
    help="Show the N largest changes.",
)
@click.option("--all", "everything", is_flag=True, help="Show all changes.")
@layout_option
@click.option("--json", "as_json", is_flag=True, help="Print the difference as JSON.")
@schema_option(difference_schema)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write an HTML page of the changes and of both runs.",
)
@click.option("--force", is_flag=True, help="Replace the page if it exists.")
def diff(
    files: tuple[Path, ...],
    category: str | None,
    most: int,
    everything: bool,
    layout: Layout,
    as_json: bool,
    page: Path | None,
    force: bool,
) -> None:
    """Show where memory differs between two runs of changed code, at the peak of each.

    BEFORE and AFTER are recordings. Either may be the JSON of a summary (ampmem show --json); then only categories
    are compared. For a job with a file for each rank, give one rank's file, or the file name without the rank
    (train.ampmem), which selects the rank that needs the most memory.

    Allocations are matched by category, module, name, op and functions, so moved lines and another checkout folder
    do not matter. The changes add up to the whole difference, to the byte.
    """
    given = without_journals(files)
    if len(given) != 2:
        raise UsageError(
            f"diff compares two runs, not {len(given)}: ampmem diff BEFORE AFTER; for a job with several ranks give "
            "one rank's file, or the job's name, such as train.ampmem"
        )
    if page is not None:
        for path in given:
            check_output(page, force=force, option="--html", source=path)  # fail before the work
    before, after = map(read_side, given)
    found = difference(before, after, category=None if category is None else Category(category))
    text = render_difference(found, layout, most=None if everything else most)
    click.echo(found.to_json() if as_json else layout.shown(text))
    if page is not None:
        # Imports jinja2, which a shell's completion must not wait for.
        from ampmem.reporters.html import write_difference

        write_difference(before, after, found, page, force=force)
        Terminal(sys.stderr).say(f"wrote {sized(page)}")
