"""The baseline of each run that is judged, and how it is written anew."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ampmem.analysis.budgets.run import OF_SUMMARY, is_same, of_summary, require_replaceable
from ampmem.analysis.difference.sides import Side, read_side
from ampmem.cli.checks.subjects import Subject
from ampmem.errors import AmpmemError, UsageError
from ampmem.output.files import open_output, replaced, sized
from ampmem.recording import rank_file
from ampmem.units import format_apart, format_peak

_JSON = ".json"


def baseline_of(path: Path, subject: Subject, subjects: Sequence[Subject]) -> Path:
    """The file in which the baseline of ``subject`` is; of one of several ranks that of the same rank.

    Raises :class:`UsageError` where one rank's file is to be that of several.
    """
    ranks = {each.run.summary.rank for each in subjects if each.run is not None}
    if subject.run is None or len(ranks) < 2:
        return path
    summary = subject.run.summary
    if path.exists() or path.suffix == _JSON:
        raise UsageError(
            f"--baseline {path} is one run, and several ranks are judged: give the job's name, such as main.ampmem, "
            f"beside which the ranks' files are, such as {rank_file(Path('main'), summary.rank, summary.world_size)}"
        )
    return rank_file(path, summary.rank, summary.world_size)


def read_baseline(path: Path) -> Side:
    """The baseline at ``path``. Raises :class:`UsageError` where there is none, or none that can be compared with."""
    if not path.exists():
        raise UsageError(f"the baseline {path} does not exist; --update-baseline makes it of this run")
    try:
        return read_side(path)
    except UsageError:
        raise
    except AmpmemError as error:
        raise UsageError(f"the baseline cannot be compared with: {error}") from error


def read_if_there(path: Path) -> Side | None:
    """The baseline that is to be written anew; ``None`` where there is none yet, or none that can be read."""
    try:
        return read_side(path) if path.exists() else None
    except AmpmemError:
        return None


def update(path: Path, subject: Subject) -> str:
    """Write the baseline of ``subject`` to ``path``, unless it is the same already; says what was done.

    Folders that are missing are made.

    Raises :class:`UsageError` where that cannot be written, or is another file than a baseline, and for a summary that
    is to become a recording.
    """
    assert subject.run is not None
    require_replaceable(path)
    side, before = subject.run.side, read_if_there(path)
    if before is not None and is_same(before, side):
        return f"{path} is as it was: nothing has changed"
    if path.suffix != _JSON and side.groups is None:
        raise UsageError(f"{subject.path} is a summary, of which no recording can be made; call the baseline main.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if path.suffix == _JSON:
        with open_output(path, force=True) as stream:
            stream.write(f"{side.summary.to_json()}\n")
    else:
        with replaced(path, force=True) as file:
            shutil.copyfile(subject.path, file)
    return f"wrote {sized(path)}{_changes(before, side)}"


def _changes(before: Side | None, after: Side) -> str:
    """``: peak 1.2 GiB, was 1.0 GiB``."""
    if before is None:
        return f": peak {format_peak(after.summary.whole.bytes)}"
    sizes = {key: (of_summary(before.summary, key), of_summary(after.summary, key)) for key in OF_SUMMARY}
    said = [_was(key, *pair) for key, pair in sizes.items() if pair[0] != pair[1]]
    return f": {'; '.join(said)}" if said else ": all sizes are as they were"


def _was(key: str, before: int, after: int) -> str:
    old, new = format_apart(before, after)
    return f"{key} {new}, was {old}"
