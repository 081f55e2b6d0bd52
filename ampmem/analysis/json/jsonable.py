"""From dataclasses to what JSON has: an object for each, with its fields' names and their order.

The types of the fields say what the JSON may hold; :mod:`ampmem.analysis.json.schema` reads them. An integer is a size
or a count, so never negative, unless it is :data:`Signed`; a mapping from an enum has all of its members as keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, TypeAlias, cast

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_KEY = "json"
NOT_IN_JSON: Mapping[str, str | None] = {_KEY: None}
"""Metadata of a field that is for Python alone."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """So large, or so long, is what is annotated with it, or larger; any number where ``least`` is ``None``."""

    least: int | None


@dataclass(frozen=True, slots=True)
class OneOf:
    """A text that is one of these."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EachOf:
    """A mapping with exactly these keys."""

    keys: tuple[str, ...]


Signed: TypeAlias = Annotated[int, AtLeast(None)]
"""An integer that may be negative."""

Positive: TypeAlias = Annotated[int, AtLeast(1)]
"""An integer that is never 0."""

Name: TypeAlias = Annotated[str, AtLeast(1)]
"""A text that is never empty."""


def named(key: str) -> Mapping[str, str | None]:
    """Metadata of a field that JSON has under ``key``, where its own name would be a word of Python's."""
    return {_KEY: key}


def json_fields(of: object) -> Iterator[tuple[str, Field[Any]]]:
    """The fields of a dataclass, or of an instance, that are in JSON, each after its key there."""
    if not is_dataclass(of):
        raise TypeError(f"{of!r} is not a dataclass")
    for item in fields(of):
        key = item.metadata.get(_KEY, item.name)
        if key is not None:
            yield key, item


def text_of(value: object, before: str = "") -> str:
    """``value`` as JSON text, as ``json.dumps(plain(value), indent=2)`` has it, in a third of the time and memory."""
    kind = type(value)
    if kind is int:
        return str(value)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null"
    if isinstance(value, (str, int, float)):
        return json.dumps(value)
    inner = f"{before}  "
    if isinstance(value, Mapping):
        items = [f"{_quoted(str(key))}: {text_of(item, inner)}" for key, item in value.items()]
        return _listed("{", items, "}", before)
    if isinstance(value, tuple):
        return _listed("[", [text_of(item, inner) for item in value], "]", before)
    names = _names_of(cast(Hashable, kind))
    items = [f"{_quoted(key)}: {text_of(getattr(value, name), inner)}" for key, name in names]
    return _listed("{", items, "}", before)


_quoted = lru_cache(1000)(json.dumps)


def _listed(start: str, items: list[str], end: str, before: str) -> str:
    inside = f",\n{before}  ".join(items)
    return f"{start}\n{before}  {inside}\n{before}{end}" if items else f"{start}{end}"


@cache
def _names_of(kind: Hashable) -> tuple[tuple[str, str], ...]:
    """The key in JSON and the name of each field that is there."""
    return tuple((key, item.name) for key, item in json_fields(kind))


def plain(value: object) -> Json:
    """``value`` in terms of what JSON has; infinite and undefined numbers have no place there."""
    if is_dataclass(value):
        return {key: plain(getattr(value, item.name)) for key, item in json_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return cast(Json, value)
