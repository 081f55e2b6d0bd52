"""Which recordings are the ranks of one job, or of one in each precision."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ampmem.analysis.ranks.runs import RankRun
from ampmem.analysis.ranks.script import script_of
from ampmem.errors import UsageError
from ampmem.recording import rank_of
from ampmem.vocabulary import Arm

_ORDER = tuple(map(str, Arm))
_BELOW = re.compile(r"^(\.{1,2}/)+")
"""With which a path begins that is not from the root."""


def are_ranks(runs: Sequence[RankRun]) -> bool:
    """Whether ``runs`` are to be merged: there are two ranks or more among those of jobs with several.

    Recordings of the same rank alone, such as rank 0 in each precision, are laid side by side instead.
    """
    return len({run.rank for run in runs if run.world_size > 1}) > 1


def jobs_of(runs: Sequence[RankRun]) -> tuple[tuple[RankRun, ...], ...]:
    """``runs`` by their precision: each is one job, and FP32 comes first, however a shell has ordered the files.

    Raises :class:`UsageError` where they are not ranks of one job in one precision or several: the scripts, the numbers
    of ranks or the versions of torch differ, or a rank is there twice. Raises the problem of one that cannot be read
    where none of a job can.
    """
    for what, of in _ALIKE:
        _require_one(what, of, [run for run in runs if run.run is not None])
    jobs: dict[tuple[str, str | None], list[RankRun]] = {}
    for run in runs:
        if run.arm is not None:
            jobs.setdefault((run.arm.name, run.arm.dtype), []).append(run)
    for run in runs:
        if run.arm is None:
            _home(run, list(jobs.values())).append(run)
    for job in jobs.values():
        _require_ranks(job)
    return tuple(tuple(jobs[precision]) for precision in sorted(jobs, key=_in_order))


def _in_order(precision: tuple[str, str | None]) -> tuple[int, str]:
    name, dtype = precision
    return _ORDER.index(name), dtype or ""


def _world_size(run: RankRun) -> str:
    return str(run.world_size)


def _script(run: RankRun) -> str:
    return "" if run.run is None else script_of(run.run)


def _torch(run: RankRun) -> str:
    return "" if run.run is None else run.run.torch


def _device(run: RankRun) -> str:
    return "" if run.run is None else f"{run.run.device_type} ({run.run.source})"


_ALIKE: tuple[tuple[str, Callable[[RankRun], str]], ...] = (
    ("numbers of ranks", _world_size),
    ("scripts", _script),
    ("versions of torch", _torch),
    ("kinds of devices", _device),
)
"""What ranks of one job have in common."""


def _require_one(what: str, of: Callable[[RankRun], str], runs: Sequence[RankRun]) -> None:
    first = runs[0] if runs else None
    other = next((run for run in runs if first is not None and not _same(of(run), of(first))), None)
    if first is not None and other is not None:
        raise UsageError(
            f"these are not the ranks of one job, the {what} differ: {of(first)} in {first.path}, "
            f"{of(other)} in {other.path}; show each job by itself"
        )


def _same(one: str, other: str) -> bool:
    """Whether both say the same, or the one is the other's path from further up, as Lightning starts ranks."""
    short, long = sorted((_BELOW.sub("", one), _BELOW.sub("", other)), key=len)
    return long == short or long.endswith(f"/{short}")


def _home(run: RankRun, jobs: Sequence[list[RankRun]]) -> list[RankRun]:
    """The job of one that cannot be read, as its name says."""
    if len(jobs) == 1:
        return jobs[0]
    name = rank_of(run.path)
    for job in jobs:
        if name is not None and any((other := rank_of(each.path)) and other.job == name.job for each in job):
            return job
    assert run.problem is not None
    raise run.problem


def _require_ranks(job: Sequence[RankRun]) -> None:
    """Of each rank there is one, and of one there is something to show."""
    seen: dict[int, Path] = {}
    for run in job:
        if run.rank in seen:
            raise UsageError(
                f"rank {run.rank} is there twice, in {seen[run.rank]} and in {run.path}; give one file of each rank"
            )
        seen[run.rank] = run.path
    for run in job:
        if run.entry is not None:
            return
    assert job[0].problem is not None
    raise job[0].problem
