"""How the private names of torch in this folder are kept, looked up, and asked for before a recording."""

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
"""The oldest and the newest torch that ampmem is tested with."""

Place: TypeAlias = tuple[Any, str]
"""An owner and the name of what is patched there."""


class Use(Enum):
    """What a name is needed for."""

    ALWAYS = "every recording"
    CUDA = "a CUDA device"
    ARM = "a forced precision"
    SHARDED = "training whose parameters are sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """One private name.

    ``since`` is the first torch known to have it; 2.11 is the oldest that was looked at. ``without`` says what
    ampmem does where it is missing: empty where it cannot record then. ``example`` makes an object that has the
    name, where that is an attribute of instances and not of ``owner`` itself. ``own`` asks for a name that ``owner``
    does not inherit.
    """

    owner: str
    name: str
    why: str
    since: str
    without: str
    use: Use
    example: Callable[[], object] | None
    own: bool = False

    @property
    def title(self) -> str:
        """The name in full."""
        return f"{self.owner}.{self.name}"

    def find(self) -> Any:
        """What torch has under that name; :data:`NOTHING` where it has not."""
        try:
            owner = at(self.owner) if self.example is None else self.example()
        except Exception:  # an owner that is not there, or cannot be made without what is missing
            return NOTHING
        if self.own and self.name not in vars(owner):
            return NOTHING
        return getattr(owner, self.name, NOTHING)


NOTHING = object()
ENTRIES: list[PrivateName] = []
"""Every entry, in the order in which these modules are imported."""


class Missing:
    """What stands for a name that is not there: nobody gets one, since the probe has refused by then."""

    def __init__(self, *_: object, **__: object) -> None:
        probe(*Use)
        raise UsageError("a private name of torch is missing")


def needed(owner: str, name: str, why: str, *, since: str = "2.11", use: Use = Use.ALWAYS) -> Any:
    """What ``owner`` has under ``name``; without it ampmem refuses to record."""
    found = _added(owner, name, why, since=since, use=use).find()
    return Missing if found is NOTHING else found


def optional(
    owner: str, name: str, why: str, *, without: str, otherwise: Any, since: str = "2.11", use: Use = Use.ALWAYS
) -> Any:
    """The same, but ``otherwise`` where it is missing; the recording then has a note that says ``without``."""
    found = _added(owner, name, why, since=since, without=without, use=use).find()
    return otherwise if found is NOTHING else found


def attribute(
    owner: str,
    name: str,
    why: str,
    *,
    example: Callable[[], object] | None = None,
    since: str = "2.11",
    without: str = "",
    use: Use = Use.ALWAYS,
) -> str:
    """``name`` itself, for what is looked up anew each time: in ``owner``, or in what ``example`` makes of it."""
    return _added(owner, name, why, since=since, without=without, use=use, example=example).name


def patched(owner: str, name: str, why: str, *, since: str = "2.11", without: str = "", use: Use = Use.ALWAYS) -> Place:
    """Where ``name`` is patched; where it is missing a place that nobody calls."""
    entry = _added(owner, name, why, since=since, without=without, use=use, own=True)
    return (type("Nowhere", (), {name: None}) if entry.find() is NOTHING else at(owner)), name


def probe(*uses: Use) -> list[str]:
    """What a reader of the recording has to know of this torch: what it lacks, that it was not tested.

    Raises :class:`UsageError` where it lacks what ampmem needs for ``uses``.
    """
    missing = [entry for use in uses for entry in _missing(use)]
    refused = [entry.title for entry in missing if not entry.without]
    if refused:
        raise UsageError(f"this torch ({torch.__version__}) lacks {', '.join(refused)}; ampmem works with {_tested()}")
    notes = [f"this torch ({torch.__version__}) lacks {entry.title}: {entry.without}" for entry in missing]
    if not _is_tested(torch.__version__):
        notes.append(f"torch {torch.__version__} is not one that ampmem is tested with, which are {_tested()}")
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


def _added(
    owner: str,
    name: str,
    why: str,
    *,
    since: str,
    use: Use,
    without: str = "",
    example: Callable[[], object] | None = None,
    own: bool = False,
) -> PrivateName:
    entry = PrivateName(
        owner=owner, name=name, why=why, since=since, without=without, use=use, example=example, own=own
    )
    ENTRIES.append(entry)
    return entry


def at(path: str) -> Any:
    """The module, class or object at ``path``, which begins with ``torch``."""
    first, *rest = path.split(".")
    found: Any = import_module(first)
    for part in rest:
        first += f".{part}"
        inner = getattr(found, part, None)
        found = import_module(first) if inner is None else inner
    return found
