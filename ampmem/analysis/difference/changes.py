"""What became of each group of allocations; changes that are alike in every layer are one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from ampmem.analysis.difference.matching import Match, match
from ampmem.analysis.difference.sides import Group
from ampmem.analysis.jsonable import like
from ampmem.analysis.modules import ROOT
from ampmem.analysis.ops import user_frame
from ampmem.analysis.timeline.categories import Category
from ampmem.names import of_all_layers

_Likeness: TypeAlias = Callable[[Group], Hashable]


class ChangeKind(StrEnum):
    """What became of a group of allocations."""

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
    module: str | None
    name: str | None
    op: str | None
    source_line: str | None
    """The innermost frame of the stack that is the script's own: ``file:line function``."""
    stack: tuple[str, ...]
    """The Python stack, outermost call first."""
    lines_of: WhichRun = WhichRun.AFTER
    """The run of ``source_line`` and ``stack``: the run after, unless the memory that differs is only in the run
    before."""
    before: int
    after: int
    count_before: int
    count_after: int
    tensor_before: Tensor = UNKNOWN
    tensor_after: Tensor = UNKNOWN

    @property
    def kind(self) -> ChangeKind:
        """What became of the group."""
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
    """The groups that grew or shrank between two instants of one run or two, the largest change first."""
    return changes_of(match(before, after))


def changes_of(matches: Iterable[Match]) -> tuple[GroupChange, ...]:
    """The groups that grew or shrank, the largest change first."""
    found = (_change(each) for each in matches if bytes_of(each.before) != bytes_of(each.after))
    return largest_first(found)


def largest_first(changes: Iterable[GroupChange]) -> tuple[GroupChange, ...]:
    """``changes`` in the order of display, the largest first; of equal ones growth comes first."""
    return tuple(sorted(changes, key=lambda change: (-abs(change.grown), -change.grown)))


def of_category(category: Category, before: int, after: int) -> GroupChange:
    """The change of a whole category, if its groups are unknown."""
    return GroupChange(
        category=category,
        module=None,
        name=None,
        op=None,
        source_line=None,
        stack=(),
        before=before,
        after=after,
        count_before=0,
        count_after=0,
    )


def by_module(changes: Iterable[GroupChange]) -> tuple[GroupChange, ...]:
    """``changes`` summed up by category and module: compiled code has other ops and functions, and names its model."""
    found: dict[tuple[Category, str | None], list[GroupChange]] = {}
    for change in changes:
        module = None if change.module is None else _WRAPPED.sub("", change.module).strip(".") or ROOT
        found.setdefault((change.category, module), []).append(change)
    summed = (_sum(category, module, mine) for (category, module), mine in found.items())
    return largest_first(each for each in summed if each.grown)


def _sum(category: Category, module: str | None, changes: Sequence[GroupChange]) -> GroupChange:
    return replace(
        of_category(category, sum(each.before for each in changes), sum(each.after for each in changes)),
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
    """The largest group that is not the same in the other run, as one function may allocate in several lines."""
    old, new = pair.before, pair.after
    for likeness in (_with_lines, _without_lines):
        old, new = _beside(old, new, likeness), _beside(new, old, likeness)
    # If every group has its like, the sides differ in number only: any group of the larger side shows that.
    shown, run = (new, WhichRun.AFTER) if new else (old, WhichRun.BEFORE)
    return max(shown, key=lambda group: group.bytes), run


def _with_lines(group: Group) -> Hashable:
    return group.stack, group.op, group.dtype, group.shape, group.bytes, group.count


def _without_lines(group: Group) -> Hashable:
    return group.op, group.dtype, group.shape, group.bytes, group.count


def _beside(groups: Sequence[Group], others: Sequence[Group], likeness: _Likeness) -> tuple[Group, ...]:
    """The ``groups`` that have no like among ``others``; each of ``others`` is the like of one group only."""
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
    return Tensor(
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        shape=shapes.pop() if len(shapes) == 1 else None,
    )


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
        found.setdefault(_alike(change), []).append(change)
    return tuple(sorted(map(_fold, found.values()), key=lambda fold: (-abs(fold.grown), -fold.grown)))


def _alike(change: GroupChange) -> Hashable:
    # New in some layers and larger in others are two things to look at, and a decrease must not hide inside an
    # increase.
    what = change.category, change.kind, change.op, change.source_line
    return what, _pattern(change.module), _pattern(change.name)


def _pattern(name: str | None) -> str | None:
    return None if name is None else of_all_layers(name)


def _fold(changes: list[GroupChange]) -> Fold:
    largest = max(changes, key=lambda change: abs(change.grown))
    modules, names = {change.module for change in changes}, {change.name for change in changes}
    return Fold(
        largest=largest,
        changes=tuple(changes),
        module=largest.module if len(modules) == 1 else _pattern(largest.module),
        name=largest.name if len(names) == 1 else _pattern(largest.name),
        before=sum(change.before for change in changes),
        after=sum(change.after for change in changes),
    )
