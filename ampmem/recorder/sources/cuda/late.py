"""Numbers on a CUDA device: copied to the host asynchronously, and read once the copy is done."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from ampmem.recorder.torch_private.general import without_dispatch, without_functions


class LateNumber:
    """A number that is being copied from a CUDA device; nothing waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Pinned host memory: the device allocates nothing. The script may have set the device as the default
        # of new tensors, and its dispatch modes must see only its own ops.
        with without_functions(), without_dispatch():
            self._copy = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor.detach().reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def __del__(self) -> None:
        # The copy's destructor queries the device, and an error there ends the process: on a failed device, even
        # before the script sees its own error. An empty number has no copy.
        copy = self.__dict__.pop("_copy", None)
        if copy is not None and not self._may_be_freed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(copy))

    def value(self) -> float | None:
        """The number; ``None`` while it is not copied yet, or if the device must not be queried."""
        with suppress(RuntimeError):  # a failed device: the script will get the error itself
            if torch.cuda.is_current_stream_capturing():  # querying an event would end the capture
                return None
            if self._event.query():
                with without_functions(), without_dispatch():
                    return float(self._copy)
        return None

    def _may_be_freed(self) -> bool:
        """Whether the device answers a query at all."""
        with suppress(Exception):  # a failed device, an event never made, a finalizing interpreter
            if not torch.cuda.is_current_stream_capturing():
                self._event.query()
                return True
        return False


def number_of(tensor: torch.Tensor) -> float | LateNumber | None:
    """The single number in ``tensor``, now or late; ``None`` during graph capture, or on a failed device."""
    with without_functions():
        if not tensor.is_cuda or type(tensor) is not torch.Tensor:
            return float(tensor.detach())
        with suppress(RuntimeError):  # the script will get the error itself
            if not torch.cuda.is_current_stream_capturing():
                return LateNumber(tensor)
    return None


def settled_number(number: float | LateNumber | None) -> float | None:
    """``number`` if it is known by now, else ``None``."""
    return number.value() if isinstance(number, LateNumber) else number
