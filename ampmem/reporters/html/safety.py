"""How text that a script chose (names, paths, stacks) gets into a page without becoming markup or code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import unicodedata

MAX_TEXT = 400
"""Longest text shown, in characters; what is longer ends with an ellipsis."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that show nothing or change what is around them: control, bidi, surrogates, separators."""

_MARKUP = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def visible(text: str) -> str:
    """``text`` in one bounded line, with every invisible character spelled out as ``\\uXXXX``."""
    bounded = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return "".join(_spelled(character) for character in bounded)


def _spelled(character: str) -> str:
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def escaped(text: str) -> str:
    """``text`` for an element's content or a quoted attribute."""
    return html.escape(visible(text), quote=True)


def json_for_script(data: object) -> str:
    """JSON that can stand inside ``<script type="application/json">`` whatever the texts in it are.

    Raises ``ValueError`` for NaN and infinities, which JSON does not have.
    """
    # Only strings can hold these three characters in JSON, and there the escape means the same.
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_MARKUP)


def script_source_hash(source: str) -> str:
    """The Content-Security-Policy source that allows exactly this inline script."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
