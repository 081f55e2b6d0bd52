"""Registers, looks up and probes the private torch APIs of this folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, TypeAlias

import torch

from ampmem.errors import UsageError

TESTED = ((2, 11), (2, 15))
"""The oldest and the newest torch version with which ampmem is tested."""

Place: TypeAlias = tuple[Any, str]
"""An owner, and the name of its attribute that is patched."""


class Use(Enum):
    """The recordings that need a name."""

    ALWAYS = "every recording"
    CUDA = "a CUDA device"
    PRECISION = "a forced precision"
    SHARDED = "training whose parameters are sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """A private name of torch.

    ``without`` says what ampmem does if it is missing; empty: it cannot record. ``example`` makes an object that has
    the name, for attributes of instances and not of ``owner`` itself. ``own`` requires a name that ``owner`` does not
    inherit.
    """

    owner: str
    name: str
    why: str
    without: str = ""
    use: Use = Use.ALWAYS
    example: Callable[[], object] | None = None
    own: bool = False

    @property
    def title(self) -> str:
        """The full name."""
        return f"{self.owner}.{self.name}"

    def find(self) -> Any:
        """The object under that name; :data:`NOTHING` if there is none."""
        try:
            owner = at(self.owner) if self.example is None else self.example()
        except Exception:  # the owner is missing, or cannot be made without the name
            return NOTHING
        if self.own and self.name not in vars(owner):
            return NOTHING
        return getattr(owner, self.name, NOTHING)


NOTHING = object()
ENTRIES: list[PrivateName] = []
"""Every entry, in the order in which these modules are imported."""


class Missing:
    """A placeholder for a missing needed name: it is never used, because the probe refuses first."""

    def __init__(self, *_: object, **__: object) -> None:
        probe(*Use)
        raise UsageError("a private name of torch is missing")


def needed(owner: str, name: str, why: str, *, use: Use = Use.ALWAYS) -> Any:
    """The attribute ``name`` of ``owner``; if it is missing, ampmem refuses to record."""
    found = _register(PrivateName(owner=owner, name=name, why=why, use=use)).find()
    return Missing if found is NOTHING else found


def optional(owner: str, name: str, why: str, *, without: str, otherwise: Any) -> Any:
    """The attribute ``name`` of ``owner``, else ``otherwise``; then ``without`` goes into the recording's notes."""
    found = _register(PrivateName(owner=owner, name=name, why=why, without=without)).find()
    return otherwise if found is NOTHING else found


def attribute(
    owner: str,
    name: str,
    why: str,
    *,
    example: Callable[[], object] | None = None,
    without: str = "",
    use: Use = Use.ALWAYS,
) -> str:
    """``name`` itself, for attributes read anew each time: of ``owner``, or of the object that ``example`` makes."""
    _register(PrivateName(owner=owner, name=name, why=why, without=without, use=use, example=example))
    return name


def patched(owner: str, name: str, why: str, *, without: str = "", use: Use = Use.ALWAYS) -> Place:
    """The place of ``name``, to be patched; if it is missing, a place that nothing calls."""
    entry = _register(PrivateName(owner=owner, name=name, why=why, without=without, use=use, own=True))
    return (type("Nowhere", (), {name: None}) if entry.find() is NOTHING else at(owner)), name


def _register(entry: PrivateName) -> PrivateName:
    ENTRIES.append(entry)
    return entry


def probe(*uses: Use) -> list[str]:
    """Notes on this version of torch: what it lacks, and whether it is untested.

    Raises :class:`UsageError` if it lacks what ampmem needs for ``uses``.
    """
    missing = [entry for use in uses for entry in _missing(use)]
    refused = [entry.title for entry in missing if not entry.without]
    if refused:
        raise UsageError(f"this torch ({torch.__version__}) lacks {', '.join(refused)}; ampmem works with {_tested()}")
    notes = [f"this torch ({torch.__version__}) lacks {entry.title}: {entry.without}" for entry in missing]
    if not _is_tested(torch.__version__):
        notes.append(f"ampmem is not tested with torch {torch.__version__}, only with {_tested()}")
    return notes


@functools.cache
def _missing(use: Use) -> tuple[PrivateName, ...]:
    return tuple(entry for entry in ENTRIES if entry.use is use and entry.find() is NOTHING)


def _tested() -> str:
    oldest, newest = (".".join(map(str, version)) for version in TESTED)
    return f"torch {oldest} to {newest}"


def _is_tested(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and TESTED[0] <= (int(found[1]), int(found[2])) <= TESTED[1]


def at(path: str) -> Any:
    """The module, class or object at ``path``, which begins with ``torch``."""
    first, *rest = path.split(".")
    found: Any = import_module(first)
    for part in rest:
        first += f".{part}"
        # A submodule is an attribute of its package only once somebody has imported it.
        inner = getattr(found, part, None)
        found = import_module(first) if inner is None else inner
    return found
