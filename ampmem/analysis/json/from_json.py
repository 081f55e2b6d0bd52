"""From JSON back to the dataclasses that :mod:`ampmem.analysis.json.jsonable` has written it from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ampmem.analysis.json.jsonable import AtLeast, EachOf, Json, OneOf, json_fields

_Of = TypeVar("_Of")


class NotOfThisKind(ValueError):
    """JSON that is not what the dataclass is written as: the message says where."""


def parsed(text: str) -> Json:
    """``text`` as JSON. Raises :class:`NotOfThisKind`."""
    try:
        return cast(Json, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise NotOfThisKind(f"it is no JSON: {error}") from None


def from_json(kind: type[_Of], value: Json) -> _Of:
    """``value`` as a ``kind``, a dataclass.

    A field that is not in JSON is what it is by default, or else empty: ``()``. Keys that ``kind`` does not know are
    passed over, as a later version may have more. Raises :class:`NotOfThisKind` for what is missing or of another type.
    """
    return cast(_Of, _object(kind, value, ""))


def _object(kind: type, value: Json, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, "an object")
    hints, keys = _hints(kind), {item.name: key for key, item in json_fields(kind)}
    given: dict[str, object] = {}
    for item in fields(kind):
        key = keys.get(item.name)
        if key is None:
            if _required(item):
                given[item.name] = ()
        elif key in value:
            given[item.name] = _value(hints[item.name], value[key], f"{where}.{key}" if where else key)
        elif _required(item):
            raise NotOfThisKind(f"{f'{where}.{key}' if where else key} is missing")
    return kind(**given)


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _required(item: Field[Any]) -> bool:
    return repr(item.default) == repr(item.default_factory)  # both are the same mark where there is neither


def _value(hint: Any, value: Json, where: str) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], value, where)
    if origin in (Union, UnionType):
        return _either(arguments, value, where)
    if origin is Literal:
        return _one_of(arguments, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "an array")
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[0], arguments[1], value, where)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(str(_one_of([each.value for each in hint], value, where)))
    return _object(cast(type, hint), value, where) if is_dataclass(hint) else _scalar(hint, value, where)


def _annotated(hint: Any, extras: tuple[object, ...], value: Json, where: str) -> object:
    if AtLeast(None) in extras and type(value) is int:
        return value
    found = _value(hint, value, where)
    for extra in extras:
        if isinstance(extra, OneOf):
            _one_of(extra.texts, value, where)
        elif isinstance(extra, EachOf) and isinstance(found, Mapping) and set(found) != set(extra.keys):
            raise _wrong(where, f"an object with {', '.join(extra.keys)}")
        elif isinstance(extra, AtLeast) and extra.least is not None and _size(found) < extra.least:
            raise _wrong(where, f"at least {extra.least}")
    return found


def _size(value: Any) -> int:
    """Of a number that, of another value its length."""
    return value if isinstance(value, int) else len(value)


def _either(hints: tuple[Any, ...], value: Json, where: str) -> object:
    if value is None and NoneType in hints:
        return None
    failure = _wrong(where, "a value")
    for hint in hints:
        if hint is not NoneType:
            try:
                return _value(hint, value, where)
            except NotOfThisKind as error:
                failure = error
    raise failure


def _mapping(key: Any, of: Any, value: Json, where: str) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object")
    found = {_value(key, name, where): _value(of, item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(key, type) and issubclass(key, StrEnum) and len(found) != len(key):
        raise _wrong(where, f"an object with {', '.join(key)}")
    return found


def _one_of(texts: Any, value: Json, where: str) -> object:
    if value not in texts:
        raise _wrong(where, f"one of {', '.join(map(str, texts))}")
    return value


def _scalar(hint: Any, value: Json, where: str) -> object:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint and not (hint is int and cast(int, value) < 0):
        return value
    words = {int: "a whole number, 0 or more", float: "a number", str: "a text", bool: "true or false"}
    raise _wrong(where, words.get(hint, "something else"))


def _wrong(where: str, expected: str) -> NotOfThisKind:
    return NotOfThisKind(f"{where or 'it'} is not {expected}")
