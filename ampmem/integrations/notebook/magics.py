"""Cells without their magics: what IPython makes of a magic is a call that only a notebook has."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_OF_CELLS = frozenset({"time", "capture", "prun", "timeit"})
"""Cell magics that run what is below them, as it is."""
_HARMLESS = frozenset({"ampmem", "autoreload", "conda", "config", "load_ext", "matplotlib", "pip", "reload_ext"})
"""Magics that bind no name and change no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A cell as ``code`` without its magics, every statement in the line where it was.

    ``left_out`` are those magics, of which nobody can tell what they do.
    """

    code: str
    left_out: tuple[str, ...]


def without_magics(code: str) -> Plain:
    """``code`` without the statements that are a magic or a shell command and nothing else. Raises ``SyntaxError``."""
    source = code.encode()
    left_out: list[str] = []
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in reversed(ast.parse(code).body):
        found = _magic(statement)
        if found is None:
            continue
        kind, name, body = found
        if kind == "run_cell_magic" and name in _OF_CELLS and (plain := _parsed(body)) is not None:
            left_out += plain.left_out
            instead = b"\n" + plain.code.encode()  # its first line stands below the magic's
        else:
            left_out += [] if name in _HARMLESS else [_word(kind, name)]
            instead = b"pass" + b"\n" * ((statement.end_lineno or statement.lineno) - statement.lineno)
        begin = starts[statement.lineno - 1] + statement.col_offset
        end = starts[(statement.end_lineno or statement.lineno) - 1] + (statement.end_col_offset or 0)
        source = source[:begin] + instead + source[end:]
    return Plain(code=source.decode(), left_out=tuple(dict.fromkeys(reversed(left_out))))


def _parsed(body: str) -> Plain | None:
    try:
        return without_magics(body)
    except SyntaxError:  # it has magics itself
        return None


def _magic(statement: ast.stmt) -> tuple[str, str, str] | None:
    """Of a statement that is one: the method of the shell, its first argument and its last."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    method = call.func if isinstance(call, ast.Call) else None
    owner = method.value if isinstance(method, ast.Attribute) else None
    if not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "get_ipython"):
        return None
    assert isinstance(call, ast.Call)
    assert isinstance(method, ast.Attribute)
    texts = [str(each.value) if isinstance(each, ast.Constant) else "" for each in call.args] or [""]
    return method.attr, texts[0], texts[-1]


def _word(kind: str, name: str) -> str:
    """The magic as it was written, more or less."""
    return {"run_line_magic": f"%{name}", "run_cell_magic": f"%%{name}"}.get(kind, f"!{name.partition(' ')[0]}")
