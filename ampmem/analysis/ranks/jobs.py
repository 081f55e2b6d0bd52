"""Which recordings are the ranks of one job, and how they are read: several at a time, in child processes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ampmem.analysis.comparison import Entry, entry_of
from ampmem.analysis.jsonable import like
from ampmem.analysis.ranks.ranks import MOST_NAMED
from ampmem.analysis.summary import Summary
from ampmem.errors import AmpmemError, NothingRecorded, RecordingError, UsageError
from ampmem.events import PrecisionRecord, Recording, RunRecord
from ampmem.recording import claimed_for, rank_file, rank_of, read
from ampmem.vocabulary import Precision

_OWN = frozenset({"--local-rank", "--local_rank", "--rank", "--node-rank", "--node_rank"})
"""Launchers' options whose values differ between processes."""
_WITH_VALUE = re.compile(r"(--[\w-]+)=.*", re.DOTALL)


def script_of(run: RunRecord) -> str:
    """The script with the arguments that all ranks share; a single process's with all arguments."""
    if run.world_size == 1:
        return " ".join((run.script, *run.arguments))
    kept, skip = [run.script], False
    for argument in run.arguments:
        if skip:
            skip = False
        elif argument in _OWN:
            skip = True
        elif (found := _WITH_VALUE.fullmatch(argument)) is None or found[1] not in _OWN:
            kept.append(argument)
    return " ".join(kept)


# The recording of one rank, summed up, from which the merged view is made.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """The recording of ``rank`` of ``world_size``, in a file, summed up.

    ``entry`` is ``None`` if there is nothing to sum up; ``problem`` says why. ``run`` and ``precision`` are ``None`` if
    the file cannot be read; then only its name tells the rank. ``notes`` are all notes of the recorder. ``ended`` is as
    :attr:`~ampmem.events.Recording.ended`.
    """

    path: Path
    rank: int
    world_size: int
    run: RunRecord | None = None
    precision: PrecisionRecord | None = None
    entry: Entry | None = None
    problem: RecordingError | NothingRecorded | None = None
    notes: tuple[str, ...] = ()
    ended: bool | None = None

    @property
    def summary(self) -> Summary | None:
        """The summary; ``None`` if there is nothing to sum up."""
        return None if self.entry is None else self.entry.summary

    @property
    def column(self) -> Entry:
        """The recording as a column of a comparison. Raises :attr:`problem` if there is nothing to sum up."""
        if self.entry is None:
            assert self.problem is not None
            raise self.problem
        return self.entry


def rank_run(path: Path) -> RankRun:
    """The recording at ``path``, summed up.

    Raises :class:`~ampmem.errors.UsageError` if there is no file, and :class:`RecordingError` if it cannot be read and
    its name has no rank.
    """
    try:
        recording = read(path)
    except RecordingError as error:
        named = rank_of(path)
        if named is None:
            raise
        return RankRun(path=path, rank=named.rank, world_size=named.world_size, problem=error)
    return rank_run_of(recording, path)


def rank_run_of(recording: Recording, path: Path) -> RankRun:
    """``recording``, in the file ``path``, summed up; the path is empty if it is not in a file."""
    run = recording.run
    read = like(RankRun, recording, path=path, rank=run.rank, world_size=run.world_size)
    try:
        entry = entry_of(recording)
    except (NothingRecorded, RecordingError) as error:
        return replace(read, problem=type(error)(f"{path}: {error}"))
    return replace(read, entry=replace(entry, script=script_of(run)))


# Which recordings are the ranks of one job, or of one job in each precision.

_ORDER = tuple(map(str, Precision))
_BELOW = re.compile(r"^(\.{1,2}/)+")
"""The beginning of a relative path."""


def are_ranks(runs: Sequence[RankRun]) -> bool:
    """Whether ``runs`` are to be merged: they have at least two different ranks of jobs with several ranks.

    Recordings of one rank only, such as rank 0 in each precision, are compared side by side instead.
    """
    return len({run.rank for run in runs if run.world_size > 1}) > 1


def jobs_of(runs: Sequence[RankRun]) -> tuple[tuple[RankRun, ...], ...]:
    """``runs`` by precision, each of which is one job; FP32 comes first, whatever the order of the files.

    Raises :class:`UsageError` if they are not ranks of one job: the scripts, the numbers of ranks or the versions of
    torch differ, or a rank is there twice. If no recording of a job can be read, raises the problem of one of them.
    """
    for what, of in _ALIKE:
        _require_one(what, of, [run for run in runs if run.run is not None])
    jobs: dict[tuple[str, str | None], list[RankRun]] = {}
    for run in runs:
        if run.precision is not None:
            jobs.setdefault((run.precision.name, run.precision.dtype), []).append(run)
    for run in runs:
        if run.precision is None:
            _home(run, list(jobs.values())).append(run)
    for job in jobs.values():
        _require_ranks(job)
    in_order = sorted(jobs, key=lambda precision: (_ORDER.index(precision[0]), precision[1] or ""))
    return tuple(tuple(jobs[precision]) for precision in in_order)


_ALIKE: tuple[tuple[str, Callable[[RankRun], str]], ...] = (
    ("numbers of ranks", lambda run: str(run.world_size)),
    ("scripts", lambda run: "" if run.run is None else script_of(run.run)),
    ("versions of torch", lambda run: "" if run.run is None else run.run.torch),
    ("kinds of devices", lambda run: "" if run.run is None else f"{run.run.device_type} ({run.run.source})"),
)
"""The properties that the ranks of one job share."""


def _require_one(what: str, of: Callable[[RankRun], str], runs: Sequence[RankRun]) -> None:
    first = runs[0] if runs else None
    other = next((run for run in runs if first is not None and not _same_path(of(run), of(first))), None)
    if first is not None and other is not None:
        raise UsageError(
            f"these are not the ranks of one job, as the {what} differ: {of(first)} in {first.path}, "
            f"{of(other)} in {other.path}; show each job by itself"
        )


def _same_path(one: str, other: str) -> bool:
    """Whether both are equal, or one is the end of the other's path, as Lightning starts ranks with absolute paths."""
    short, long = sorted((_BELOW.sub("", one), _BELOW.sub("", other)), key=len)
    return long == short or long.endswith(f"/{short}")


