"""Escapes texts from a script (names, paths, stacks), so that they never become markup or code of a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

MAX_TEXT = 400
"""Longest name shown, in characters; a longer one ends with an ellipsis."""

MAX_PROSE = 2000
"""Longest sentence shown, in characters."""

LONG_NAME = 12
"""Characters from which on a name may be broken behind its dots."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that are invisible or change the text around them: control, bidi, surrogates, separators."""

_MARKUP = {character: f"\\u{ord(character):04x}" for character in "<>&"}


def visible(text: str, limit: int = MAX_TEXT) -> str:
    """``text`` in one line of at most ``limit`` characters, every invisible one spelled out as ``\\uXXXX``."""
    bounded = _cut(text, limit)
    return bounded if bounded.isprintable() else _cut("".join(map(_spelled, bounded)), limit)


def distinct_texts(texts: Iterable[str]) -> list[str]:
    """``texts`` as :func:`visible` shows them, with a number added where two different ones would look the same."""
    owner: dict[str, str] = {}
    numbers: dict[str, int] = {}
    shown = []
    for text in texts:
        look = base = visible(text)
        while owner.setdefault(look, text) != text:
            numbers[base] = numbers.get(base, 1) + 1
            suffix = f" ({numbers[base]})"
            look = _cut(base, MAX_TEXT - len(suffix)) + suffix
        shown.append(look)
    return shown


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _spelled(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def json_for_script(data: object) -> str:
    """JSON that can be inside ``<script type="application/json">`` whatever its texts are.

    Raises ``ValueError`` for NaN and infinities, which JSON does not have.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Only strings in JSON can have these three characters, and there the escape means the same.
    for character, escape in _MARKUP.items():
        text = text.replace(character, escape)
    return text


def script_source_hash(source: str) -> str:
    """The Content-Security-Policy source that allows exactly this inline script."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


FOLDER = Path(__file__).parent / "templates"


def filled_template(name: str, /, **values: object) -> str:
    """The template ``name`` filled with ``values``; a missing value is an error."""
    return _environment().get_template(name).render(**values)


_AMOUNT = r"\d[\d,.]*\s(?:[KMGTP]i?B|B|%|n?s|ms|µs|min|h)(?![\w-])"
"""A number and its unit, as in ``dom.js``."""

_OPTION = r"(?<![\w-])--[a-z][\w-]*"
"""An option of a command, as in ``dom.js``."""


def breakable(text: str) -> Markup:
    """``text`` as it may be broken into lines: not inside numbers with units or options, in long names behind a dot."""
    amount, rest = Markup('<span class="amount">{}</span>'), Markup("").join
    parts = re.split(rf"([-+\u2212<>]?{_AMOUNT}|{_OPTION})", text)
    return rest(amount.format(part) if at % 2 else _with_breaks(part) for at, part in enumerate(parts))


def unbroken(html: str) -> str:
    """``html`` in whose text numbers stay with their units and options are whole, except in drawings."""
    amount = re.compile(rf"(<svg.*?</svg>)|((?:&lt; )?[-+\u2212]?{_AMOUNT}|{_OPTION})(?![^<>]*>)", re.DOTALL)
    return amount.sub(lambda found: found[1] or f'<span class="amount">{found[2]}</span>', html)


def _with_breaks(text: str) -> Markup:
    words = (word if len(word) < LONG_NAME else Markup(".<wbr>").join(word.split(".")) for word in text.split(" "))
    return Markup(" ").join(words)


@cache
def _environment() -> Environment:
    """The template environment, which caches compiled templates."""
    loader = FileSystemLoader(FOLDER)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters |= {"breakable": breakable, "unbroken": unbroken, "visible": visible}
    return environment
