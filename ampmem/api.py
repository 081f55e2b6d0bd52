"""The public functions of ampmem: :func:`profile`, :func:`load`, :func:`compare`, :func:`diff`, :func:`ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from ampmem.analysis.budgets.budget import budgets_of, parse_allowance
from ampmem.analysis.budgets.check import CheckResult, check_run
from ampmem.analysis.budgets.run import run_given
from ampmem.analysis.comparison import Comparison, distinct
from ampmem.analysis.comparison import compare as compare_entries
from ampmem.analysis.difference.difference import Difference, difference
from ampmem.analysis.difference.sides import side_given
from ampmem.analysis.ranks.jobs import RankRun, are_ranks, rank_run_of, read_runs
from ampmem.analysis.ranks.merge import merge_all
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.summary import Summary
from ampmem.block import Profile, profile
from ampmem.errors import UsageError
from ampmem.events import Recording
from ampmem.output import Bundle, tables_by
from ampmem.recording import read, without_journals

Run: TypeAlias = "str | Path | Recording | Summary | Profile"
"""A run to check or compare, or its file."""

__all__ = [
    "CheckResult",
    "Comparison",
    "Difference",
    "Profile",
    "Ranks",
    "Recording",
    "Summary",
    "check",
    "compare",
    "diff",
    "load",
    "profile",
    "ranks",
]


def _tables(value: Any) -> Bundle:
    """The tables of ``value`` in a notebook."""
    from ampmem.reporters.html.notebook import bundle_of

    return bundle_of(value)


tables_by(_tables)


def load(path: str | Path) -> Recording:
    """Read a recording. Needs no torch.

    Args:
        path: the file, such as ``train.ampmem``.

    Raises:
        UsageError: ``path`` does not exist.
        RecordingError: it is not a recording, or one of another format version.
    """
    return read(_path(path))


def compare(*recordings: str | Path | Recording | Profile) -> Comparison:
    """Compare recordings, profiles, or files of recordings, side by side. Needs no torch.

    The columns are labelled with the precisions; recordings of the same precision get their file's name as well. For
    the ranks of a job in several precisions, the worst rank of each is a column.

    Args:
        recordings: one column each, in this order; the first in FP32 is what the others are compared with.

    Raises:
        UsageError: no recording is given, or a file does not exist.
        RecordingError: a file is not a recording, or one of another format version.
        NothingRecorded: one has no step, no backward or no model.
    """
    if not recordings:
        raise UsageError("nothing to compare: give at least one recording")
    given = _with_recordings(recordings)
    runs = _runs(given)
    if are_ranks(runs) and (worst := merge_all(runs).comparison) is not None:
        return worst
    names = ["" if isinstance(item, Recording) else Path(item).name for item in given]
    return compare_entries(distinct([run.column for run in runs], names))


def diff(before: Run, after: Run) -> Difference:
    """The difference between the memory of two runs of changed code, at the peak of each. Needs no torch.

    Args:
        before: a recording or a profile, a summary, or a file with a recording or with the JSON of a summary. Of a
            summary only the categories are compared.
        after: the run of the changed code, given in the same ways.

    Raises:
        UsageError: a file does not exist.
        RecordingError: a file is not a recording, or one of another format version.
        NothingRecorded: one has no step, no backward or no model.
    """
    return difference(side_given(_recorded(before), "before"), side_given(_recorded(after), "after"))


def check(
    recording: Run,
    *,
    budgets: Mapping[str, str | int] | None = None,
    baseline: Run | None = None,
    allow: str | int = 0,
) -> CheckResult:
    """Check a run against budgets and a baseline, as ``ampmem check`` does. Needs no torch.

    Args:
        recording: a recording or a profile, a summary, or a file with a recording or with the JSON of a summary.
        budgets: limits by their keys, in bytes or as ``"20GiB"``; see ``docs/budgets.md`` for the keys.
            ``pyproject.toml`` is not read.
        baseline: the run to compare with, given in the same ways.
        allow: how much more than the baseline is allowed: bytes, ``"10MiB"`` or ``"1%"``.

    Raises:
        UsageError: a file does not exist, a budget is unknown, the baseline is of another device, or
            ``allow`` is given without one.
        RecordingError: a file is not a recording, or one of another format version.
        NothingRecorded: one has no step, no backward or no model.
    """
    limits, allowance = budgets_of({} if budgets is None else budgets), parse_allowance(allow, "allow")
    if baseline is None and allow != 0:
        raise UsageError("allow needs baseline")
    before = None if baseline is None else side_given(_recorded(baseline), "baseline")
    return check_run(run_given(_recorded(recording), "run"), limits, before, allowance)


def _recorded(run: Run) -> str | Path | Recording | Summary:
    return run.recording() if isinstance(run, Profile) else run


def ranks(*recordings: str | Path | Recording | Profile) -> Ranks:
    """Merge the recordings of one job's ranks, or their files, and find the worst rank. Needs no torch.

    Args:
        recordings: one for each rank, in any order; some may be missing.

    Raises:
        UsageError: no recording is given, a file does not exist, or they are not the ranks of one job in one precision.
        RecordingError: a file is not a recording, or one of another format version, and no other rank can be shown.
        NothingRecorded: none has a step, a backward or a model.
    """
    if not recordings:
        raise UsageError("nothing to merge: give at least one recording")
    jobs = merge_all(_runs(_with_recordings(recordings))).jobs
    if len(jobs) > 1:
        precisions = ", ".join(job.job.precision.name for job in jobs)
        raise UsageError(
            f"these jobs have several precisions ({precisions}): merge each precision separately, or compare() them"
        )
    return jobs[0]


def _with_recordings(items: Sequence[str | Path | Recording | Profile]) -> Sequence[str | Path | Recording]:
    """``items`` with each profile's recording in its place. Raises :class:`UsageError` for other objects."""
    recorded = map(_recorded, items)
    found = [item if isinstance(item, Recording) else _path(item) for item in recorded]
    paths = [item for item in found if not isinstance(item, Recording)]
    kept = without_journals(paths)
    return [item for item in found if isinstance(item, Recording) or item in kept]


def _path(given: object) -> Path:
    """``given`` as a path."""
    if not isinstance(given, str | PathLike):
        raise UsageError(f"give a recording, or the path of a file that holds one, not {type(given).__name__}")
    return Path(given)


def _runs(recordings: Sequence[str | Path | Recording]) -> list[RankRun]:
    files = iter(read_runs([Path(item) for item in recordings if not isinstance(item, Recording)]))
    return [rank_run_of(item, Path()) if isinstance(item, Recording) else next(files) for item in recordings]
