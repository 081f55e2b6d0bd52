"""One of two compared runs: how it is read, and the groups of allocations that are alive in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.jsonable import NotOfThisKind, from_json, parsed
from ampmem.analysis.ranks.jobs import read_runs
from ampmem.analysis.ranks.merge import merge_all
from ampmem.analysis.summary import SCHEMA, Summary, require_training, summary_of
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.timeline import PhaseName, largest_positions
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.events import Column, Recording
from ampmem.names import shape_of
from ampmem.recording import SUFFIX, rank_of, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """``count`` allocations that are equal in everything known about them; ``None`` means unknown.

    ``stack`` is ``file:line function``, outermost first. ``shape`` is the shape of each allocation, ``bytes`` the sum.
    """

    category: Category
    module: str | None
    name: str | None
    op: str | None
    stack: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instant of a run; ``op`` and ``module`` are those of the last alloc before it, if known."""

    step: int
    phase: PhaseName
    op: str | None
    module: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups at a run's peak, and those of each category at the instant at which it was largest.

    The bytes of ``peak`` add up to the run's peak, those of each entry of ``most`` to the summary's ``most``;
    ``moments`` has the instant of each. ``analysis`` has what was alive at all other instants.
    """

    peak: tuple[Group, ...]
    most: Mapping[Category, tuple[Group, ...]]
    moments: Mapping[Category, Moment]
    analysis: Analysis


def groups_of(analysis: Analysis) -> Groups:
    """The groups of a run."""
    most = largest_positions(analysis.timeline, analysis.recording.steps)
    return Groups(
        peak=groups_at(analysis, analysis.peak),
        most={category: groups_at(analysis, position, category) for category, position in most.items()},
        moments={category: _moment(analysis, position) for category, position in most.items()},
        analysis=analysis,
    )


def _moment(analysis: Analysis, position: int) -> Moment:
    steps = analysis.recording.steps
    step = [step for step in steps if analysis.timeline.position(step.start_ns) <= position][-1]
    phase, op, module = analysis.made_by(position, step)
    return Moment(step=step.index, phase=phase.name.lower(), op=op or None, module=module or None)


def groups_at(analysis: Analysis, position: int, category: Category | None = None) -> tuple[Group, ...]:
    """The groups alive at ``position``, or those of ``category`` among them; in order of birth."""
    mine = analysis.lifetimes.alive_at(position)
    return groups_among(analysis, mine if category is None else mine & analysis.classes.of(category))


def groups_among(analysis: Analysis, mine: Mask) -> tuple[Group, ...]:
    """The groups of the allocations in ``mine``, in order of birth."""
    lifetimes, tensors = analysis.lifetimes, analysis.tensors
    rows = np.flatnonzero(mine & (lifetimes.bytes > 0))
    if not len(rows):
        return ()
    texts, keys = analysis.recording.texts, np.stack([*_identities(analysis), tensors.dtype, tensors.shape])[:, rows]
    distinct, first, place = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    size = np.zeros(len(first), dtype=np.int64)
    np.add.at(size, place, lifetimes.bytes[rows])
    found = zip(distinct.T.tolist(), size.tolist(), np.bincount(place).tolist(), strict=True)
    stacks = {stack: _lines(texts[stack]) for stack in np.unique(keys[4]).tolist()}
    groups = [_group(key, stacks[key[4]], held, count, texts) for key, held, count in found]
    return tuple(groups[i] for i in np.argsort(first).tolist())


def makers_of(analysis: Analysis) -> tuple[tuple[Group, ...], Column]:
    """The makers of all allocations, as groups without types, shapes and bytes, and each allocation's maker."""
    columns = _identities(analysis)
    place = np.zeros(len(analysis.lifetimes), dtype=np.int64)
    for column in columns:  # one column after the other: numpy is slow at finding distinct rows of several columns
        place = np.unique(place * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1].reshape(-1)
    first = np.unique(place, return_index=True)[1]
    texts = analysis.recording.texts
    keys = np.stack(columns)[:, first].T.tolist()
    return tuple(_group([*key, 0, 0], _lines(texts[key[4]]), 0, 0, texts) for key in keys), place


