"""Changes that are alike in every layer, as one: ``blocks.*.mlp.up``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ampmem.analysis.difference.changes import GroupChange
from ampmem.names import of_all_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One change, or several of the same kind whose modules and names differ in numbers alone: those are ``*`` here.

    ``largest`` is the one of them that differs the most; bytes and counts are of all.
    """

    largest: GroupChange
    changes: tuple[GroupChange, ...]
    module: str | None
    name: str | None
    before: int
    after: int

    @property
    def grown(self) -> int:
        """Bytes after less those before."""
        return self.after - self.before


def folded(changes: Iterable[GroupChange]) -> tuple[Fold, ...]:
    """``changes``, each in one fold, the largest first."""
    found: dict[Hashable, list[GroupChange]] = {}
    for change in changes:
        found.setdefault(_alike(change), []).append(change)
    return tuple(sorted(map(_fold, found.values()), key=lambda fold: (-abs(fold.grown), -fold.grown)))


def _alike(change: GroupChange) -> Hashable:
    # What is new in some layers and has grown in others is two things to look at; what shrank is never hidden in it.
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
