"""Run what needs a GPU, in parts, and leave figures and small recordings in a folder.

    python tests/gpu/run_all.py FOLDER PART... [--quick] [--minutes 9.5] [--device cuda]

The parts, and how long they may take (all that is asked for together ends after ``--minutes``):

    environment   20 s    the machine, its versions, and what is missing
    laws          4 min   the laws that ampmem keeps, on its workloads, in every precision
    processes     3 min   out of memory, allocator settings, the command line
    compare       90 s    the tiny GPT in three precisions, recorded
    oom           60 s    a run that runs out of memory, recorded
    pages         30 s    the pages of those recordings
    overhead      5 min   what recording costs beside its peers (2 min with --quick)
    probes        5 min   single questions, each in a process of its own (probes.py)
    truth         9 min   measured peaks beside the simulation's (truth.py)
    workspaces    9 min   what convolutions and matrix products take beside their results (workspaces.py)
    recorder      6 min   the programs of tests/emulated, recorded and as they are
    steps         3 min   whole steps of tests/emulated/steps.py, to be laid beside the emulation and the simulation
    ops-large       3 min   the same of single ops: what training uses in its usual shapes,
    ops-optimizers  2 min   the updates of torch.optim,
    ops-recurrent   1 min   cuDNN's recurrent networks,
    ops-op_db       5 min   and PyTorch's own samples of its ops (needs expecttest)

Where a command may take ten minutes: ``environment laws processes``, then ``compare oom pages
overhead --quick``, then ``probes``, ``truth`` and ``workspaces`` by themselves. ``pages``
needs ``compare`` and ``oom`` before it.

A part is ``ok`` where something in it passed and nothing failed; one of which all was skipped is not. Everything is
printed, and ``results.json``, ``results.txt`` and ``log.txt`` are there, as it comes: a kill loses nothing. The rest is
in ``rest.tar.gz``, which grows with each part. Of ``truth`` and ``workspaces`` the tables are files of their own, so
FOLDER never has more than eight. Exits with 1 when a part is not ok. Nothing has to be installed: ampmem is taken from
the checkout.
"""

import argparse
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import children
import results
from parts import Part, parts
from results import DIED, FAILED, LATE, NO_TIME, PASSED, STARTED, Row

MOST_IN_ARCHIVE = 12 << 20
"""Bytes of a file beyond which it is left out of the archive, and of all files together."""
_EACH = 1.0
"""Seconds between two writings of the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a part."""

    name: str
    how: str
    seconds: float
    rows: tuple[Row, ...]


class Report:
    """The files in the folder, written anew as rows come."""

    def __init__(self, folder: Path, work: Path, say: Callable[[str], None] = print) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._work = work
        self._say = say
        self._done: list[Outcome] = []
        self._written = 0.0
        self._running: tuple[str, float] | None = None
        self._log = (folder / "log.txt").open("w", encoding="utf-8")

    def rows_of(self, name: str) -> Path:
        """Where the part writes its rows."""
        return self._work / f"{name}.rows.jsonl"

    def line(self, text: str) -> None:
        """What a part printed: shown, logged, and a reason to look for new rows."""
        self._say(text)
        self._log.write(text + "\n")
        self._log.flush()
        if monotonic() - self._written > _EACH:
            self.write()

    def begin(self, name: str) -> None:
        """A part starts."""
        self._running = name, monotonic()
        self.line(f"== {name}")

    def end(self, outcome: Outcome) -> None:
        """A part is over."""
        self._running = None
        self._done.append(outcome)
        said = results.counts(outcome.rows)
        self.line(f"== {outcome.name}: {outcome.how}, {outcome.seconds:.0f} s{said and ', ' + said}")
        self.write()
        self._pack()

    def write(self) -> None:
        """``results.json`` and ``results.txt``, as things stand."""
        self._written = monotonic()
        outcomes = list(self._done)
        if self._running is not None:
            name, began = self._running
            rows = tuple(results.read(self.rows_of(name)))
            outcomes.append(Outcome(name=name, how="running", seconds=monotonic() - began, rows=rows))
        document = {"schema": "ampmem.gpu-run/1", "parts": [asdict(each) for each in outcomes]}
        results.replace(self.folder / "results.json", json.dumps(document, indent=1) + "\n")
        results.replace(self.folder / "results.txt", text_of(outcomes))

    def _pack(self) -> None:
        """The archive of what the parts left in the working folder."""
        half = self.folder / "rest.tar.gz.new"
        room = MOST_IN_ARCHIVE
        with tarfile.open(half, "w:gz") as archive:
            for path in sorted(each for each in self._work.rglob("*") if each.is_file()):
                size = path.stat().st_size
                if size > room:
                    self._log.write(f"left out of the archive, {size} bytes: {path.name}\n")
                    continue
                room -= size
                archive.add(path, path.relative_to(self._work))
        half.replace(self.folder / "rest.tar.gz")
        self._log.flush()

    def close(self) -> bool:
        """Say what to bring home; whether everything was ok."""
        self.line("\n" + text_of(self._done))
        names = [f"  {path.name}  {path.stat().st_size:,} bytes" for path in sorted(self.folder.iterdir())]
        self.line("\n".join([f"bring home, from {self.folder}:", *names]))
        self._log.close()
        return bool(self._done) and all(each.how == "ok" for each in self._done)


