"""The one way in which templates become HTML: every value is escaped unless the template says otherwise."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).parent


def filled(name: str, /, **values: object) -> str:
    """The template ``name`` with ``values``; one that it needs and does not get is an error."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    """It keeps what it has compiled."""
    loader = FileSystemLoader([FOLDER, FOLDER.parent / "notebook"])
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
