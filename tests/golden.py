"""A golden set: what ampmem puts out, kept, to prove that a refactoring changes none of it.

It uses ampmem's command line, ``ampmem.profile``, ``load`` and ``compare``, and SQL alone, so one copy of it runs on
any commit; PYTHONPATH says on which. Before a refactoring::

    PYTHONPATH=OLD python tests/golden.py make golden/old --inputs golden/inputs

and after it, at any time::

    PYTHONPATH=NEW python tests/golden.py make golden/new --inputs golden/inputs
    python tests/golden.py compare golden/old golden/new

``fresh/`` has what new recordings come to. Masked in it is what differs between two runs of one commit: times, paths,
addresses of the CPU, the order of neighbouring frees; and line numbers in ampmem's own files. ``same/`` has what is put
out for one set of recordings, to the byte; of a page its data and its markup, without scripts and styles.

The first ``make`` fills the folder of ``--inputs`` with its fresh recordings, later ones read it. ``make --only fresh``
or ``--only same`` makes one half, ``make --match "^gpt"`` runs only the commands whose names match; ``compare
--partial`` then leaves out what the new set lacks. Snapshots to import are taken from the folder AMPMEM_SNAPSHOTS.
``compare`` prints a line for each file that differs, and exits with 1 when there is one. ``golden_runs.py`` says what
is run.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from golden_runs import SCRIPTS, Command, fill_inputs, fresh, same

HALVES = ("fresh", "same")
FREE, RECOMPUTED = 3, 10  # an action of events and a kind of facts, as recordings number them
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}
"""What the environment must not decide."""

Mask = Callable[[str], str]
Row = dict[str, Any]


def run(arguments: Sequence[str], folder: Path) -> str:
    """The exit code, standard output and standard error of Python with ``arguments``, in ``folder``."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=os.environ | FIXED, capture_output=True)
    out, err = (stream.decode(errors="backslashreplace") for stream in (done.stdout, done.stderr))
    return f"exit code {done.returncode}\n--- stdout\n{out}--- stderr\n{err}"


def tree() -> Path:
    """The folder that holds the ampmem that is run."""
    where = (sys.executable, "-c", "import ampmem; print(ampmem.__file__)")
    return Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()).parents[1]


def keep_fresh(command: Command, folder: Path, work: Path, mask: Mask) -> None:
    """Run ``command`` in ``work``; keep what it prints, and its recordings as tables and as a summary."""
    write(folder / f"{command.name}.output.txt", mask(run(command.arguments, work)))
    for name in command.recordings:
        if (work / name).exists():
            write(folder / f"{name}.tables.txt", mask(tables(work / name)))
            write(folder / f"{name}.json", mask(run(("-m", "ampmem", "show", "--json", name), work)))


def masked(root: Path, work: Path) -> Mask:
    """What takes from a text of a fresh run all that need not be the same in the next one."""
    own_lines = re.compile(r"(<tree>/ampmem/[\w/]+\.py)(:|\W*, line )\d+")

    def mask(text: str) -> str:
        text = text.replace(str(work), "<work>").replace(f"{root}/ampmem/", "<tree>/ampmem/")
        text = own_lines.sub(r"\1\2N", text)
        text = re.sub(r"(\"duration_ns\": )\d+", r"\1N", text)
        text = re.sub(r"\b\d+(\.\d+)? (s|ms|µs)(?!\w)", "TIME", text)
        # A column of a table is as wide as its times, and a path decides where a line is broken.
        return re.sub(r"-{3,}", "---", re.sub(r" {2,}", "  ", text))

    return mask