def _identities(analysis: Analysis) -> tuple[Column, ...]:
    """For each allocation its category, module, name, op and stack."""
    lifetimes, classes = analysis.lifetimes, analysis.classes
    module = np.where(lifetimes.module != 0, lifetimes.module, classes.module)
    return classes.category, module, classes.name, lifetimes.op, lifetimes.stack


def _lines(stack: str) -> tuple[str, ...]:
    return tuple(line for line in stack.split("\n") if line)


def _group(key: list[int], stack: tuple[str, ...], size: int, count: int, texts: tuple[str, ...]) -> Group:
    category, module, name, op, _, dtype, shape = key
    return Group(
        category=CATEGORIES[category],
        module=texts[module] or None,
        name=texts[name] or None,
        op=texts[op] or None,
        stack=stack,
        dtype=texts[dtype] or None,
        shape=shape_of(texts[shape]),
        bytes=size,
        count=count,
    )


# One of the two runs that are compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A compared run with its ``label``; ``groups`` and ``arguments`` are ``None`` if only its summary is known."""

    label: str
    summary: Summary
    groups: Groups | None
    arguments: tuple[str, ...] | None = None
    """The arguments of the run's script."""
    file: Path | None = None
    """The file of the recording, if it is in a file."""

    def held(self, category: Category | None) -> tuple[Group, ...] | None:
        """The groups at the peak, or of ``category`` at its largest; ``None`` where not known."""
        if self.groups is None:
            return None
        return self.groups.peak if category is None else self.groups.most[category]

    def total(self, category: Category | None) -> int:
        """The bytes requested by the groups of :meth:`held`."""
        return self.summary.peak.bytes if category is None else self.summary.most[category]

    def moment(self, category: Category | None) -> Moment | None:
        """The instant of the groups of :meth:`held`; ``None`` where not known."""
        if category is not None:
            return None if self.groups is None else self.groups.moments[category]
        peak = self.summary.peak
        return Moment(step=peak.step, phase=peak.phase, op=peak.op, module=peak.module)

    def doubts(self) -> tuple[str, ...]:
        """Why the numbers of the run may be wrong."""
        breach, oom = self.summary.conservation.breach, self.summary.ended_by
        found = [] if breach is None else [f"{self.label}: {breach}"]
        if oom is not None:
            found.append(f"{self.label} ran out of memory in {oom.where}: its numbers are those of the part before")
        return tuple(found)


# A side of a difference, read from a recording or from a file with a recording or the JSON of a summary.

_SPACE = b" \t\r\n\xef\xbb\xbf"


def side_of(recording: Recording, label: str, *, file: Path | None = None) -> Side:
    """``recording`` as a side; ``file`` is its file, if it has one.

    Raises :class:`~ampmem.errors.NothingRecorded` and :class:`~ampmem.errors.RecordingError` as
    :func:`~ampmem.analysis.summary.summarize` does.
    """
    require_training(recording)
    analysis = analyse(recording)
    arguments = recording.run.arguments
    return Side(label=label, summary=summary_of(analysis), groups=groups_of(analysis), arguments=arguments, file=file)


def side_given(given: object, label: str) -> Side:
    """The side in a recording, a summary, or a file with one of them; ``label`` names one that is not in a file.

    Raises :class:`~ampmem.errors.UsageError` for anything else, and what :func:`side_of` and :func:`read_side` raise.
    """
    if isinstance(given, Recording):
        return side_of(given, label)
    if isinstance(given, Summary):
        return Side(label=label, summary=given, groups=None)
    return read_side(path_given(given))


