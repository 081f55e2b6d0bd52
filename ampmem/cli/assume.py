"""What ``--assume`` says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ampmem.errors import UsageError
from ampmem.vocabulary import Device

if TYPE_CHECKING:
    from ampmem.simulator.assumed import Assumed

ASSUMABLE = ("nonzero", "unique")
"""Ops whose result depends on the data, of which ``--assume`` can say how much it is; masks are ``nonzero``."""

_LINE = re.compile(r"(?:\./)?(?P<place>.+:[1-9][0-9]*)")


def assumed_data(device: Device, assume: tuple[str, ...]) -> Assumed | None:
    """What each ``--assume`` says; ``None`` for a real device. Raises :class:`UsageError` for what cannot be meant."""
    if device != Device.SIMULATED:
        if assume:
            raise UsageError("--assume says what a simulated device takes for granted, so it needs --device sim")
        return None
    from ampmem.simulator.assumed import Assumed  # of which a recording of a real device knows nothing

    fractions: dict[str, float] = {}
    numbers: dict[str, float] = {}
    for text in assume:
        name, _, given = text.partition("=")
        line = _LINE.fullmatch(name)
        if name in fractions or (line is not None and line["place"] in numbers):
            raise UsageError(f"--assume: {name} is there twice")
        if line is not None:
            numbers[line["place"]] = _number(text, given)
        else:
            fractions[name] = _fraction(text, name, given)
    return Assumed(fractions=fractions, numbers=numbers)


def _number(text: str, given: str) -> float:
    try:
        return float(given) if "." in given or "e" in given else int(given)
    except ValueError:
        raise UsageError(f"--assume {text}: it takes the number that is read there, such as train.py:12=7") from None


def _fraction(text: str, op: str, given: str) -> float:
    if op not in ASSUMABLE:
        raise UsageError(
            f"--assume {text}: there is no op {op!r} to assume of; there are {', '.join(ASSUMABLE)}, and lines of the "
            "script where a number is read, such as train.py:12=7"
        )
    try:
        fraction = float(given)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise UsageError(f"--assume {text}: it takes a fraction of the elements, from 0 to 1, such as {op}=0.5")
    return fraction
