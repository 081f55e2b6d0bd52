"""Matches the groups of two runs, although lines, names of modules and the folder of the checkout may differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

from ampmem.analysis.difference.sides import Group
from ampmem.analysis.modules import ROOT
from ampmem.analysis.ops import user_frame
from ampmem.analysis.timeline.categories import Category
from ampmem.names import StateName

_FRAME = re.compile(r"(.*?):\d+ (.*)", re.DOTALL)

Function: TypeAlias = tuple[str, str]
"""A file and a function in it."""


@lru_cache(100_000)
def function_of(frame: str) -> Function:
    """``file:line function`` without the line; other texts stay as they are."""
    found = _FRAME.fullmatch(frame)
    return (found[1], found[2]) if found is not None else ("", frame)


class Functions:
    """The functions in stacks, with the files renamed by ``files``."""

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        self._files = files or {}
        self.of, self.own = cache(self._of), cache(self._innermost)

    def _of(self, stack: tuple[str, ...]) -> tuple[Function, ...]:
        """The functions of ``stack``, outermost first."""
        return tuple(map(self._function, stack))

    def _innermost(self, stack: tuple[str, ...]) -> Function | None:
        """The innermost function of the script's own; ``None`` for an empty stack."""
        frame = user_frame(stack)
        return None if frame is None else self._function(frame)

    def _function(self, frame: str) -> Function:
        file, function = function_of(frame)
        return self._files.get(file, file), function


def same_files(before: Iterable[str], after: Iterable[str]) -> dict[str, str]:
    """The names in ``after`` of the files of ``before`` that have another name there.

    A file in both is the same. Two other files are the same if their paths end alike and no third path does:
    ``/a/repo/net.py`` is ``/b/repo/net.py``, but neither of ``/b/repo/one/net.py`` and ``/b/repo/two/net.py``.
    """
    first, second = set(before), set(after)
    old, new = first - second, second - first
    found: dict[str, str] = {}
    longest = max((file.count("/") + 1 for file in old), default=0)
    for length in range(longest, 0, -1):
        tails = _by_tail(new, length)
        for tail, files in _by_tail(old, length).items():
            others = tails.get(tail, [])
            if len(files) == 1 and len(others) == 1:
                found[files[0]] = others[0]
        old.difference_update(found)
        new.difference_update(found.values())
    return found


def _by_tail(files: Iterable[str], length: int) -> dict[Sequence[str], list[str]]:
    tails: dict[Sequence[str], list[str]] = defaultdict(list)
    for file in files:
        parts = tuple(file.split("/"))
        if len(parts) >= length:
            tails[parts[-length:]].append(file)
    return tails


# Modules that have another name in the other run, recognised by their parameters.

_Form: TypeAlias = tuple[str | None, tuple[int, ...] | None]
"""The type and shape of a parameter."""
_Signature: TypeAlias = frozenset[tuple[str, _Form]]
"""The parameters below a module: for each the rest of its name, and its type and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """A module under two names: gone from one run, and new in the other with the same parameters below it.

    Both, and everything below them, are compared with each other. ``None`` is the whole model: what was ``blocks.0`` is
    ``module.blocks.0``.
    """

    before: str | None
    after: str | None
    parameters: int
    bytes: int


def renames(before: Iterable[Group], after: Iterable[Group]) -> tuple[Renamed, ...]:
    """The renamed modules, the largest number of parameters first.

    Several equal modules, such as layers, are paired in order if both runs have the same number of them.
    """
    old, new = _parameters(before), _parameters(after)
    gone, come = _subtrees(old, new), _subtrees(new, old)
    found: list[Renamed] = []
    left = set(old) - set(new)
    right = set(new) - set(old)

    def order(signature: _Signature) -> tuple[int, int]:
        outermost = gone[signature][0]
        return -len(signature), outermost.count(".") + 1 if outermost else 0

    for signature in sorted(gone.keys() & come.keys(), key=order):
        olds = [prefix for prefix in gone[signature] if _names(prefix, signature) <= left]
        news = [prefix for prefix in come[signature] if _names(prefix, signature) <= right]
        if len(olds) != len(news):
            continue
        for mine, other in zip(olds, news, strict=True):
            left -= _names(mine, signature)
            right -= _names(other, signature)
            size = sum(new[name].bytes for name in _names(other, signature))
            found.append(Renamed(before=mine or None, after=other or None, parameters=len(signature), bytes=size))
    return tuple(found)


class RenamedNames:
    """The names in the run after for modules and parameters of the run before."""

    def __init__(self, renamed: Sequence[Renamed] = ()) -> None:
        self._prefixes = {each.before or "": each.after or "" for each in renamed}

    def of(self, name: str | None) -> str | None:
        """The name in the run after for ``name``, also for the name of optimizer state."""
        if not self._prefixes or name is None:
            return name
        state = StateName.read(name)
        if state.parameter:
            return str(StateName(state=state.state, parameter=self._of(state.parameter)))
        return self._of(name)

    def _of(self, name: str) -> str:
        parts = [] if name == ROOT else name.split(".")
        for length in range(len(parts), -1, -1):
            prefix = ".".join(parts[:length])
            if prefix in self._prefixes:
                return ".".join([*filter(None, [self._prefixes[prefix]]), *parts[length:]]) or ROOT
        return name


def _parameters(groups: Iterable[Group]) -> dict[str, Group]:
    return {group.name: group for group in groups if group.category is Category.PARAMETERS and group.name is not None}


def _subtrees(parameters: Mapping[str, Group], others: Mapping[str, Group]) -> dict[_Signature, list[str]]:
    """The modules whose parameters are all missing in the other run, in order, by their signature."""
    below: dict[str, set[tuple[str, _Form]]] = defaultdict(set)
    kept: set[str] = set()
    for name, group in parameters.items():
        parts = name.split(".")
        for length in range(len(parts)):
            prefix = ".".join(parts[:length])
            if name in others:
                kept.add(prefix)
            else:
                below[prefix].add((".".join(parts[length:]), (group.dtype, group.shape)))
    found: dict[_Signature, list[str]] = defaultdict(list)
    for prefix, parts_below in below.items():
        if prefix not in kept:
            found[frozenset(parts_below)].append(prefix)
    return found


def _names(prefix: str, signature: _Signature) -> set[str]:
    return {f"{prefix}.{rest}" if prefix else rest for rest, _ in signature}


# Which groups of the two runs are the same.

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
"""Categories whose name says which tensor of the model it is; in other categories the name is an op's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Groups of two runs that are the same, as far as known; a side is empty if only one run has them."""

    before: tuple[Group, ...]
    after: tuple[Group, ...]


