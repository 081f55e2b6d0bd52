"""One rank's recording, read and summed up: what the merged view is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ampmem.analysis.comparison.compare import Entry, entry_of
from ampmem.analysis.ranks.script import script_of
from ampmem.analysis.summary import Summary
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.events import ArmRecord, Recording, RunRecord
from ampmem.recording import rank_of, read


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """A recording in a file, which is that of ``rank`` of ``world_size``, and what it comes to.

    ``entry`` is ``None`` where there is nothing to sum up; ``problem`` then says why. ``run`` and ``arm`` are ``None``
    where the file cannot be read at all, and its name alone says which rank it is of. ``notes`` are all of the
    recorder's remarks. ``ended`` is as :attr:`~ampmem.events.Recording.ended`.
    """

    path: Path
    rank: int
    world_size: int
    run: RunRecord | None = None
    arm: ArmRecord | None = None
    entry: Entry | None = None
    problem: RecordingError | NothingRecorded | None = None
    notes: tuple[str, ...] = ()
    ended: bool | None = None

    @property
    def summary(self) -> Summary | None:
        """What it comes to; ``None`` where there is nothing to sum up."""
        return None if self.entry is None else self.entry.summary

    @property
    def column(self) -> Entry:
        """The recording as a column of a comparison. Raises :attr:`problem` where there is nothing to sum up."""
        if self.entry is None:
            assert self.problem is not None
            raise self.problem
        return self.entry


def rank_run(path: Path) -> RankRun:
    """The recording at ``path``, summed up.

    Raises :class:`~ampmem.errors.UsageError` where there is no file, and :class:`RecordingError` for one that cannot be
    read and whose name does not say which rank it is of.
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
    """``recording``, which is in ``path``, summed up; the path is empty where it is in no file."""
    read = RankRun(
        path=path,
        rank=recording.run.rank,
        world_size=recording.run.world_size,
        run=recording.run,
        arm=recording.arm,
        notes=recording.notes,
        ended=recording.ended,
    )
    try:
        entry = entry_of(recording)
    except (NothingRecorded, RecordingError) as error:
        return replace(read, problem=type(error)(f"{path}: {error}"))
    return replace(read, entry=replace(entry, script=script_of(recording.run)))
