"""Which earlier cells a cell needs: all that bind the names that it reads, itself or through others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ampmem.integrations.notebook.names import Function, Names, names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The numbers of the cells that bind what is read, in order; ``missing`` are names that none of them binds."""

    cells: tuple[int, ...]
    missing: tuple[str, ...]


def needed(code: str, before: Mapping[int, str], known: Collection[str]) -> Needed:
    """Which of the cells ``before`` (code by number, in order) bind what ``code`` reads, or what these cells read.

    It is every cell that binds such a name and not only the last, whose code may be in a branch that is not taken, or
    in a function. Of the names that there are in the notebook (``known``), ``missing`` are those that no cell binds.
    Raises ``SyntaxError`` for ``code`` that is no Python.
    """
    cells = _read(before)
    bound = _bound(cells)
    wanted = set(names_of(code).needs)
    chosen: set[int] = set()
    while found := {number for number in cells if number not in chosen and _is_wanted(number, cells, bound, wanted)}:
        chosen |= found
        wanted |= {name for number in found for name in cells[number].reads}
    there = {name for number in chosen for name in bound[number]}
    missing = set() if any(cells[number].star for number in chosen) else wanted & set(known) - there
    return Needed(cells=tuple(sorted(chosen)), missing=tuple(sorted(missing)))


def untold(code: str, before: Mapping[int, str], chosen: Collection[int]) -> dict[int, tuple[str, ...]]:
    """What the cells ``before`` may do besides, to what ``code`` and the ``chosen`` of them read; by their numbers.

    These are names whose values a cell that is not chosen may change in place, and what may do anything and is left
    out: ``exec`` and the like of such a cell, the magics of every one.
    """
    cells = _read(before)
    wanted = set(names_of(code).needs).union(*(cells[number].reads for number in chosen if number in cells))
    found = {}
    for number, names in cells.items():
        if number in chosen:
            found[number] = tuple(each for each in names.hidden if each[0] in "%!")
        else:
            found[number] = (*sorted(names.changes & wanted), *names.hidden)
    return {number: said for number, said in found.items() if said}


def _is_wanted(number: int, cells: Mapping[int, Names], bound: Mapping[int, set[str]], wanted: set[str]) -> bool:
    return bool(bound[number] & wanted or (cells[number].star and wanted))


def _bound(cells: Mapping[int, Names]) -> dict[int, set[str]]:
    """What each cell binds, also through functions of other cells that it may call."""
    functions: dict[str, list[Function]] = {}
    for names in cells.values():
        for name, function in names.functions.items():
            functions.setdefault(name, []).append(function)
    return {number: set(names.binds) | _through(names, functions) for number, names in cells.items()}


def _through(names: Names, functions: Mapping[str, list[Function]]) -> set[str]:
    """What the functions bind that a cell may call when it runs, and those that they call."""
    pending, seen, bound = set(names.changes), set[str](), set[str]()
    while pending:
        name = pending.pop()
        seen.add(name)
        for function in functions.get(name, ()):
            bound |= function.binds
            pending |= function.reads - seen
    return bound


def _read(cells: Mapping[int, str]) -> dict[int, Names]:
    return dict(_readable(cells))


def _readable(cells: Mapping[int, str]) -> Iterable[tuple[int, Names]]:
    for number, code in cells.items():
        try:
            yield number, names_of(code)
        except SyntaxError:  # it never ran
            continue
