"""Which groups of one run are which of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ampmem.analysis.difference.frames import Functions, function_of, same_files
from ampmem.analysis.difference.groups import Group
from ampmem.analysis.difference.renames import Names, Renamed
from ampmem.analysis.timeline.categories import Category

_NAMED = frozenset(
    {
        Category.PARAMETERS,
        Category.UNTRAINED,
        Category.GRADIENTS,
        Category.OPTIMIZER_STATE,
        Category.MASTER_COPIES,
        Category.CAST_COPIES,
        Category.BUFFERS,
    }
)
"""Whose name says which tensor of the model it belongs to, whoever makes it; elsewhere it is an op's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Groups of two runs that are the same by what is known of them; of what only one run has, the other are none."""

    before: tuple[Group, ...]
    after: tuple[Group, ...]


class _Run:
    """What the groups of a run are matched by, in the words of the run after."""

    def __init__(self, functions: Functions, names: Names) -> None:
        self._functions, self._names = functions, names

    def name(self, group: Group) -> Hashable:
        """``None`` of what has no name that says which tensor it is."""
        return (group.category, self._names.of(group.name)) if group.name and group.category in _NAMED else None

    def functions(self, group: Group) -> Hashable:
        return *self._made(group), group.name, self._functions.of(group.stack)

    def own_function(self, group: Group) -> Hashable:
        return *self._made(group), group.name, self._functions.own(group.stack)

    def own_function_whoever_saved(self, group: Group) -> Hashable:
        return *self._made(group), self._functions.own(group.stack)

    def op(self, group: Group) -> Hashable:
        return self._made(group)

    def _made(self, group: Group) -> tuple[object, ...]:
        return group.category, self._names.of(group.module), group.op


_Places: TypeAlias = Mapping[Hashable, Sequence[int]]

_KEYS: tuple[tuple[Callable[[_Run, Group], Hashable], bool], ...] = (
    (_Run.name, True),
    (_Run.functions, False),
    (_Run.own_function, False),
    (_Run.own_function_whoever_saved, False),
    (_Run.op, False),
)
"""By what groups are matched, the surest first; whether what is named is, too: it is by its name, and by nothing else.

What a function makes that has another name now is the same by its module and its op, which both runs have.
"""


def match(before: Sequence[Group], after: Sequence[Group], renamed: Sequence[Renamed] = ()) -> list[Match]:
    """Every group of both in one match; ``renamed`` are the modules that have another name after."""
    files = same_files(_files(before), _files(after))
    old, new = _Run(Functions(files), Names(renamed)), _Run(Functions(), Names())
    left, right = list(before), list(after)
    found: list[Match] = []
    for key, named in _KEYS:
        mine, others = _by_key(left, key, old, named=named), _by_key(right, key, new, named=named)
        found += [Match(before=tuple(mine[each]), after=tuple(others[each])) for each in others if each in mine]
        left = _without(left, (mine[each] for each in mine if each in others))
        right = _without(right, (others[each] for each in others if each in mine))
    found += _alone(right, new, gone=False)
    return found + _alone(left, old, gone=True)


class Kin:
    """What of all that two runs allocated is the same, wherever it was alive: matched as :func:`match` does."""

    def __init__(self, before: Sequence[Group], after: Sequence[Group], renamed: Sequence[Renamed] = ()) -> None:
        files = same_files(_files(before), _files(after))
        self._old, self._new = _Run(Functions(files), Names(renamed)), _Run(Functions(), Names())
        self._before, self._after = before, after
        self._places: dict[Callable[[_Run, Group], Hashable], tuple[_Places, _Places]] = {}

    def of(self, group: Group, *, gone: bool) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Places in ``before`` and in ``after`` of what is the same as ``group``, the surest likeness first.

        ``group`` is one of the run before where it is ``gone``, and else of the run after.
        """
        run = self._old if gone else self._new
        named = run.name(group) is not None
        for key, of_named in _KEYS:
            if of_named == named:
                if key not in self._places:
                    self._places[key] = (
                        _places(self._before, key, self._old, named=named),
                        _places(self._after, key, self._new, named=named),
                    )
                old, new = self._places[key]
                yield old.get(key(run, group), ()), new.get(key(run, group), ())


def _places(groups: Sequence[Group], key: Callable[[_Run, Group], Hashable], run: _Run, *, named: bool) -> _Places:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        if (run.name(group) is not None) == named:
            found[key(run, group)].append(place)
    return found


def _files(groups: Iterable[Group]) -> set[str]:
    return {function_of(frame)[0] for stack in {group.stack for group in groups} for frame in stack}


def _by_key(
    groups: Iterable[Group], key: Callable[[_Run, Group], Hashable], run: _Run, *, named: bool
) -> dict[Hashable, list[Group]]:
    found: dict[Hashable, list[Group]] = defaultdict(list)
    for group in groups:
        if (run.name(group) is not None) == named:
            found[key(run, group)].append(group)
    return found


def _without(groups: Sequence[Group], taken: Iterable[Sequence[Group]]) -> list[Group]:
    gone = {id(group) for each in taken for group in each}
    return [group for group in groups if id(group) not in gone]


def _alone(groups: Sequence[Group], run: _Run, *, gone: bool) -> list[Match]:
    """What only one run has: of the same tensor, or from the same functions, in one."""
    found: dict[Hashable, list[Group]] = defaultdict(list)
    for group in groups:
        found[run.name(group) or run.functions(group)].append(group)
    return [Match(before=tuple(each) if gone else (), after=() if gone else tuple(each)) for each in found.values()]
