"""Runs of other people, with exact configurations: their real peak beside the predicted one, and other predictors'.

    python tests/benchmarks/published.py [--only PATTERN]... [--before DAY] [--jobs N] [--json FILE [--update]]
                                         [--html FILE] [--docs FILE] [--no-runs]

``--only`` takes a part of a run's name, ``--update`` keeps the rows of FILE that are not run now. FILE is written after
each run, with the day on which it was simulated: after an interruption the same command with ``--update --before DAY``
goes on, and simulates only those whose row is older than that day, or is missing. ``--html`` makes the page of all
that is in FILE then, and ``--docs`` writes the short tables of ``docs/simulation.md``. A run that needs libraries gets
them, in the versions that it was published with, in a folder of the user's cache; torch is that of the interpreter.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from published.document import document_of, joined, older, read_document, write_document
from published.documentation import update
from published.page import write_page
from published.runs import Row
from published.sources import every_run
from published.table import line_of, summary_of
from published.together import LeftOut, every_row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="runs with this in their name")
    parser.add_argument("--before", metavar="DAY", help="runs whose row in --json is older than this (2026-11-24)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many to simulate at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--update", action="store_true", help="keep what that file has of runs that are not run now")
    parser.add_argument("--html", type=Path, metavar="FILE", help="make the page of what --json names")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the short tables of what --json names there")
    parser.add_argument("--no-runs", action="store_true", help="only --html and --docs, of the table that is there")
    options = parser.parse_args()
    if options.json is None and (options.html or options.docs or options.no_runs or options.before):
        parser.error("say with --json where the table is")
    if not options.no_runs:
        simulate(options)
    if options.html is not None:
        write_page(read_document(options.json), options.html)
    if options.docs is not None:
        update(options.docs, read_document(options.json)["rows"])


def simulate(options: argparse.Namespace) -> None:
    """The runs that are asked for, and what they come to."""
    every = every_run()
    runs = [run for run in every if not options.only or any(part in run.key for part in options.only)]
    if not runs:
        sys.exit("no published run has that in its name")
    if options.before is not None and options.json.exists():
        runs = older(runs, read_document(options.json), options.before)
        if not runs:
            sys.exit(f"every such run was simulated on {options.before} or later")
    order = [run.key for run in every]
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for found in every_row(runs, options.jobs):
        print(line_of(found), flush=True)
        if isinstance(found, Row):
            rows.append(found)
        else:
            left_out.append(found)
        if options.json is not None:
            save(options.json, rows, left_out, order if options.update else None)
    print(summary_of(rows))


def save(file: Path, rows: Sequence[Row], left_out: Sequence[LeftOut], order: Sequence[str] | None) -> None:
    """Write what is known by now; beside what ``file`` has of the runs of ``order``."""
    document = document_of(rows, left_out)
    if order is not None and file.exists():
        document = joined(read_document(file), document, order)
    write_document(document, file)


if __name__ == "__main__":
    main()
