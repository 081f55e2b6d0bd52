"""The storages that are alive when a recording starts in the middle of a run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from time import time_ns

import torch


class Baseline:
    """Knows the live CPU storages and notes when each dies.

    The profiler does not report the free of a block that it did not see allocated; a weak
    reference to the storage does, since the storage's Python object lives as long as the storage.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Address of each live storage to its bytes, at the start."""
        self._references: list[weakref.ref[torch.UntypedStorage]] = []
        self._freed: list[tuple[int, int]] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the storages of ``tensors`` into the baseline."""
        for tensor in tensors:
            self._add(tensor)

    def take_freed(self) -> list[tuple[int, int]]:
        """(time, address) of each storage that died since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def forget(self) -> None:
        """Drop the weak references."""
        self._references.clear()
        self._freed.clear()

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            if storage.device.type != "cpu":
                return
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # fake, functorch and wrapper tensors have none
            return
        # Memory that torch's allocator did not hand out (numpy's, a mapped file's) cannot be resized.
        if address == 0 or size == 0 or not storage.resizable():
            return
        if address not in self.blocks:
            self.blocks[address] = size
            self._references.append(weakref.ref(storage, functools.partial(self._died, address)))

    def _died(self, address: int, _: object) -> None:
        self._freed.append((time_ns(), address))
