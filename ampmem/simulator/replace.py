"""Replacing what a script may use of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any


def replace_all(owners: tuple[Any, ...], values: Mapping[str, Any]) -> Callable[[], None]:
    """Put ``values`` into all ``owners``, by name; returns what puts the former ones back."""
    with ExitStack() as undo:
        for owner in owners:
            for name, value in values.items():
                undo.callback(_replace(owner, name, value))
        return undo.pop_all().close


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Put ``value`` into ``owner``; returns what puts the former value back."""
    missing = object()
    former = vars(owner).get(name, missing)
    if former is missing and not hasattr(owner, name):
        return lambda: None  # a name that this version of torch does not have
    setattr(owner, name, value)

    def undo() -> None:
        if former is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, former)

    return undo
