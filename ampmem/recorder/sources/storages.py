"""CPU storages of the script's tensors: those alive when a recording starts, and those that hooks see later."""

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
    """A storage that a hook has seen; ``resizable`` if torch's allocator allocated its memory."""

    time_ns: int
    address: int
    bytes: int
    resizable: bool
    kept: bool
    """Whether the script keeps it for long: a parameter, a buffer, optimizer state."""


class Died(NamedTuple):
    """The storage that was known at ``address`` has been freed."""

    time_ns: int
    address: int


class Storages:
    """Knows CPU storages, and when each is freed.

    The profiler reports neither frees of blocks whose allocation it missed nor events of other threads. A weak
    reference to the storage shows when it is freed: its Python object lives as long as the storage.
    """

    def __init__(self) -> None:
        self.baseline: dict[int, int] = {}
        """Address to bytes of each storage that was alive at the start."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._places: dict[int, int] = {}
        """The last known address of each storage, by ``id``: one may be emptied, and filled again elsewhere."""
        self._seen: list[SeenStorage] = []
        self._died: list[Died] = []

    def add(self, tensors: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
        """Add the storages of ``tensors`` to the baseline; those of ``kept`` even if torch did not allocate them."""
        # Memory that torch's allocator did not allocate (numpy's, a mapped file's) cannot be resized; neither can what
        # torch.load has read, such as the optimizer state of a resumed training.
        with without_functions():
            for tensor, any_memory in chain(zip(kept, repeat(True)), zip(tensors, repeat(False))):
                storage, address = cpu_storage(tensor)
                if storage is None or not (address and storage.nbytes()) or address in self.baseline:
                    continue
                if any_memory or storage.resizable():
                    self.baseline[address] = storage.nbytes()
                    self._watch(storage, address)

    def see(self, tensor: torch.Tensor, *, kept: bool) -> None:
        """Note that a hook found ``tensor`` to be the script's; does nothing if it was seen before.

        Hooks call it where the script's function modes see nothing.
        """
        storage, address = cpu_storage(tensor)
        if storage is None:
            return
        # The same object at the same address: as a rule nothing is new, and this is called for each tensor of each
        # step.
        known = self._references.get(address)
        if known is not None and known() is storage and self._places.get(id(storage)) == address:
            return
        self._forget_former_address(storage, address)
        if address and storage.nbytes():
            self._seen.append(SeenStorage(time_ns(), address, storage.nbytes(), storage.resizable(), kept))
            self._watch(storage, address)

    def alive(self, address: int) -> bool:
        """Whether a storage that was seen at ``address`` is alive."""
        known = self._references.get(address)
        storage = None if known is None else known()
        return storage is not None and storage.data_ptr() == address

    def knows(self, addresses: frozenset[int]) -> bool:
        """Whether at each of ``addresses`` there is a storage that was seen, and not freed since."""
        return self._references.keys() >= addresses

    def take_seen(self) -> list[SeenStorage]:
        """The storages seen since the last call, in order."""
        seen, self._seen = self._seen, []
        return seen

    def take_died(self) -> list[Died]:
        """The storages freed since the last call, in order."""
        died, self._died = self._died, []
        return died

    def forget(self) -> None:
        """Drop all weak references."""
        self._references.clear()
        self._places.clear()
        self._seen.clear()
        self._died.clear()

    def _watch(self, storage: torch.UntypedStorage, address: int) -> None:
        self._places[id(storage)] = address
        # Python's object for a storage is kept alive by the storage, once it was made: it dies when the memory is
        # freed.
        self._references[address] = weakref.ref(storage, functools.partial(self._note_death, address, id(storage)))

    def _forget_former_address(self, storage: torch.UntypedStorage, address: int) -> None:
        """Forget the earlier address of ``storage``, which is at ``address`` now."""
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
        # Another storage may have been seen at this address since: then the reference kept is that one's.
        if self._references.get(address) is reference:
            del self._references[address]


def cpu_storage(tensor: torch.Tensor) -> tuple[torch.UntypedStorage | None, int]:
    """``tensor``'s storage, which may be empty, and its address; ``None`` if it is not on the CPU, or unknown."""
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        # Creating the string of a device's type would take longer than all the rest.
        on_cpu = tensor.is_cpu if type(tensor) in PLAIN else storage.device.type == "cpu"
        # The address of a storage elsewhere is not asked: of a fake one torch warns.
        return (storage, storage.data_ptr()) if on_cpu else (None, 0)
    except Exception:  # fake, functorch and lazy tensors, and classes that refuse
        return None, 0
