"""The difference between two runs of changed code, by group of allocations (``ampmem.diff/1``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.difference.matching import Kin, Match, Renamed, RenamedNames, match, renames
from ampmem.analysis.difference.sides import Group, Moment, Side, makers_of
from ampmem.analysis.jsonable import Json, JsonDocument, OneOf, Signed, like, schema_of_printed
from ampmem.analysis.modules import ROOT
from ampmem.analysis.ops import user_frame
from ampmem.analysis.summary import PLACES, PeakPlace
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Column
from ampmem.names import of_all_layers
from ampmem.output import Shown
from ampmem.units import counted, format_peak
from ampmem.vocabulary import Precision, SourceKind

# The changes of groups of allocations.


class ChangeKind(StrEnum):
    """The kind of a change: whether a group of allocations is new, gone, larger or smaller."""

    NEW = "new"
    GONE = "gone"
    GREW = "grew"
    SHRANK = "shrank"


class WhichRun(StrEnum):
    """The run before the change of code, or the run after it."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The type and shape that all tensors of a group share; ``None`` where they differ or are unknown."""

    dtype: str | None
    shape: tuple[int, ...] | None


UNKNOWN = Tensor(dtype=None, shape=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """The bytes before and after of the allocations that share category, module, name, op and functions.

    ``None`` means unknown. The ``name`` of an activation is the op that saved it.
    """

    category: Category
    module: str | None = None
    name: str | None = None
    op: str | None = None
    source_line: str | None = None
    """The innermost frame of the stack that is the script's own: ``file:line function``."""
    stack: tuple[str, ...] = ()
    """The Python stack, outermost call first."""
    lines_of: WhichRun = WhichRun.AFTER
    """The run of ``source_line`` and ``stack``: the run after, unless the memory that differs is only in the run
    before."""
    before: int
    after: int
    count_before: int = 0
    count_after: int = 0
    tensor_before: Tensor = UNKNOWN
    tensor_after: Tensor = UNKNOWN

    @property
    def kind(self) -> ChangeKind:
        """Whether the group is new, gone, larger or smaller."""
        if not self.before:
            return ChangeKind.NEW
        if not self.after:
            return ChangeKind.GONE
        return ChangeKind.GREW if self.grown > 0 else ChangeKind.SHRANK

    @property
    def grown(self) -> int:
        """The bytes after less those before."""
        return self.after - self.before


def changes_between(before: Sequence[Group], after: Sequence[Group]) -> tuple[GroupChange, ...]:
    """The groups that grew or shrank between two instants, of one run or of two; the largest change first."""
    return changes_of(match(before, after))


def changes_of(matches: Iterable[Match]) -> tuple[GroupChange, ...]:
    """The groups that grew or shrank, the largest change first."""
    found = (_change(each) for each in matches if bytes_of(each.before) != bytes_of(each.after))
    return largest_first(found)


def largest_first(changes: Iterable[GroupChange]) -> tuple[GroupChange, ...]:
    """``changes`` in the order of display, the largest first; of equal ones growth comes first."""
    return tuple(sorted(changes, key=lambda change: (-abs(change.grown), -change.grown)))


def by_module(changes: Iterable[GroupChange]) -> tuple[GroupChange, ...]:
    """``changes`` summed up by category and module, to compare compiled code with code that is not compiled.

    Compiled code has other ops and functions, but the same modules, apart from ``_orig_mod`` in their names.
    """
    found: dict[tuple[Category, str | None], list[GroupChange]] = {}
    for change in changes:
        module = None if change.module is None else _WRAPPED.sub("", change.module).strip(".") or ROOT
        found.setdefault((change.category, module), []).append(change)
    summed = (_sum(category, module, mine) for (category, module), mine in found.items())
    return largest_first(each for each in summed if each.grown)


def _sum(category: Category, module: str | None, changes: Sequence[GroupChange]) -> GroupChange:
    return GroupChange(
        category=category,
        before=sum(each.before for each in changes),
        after=sum(each.after for each in changes),
        module=module,
        count_before=sum(each.count_before for each in changes),
        count_after=sum(each.count_after for each in changes),
    )


_WRAPPED = re.compile(r"(^|\.)_orig_mod(?=\.|$)")
"""A part of the path of a module in a model that ``torch.compile`` returned."""


def _change(pair: Match) -> GroupChange:
    shown, run = _what_differs(pair)
    named = (pair.after or pair.before)[0]
    return like(
        GroupChange,
        shown,
        category=named.category,
        source_line=user_frame(shown.stack),
        lines_of=run,
        before=bytes_of(pair.before),
        after=bytes_of(pair.after),
        count_before=sum(group.count for group in pair.before),
        count_after=sum(group.count for group in pair.after),
        tensor_before=_tensor(pair.before),
        tensor_after=_tensor(pair.after),
    )


def bytes_of(groups: Iterable[Group]) -> int:
    """The bytes of all ``groups``."""
    return sum(group.bytes for group in groups)


def _what_differs(pair: Match) -> tuple[Group, WhichRun]:
    """The largest group without an equal group in the other run, and its run: one function may have several lines."""
    old, new = pair.before, pair.after
    for lines in (True, False):
        old, new = _beside(old, new, lines=lines), _beside(new, old, lines=lines)
    # If every group has an equal one, the sides differ in number only: any group of the larger side shows that.
    shown, run = (new, WhichRun.AFTER) if new else (old, WhichRun.BEFORE)
    return max(shown, key=lambda group: group.bytes), run


def _beside(groups: Sequence[Group], others: Sequence[Group], *, lines: bool) -> tuple[Group, ...]:
    """The ``groups`` that have no equal group among ``others``; each of ``others`` equals one group only.

    Equal groups have the same op, type, shape, bytes and count; with ``lines`` the same stack, too.
    """

    def likeness(group: Group) -> Hashable:
        return group.stack if lines else (), group.op, group.dtype, group.shape, group.bytes, group.count

    there = Counter(map(likeness, others))
    kept = []
    for group in groups:
        if there[likeness(group)]:
            there[likeness(group)] -= 1
        else:
            kept.append(group)
    return tuple(kept)


def _tensor(groups: Sequence[Group]) -> Tensor:
    dtypes, shapes = {group.dtype for group in groups}, {group.shape for group in groups}
    dtype, shape = dtypes.pop() if len(dtypes) == 1 else None, shapes.pop() if len(shapes) == 1 else None
    return Tensor(dtype=dtype, shape=shape)


# Changes that are alike in every layer are folded into one: ``blocks.*.mlp.up``.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One change, or several of a kind whose modules and names differ in numbers only, shown as ``*``.

    ``largest`` is the change with the largest difference; bytes and counts are the sums.
    """

    largest: GroupChange
    changes: tuple[GroupChange, ...]
    module: str | None
    name: str | None
    before: int
    after: int

    @property
    def grown(self) -> int:
        """The bytes after less those before."""
        return self.after - self.before


def folded(changes: Iterable[GroupChange]) -> tuple[Fold, ...]:
    """``changes``, each in one fold, the largest fold first."""
    found: dict[Hashable, list[GroupChange]] = {}
    for change in changes:
        # New in some layers and larger in others are two things to look at, and a decrease must not hide inside an
        # increase.
        what = change.category, change.kind, change.op, change.source_line
        alike = what, _common([change.module], fold=True), _common([change.name], fold=True)
        found.setdefault(alike, []).append(change)
    return tuple(sorted(map(_fold, found.values()), key=lambda fold: (-abs(fold.grown), -fold.grown)))


def _common(names: Sequence[str | None], *, fold: bool = False) -> str | None:
    """The name that all ``names`` share: with ``*`` for the numbers if they differ, or to ``fold``."""
    name = names[0]
    return of_all_layers(name) if name is not None and (fold or len(set(names)) > 1) else name


def _fold(changes: list[GroupChange]) -> Fold:
    return Fold(
        largest=max(changes, key=lambda change: abs(change.grown)),
        changes=tuple(changes),
        module=_common([change.module for change in changes]),
        name=_common([change.name for change in changes]),
        before=sum(change.before for change in changes),
        after=sum(change.after for change in changes),
    )


# The difference, and the conditions that differ.


class ConditionKind(StrEnum):
    """A condition that may differ between two runs."""

    DEVICE = "device"
    PRECISION = "precision"
    BATCH_SIZE = "batch size"
    STEPS = "recorded steps"
    END = "end"
    ARGUMENTS = "arguments"
    RANK = "rank"
    WORLD_SIZE = "number of ranks"
    TORCH = "torch"
    AMPMEM = "ampmem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition that differs: then the code is not the only cause of a difference in memory."""

    what: ConditionKind
    before: str
    after: str


def conditions_of(before: Side, after: Side) -> tuple[Condition, ...]:
    """The conditions that differ; a condition that is unknown for one run does not count."""
    old, new = _circumstances(before), _circumstances(after)
    differing = (what for what in ConditionKind if what in old and what in new and old[what] != new[what])
    return tuple(Condition(what=what, before=old[what], after=new[what]) for what in differing)


def _circumstances(side: Side) -> dict[ConditionKind, str]:
    summary = side.summary
    last, oom = summary.steps[-1], summary.ended_by
    end = "whole" if last.finished else f"failed in step {last.index}"
    simulated = ", simulated" if summary.source == SourceKind.SIMULATED else ""
    found = {
        ConditionKind.DEVICE: f"{summary.device.name or summary.device.type}{simulated}",
        ConditionKind.STEPS: str(len(summary.steps)),
        ConditionKind.END: end if oom is None else f"out of memory in {oom.where}",
        ConditionKind.RANK: str(summary.rank),
        ConditionKind.WORLD_SIZE: str(summary.world_size),
        ConditionKind.TORCH: summary.torch,
        ConditionKind.AMPMEM: summary.ampmem,
    }
    if summary.source != SourceKind.SNAPSHOT or summary.precision.name != Precision.AS_IS:
        found[ConditionKind.PRECISION] = ", ".join(filter(None, (summary.precision.name, summary.precision.dtype)))
    if summary.last_step.batch_size is not None:
        found[ConditionKind.BATCH_SIZE] = str(summary.last_step.batch_size)
    if side.arguments is not None:
        found[ConditionKind.ARGUMENTS] = " ".join(side.arguments) or "none"
    return found


# Two runs of changed code: the bytes of each group of allocations in one and in the other (``ampmem.diff/1``).

SCHEMA = "ampmem.diff/1"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(JsonDocument, Shown):
    """The difference between two runs, at the peak of each or at the instant at which one category is largest."""

    schema: Annotated[str, OneOf((SCHEMA,))]
    label_before: str
    """The name of the run before the change."""
    label_after: str
    """The name of the run after the change."""
    category: Category | None
    """The compared category, at the instant at which it is largest; null for all categories at the peak."""
    before: int
    """Bytes requested before, at the compared instant, so without the rounding of blocks."""
    after: int
    """Bytes requested after, at the compared instant, so without the rounding of blocks."""
    moment_before: Moment | None
    """The compared instant before; null where not known."""
    moment_after: Moment | None
    """The compared instant after; null where not known."""
    categories_before: Breakdown
    """Bytes of each category at the peak before."""
    categories_after: Breakdown
    """Bytes of each category at the peak after."""
    conditions: tuple[Condition, ...]
    """The differences between the runs besides their code."""
    doubts: tuple[str, ...]
    """Why the numbers of one of the runs may be wrong; empty if nothing is wrong."""
    without_groups: tuple[str, ...]
    """The labels of runs known by a summary only, without groups: then the changes are of whole categories."""
    changes: tuple[GroupChange, ...]
    """All groups that grew or shrank, the largest change first; they add up to the difference."""
    renamed: tuple[Renamed, ...]
    """Modules that were compared under different names."""
    residual: Signed
    """Bytes of the difference that are in no change: 0 unless something is wrong."""
    allocated_before: int | None = None
    """The peak of allocated bytes before, with the rounding of blocks; null if the run has no such allocator, or one
    category is compared."""
    allocated_after: int | None = None
    """The peak of allocated bytes after, with the rounding of blocks; null likewise."""
    elsewhere_in_run: tuple[str, ...] = ()
    """A sentence for each run whose peak is outside of the recorded steps, which are compared."""

    @property
    def peaks(self) -> tuple[int, int]:
        """The two numbers called the peak, before and after: allocated where known, else requested."""
        before, after = self.allocated_before, self.allocated_after
        return self.before if before is None else before, self.after if after is None else after

    @property
    def grown(self) -> int:
        """The peak after less the peak before, in bytes."""
        before, after = self.peaks
        return after - before

    @property
    def rounding(self) -> int:
        """The part of :attr:`grown` that is rounding of blocks, which is in no change."""
        return self.grown - (self.after - self.before)

    @property
    def elsewhere(self) -> bool:
        """Whether the two instants are different ones of a step, as far as they are known."""
        old, new = self.moment_before, self.moment_after
        if old is None or new is None:
            return False
        before = old.phase, old.op, RenamedNames(self.renamed).of(old.module)
        return before != (new.phase, new.op, new.module)

    def _in_short(self) -> str:
        before, after = map(format_peak, self.peaks)
        sizes = f"{before} in {self.label_before}, {after} in {self.label_after}"
        return f"{self.category or 'peak'} {sizes}, {counted(len(self.changes), 'change')}"


def difference_schema() -> dict[str, Json]:
    """The JSON Schema of a :class:`Difference`."""
    return schema_of_printed(Difference, SCHEMA, "ampmem diff")


def difference(before: Side, after: Side, *, category: Category | None = None) -> Difference:
    """The difference from ``before`` to ``after``, for one ``category`` at the instant at which it is largest."""
    renamed = renames_between(before, after)
    old, new = before.held(category), after.held(category)
    if old is None or new is None:
        changes = _of_categories(before, after, category)
    else:
        changes = changes_of(match(old, new, renamed))
    grown, sides = after.total(category) - before.total(category), (before, after)
    allocated = [None if category is not None else side.summary.peak.allocated for side in sides]
    outside = [
        f"the peak of the whole run of {side.label} is {format_peak(whole.bytes)}, {PLACES[whole.where]}"
        for side in sides
        if category is None and (whole := side.summary.whole).where is not PeakPlace.STEP
    ]
    return Difference(
        schema=SCHEMA,
        label_before=before.label,
        label_after=after.label,
        category=category,
        before=before.total(category),
        after=after.total(category),
        moment_before=before.moment(category),
        moment_after=after.moment(category),
        categories_before=before.summary.peak.categories,
        categories_after=after.summary.peak.categories,
        conditions=conditions_of(before, after),
        doubts=tuple(doubt for side in sides for doubt in side.doubts()),
        without_groups=tuple(side.label for side in sides if side.groups is None),
        changes=changes,
        renamed=renamed,
        residual=grown - sum(change.grown for change in changes),
        allocated_before=allocated[0],
        allocated_after=allocated[1],
        elsewhere_in_run=tuple(outside),
    )


def renames_between(before: Side, after: Side) -> tuple[Renamed, ...]:
    """The modules that have another name in ``after``, if groups are known."""
    # All parameters are alive at the peak, whichever category is compared.
    return () if before.groups is None or after.groups is None else renames(before.groups.peak, after.groups.peak)


def _of_categories(before: Side, after: Side, category: Category | None) -> tuple[GroupChange, ...]:
    old, new = before.summary.peak.categories, after.summary.peak.categories
    if category is not None:
        old, new = {category: before.total(category)}, {category: after.total(category)}
    found = ((category, size, new[category]) for category, size in old.items())
    return largest_first(GroupChange(category=each, before=a, after=b) for each, a, b in found if a != b)


# The most bytes held at any instant of the steps tell growth from a mere shift to another instant.


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """The most bytes that the same code held at once in the recorded steps, and the most that it made in one step."""

    held: int
    made: int


class Histories:
    """The bytes that groups held over time, in two runs whose allocations are known."""

    def __init__(self, before: Side, after: Side) -> None:
        """Raises ``ValueError`` for a side that has a summary only."""
        if before.groups is None or after.groups is None:
            raise ValueError("a summary does not know single allocations")
        self._old, self._new = _History(before.groups.analysis), _History(after.groups.analysis)
        self._kin = Kin(self._old.makers, self._new.makers, renames_between(before, after))

    def explain(self, change: GroupChange) -> bool:
        """Whether ``change`` is larger because its code needs more, not because it is alive at another instant.

        Code that makes more bytes per step counts as needing more, whatever it holds at once: it may be a new line. It
        is matched by the surest likeness that both runs have; new code held nothing before.
        """
        before, after = _NOTHING, Most(held=change.after, made=change.after)
        maker = like(Group, change, dtype=None, shape=None, bytes=0, count=0)
        for old, new in self._kin.of(maker, gone=change.lines_of is WhichRun.BEFORE):
            if new:
                before, after = self._old.most(old), self._new.most(new)
            if before.held:
                break
        return 2 * max(after.held - before.held, after.made - before.made) > change.grown


_NOTHING = Most(held=0, made=0)


class _History:
    """All allocations of a run, by the code that made them."""

    def __init__(self, analysis: Analysis) -> None:
        self.makers, maker = makers_of(analysis)
        self._lifetimes = analysis.lifetimes
        self._rows = np.argsort(maker, kind="stable")
        self._starts = np.searchsorted(maker[self._rows], np.arange(len(self.makers) + 1))
        position = analysis.timeline.position
        self._spans = [(position(step.start_ns), position(step.end_ns)) for step in analysis.recording.steps]

    def most(self, makers: Sequence[int]) -> Most:
        """The most bytes that ``makers`` (indices into :attr:`makers`) held together, and made in one step."""
        if not makers:
            return _NOTHING
        mine = np.concatenate([self._rows[self._starts[maker] : self._starts[maker + 1]] for maker in makers])
        sizes, born, died = self._lifetimes.bytes[mine], self._lifetimes.born[mine], self._lifetimes.died[mine]
        freed = died != ALIVE
        # Their sum changes only at births and deaths of their own allocations, and no event is of two allocations.
        at = np.concatenate((born, died[freed])) + 1
        order = np.argsort(at)
        at, held = at[order], np.cumsum(np.concatenate((sizes, -sizes[freed]))[order])
        return Most(
            held=max(_largest(at, held, first, last) for first, last in self._spans),
            made=max(int(sizes[(born >= first) & (born < last)].sum()) for first, last in self._spans),
        )


def _largest(at: Column, held: Column, first: int, last: int) -> int:
    """The largest of ``held`` from ``first`` to ``last``; each value holds from its position in ``at`` on."""
    begin, end = np.searchsorted(at, [first, last], side="right")
    return max(int(held[begin - 1]) if begin else 0, int(held[begin:end].max(initial=0)))
