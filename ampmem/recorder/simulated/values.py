"""The few numbers on the device whose value is known although nothing is computed.

A GradScaler needs two of them: its scale, and whether it found an infinity.
"""

from __future__ import annotations

import weakref

import torch

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
            version = tensor._version
            self._known[tensor.untyped_storage()] = (number, version, version + written)

    def get(self, tensor: torch.Tensor) -> Number | None:
        """The number that ``tensor`` holds, ``None`` when it is not known."""
        if tensor.is_inference():
            return None
        number, first, last = self._known.get(tensor.untyped_storage(), (None, 0, 0))
        return number if first <= tensor._version <= last else None
