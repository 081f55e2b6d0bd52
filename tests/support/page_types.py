"""The page's data as types for the check of its JavaScript.

The types of what commands print as JSON are made from the schemas that they print, those of the rest from the views
that become that rest. ``python tests/support/page_types.py`` writes them anew; a test fails when they are others.
"""

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from ampmem.analysis.difference.difference import difference_schema
from ampmem.analysis.fit import fit_schema
from ampmem.analysis.jsonable import json_fields
from ampmem.analysis.summary import summary_schema
from ampmem.reporters.html.advise_page import AdviceView
from ampmem.reporters.html.fit_page import FitView
from ampmem.reporters.html.page import PageView
from ampmem.reporters.html.run import RunWords
from ampmem.reporters.html.watched_page import WatchedView

FILE = Path(__file__).resolve().parents[2] / "ampmem" / "reporters" / "html" / "js" / "common" / "page.d.ts"
HEAD = (
    "/** What the pages are drawn from: the JSON that commands print, by its schemas, and the views in Python. "
    "Made by tests/support/page_types.py. */\n"
)
WORDS = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
SCHEMA_WORDS = {"boolean": "boolean", "integer": "number", "number": "number", "string": "string", "null": "null"}


def page_types() -> str:
    """The declarations of all that the views of the pages, and :class:`RunWords`, hold."""
    declared: dict[str, str] = {}
    for view in (RunWords, PageView, FitView, WatchedView, AdviceView):
        _declare(view, declared)
    return "\n".join((HEAD, *declared.values()))


@cache
def _described() -> Mapping[str, Any]:
    """The schemas of all that the commands print as JSON."""
    found: dict[str, Any] = {}
    roots = (("Summary", summary_schema()), ("Difference", difference_schema()), ("FitResult", fit_schema()))
    for name, schema in roots:
        found |= {name: schema, **schema["$defs"]}  # type: ignore[dict-item]
    return found


def _interface(name: str, members: Mapping[str, str]) -> str:
    lines = [f"  {key}: {typed};\n" for key, typed in members.items()]
    return f"export interface {name} {{\n{''.join(lines)}}}\n"


def _members(of: Mapping[str, Any]) -> dict[str, str]:
    return {key: _of_schema(value) for key, value in of["properties"].items()}


def _of_schema(of: Mapping[str, Any]) -> str:
    match of:
        case {"$ref": reference}:
            return str(reference).removeprefix("#/$defs/")
        case {"anyOf": choices}:
            return " | ".join(map(_of_schema, choices))
        case {"enum": texts}:
            return " | ".join(map(json.dumps, texts))
        case {"type": "array", "items": items}:
            return f"Array<{_of_schema(items)}>"
        case {"type": "object", "properties": properties}:
            return f"Record<{' | '.join(map(json.dumps, properties))}, {_of_schema(next(iter(properties.values())))}>"
        case {"type": "object", "additionalProperties": values}:
            return f"Record<string, {_of_schema(values)}>"
        case {"type": [*kinds]}:
            return " | ".join(_of_schema({**of, "type": kind}) for kind in kinds)
        case {"type": kind}:
            return SCHEMA_WORDS[kind]
    raise TypeError(f"no type for the schema {of}")


def _declare(view: type, declared: dict[str, str]) -> None:
    name = view.__name__
    if name in declared:
        return
    declared[name] = ""
    hints = get_type_hints(view)
    members = {key: hints[item.name] for key, item in json_fields(view)}
    schema = _described().get(name)
    typed = {key: _typed(hint) for key, hint in members.items()} if schema is None else _members(schema)
    declared[name] = _interface(name, typed)
    for hint in members.values():
        for inner in _views_in(hint):
            _declare(inner, declared)


def _views_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from _views_in(argument)


def _typed(hint: object) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(_typed, arguments))
    if origin is tuple and arguments[-1] is ...:
        return f"Array<{_typed(arguments[0])}>"
    if origin is tuple:
        return f"[{', '.join(map(_typed, arguments))}]"
    if origin in (dict, Mapping):
        return f"Record<{_typed(arguments[0])}, {_typed(arguments[1])}>"
    if isinstance(hint, type) and is_dataclass(hint):
        return hint.__name__
    if isinstance(hint, type):
        return next(word for kind, word in WORDS.items() if issubclass(hint, kind))
    raise TypeError(f"there is no type for {hint}")


if __name__ == "__main__":
    FILE.write_text(page_types(), encoding="utf-8")
