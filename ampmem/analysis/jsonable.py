"""Dataclasses as JSON: written, read again, and described by a schema.

An object is a dataclass, with its fields' names and their order. The types of the fields say what the JSON may hold.
An integer is a size or a count, so never negative, unless it is :data:`Signed`; a mapping from an enum has all of its
members as keys.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_Of = TypeVar("_Of")

_KEY = "json"
NOT_IN_JSON: Mapping[str, str | None] = {_KEY: None}
"""Metadata of a field that is not in the JSON, only in Python."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The annotated value is at least this large, or this long; any number if ``least`` is ``None``."""

    least: int | None


@dataclass(frozen=True, slots=True)
class OneOf:
    """The annotated text is one of these."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EachOf:
    """The annotated mapping has exactly these keys."""

    keys: tuple[str, ...]


Signed: TypeAlias = Annotated[int, AtLeast(None)]
"""An integer that may be negative."""

Positive: TypeAlias = Annotated[int, AtLeast(1)]
"""An integer that is never 0."""

Name: TypeAlias = Annotated[str, AtLeast(1)]
"""A text that is never empty."""


def named(key: str) -> Mapping[str, str | None]:
    """Metadata of a field whose key in JSON is ``key`` instead of the field's name."""
    return {_KEY: key}


def json_fields(of: object) -> Iterator[tuple[str, Field[Any]]]:
    """The fields of a dataclass or an instance that are in JSON, each after its JSON key."""
    if not is_dataclass(of):
        raise TypeError(f"{of!r} is not a dataclass")
    for item in fields(of):
        key = item.metadata.get(_KEY, item.name)
        if key is not None:
            yield key, item


def like(kind: Callable[..., _Of], source: object, /, **others: Any) -> _Of:
    """A new ``kind`` (a dataclass): its fields are taken from ``others``, then from attributes of ``source``.

    Raises ``TypeError`` if neither has a field without a default.
    """
    names = [item.name for item in fields(cast(Any, kind)) if item.name not in others]
    return kind(**{name: getattr(source, name) for name in names if hasattr(source, name)}, **others)


def text_of(value: object, before: str = "") -> str:
    """``value`` as JSON text, faster than and equal to ``json.dumps(plain(value), indent=2)``."""
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
        return _array_text("{", items, "}", before)
    if isinstance(value, tuple):
        return _array_text("[", [text_of(item, inner) for item in value], "]", before)
    names = _names_of(cast(Hashable, kind))
    items = [f"{_quoted(key)}: {text_of(getattr(value, name), inner)}" for key, name in names]
    return _array_text("{", items, "}", before)


_quoted = lru_cache(1000)(json.dumps)


def _array_text(start: str, items: list[str], end: str, before: str) -> str:
    inside = f",\n{before}  ".join(items)
    return f"{start}\n{before}  {inside}\n{before}{end}" if items else f"{start}{end}"


@cache
def _names_of(kind: Hashable) -> tuple[tuple[str, str], ...]:
    """The JSON key and the name of each field that is in JSON."""
    return tuple((key, item.name) for key, item in json_fields(kind))


