"""JSON Schemas (draft 2020-12) of dataclasses, from the types of their fields and from what is written below them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from ampmem.analysis.json.jsonable import AtLeast, EachOf, Json, OneOf, json_fields

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
"""The schemas of the dataclasses that were met so far."""


def schema_of(root: type, *, title: str, description: str) -> dict[str, Json]:
    """The schema of ``root``, a dataclass as :func:`~ampmem.analysis.json.jsonable.plain` writes it.

    Every object has all of its keys and no others. Raises ``TypeError`` for a field of a type that JSON does not have.
    """
    definitions: _Definitions = {}
    body = _object(root, definitions)
    by_name = {of.__name__: definitions[of] for of in sorted(definitions, key=lambda of: of.__name__)}
    if len(by_name) != len(definitions):
        raise TypeError(f"two dataclasses in {root.__name__} have the same name")
    return {"$schema": DIALECT, "title": title, **body, "description": description, "$defs": by_name}


def one_or_several(root: type, one: Mapping[str, Json]) -> dict[str, Json]:
    """The schema of what a command prints that gives an object of ``root`` for one file, an array of them for several.

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


def _object(of: type, definitions: _Definitions) -> dict[str, Json]:
    hints, written = get_type_hints(of, include_extras=True), _written_below(of)
    properties: dict[str, Json] = {}
    for key, item in json_fields(of):
        description = {"description": written[item.name]} if item.name in written else {}
        properties[key] = {**_type(hints[item.name], definitions), **description}
    return {
        "description": _prose(of.__doc__ or ""),
        **_exactly(properties),
    }


def _exactly(properties: dict[str, Json]) -> dict[str, Json]:
    """An object with these properties."""
    return {"type": "object", "additionalProperties": False, "required": [*properties], "properties": properties}


def _type(hint: Any, definitions: _Definitions) -> dict[str, Json]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:], definitions)
    if origin in (Union, UnionType):
        return _union([_type(each, definitions) for each in arguments])
    if origin is Literal:
        return {"enum": [*arguments]}
    if origin is tuple:
        return _tuple(arguments, definitions)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[0], arguments[1], definitions)
    if hint is int:
        return {"type": "integer", "minimum": 0}
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": [each.value for each in hint]}
    return _reference(hint, definitions)


def _union(choices: Sequence[dict[str, Json]]) -> dict[str, Json]:
    match choices:
        case [{"type": str(kind), **rest}, {"type": "null"}] if "properties" not in rest:
            return {"type": [kind, "null"], **rest}
    return {"anyOf": [*choices]}


def _annotated(of: Any, extras: tuple[object, ...], definitions: _Definitions) -> dict[str, Json]:
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


def _tuple(arguments: tuple[Any, ...], definitions: _Definitions) -> dict[str, Json]:
    if len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise TypeError(f"a schema needs tuples of any length and one type, not of {arguments}")
    return {"type": "array", "items": _type(arguments[0], definitions)}


def _mapping(key: Any, value: Any, definitions: _Definitions) -> dict[str, Json]:
    values: Json = _type(value, definitions)
    if isinstance(key, type) and issubclass(key, StrEnum):
        return _exactly({each.value: values for each in key})
    keys: Json = _type(key, definitions)
    return {"type": "object", "propertyNames": keys, "additionalProperties": values}


def _reference(of: type, definitions: _Definitions) -> dict[str, Json]:
    if of not in definitions:
        definitions[of] = None  # its place, should it hold itself
        definitions[of] = _object(of, definitions)
    return {"$ref": f"#/$defs/{of.__name__}"}


def _written_below(of: type) -> dict[str, str]:
    """The texts that stand below fields of the class and of those that it derives from; of no builtin."""
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
