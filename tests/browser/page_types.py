"""The page's data as types for the check of its JavaScript, made from the views that become that data.

``python tests/browser/page_types.py`` writes them anew; a test fails when they are not those of the views.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

from ampmem.analysis.jsonable import json_fields
from ampmem.reporters.html.page.fit_page import FitView
from ampmem.reporters.html.page.page import PageView

FILE = Path(__file__).resolve().parents[2] / "ampmem" / "reporters" / "html" / "js" / "common" / "page.d.ts"
HEAD = "/** What the pages are drawn from. Made from the views in Python by tests/browser/page_types.py. */\n"
WORDS = {bool: "boolean", int: "number", float: "number", str: "string", bytes: "string", type(None): "null"}
"""Bytes become base64."""


def page_types() -> str:
    """The declarations of all that :class:`PageView` and :class:`FitView` hold."""
    declared: dict[str, str] = {}
    for view in (PageView, FitView):
        _declare(view, declared)
    return "\n".join((HEAD, *declared.values()))


def _declare(view: type, declared: dict[str, str]) -> None:
    if view.__name__ in declared:
        return
    declared[view.__name__] = ""
    hints = get_type_hints(view)
    members = [(key, hints[item.name]) for key, item in json_fields(view)]
    lines = [f"  {name}: {_typed(hint)};\n" for name, hint in members]
    declared[view.__name__] = f"export interface {view.__name__} {{\n{''.join(lines)}}}\n"
    for _, hint in members:
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
