"""The few numbers on the device whose value is known although nothing is computed, and what is taken for the others.

A GradScaler needs two of them: its scale, and whether it found an infinity.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping

import torch

from ampmem.own_code import script_line
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private import writes

Number = int | float | bool


class KnownNumbers:
    """Which one-element tensors hold which number, as long as nobody writes to them."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Number, int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """By storage: the number, and the first and last version of the tensor that hold it."""

    def note(self, tensor: torch.Tensor, number: Number, *, written: bool = False) -> None:
        """``tensor`` holds ``number`` now; ``written`` when its version may still go up for that."""
        if tensor.numel() == 1 and not tensor.is_inference():  # which counts no writes
            version = writes(tensor)
            self._known[tensor.untyped_storage()] = (number, version, version + written)

    def get(self, tensor: torch.Tensor) -> Number | None:
        """The number that ``tensor`` holds, ``None`` when it is not known."""
        if tensor.is_inference():
            return None
        number, first, last = self._known.get(tensor.untyped_storage(), (None, 0, 0))
        return number if first <= writes(tensor) <= last else None


def guess(dtype: torch.dtype) -> Number:
    """What is taken for a number that nobody computed."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 1


class Guesses:
    """The notes of what was taken for granted, and on which lines of the script: one per kind, however many lines."""

    SHOWN = 5
    """So many lines are named."""
    MANY = 10_000
    """So many times on one line may be a loop that waits for a number to change, and it never will."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._lines: dict[str, Counter[str]] = {}

    def note(self, what: str) -> None:
        """``what`` was taken for granted on the line that runs."""
        line = script_line()
        lines = self._lines.setdefault(what, Counter())
        known = line in lines
        if not known:
            self._device.assumptions.pop(_listed(what, lines), None)
        lines[line] += 1
        if not known:
            self._device.assume(_listed(what, lines))
        if lines[line] == self.MANY:
            print(
                f"ampmem: {line} has asked {self.MANY} times so far: {what}. If the script waits there for that to "
                "change, it waits for ever: Ctrl-C ends it",
                file=sys.stderr,
            )


def _listed(what: str, lines: Mapping[str, int]) -> str:
    shown = list(lines)[: Guesses.SHOWN]
    more = len(lines) - len(shown)
    beyond = f" and at {more} more line{'' if more == 1 else 's'}" if more else ""
    return f"{what} at {', '.join(shown)}{beyond}"