def path_given(given: object) -> Path:
    """``given`` as a path. Raises :class:`~ampmem.errors.UsageError` if it is not a path."""
    if isinstance(given, str | PathLike):
        return Path(given)
    raise UsageError(
        f"{type(given).__name__} is not a run: give a recording, a file with one, or a summary, such as "
        "profile.recording()"
    )


def read_side(path: Path) -> Side:
    """The run at ``path`` as a side: a recording, the JSON of a summary, or the worst rank of a job.

    A job has a file for each rank; ``path`` is then the name that a single process would have used. Raises
    :class:`~ampmem.errors.UsageError` where there is no file, and what :func:`side_of` raises.
    """
    file, label = path, str(path)
    if not path.exists() and (ranks := _ranks_of(path)):
        file, rank = _worst(ranks)
        label = f"{path}, rank {rank}"
    elif is_json(path):
        return _summed_up(path)
    try:
        return side_of(read(file), label, file=file)
    except NothingRecorded as error:
        raise NothingRecorded(f"{file}: {error}") from error


def _ranks_of(job: Path) -> list[Path]:
    """The files of the ranks of ``job``; empty if it has none."""
    stem = job.name.removesuffix(SUFFIX)
    try:
        beside = [path for path in job.parent.iterdir() if path.name.startswith(f"{stem}.rank")]
    except OSError:
        return []
    named = {path: found for path in sorted(beside) if (found := rank_of(path)) is not None}
    return [path for path, found in named.items() if found.job.name in (job.name, f"{job.name}{SUFFIX}")]


def _worst(ranks: list[Path]) -> tuple[Path, int]:
    """The file of the rank with the largest peak. Raises :class:`UsageError` if the files are not of one job."""
    runs = read_runs(ranks)
    jobs = merge_all(runs).jobs
    if len(jobs) > 1:
        raise UsageError(
            f"{ranks[0]} and the ranks beside it are from jobs in several precisions; name the file of one rank"
        )
    peaks = {(run.path, run.rank): run.summary.whole.bytes for run in runs if run.summary is not None}
    return max(peaks, key=lambda run: peaks[run])


def is_json(path: Path) -> bool:
    """Whether the file at ``path`` begins like JSON, not like a recording."""
    try:
        with path.open("rb") as stream:
            return stream.read(64).lstrip(_SPACE)[:1] in (b"{", b"[")
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A kind of JSON that a command prints: its schema, its dataclass, its name in messages, and the command."""

    schema: str
    of: type
    what: str
    command: str


PRINTED_SUMMARY = Printed(schema=SCHEMA, of=Summary, what="a summary", command="ampmem show --json")


def printed_in(path: Path, kinds: Sequence[Printed]) -> list[Any]:
    """The objects in the JSON file at ``path``, one or an array of them, each of one of ``kinds``.

    Raises :class:`RecordingError` for other JSON.
    """
    shown = kinds[0]
    found: list[Any] = []
    try:
        value = parsed(path.read_text(encoding="utf-8-sig"))
        for each in value if isinstance(value, list) else [value]:
            schema = each.get("schema") if isinstance(each, dict) else None
            named = [kind for kind in kinds if kind.schema == schema]
            if not named and len(kinds) > 1:
                commands = ", ".join(kind.command for kind in kinds)
                raise RecordingError(f"{path} is JSON, but not from one of these commands: {commands}")
            shown = (named or kinds)[0]
            found.append(from_json(shown.of, each))
        if not found:
            raise NotOfThisKind("it is an empty array")
    except ValueError as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise RecordingError(
            f"{path} is not {shown.what} of this version of ampmem ({why:.200}); write it again with {shown.command}"
        ) from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    return found


def _summed_up(path: Path) -> Side:
    """The side of a summary's JSON. Raises :class:`RecordingError` for other JSON."""
    found = printed_in(path, [PRINTED_SUMMARY])
    if len(found) != 1:
        raise UsageError(f"{path} has {len(found)} summaries, but only one can be compared; write each to its own file")
    return Side(label=str(path), summary=found[0], groups=None)