def plain(value: object) -> Json:
    """``value`` as the types of JSON; infinities and NaN have no place there."""
    if is_dataclass(value):
        return {key: plain(getattr(value, item.name)) for key, item in json_fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return cast(Json, value)


# From JSON back to the dataclasses.


class NotOfThisKind(ValueError):
    """The JSON does not fit the dataclass; the message says where."""


def parsed(text: str) -> Json:
    """``text`` parsed as JSON. Raises :class:`NotOfThisKind` for invalid JSON."""
    try:
        return cast(Json, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise NotOfThisKind(f"it is not JSON: {error}") from None


def from_json(kind: type[_Of], value: Json) -> _Of:
    """``value`` as a ``kind``, a dataclass.

    A field that is not in JSON gets its default, or else ``()``. Unknown keys are ignored, as a later version may have
    more. Raises :class:`NotOfThisKind` for a missing key, and for a value of another type.
    """
    return cast(_Of, _object(kind, value, ""))


def _object(kind: type, value: Json, where: str) -> object:
    if not isinstance(value, dict):
        raise _not_expected(where, "an object")
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
    # Both are MISSING, the same mark, for a field without a default.
    return repr(item.default) == repr(item.default_factory)


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
            raise _not_expected(where, "an array")
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
            raise _not_expected(where, f"an object with {', '.join(extra.keys)}")
        elif isinstance(extra, AtLeast) and extra.least is not None and _size(found) < extra.least:
            raise _not_expected(where, f"at least {extra.least}")
    return found


def _size(value: Any) -> int:
    """The number itself, or the length of another value."""
    return value if isinstance(value, int) else len(value)


def _either(hints: tuple[Any, ...], value: Json, where: str) -> object:
    if value is None and NoneType in hints:
        return None
    failure = _not_expected(where, "a value")
    for hint in hints:
        if hint is not NoneType:
            try:
                return _value(hint, value, where)
            except NotOfThisKind as error:
                failure = error
    raise failure


def _mapping(key: Any, of: Any, value: Json, where: str) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise _not_expected(where, "an object")
    found = {_value(key, name, where): _value(of, item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(key, type) and issubclass(key, StrEnum) and len(found) != len(key):
        raise _not_expected(where, f"an object with {', '.join(key)}")
    return found


def _one_of(texts: Any, value: Json, where: str) -> object:
    if value not in texts:
        raise _not_expected(where, f"one of {', '.join(map(str, texts))}")
    return value


def _scalar(hint: Any, value: Json, where: str) -> object:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint and not (hint is int and cast(int, value) < 0):
        return value
    words = {int: "a whole number, 0 or more", float: "a number", str: "a text", bool: "true or false"}
    raise _not_expected(where, words.get(hint, "something else"))


def _not_expected(where: str, expected: str) -> NotOfThisKind:
    return NotOfThisKind(f"{where or 'it'} is not {expected}")


# JSON Schemas (draft 2020-12) of dataclasses, from the types of their fields and from what is written below them.

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?([\w]+)`")
_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_SCALARS: Mapping[Any, Mapping[str, Json]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    float: {"type": "number"},
    NoneType: {"type": "null"},
}


_Definitions: TypeAlias = "dict[type, Json]"
"""The schemas of the dataclasses met so far."""


def schema_of(root: type, *, title: str, description: str) -> dict[str, Json]:
    """The JSON Schema of ``root``, a dataclass as :func:`plain` writes it.

    Every object has all of its keys and no other keys. Raises ``TypeError`` for a field of a type that JSON does not
    have.
    """
    definitions: _Definitions = {}
    body = _object_schema(root, definitions)
    by_name = {of.__name__: definitions[of] for of in sorted(definitions, key=lambda of: of.__name__)}
    if len(by_name) != len(definitions):
        raise TypeError(f"two dataclasses in {root.__name__} have the same name")
    return {"$schema": DIALECT, "title": title, **body, "description": description, "$defs": by_name}


def schema_of_printed(root: type, schema: str, command: str) -> dict[str, Json]:
    """The schema of the ``root`` object that ``command --json`` prints; ``schema`` is its name, ``ampmem.fit/1``."""
    return schema_of(
        root,
        title=schema.replace(".", " ").replace("/", ", version "),
        description=f"What `{command} --json` prints. Sizes are bytes; null is a value that is not known.",
    )


class JsonDocument:
    """A dataclass that a command prints as JSON."""

    __slots__ = ()

    def to_json(self) -> str:
        """The JSON text, as the command prints it with ``--json``."""
        return text_of(self)


def one_or_several(root: type, one: Mapping[str, Json]) -> dict[str, Json]:
    """The schema of a command that prints an object of ``root`` for one file, and an array of them for several.

    ``one`` is the schema of the object, as :func:`schema_of` made it.
    """
    of_root = ("$schema", "title", "description", "$defs")
    definitions = one["$defs"]
    assert isinstance(definitions, dict)
    name = root.__name__
    object_itself = {key: value for key, value in one.items() if key not in of_root}
    reference: Json = {"$ref": f"#/$defs/{name}"}
    return {
        **{key: one[key] for key in of_root[:-1]},
        "anyOf": [reference, {"type": "array", "minItems": 2, "items": reference}],
        "$defs": {name: {"description": _prose(root.__doc__ or ""), **object_itself}, **definitions},
    }


def _object_schema(of: type, definitions: _Definitions) -> dict[str, Json]:
    hints, written = get_type_hints(of, include_extras=True), _written_below(of)
    properties: dict[str, Json] = {}
    for key, item in json_fields(of):
        description = {"description": written[item.name]} if item.name in written else {}
        properties[key] = {**_type(hints[item.name], definitions), **description}
    return {"description": _prose(of.__doc__ or ""), **_exactly(properties)}


def _exactly(properties: dict[str, Json]) -> dict[str, Json]:
    """The schema of an object with exactly these properties."""
    return {"type": "object", "additionalProperties": False, "required": [*properties], "properties": properties}


def _type(hint: Any, definitions: _Definitions) -> dict[str, Json]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated_schema(arguments[0], arguments[1:], definitions)
    if origin in (Union, UnionType):
        return _union([_type(each, definitions) for each in arguments])
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin is tuple:
        if len(arguments) != 2 or arguments[1] is not Ellipsis:
            raise TypeError(f"a schema needs tuples of any length and one type, not of {arguments}")
        return {"type": "array", "items": _type(arguments[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_schema(arguments[0], arguments[1], definitions)
    if hint is int:
        return {"type": "integer", "minimum": 0}
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": [each.value for each in hint]}
    if hint not in definitions:
        definitions[hint] = None  # reserves its place, in case the class contains itself
        definitions[hint] = _object_schema(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _union(choices: Sequence[dict[str, Json]]) -> dict[str, Json]:
    match choices:
        case [{"type": str(kind), **rest}, {"type": "null"}] if "properties" not in rest:
            return {"type": [kind, "null"], **rest}
    return {"anyOf": [*choices]}


def _annotated_schema(of: Any, extras: tuple[object, ...], definitions: _Definitions) -> dict[str, Json]:
    found = _type(of, definitions)
    for extra in extras:
        match extra:
            case AtLeast(least=None):
                del found["minimum"]
            case AtLeast(least=least):
                word = {"integer": "minimum", "array": "minItems", "string": "minLength"}[str(found["type"])]
                found[word] = least
            case OneOf(texts=texts):
                found = {"enum": [*texts]}
            case EachOf(keys=keys):
                found = _exactly(dict.fromkeys(keys, found["additionalProperties"]))
    return found


def _mapping_schema(key: Any, value: Any, definitions: _Definitions) -> dict[str, Json]:
    values: Json = _type(value, definitions)
    if isinstance(key, type) and issubclass(key, StrEnum):
        return _exactly({each.value: values for each in key})
    keys: Json = _type(key, definitions)
    return {"type": "object", "propertyNames": keys, "additionalProperties": values}


def _written_below(of: type) -> dict[str, str]:
    """The docstrings below the fields of the class and of its base classes, except builtins."""
    found: dict[str, str] = {}
    for each in reversed(of.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = _prose(text)
    return found


def _prose(text: str) -> str:
    """A docstring as plain text in one line."""
    return " ".join(_LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", text)).split())
