"""Modules that have another name in the other run, as far as their parameters show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ampmem.analysis.difference.groups import Group
from ampmem.analysis.modules import ROOT
from ampmem.analysis.timeline.categories import Category
from ampmem.names import StateName

_Form: TypeAlias = tuple[str | None, tuple[int, ...] | None]
"""Type and shape of a parameter."""
_Signature: TypeAlias = frozenset[tuple[str, _Form]]
"""What is below a module: of each parameter the rest of its name, and its form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """A module that is gone, and one that is new with parameters of the same names below it, types and shapes.

    The two are compared with each other, and so is all below them. ``None`` is the whole model: what was ``blocks.0``
    is ``module.blocks.0``.
    """

    before: str | None
    after: str | None
    parameters: int
    bytes: int


def renames(before: Iterable[Group], after: Iterable[Group]) -> tuple[Renamed, ...]:
    """The modules with other names, those with most parameters first.

    Where several are alike, such as the layers of a model, there have to be as many in both runs: they are paired in
    order.
    """
    old, new = _parameters(before), _parameters(after)
    gone, come = _subtrees(old, new), _subtrees(new, old)
    found: list[Renamed] = []
    left = set(old) - set(new)
    right = set(new) - set(old)
    for signature in sorted(gone.keys() & come.keys(), key=lambda each: (-len(each), _depth(gone[each][0]))):
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


class Names:
    """What modules and parameters of the run before are called in the run after."""

    def __init__(self, renamed: Sequence[Renamed] = ()) -> None:
        self._prefixes = {each.before or "": each.after or "" for each in renamed}

    def of(self, name: str | None) -> str | None:
        """``name`` as the run after has it; that of a piece of optimizer state, too."""
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
    """The modules all of whose parameters the other run does not have, in order, by what is below them."""
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


def _depth(prefix: str) -> int:
    return prefix.count(".") + 1 if prefix else 0