class _Keys:
    """The keys by which the groups of a run are matched, with the names of the run after."""

    def __init__(self, functions: Functions, names: RenamedNames) -> None:
        self._functions, self._names = functions, names

    def name(self, group: Group) -> Hashable:
        """The name of a group; ``None`` if the name does not say which tensor it is."""
        return (group.category, self._names.of(group.name)) if group.name and group.category in _NAMED else None

    def functions(self, group: Group) -> Hashable:
        """All functions in the stack, the op that saved the group, its op and its module."""
        return *self.module_and_op(group), group.name, self._functions.of(group.stack)

    def own_function(self, group: Group) -> Hashable:
        """As :meth:`functions`, with only the script's innermost function."""
        return *self.module_and_op(group), group.name, self._functions.own(group.stack)

    def own_function_whoever_saved(self, group: Group) -> Hashable:
        """As :meth:`own_function`, without the op that saved the group."""
        return *self.module_and_op(group), self._functions.own(group.stack)

    def module_and_op(self, group: Group) -> tuple[object, ...]:
        """The category, the module and the op that made the group."""
        return group.category, self._names.of(group.module), group.op


_Places: TypeAlias = Mapping[Hashable, Sequence[int]]

_KEYS: tuple[tuple[Callable[[_Keys, Group], Hashable], bool], ...] = (
    (_Keys.name, True),
    (_Keys.functions, False),
    (_Keys.own_function, False),
    (_Keys.own_function_whoever_saved, False),
    (_Keys.module_and_op, False),
)
"""The keys by which groups are matched, the surest first, and whether named groups use them too.

A named group is matched by its name alone. A renamed function's results are matched by module and op, which both runs
have.
"""


def match(before: Sequence[Group], after: Sequence[Group], renamed: Sequence[Renamed] = ()) -> list[Match]:
    """The matches; every group of both runs is in exactly one. ``renamed`` are modules with another name after."""
    old, new = _runs(before, after, renamed)
    left, right = list(before), list(after)
    found: list[Match] = []
    for key, named in _KEYS:
        mine, others = _places(left, key, old, named=named), _places(right, key, new, named=named)
        both = [each for each in others if each in mine]
        for each in both:
            before_it, after_it = (left[place] for place in mine[each]), (right[place] for place in others[each])
            found.append(Match(before=tuple(before_it), after=tuple(after_it)))
        gone, come = ({place for each in both for place in places[each]} for places in (mine, others))
        left = [group for place, group in enumerate(left) if place not in gone]
        right = [group for place, group in enumerate(right) if place not in come]
    found += _alone(right, new, gone=False)
    return found + _alone(left, old, gone=True)


class Kin:
    """Which allocations of two runs are the same, whenever they were alive: matched as :func:`match` does."""

    def __init__(self, before: Sequence[Group], after: Sequence[Group], renamed: Sequence[Renamed] = ()) -> None:
        self._old, self._new = _runs(before, after, renamed)
        self._before, self._after = before, after
        self._places: dict[Callable[[_Keys, Group], Hashable], tuple[_Places, _Places]] = {}

    def of(self, group: Group, *, gone: bool) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """The indices in ``before`` and ``after`` of groups like ``group``, by each of :data:`_KEYS`, surest first.

        ``group`` is from the run before if it is ``gone``, else from the run after.
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


def _places(groups: Sequence[Group], key: Callable[[_Keys, Group], Hashable], run: _Keys, *, named: bool) -> _Places:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        if (run.name(group) is not None) == named:
            found[key(run, group)].append(place)
    return found


def _runs(before: Sequence[Group], after: Sequence[Group], renamed: Sequence[Renamed]) -> tuple[_Keys, _Keys]:
    """The keys of both runs, in which files and modules have the names of the run after."""
    stacks = ({group.stack for group in groups} for groups in (before, after))
    old, new = ({function_of(frame)[0] for stack in each for frame in stack} for each in stacks)
    return _Keys(Functions(same_files(old, new)), RenamedNames(renamed)), _Keys(Functions(), RenamedNames())


def _alone(groups: Sequence[Group], run: _Keys, *, gone: bool) -> list[Match]:
    """The matches with one empty side: the ``groups`` of one run only, joined by tensor or by functions."""
    found: dict[Hashable, list[Group]] = defaultdict(list)
    for group in groups:
        found[run.name(group) or run.functions(group)].append(group)
    return [Match(before=tuple(each) if gone else (), after=() if gone else tuple(each)) for each in found.values()]
