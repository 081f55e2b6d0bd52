"""The few numbers on the device whose value is known although nothing is computed, and what is taken for the others.

A GradScaler needs two of them: its scale, and whether it found an infinity.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from ampmem.own_code import script_line
from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private import writes
from ampmem.terminal import Terminal

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

    def forget(self, tensor: torch.Tensor) -> None:
        """``tensor`` holds a number that is not known."""
        self._known.pop(tensor.untyped_storage(), None)

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


def _of(dtype: torch.dtype, number: float) -> Number:
    """``number`` as reading it from a tensor of ``dtype`` gives it."""
    if dtype == torch.bool:
        return bool(number)
    return float(number) if dtype.is_floating_point or dtype.is_complex else int(number)


class Guesses:
    """The notes of what was taken for granted, and on which lines of the script: one per kind, however many lines."""

    SHOWN = 5
    """So many lines are named."""
    MANY = 10_000
    """So many times on one line may be a loop that waits for a number to change, and it never will."""

    def __init__(self, device: SimulatedDevice, assumed: Assumed = NOTHING) -> None:
        self._device = device
        self._assumed = assumed
        self._unused = {line: _changed_nothing(line) for line in assumed.numbers}
        for text in self._unused.values():
            device.warn(text)
        self._lines: dict[str, Counter[str]] = {}
        self._warned: Counter[str] = Counter()
        self.backward_seen = False
        """Whether the script trains: what it reads from then on are losses and counts."""

    def assumed(self, dtype: torch.dtype) -> Number | None:
        """What the user says of the number that is read on the line that runs, as ``dtype`` has it."""
        if not self._assumed.numbers:
            return None
        found = self._assumed.number(script_line())
        if found is None:
            return None
        line, number = found
        if line in self._unused:
            self._device.retract(self._unused.pop(line))
        self._device.assume(f"assumed: {number} is read at {line}, as --assume says")
        return _of(dtype, number)

    def note_integer(self, what: str) -> None:
        """The same of integers. Before the first backward one may well be a size, such as a number of classes."""
        line = script_line()
        if self.backward_seen or (line not in self._warned and len(self._warned) == self.SHOWN):
            self.note(what)
            return
        self._warned[line] += 1
        path, _, number = line.rpartition(":")
        self._device.warn(
            f"{line}: {what}, as the device has no data. If a size depends on it, the numbers here are of a wrong "
            f"size: --assume {Path(path).name}:{number}=NUMBER says what is read there"
        )
        self._see_whether_it_waits(line, self._warned[line], what)

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
        self._see_whether_it_waits(line, lines[line], what)

    def _see_whether_it_waits(self, line: str, times: int, what: str) -> None:
        if times == self.MANY:
            Terminal(sys.stderr).say(
                f"{line} has asked {self.MANY} times so far: {what}. If the script waits there for that to "
                "change, it waits for ever: Ctrl-C ends it"
            )


def _changed_nothing(line: str) -> str:
    return f"--assume for {line} changed nothing: no number was read from the device on that line"


def _listed(what: str, lines: Mapping[str, int]) -> str:
    shown = list(lines)[: Guesses.SHOWN]
    more = len(lines) - len(shown)
    beyond = f" and at {more} more line{'' if more == 1 else 's'}" if more else ""
    return f"{what} at {', '.join(shown)}{beyond}"