def _home(run: RankRun, jobs: Sequence[list[RankRun]]) -> list[RankRun]:
    """The job of a recording that cannot be read, found by its file's name."""
    if len(jobs) == 1:
        return jobs[0]
    name = rank_of(run.path)
    for job in jobs:
        if name is not None and any((other := rank_of(each.path)) and other.job == name.job for each in job):
            return job
    assert run.problem is not None
    raise run.problem


def _require_ranks(job: Sequence[RankRun]) -> None:
    """Raise if a rank is there twice, or if no rank has something to show."""
    seen: dict[int, Path] = {}
    for run in job:
        if run.rank in seen:
            raise UsageError(
                f"rank {run.rank} is given twice, in {seen[run.rank]} and in {run.path}; give one file for each rank"
            )
        seen[run.rank] = run.path
    if job[0].problem is not None and all(run.entry is None for run in job):
        raise job[0].problem


# Reads the recordings of many ranks, several at a time, in child processes.

_ENOUGH_BYTES = 4 << 20
"""Files smaller than this together are read sooner than a process starts."""
_MOST_PROCESSES = 8
"""The most processes, each of which needs the memory that its largest recording takes."""
_ROOT = str(Path(__file__).absolute().parents[3])

# Not ``-m``, which would put the current directory first on the path, nor multiprocessing, which would import the
# caller's main module again.
_START = """
import sys
sys.path[: not sys.flags.safe_path] = [sys.argv.pop(1)]
from ampmem.analysis.ranks.jobs import serve_reading
serve_reading()
"""


def read_runs(paths: Sequence[Path], *, processes: int | None = None) -> list[RankRun]:
    """The recordings at ``paths``, in their order, summed up.

    ``processes`` is the number of processes that read, this one included: by default one per processor, or this one
    alone if there is little to read. Raises what :func:`~ampmem.analysis.ranks.jobs.rank_run` raises, for the first
    file with an error.
    """
    if not paths:
        return []
    count = _processes(paths) if processes is None else min(processes, len(paths))
    own, *others = (paths[first::count] for first in range(count))
    with ThreadPoolExecutor(count) as pool:
        children = [pool.submit(_read_in_child, share) for share in others]
        found = [
            _read_each(own),
            *(child.result() or _read_each(share) for child, share in zip(children, others, strict=True)),
        ]
    return [_or_raise(found[i % count][i // count]) for i in range(len(paths))]


def _processes(paths: Sequence[Path]) -> int:
    size = 0
    for path in paths:
        with suppress(OSError):  # reading it will report the error
            size += path.stat().st_size
    if size < _ENOUGH_BYTES or not sys.executable:
        return 1
    return min(len(os.sched_getaffinity(0)), len(paths), _MOST_PROCESSES)


def _read_each(paths: Sequence[Path]) -> list[RankRun | AmpmemError]:
    """Each recording, or the error that reading it raised."""
    found: list[RankRun | AmpmemError] = []
    for path in paths:
        try:
            found.append(rank_run(path))
        except AmpmemError as error:
            found.append(error)
    return found


def _or_raise(found: RankRun | AmpmemError) -> RankRun:
    if isinstance(found, AmpmemError):
        raise found
    return found


def ranks_beside(runs: Sequence[RankRun]) -> dict[int, Path]:
    """The files of other ranks of the same jobs in the same folders as ``runs``, by rank and the usual names."""
    given, found = {run.rank for run in runs}, {}
    names = {named.job: named.world_size for run in runs if (named := rank_of(run.path)) is not None}
    for job, world_size in names.items():
        for rank in range(min(world_size, MOST_NAMED)):
            path = rank_file(job, rank, world_size)
            if rank not in given and path.is_file() and claimed_for(path) is None:
                found[rank] = path
    return found


def serve_reading() -> None:
    """Read the files named on stdin and write their summaries to stdout; runs in a child process."""
    paths = [Path(os.fsdecode(bytes.fromhex(name))) for name in json.load(sys.stdin)]
    try:
        pickle.dump(_read_each(paths), sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):  # the parent got the signal too, or has ended
        sys.exit(1)


def _read_in_child(paths: Sequence[Path]) -> list[RankRun | AmpmemError] | None:
    """The results of a process that reads ``paths``; ``None`` if it cannot be started or did not finish."""
    command = [sys.executable, "-c", _START, _ROOT]
    names = json.dumps([os.fsencode(path).hex() for path in paths]).encode()
    try:
        child = subprocess.run(command, input=names, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    if child.returncode != 0:
        return None
    results: list[RankRun | AmpmemError] = pickle.loads(child.stdout)  # trusted: written by our own child
    return results if len(results) == len(paths) else None
