"""Budgets: what can be limited, and how people write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction

from ampmem.analysis.json.jsonable import Name
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.errors import UsageError
from ampmem.units import parse_bytes

PEAK, ALLOCATED, RESERVED, DEVICE = "peak", "allocated", "reserved", "device"
COPIES, GROWTH, MODULES = "precision_copies", "growth", "modules"

KEYS: tuple[str, ...] = (PEAK, ALLOCATED, RESERVED, DEVICE, *map(str, CATEGORIES), COPIES, GROWTH)
"""What can be limited of a whole run; of a module see :data:`OF_MODULE`."""

OF_MODULE: tuple[str, ...] = tuple(item.name for item in fields(ModuleMemory) if item.name != "name")
"""What can be limited of a module: ``modules.encoder.activations``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """At most ``limit`` bytes of what ``key`` names; of ``growth`` in each step."""

    key: Name
    limit: int

    @property
    def module(self) -> tuple[str, str] | None:
        """The module's name and the key of it: ``("encoder", "activations")``; ``None`` for the whole run."""
        return module_in(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How much more than the baseline's is no failure: a fraction of it, or so many bytes.

    A fraction of little is next to nothing, and of a category that was not there it is nothing. So each category may
    also grow by :data:`FLOOR` of the same fraction of the baseline's peak.
    """

    fraction: Fraction = Fraction(0)
    bytes: int = 0
    text: str = ""

    def limit(self, before: int, peak: int) -> int:
        """The most bytes that are allowed of what the baseline has ``before`` bytes of; its peak is ``peak`` bytes."""
        return before + self.bytes + int(max(before * self.fraction, peak * self.fraction * FLOOR))


FLOOR = Fraction(1, 10)
"""Of what is allowed of the peak, what is allowed of each category at least."""


NONE_ALLOWED = Allowance()


def budget_of(key: str, limit: str | int) -> Budget:
    """The budget ``key``, of bytes or of a text such as ``20GiB``.

    Raises :class:`UsageError` for a key that there is none of, with the nearest, and for a limit that is no size.
    """
    key = key.strip()
    check_key(key)
    if isinstance(limit, bool) or not isinstance(limit, str | int) or (isinstance(limit, int) and limit < 0):
        raise UsageError(f"{key}: {limit!r} is not a size; write bytes as 24GiB, 512MiB or 1073741824")
    try:
        return Budget(key=key, limit=limit if isinstance(limit, int) else parse_bytes(limit))
    except ValueError as error:
        raise UsageError(f"{key}: {error}") from None


def parse_budget(text: str) -> Budget:
    """``peak=20GiB``. Raises :class:`UsageError` as :func:`budget_of` does."""
    key, equals, limit = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not a budget; write KEY=SIZE, such as peak=20GiB")
    return budget_of(key, limit)


def budgets_of(limits: Mapping[str, str | int]) -> tuple[Budget, ...]:
    """The budgets of a mapping from keys to limits.

    Raises :class:`UsageError` as :func:`budget_of` does, and for what is no mapping.
    """
    if not isinstance(limits, Mapping):
        raise UsageError(f"budgets are a mapping from keys to limits, such as {{'peak': '20GiB'}}, and not {limits!r}")
    return tuple(budget_of(key, limit) for key, limit in limits.items())


def parse_allowance(text: str | int, option: str = "--allow") -> Allowance:
    """``1%``, ``10MiB``, or whole bytes; ``option`` is what messages call it.

    Raises :class:`UsageError` for what is none of them, such as ``0.01``.
    """
    given = str(text).strip()
    try:
        if given.isdecimal() and not isinstance(text, bool):
            return Allowance(bytes=int(given), text=f"{given} B")
        if not given.endswith("%"):
            return Allowance(bytes=_with_unit(given), text=given)
        fraction = Fraction(given[:-1].strip()) / 100
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{option}: {given!r} is neither a share, such as 1%, nor a size, such as 10MiB") from None
    if fraction < 0:
        raise UsageError(f"{option}: {given} is less than nothing; shrinking is never a failure")
    return Allowance(fraction=fraction, text=given)


def _with_unit(text: str) -> int:
    """The bytes of ``10MiB``. Raises ``ValueError`` for a number alone: of ``0.01`` nobody knows which share it is."""
    if not text[-1:].isalpha():
        raise ValueError(text)
    return parse_bytes(text)


def check_key(key: str) -> None:
    """Raise :class:`UsageError` for a key that there is none of."""
    if key in KEYS:
        return
    found = module_in(key)
    first, _, name = key.partition(".")
    if first == MODULES and name and "." not in name:
        raise UsageError(f"{key}: write what of the module is limited, such as {key}.activations")
    if found is None:
        raise UsageError(
            f"unknown budget {key!r}{nearest(key.lower(), (*KEYS, f'{MODULES}.'))}; "
            f"there are {', '.join(KEYS)} and {MODULES}.NAME.KEY"
        )
    if found[1] not in OF_MODULE:
        meant, known = nearest(found[1], OF_MODULE), ", ".join(OF_MODULE)
        raise UsageError(f"{key}: of a module there is no {found[1]!r}{meant}; there are {known}")


def nearest(word: str, words: Iterable[str]) -> str:
    """``; did you mean 'peak'?``; empty where nothing is near."""
    near = get_close_matches(word, list(map(str, words)), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def module_in(key: str) -> tuple[str, str] | None:
    """The module's name in ``key``, and the key of it; ``None`` for the whole run."""
    first, _, rest = key.partition(".")
    name, dot, what = rest.rpartition(".")
    return (name, what) if first == MODULES and dot and name and what else None
