"""The storages of the script's tensors: those alive when a recording starts, and those that hooks see later."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from itertools import chain, repeat
from time import time_ns
from typing import NamedTuple

import torch

from ampmem.recorder.facts.addresses import PLAIN
from ampmem.recorder.torch_private.general import without_functions


class SeenStorage(NamedTuple):
    """A storage that a hook has seen; ``resizable`` where torch's allocator handed its memory out."""

    time_ns: int
    address: int
    bytes: int
    resizable: bool
    kept: bool
    """Whether it is the script's for long: a parameter, a buffer, optimizer state."""


class Died(NamedTuple):
    """The storage that was known at ``address`` is dead."""

    time_ns: int
    address: int


class Storages:
    """Knows CPU storages and notes when each dies.

    The profiler reports neither the free of a block that it did not see allocated nor what other threads do; a weak
    reference to the storage tells its death, since the storage's Python object lives as long as the storage.
    """

    def __init__(self) -> None:
        self.baseline: dict[int, int] = {}
        """Address of each live storage to its bytes, at the start."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._places: dict[int, int] = {}
        """``id`` of each storage to where it was seen last: one may be emptied, and filled again elsewhere."""
        self._seen: list[SeenStorage] = []
        self._died: list[Died] = []

    def add(self, tensors: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
        """Take the storages of ``tensors`` into the baseline; those of ``kept`` whoever handed their memory out."""
        # Memory that torch's allocator did not hand out (numpy's, a mapped file's) cannot be resized; nor can what
        # torch.load has read, such as the optimizer state of a training that is resumed.
        for tensor, any_memory in chain(zip(kept, repeat(True)), zip(tensors, repeat(False))):
            storage = _storage(tensor)
            if storage is None or storage.data_ptr() in self.baseline:
                continue
            if any_memory or storage.resizable():
                self.baseline[storage.data_ptr()] = storage.nbytes()
                self._watch(storage)

    def see(self, tensor: torch.Tensor, *, kept: bool) -> None:
        """A hook has found ``tensor`` to be the script's; nothing new where it was seen before."""
        storage = _of_cpu(tensor)
        if storage is None or self._was_seen(storage):
            return
        address = storage.data_ptr()
        self._left(storage, address)
        if address and storage.nbytes():
            self._seen.append(SeenStorage(time_ns(), address, storage.nbytes(), storage.resizable(), kept))
            self._watch(storage)

    def _was_seen(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is known where it is now."""
        address = storage.data_ptr()
        known = self._references.get(address)
        return known is not None and known() is storage and self._places.get(id(storage)) == address

    def alive(self, address: int) -> bool:
        """Whether a storage that was seen at ``address`` lives."""
        known = self._references.get(address)
        storage = None if known is None else known()
        return storage is not None and storage.data_ptr() == address

    def take_seen(self) -> list[SeenStorage]:
        """What was seen since the last call, in order."""
        seen, self._seen = self._seen, []
        return seen

    def take_died(self) -> list[Died]:
        """What died since the last call, in order."""
        died, self._died = self._died, []
        return died

    def forget(self) -> None:
        """Drop the weak references."""
        self._references.clear()
        self._places.clear()
        self._seen.clear()
        self._died.clear()

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._places[id(storage)] = address
        self._references[address] = weakref.ref(storage, functools.partial(self._note_death, address, id(storage)))

    def _left(self, storage: torch.UntypedStorage, address: int) -> None:
        """``storage`` is at ``address`` now: of what is where it was it says nothing any longer."""
        before = self._places.get(id(storage), address)
        if before != address:
            known = self._references.get(before)
            if known is not None and known() is storage:
                del self._references[before]
            del self._places[id(storage)]

    def _note_death(self, address: int, identity: int, reference: object) -> None:
        self._died.append(Died(time_ns(), address))
        if self._places.get(identity) == address:
            del self._places[identity]
        if self._references.get(address) is reference:
            del self._references[address]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """``tensor``'s storage; ``None`` where it has no memory of the CPU's."""
    storage = _of_cpu(tensor)
    return storage if storage is not None and storage.data_ptr() and storage.nbytes() else None


def _of_cpu(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """``tensor``'s storage, which may be empty; ``None`` where that is not on the CPU, or cannot be told."""
    try:
        with without_functions():
            storage = torch.Tensor.untyped_storage(tensor)
            # To make the word of a device's type takes longer than all the rest.
            on_cpu = tensor.is_cpu if type(tensor) in PLAIN else storage.device.type == "cpu"
        if not on_cpu:  # a fake one's, say, of which torch warns when it is asked where it lies
            return None
        storage.data_ptr()
        return storage
    except Exception:  # fake, functorch and lazy tensors; those of classes that do not let it be asked
        return None