def text_of(outcomes: Sequence[Outcome]) -> str:
    """A line per part; then all rows but those that passed and have nothing to say."""
    heads = [[each.name, each.how, f"{each.seconds:.0f} s", results.counts(each.rows)] for each in outcomes]
    shown = [
        [f"{each.name}: {row.name}", row.outcome, f"{row.seconds:.1f} s", row.detail]
        for each in outcomes
        for row in each.rows
        if row.outcome != PASSED or row.detail
    ]
    return "\n\n".join(results.table(part) for part in (heads, shown) if part) + "\n"


def run(part: Part, report: Report, ends: float) -> Outcome:
    """Run a part until it is over, for as long as it may and there is time."""
    began = monotonic()
    limit = min(part.seconds, ends - began)
    if limit <= 0:
        return Outcome(name=part.name, how=NO_TIME, seconds=0, rows=())
    report.begin(part.name)
    path = report.rows_of(part.name)
    variables = {results.FILE: str(path), **part.variables}
    late = False
    while True:
        left = limit - (monotonic() - began)
        arguments = [each.replace("{seconds}", str(max(int(left) - 5, 1))) for each in part.command]
        ended = children.follow(arguments, left, variables=variables, say=report.line)
        late = ended.code is None
        if not part.tests or not _goes_on(path, ended) or monotonic() - began >= limit:
            break
    if late and part.tests:
        _mark_unfinished(path, LATE)
    rows = tuple(results.read(path)) if part.rows else (_row(part, ended),)
    how = _how(part, rows, ended)
    return Outcome(name=part.name, how=how, seconds=monotonic() - began, rows=rows)


def _goes_on(path: Path, ended: children.Ended) -> bool:
    """Whether tests are left that another process can run: this one ended in the middle of one, or its device broke."""
    if ended.code is None:
        return False
    died = any(row.outcome == STARTED for row in results.read(path))
    if died:
        _mark_unfinished(path, DIED)
    return died or ended.code == 3


def _mark_unfinished(path: Path, outcome: str) -> None:
    for row in results.read(path):
        if row.outcome == STARTED:
            results.append(path, Row(name=row.name, outcome=outcome, detail="its process ended while it ran"))


def _row(part: Part, ended: children.Ended) -> Row:
    """The one row of a part that is a command: its exit code, and whether the files are there that it is to leave."""
    missing = [path.name for path in part.leaves if not path.exists()]
    outcome, detail = PASSED, ""
    if ended.code is None:
        outcome = LATE
    elif ended.code != part.code:
        outcome, detail = FAILED, ended.how
    elif missing:
        outcome, detail = FAILED, f"{', '.join(missing)} is missing"
    last = next((line for line in reversed(ended.lines) if line.strip()), "")
    return Row(name=part.name, outcome=outcome, seconds=round(ended.seconds, 1), detail=detail or last[:200])


def _how(part: Part, rows: Sequence[Row], ended: children.Ended) -> str:
    found = results.verdict(rows)
    if ended.code is None:
        return LATE if found == "ok" else f"{LATE}, {found}"
    if found == "ok" and part.rows and ended.code not in (part.code, 5):  # 5: pytest had no tests left
        return ended.how
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The parts that were asked for, one after the other; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+", metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds of overhead")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything together")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="sim: to try the parts without a GPU")
    options = parser.parse_intermixed_args(arguments)
    ends = monotonic() + 60 * options.minutes
    folder = options.folder.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        known = parts(folder, work, device=options.device, quick=options.quick)
        strangers = [each for each in options.parts if each not in known]
        if strangers:
            parser.error(f"there is no part {strangers[0]!r}; there are {', '.join(known)}")
        report = Report(folder, work, lambda text: print(text, flush=True))
        for name in dict.fromkeys(options.parts):
            report.end(run(known[name], report, ends))
        return 0 if report.close() else 1


if __name__ == "__main__":
    children.end_with_us()
    sys.exit(main())
