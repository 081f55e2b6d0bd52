"""Replacing an attribute of torch for as long as a session records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace ``owner.name`` by ``wrapper(original)`` and return what undoes it.

    When someone else has replaced the attribute since, theirs stays: it still leads to the
    original through ours, which by then only passes calls on.
    """
    original = owner.__dict__[name]
    replacement = wrapper(original)
    setattr(owner, name, replacement)

    def undo() -> None:
        if owner.__dict__.get(name) is replacement:
            setattr(owner, name, original)

    return undo
