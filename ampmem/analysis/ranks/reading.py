"""Reads the recordings of many ranks, several at a time in processes of their own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ampmem.analysis.ranks.ranks import MOST_NAMED
from ampmem.analysis.ranks.runs import RankRun, rank_run
from ampmem.errors import AmpmemError
from ampmem.recording import claimed_for, rank_file, rank_of

_ENOUGH_BYTES = 4 << 20
"""Files that are smaller together are read sooner than a process has started."""
_MOST_PROCESSES = 8
"""Each takes the memory that the largest of its recordings does."""
_ROOT = str(Path(__file__).absolute().parents[3])

# Not ``-m``, which would put the current directory first on the path, nor multiprocessing, which would run the main
# module of whoever asks once more.
_START = """
import sys
sys.path[: not sys.flags.safe_path] = [sys.argv.pop(1)]
from ampmem.analysis.ranks.reading import serve
serve()
"""


def read_runs(paths: Sequence[Path], *, processes: int | None = None) -> list[RankRun]:
    """The recordings at ``paths``, in their order, summed up.

    ``processes`` is how many read, this one included: as many as there are processors by default, and this one alone
    where there is little to read. Raises what :func:`~ampmem.analysis.ranks.runs.rank_run` raises, for the first file
    of which there is something to raise.
    """
    if not paths:
        return []
    count = _processes(paths) if processes is None else min(processes, len(paths))
    shares = [range(first, len(paths), count) for first in range(count)]
    children = [_child([paths[i] for i in share]) for share in shares[1:]]
    found: dict[int, RankRun | AmpmemError] = {}
    try:
        for share, child in zip(shares, (None, *children), strict=True):
            theirs = None if child is None else _answer(child, len(share))
            results = _all_of([paths[i] for i in share]) if theirs is None else theirs
            found.update(zip(share, results, strict=True))
    finally:
        for child in children:
            if child is not None:
                _end(child)
    return [_or_raise(found[i]) for i in range(len(paths))]


def _processes(paths: Sequence[Path]) -> int:
    size = 0
    for path in paths:
        with suppress(OSError):  # whoever reads it says so
            size += path.stat().st_size
    if size < _ENOUGH_BYTES or not sys.executable:
        return 1
    return min(len(os.sched_getaffinity(0)), len(paths), _MOST_PROCESSES)


def _all_of(paths: Sequence[Path]) -> list[RankRun | AmpmemError]:
    """Each as it is read, or why it is not."""
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
    """The files of other ranks of the same job that lie beside those of ``runs``, by what they are called."""
    given, found = {run.rank for run in runs}, {}
    names = {named.job: named.world_size for run in runs if (named := rank_of(run.path)) is not None}
    for job, world_size in names.items():
        for rank in range(min(world_size, MOST_NAMED)):
            path = rank_file(job, rank, world_size)
            if rank not in given and path.is_file() and claimed_for(path) is None:
                found[rank] = path
    return found


def serve() -> None:
    """In a child: read the files that standard input names, and hand what they come to to standard output."""
    paths = [Path(os.fsdecode(bytes.fromhex(name))) for name in json.load(sys.stdin)]
    try:
        pickle.dump(_all_of(paths), sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):  # whoever asked is told, too, or is gone
        sys.exit(1)


def _child(paths: Sequence[Path]) -> subprocess.Popen[bytes] | None:
    """A process that reads ``paths``; ``None`` where there can be no more processes."""
    command = [sys.executable, "-c", _START, _ROOT]
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:  # a child that is dead answers nothing, which is seen there
        child.stdin.write(json.dumps([os.fsencode(path).hex() for path in paths]).encode())
    return child


def _answer(child: subprocess.Popen[bytes], count: int) -> list[RankRun | AmpmemError] | None:
    """What ``child`` has read; ``None`` where it did not get to its end."""
    assert child.stdout is not None
    said = child.stdout.read()
    if child.wait() != 0:
        return None
    results: list[RankRun | AmpmemError] = pickle.loads(said)  # of a process of our own
    return results if len(results) == count else None


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