def tables(path: Path) -> str:
    """Everything in a recording, a line for each row; a time is told by the number of events up to it."""
    with closing(sqlite3.connect(path)) as database:
        lines = [row[0] for row in database.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name")]
        names = [
            row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        rows = {name: rows_of(database, name) for name in names}
    source = next(json.loads(row["value"])["source"] for row in rows["meta"] if row["key"] == "run")
    if source != "snapshot":  # there all is as the snapshot has it
        number_times(rows)
        (number_blocks if source == "cpu" else forget_elsewhere)(rows["event"], rows["fact"])
        sort_frees(rows["event"])
    for name in names:
        lines += [f"== {name}", *(json.dumps(row) for row in rows[name])]
    return "\n".join(lines) + "\n"


def rows_of(database: sqlite3.Connection, table: str) -> list[Row]:
    """The rows of a table, each by column."""
    cursor = database.execute(f"SELECT * FROM {table} ORDER BY rowid")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def number_times(rows: dict[str, list[Row]]) -> None:
    """Replace every time by the number of events up to it; those of the events themselves go."""
    instants = sorted(event.pop("time_ns") for event in rows["event"])
    for row in (row for table in rows.values() for row in table):
        row |= {key: bisect_right(instants, row[key]) for key in ("time_ns", "start_ns", "end_ns") if key in row}


def number_blocks(events: list[Row], facts: list[Row]) -> None:
    """Replace addresses by the position of the block's alloc; of the blocks recomputed keep those not freed since."""
    blocks: dict[int, list[list[int]]] = {}  # by address, in order: where a block was allocated, and where freed
    for position, event in enumerate(events):
        known = blocks.setdefault(event["address"], [])
        if event["action"] != FREE:
            known.append([position, len(events)])
        elif known:
            known[-1][1] = position
        event["address"] = known[-1][0] if known else -1
    recomputed: dict[tuple[int, int], Row] = {}
    for fact in facts:
        before = [block for block in blocks.get(fact["address"], []) if block[0] < fact["time_ns"]]
        born, died = before[-1] if before else (-1, -1)
        fact["address"] = born
        # Where one is freed, a younger block lies at its address, or not.
        if fact["fact"] == RECOMPUTED and died >= fact["time_ns"]:
            recomputed[fact["time_ns"], born] = fact
    facts[:] = [fact for fact in facts if fact["fact"] != RECOMPUTED]
    facts += [recomputed[key] for key in sorted(recomputed)]


def forget_elsewhere(events: list[Row], facts: list[Row]) -> None:
    """Replace the addresses of what does not lie on the simulated device, which are those of real memory."""
    known = {event["address"] for event in events}
    for fact in facts:
        fact["address"] = fact["address"] if fact["address"] in known else -1


def sort_frees(events: list[Row]) -> None:
    """Sort frees that follow one another: autocast drops its copies in no certain order."""
    ordered: list[Row] = []
    for frees, group in groupby(events, key=lambda event: event["action"] == FREE):
        neighbours = list(group)
        if frees:
            neighbours = [event | {"allocated": neighbours[-1]["allocated"]} for event in neighbours]
            neighbours.sort(key=lambda event: event["address"])
        ordered += neighbours
    events[:] = ordered


def keep_same(command: Command, folder: Path) -> None:
    """Run ``command`` in ``folder``, where its inputs are in ``in/``; keep what it prints and writes."""
    write(folder / f"{command.name}.txt", run(command.arguments, folder))
    page = folder / command.output
    if page.suffix == ".html" and page.exists():
        split_page(page)


def split_page(page: Path) -> None:
    """Put what the page is drawn from and its markup in its place: ``x.data.json`` and ``x.markup.html``."""
    data: list[str] = []

    def part(match: re.Match[str]) -> str:
        opening, body, closing_tag = match.groups()
        if "application/json" in opening:
            data.append(json.dumps(json.loads(body), indent=1))
            body = ""
        elif "type=" in opening:  # packed, such as plotly.js
            body = hashlib.sha256(body.encode()).hexdigest()
        else:  # a script or a style, which a refactoring may change
            body = ""
        return f"{opening}{body}{closing_tag}"

    elements = re.compile(r"(<(?:script|style)[^>]*>)(.*?)(</(?:script|style)>)", re.DOTALL)
    markup = elements.sub(part, page.read_text(encoding="utf-8"))
    write(page.with_suffix(".data.json"), "\n".join(data) + "\n")
    write(page.with_suffix(".markup.html"), re.sub(r"sha256-[\w+/=]+", "HASH", markup))
    page.unlink()


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def make(folder: Path, inputs: Path, *, only: str | None, match: str, processes: int) -> None:
    """Make the golden set of the ampmem that PYTHONPATH gives in the new ``folder``."""
    folder.mkdir(parents=True)
    folder, work, root = folder.resolve(), folder.resolve() / "work", tree()
    print(f"ampmem in {root}", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        for half in (only,) if only else HALVES:
            started, place = time.monotonic(), folder / half
            place.mkdir()
            if half == "fresh":
                work.mkdir()
                for name, text in SCRIPTS.items():
                    write(work / name, text.lstrip())
                commands, keep = fresh(), partial(keep_fresh, folder=place, work=work, mask=masked(root, work))
            else:
                if not inputs.exists():
                    fill_inputs(inputs, work)
                (place / "in").symlink_to(inputs.resolve())
                commands, keep = same(inputs), partial(keep_same, folder=place)
            commands = [command for command in commands if re.search(match, command.name)]
            list(pool.map(keep, commands))
            print(f"{half}: {len(commands)} commands in {time.monotonic() - started:.0f} s", flush=True)
    shutil.rmtree(work, ignore_errors=True)
    (folder / "same" / "in").unlink(missing_ok=True)


def compare(old: Path, new: Path, *, partial_set: bool) -> int:
    """Print how the files of two golden sets differ, and count them; a half that one of them lacks is left out."""
    halves = [half for half in HALVES if (old / half).is_dir() and (new / half).is_dir()]
    if not halves:
        raise SystemExit(f"{old} and {new} have nothing in common to compare")
    roots = (new,) if partial_set else (old, new)
    names = sorted({f"{half}/{path.name}" for root in roots for half in halves for path in (root / half).iterdir()})
    found = 0
    for name in names:
        missing = [root for root in (old, new) if not (root / name).exists()]
        sides = [] if missing else [(root / name).read_bytes() for root in (old, new)]
        if missing or sides[0] != sides[1]:
            found += 1
            print(f"{name}: not in {missing[0]}" if missing else f"{name}: {first_difference(*sides)}")
    print(f"{found} of {len(names)} files differ ({' and '.join(halves)})")
    return found


def first_difference(old: bytes, new: bytes) -> str:
    """The first line that differs, as each has it; of long lines the part around the difference."""
    lines = zip_longest(old.split(b"\n"), new.split(b"\n"), fillvalue=b"<end of file>")
    number, pair = next((number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
    at = next((at for at, (one, other) in enumerate(zip(*pair, strict=False)) if one != other), min(map(len, pair)))
    parts = [line[max(0, at - 40) : at + 80].decode(errors="backslashreplace") for line in pair]
    return f"line {number}: {parts[0]!r} became {parts[1]!r}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make the golden set of the ampmem that PYTHONPATH gives")
    making.add_argument("folder", type=Path, help="where to; must not exist")
    making.add_argument("--inputs", type=Path, required=True, help="the recordings that same/ is made from")
    making.add_argument("--only", choices=HALVES, help="make this half only")
    making.add_argument("--match", default="", help="run only the commands in whose names this pattern is found")
    making.add_argument("--processes", type=int, default=2, help="how many to run at once (default 2)")
    comparing = commands.add_parser("compare", help="compare two golden sets")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--partial", action="store_true", help="leave out what the new set lacks")
    given = parser.parse_args()
    if given.command == "compare":
        raise SystemExit(1 if compare(given.old, given.new, partial_set=given.partial) else 0)
    if given.folder.exists():
        parser.error(f"{given.folder} exists already")
    if (given.only or given.match) and not given.inputs.exists():
        parser.error(f"{given.inputs} does not exist; the first make is a whole one, which fills it")
    make(given.folder, given.inputs, only=given.only, match=given.match, processes=given.processes)


if __name__ == "__main__":
    main()
