"""Numbers that are on a device: copied to the host behind the work that makes them, and read when that is done."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from ampmem.recorder.torch_private.general import without_dispatch, without_functions


class LateNumber:
    """One number on its way from a CUDA device; nothing waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Pinned memory is the host's: the device's allocator is not asked for anything. The script may have said that
        # tensors are made on the device, and its own modes count only what the script does.
        with without_functions(), without_dispatch():
            self._copy = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach().reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def __del__(self) -> None:
        # torch asks the device whether it still needs the copy, in a destructor, which ends the process where the
        # device has failed: before the script gets to see its error. An empty number has no copy.
        copy = self.__dict__.pop("_copy", None)
        if copy is not None and not self._may_be_freed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(copy))

    def value(self) -> float | None:
        """The number; ``None`` where the device has not come that far, or must not be asked."""
        with suppress(RuntimeError):  # of a device that has failed: the script gets to know by itself
            if torch.cuda.is_current_stream_capturing():  # to query an event would end the capture
                return None
            if self._event.query():
                with without_functions(), without_dispatch():
                    return float(self._copy)
        return None

    def _may_be_freed(self) -> bool:
        """Whether the device still answers, which it does whatever the answer."""
        try:
            if not torch.cuda.is_current_stream_capturing():
                self._event.query()
                return True
        except Exception:  # of the device, of an event that was never made, of an interpreter that ends
            return False
        return False


def number_of(tensor: torch.Tensor) -> float | LateNumber | None:
    """The one number in ``tensor``, now or late; ``None`` while a CUDA graph is captured, or of a failed device."""
    with without_functions():
        if not tensor.is_cuda or type(tensor) is not torch.Tensor:
            return float(tensor.detach())
        with suppress(RuntimeError):  # the script gets to know by itself
            if not torch.cuda.is_current_stream_capturing():
                return LateNumber(tensor)
    return None


def settled_number(number: float | LateNumber | None) -> float | None:
    """``number``, where it is there."""
    return number.value() if isinstance(number, LateNumber) else number
