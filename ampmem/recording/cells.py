"""From the cells of a row to a typed record: each is checked once, and what its field's type does not admit is refused.

The types of the records' fields say what a cell may hold, :mod:`ampmem.recording.bounds` how much of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ampmem.recording.bounds import DIMENSIONS, INT64, ITEMS, NAME, STATE, TEXT, integers_of

_RecordT = TypeVar("_RecordT")

_Check = Callable[[object], Any]
"""Takes a cell, returns the field's value, or raises ``ValueError``."""

_LENGTHS = {"segments": STATE, **dict.fromkeys(("message", "stack", "script", "settings", "arguments"), TEXT)}
"""Characters of the fields of that name; all others are names."""


def record_of(kind: type[_RecordT], row: Mapping[str, object]) -> _RecordT:
    """``row`` as a record: one cell for each field, but for fields with a default, which older files lack.

    A list or a mapping may be there as JSON text, and so may a number that is none, ``NaN``.
    Raises ``ValueError`` for a row that is no such record.
    """
    checks, needed = _checks_of(cast(Hashable, kind))
    unknown, missing = row.keys() - checks.keys(), needed - row.keys()
    if unknown or missing:
        raise ValueError(
            f"{_table(kind)} has no {', '.join(sorted(missing))}" if missing else f"{_table(kind)} has more"
        )
    values = {}
    for name, cell in row.items():
        try:
            values[name] = checks[name](cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_table(kind)}.{name} holds {_short(cell)}: {error}") from error
    return kind(**values)


def text(cell: object, length: int = TEXT) -> str:
    """A text of at most ``length`` characters."""
    if not isinstance(cell, str):
        raise ValueError("expected text")
    if len(cell) > length:
        raise ValueError(f"it has more than {length} characters")
    return cell


def integer(cell: object, bounds: tuple[int, int] = INT64) -> int:
    """A whole number within ``bounds``."""
    if type(cell) is not int or not bounds[0] <= cell <= bounds[1]:
        raise ValueError(f"expected a whole number from {bounds[0]} to {bounds[1]}")
    return cell


def parsed(cell: object) -> object:
    """What the JSON in ``cell`` says. Raises ``ValueError`` for what is none, or too long or deep."""
    try:
        return json.loads(text(cell, STATE))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@cache
def _checks_of(kind: Any) -> tuple[dict[str, _Check], frozenset[str]]:
    """The check of each field, and the fields that have to be there."""
    hints = get_type_hints(kind)
    needed = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    return {item.name: _check_of(item.name, hints[item.name]) for item in fields(kind)}, frozenset(needed)


def _check_of(name: str, hint: Any) -> _Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType and len(arguments) == 2 and arguments[1] is type(None):
        inner = _check_of(name, arguments[0])
        return lambda cell: None if cell is None else inner(cell)
    if origin is UnionType:
        return _setting
    if origin is tuple:
        return _list_of(_check_of(name, arguments[0]), DIMENSIONS if arguments[0] is int else ITEMS)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_of(_check_of(name, arguments[1]))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda cell: hint(text(cell, NAME))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda cell: record_of(hint, _mapping(cell))
    return _plain_check_of(name, hint)


def _plain_check_of(name: str, hint: Any) -> _Check:
    if hint is bool:
        return _flag
    if hint is int:
        bounds = integers_of(name)
        return lambda cell: integer(cell, bounds)
    if hint is float:
        return _number
    if hint is str:
        length = _LENGTHS.get(name, NAME)
        return lambda cell: text(cell, length)
    raise TypeError(f"no cell can hold {hint}")


def _list_of(check: _Check, most: int) -> _Check:
    def checked(cell: object) -> tuple[Any, ...]:
        items = parsed(cell) if isinstance(cell, str) else cell
        if not isinstance(items, list) or len(items) > most:
            raise ValueError(f"expected a list of at most {most}")
        return tuple(map(check, items))

    return checked


def _mapping_of(check: _Check) -> _Check:
    return lambda cell: {text(key, NAME): check(value) for key, value in _mapping(cell).items()}


def _mapping(cell: object) -> dict[str, object]:
    items = parsed(cell) if isinstance(cell, str) else cell
    if not isinstance(items, dict) or len(items) > ITEMS:
        raise ValueError("expected a mapping")
    return items


def _flag(cell: object) -> bool:
    if isinstance(cell, int) and cell in (0, 1):
        return bool(cell)
    raise ValueError("that is neither 0 nor 1")


def _number(cell: object) -> float:
    """A number of any kind: SQLite takes NaN for NULL, so a recording has it as text."""
    if cell == "NaN":
        return float("nan")
    if isinstance(cell, float):
        return cell
    return float(integer(cell))


def _setting(cell: object) -> bool | int | float | str | None:
    if cell is None or isinstance(cell, (bool, float)):
        return cell
    return integer(cell) if isinstance(cell, int) else text(cell)


def _table(kind: type[Any]) -> str:
    return kind.__name__.removesuffix("Record").lower()


def _short(cell: object) -> str:
    shown = repr(cell[:40] if isinstance(cell, (str, bytes)) else cell)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"
