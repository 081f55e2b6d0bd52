"""Numbers that are on a device: copied to the host behind the work that makes them, and read when that is done."""

from __future__ import annotations

from contextlib import suppress

import torch

from ampmem.recorder.torch_private import without_dispatch


class LateNumber:
    """One number on its way from a CUDA device; nothing waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Pinned memory is the host's: the device's allocator is not asked for anything.
        with without_dispatch():  # the script's own modes count only what the script does
            self._copy = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def value(self) -> float | None:
        """The number; ``None`` where the device has not come that far, or must not be asked."""
        with suppress(RuntimeError):  # of a device that has failed: the script gets to know by itself
            if torch.cuda.is_current_stream_capturing():  # to query an event would end the capture
                return None
            return float(self._copy) if self._event.query() else None
        return None


def number_of(tensor: torch.Tensor) -> float | LateNumber | None:
    """The one number in ``tensor``, now or late; ``None`` while a CUDA graph is captured."""
    if not tensor.is_cuda or type(tensor) is not torch.Tensor:
        return float(tensor.detach())
    if torch.cuda.is_current_stream_capturing():
        return None
    return LateNumber(tensor)


def settled(number: float | LateNumber | None) -> float | None:
    """``number``, where it is there."""
    return number.value() if isinstance(number, LateNumber) else number
