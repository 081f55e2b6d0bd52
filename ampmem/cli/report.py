"""``ampmem report``: write recordings to one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from ampmem.reporters.html import write as write_report

__all__ = ["report", "write_report"]


@click.command("report", short_help="Write recordings to one HTML page that works offline.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, metavar="OUT.html", type=click.Path(path_type=Path), help="The page.")
@click.option("--force", is_flag=True, help="Replace the page when it exists already.")
def report(files: tuple[Path, ...], output: Path, force: bool) -> None:
    """Write one HTML page with a section for each recording; it needs nothing but a browser."""
    write_report(files, output, force=force)
