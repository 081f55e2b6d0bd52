"""Casts: the copies in another precision, the ops that use them, and which of them autocast's cache holds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from time import time_ns
from typing import Any

import torch

from ampmem.events import Fact
from ampmem.patching import Undo, patch_call
from ampmem.recorder.facts.addresses import parts_of
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.models import Models
from ampmem.recorder.torch_private.general import CLEAR_CACHE, is_view, use_count


class SeenCopy:
    """A copy that the C++ extension saw, by the address of its storage; called like a weak reference.

    ``holders`` returns the number of references to the copy at an address, 0 if it was freed.
    """

    def __init__(self, address: int, holders: Callable[[int], int]) -> None:
        self._address = address
        self._holders = holders

    def __call__(self) -> SeenCopy | None:
        return self if self.holders() else None

    def holders(self) -> int:
        """Number of references to the copy; 0 if it was freed."""
        return self._holders(self._address)


class CastHooks:
    """Follows each copy of a floating tensor in another floating dtype from the op that makes it."""

    def __init__(self, log: Log, models: Models) -> None:
        self._log = log
        self._models = models
        self.copies: dict[int, weakref.ref[torch.Tensor] | SeenCopy] = {}
        """Copies of parameters and of other leaves (autocast caches those too), by storage address."""
        self._thread = threading.get_ident()
        self.collect: Callable[[], None] = lambda: None
        """Called before the copies are looked at: the C++ extension has seen some of them."""
        self.drop: Callable[[int], object] = lambda address: None
        """Makes the C++ extension let go of the copy at an address."""

    def made(self, source: torch.Tensor, copy: torch.Tensor, module: int) -> None:
        """Note that the op ``_to_copy`` in ``module`` made ``copy`` from ``source``."""
        for part, part_copy in zip(parts_of(source), parts_of(copy), strict=False):  # a quantized one has more parts
            if part.is_floating_point() and part_copy.is_floating_point() and part.dtype != part_copy.dtype:
                self._note_cast(part, part_copy, module)

    def copied(self, source: torch.Tensor, target: torch.Tensor, module: int) -> None:
        """Note that the op ``copy_`` in ``module`` filled ``target`` from ``source``, as when parameters are flattened.

        Autocast makes such a copy in each forward of cuDNN's recurrent layers, and does not cache it.
        """
        if not (source.is_floating_point() and target.is_floating_point() and source.dtype != target.dtype):
            return
        parameter = self._models.parameters_at.find(self._log.storage_address(source), source)
        if parameter is not None:
            self._log.casts += 1
            self._log.fact(Fact.CAST_COPY, self._log.storage_address(target), parameter, module, target)

    def _note_cast(self, source: torch.Tensor, copy: torch.Tensor, module: int) -> None:
        address, origin = self._log.storage_address(copy), self._log.storage_address(source)
        parameter = self._models.parameters_at.find(origin, source)
        if parameter is None:
            buffer = self._models.buffers_at.find(origin, source)
            now = time_ns()
            self._log.fact(Fact.OTHER_CAST, address, buffer or 0, module, copy, at=now)
            self._log.fact(Fact.CAST_SOURCE, origin, at=now)
        else:
            self._log.casts += 1
            self._log.fact(Fact.CAST_COPY, address, parameter, module, copy)
            # Autocast caches the casts of leaves alone: one of a view is made anew at each use.
            if is_view(source):
                self._log.fact(Fact.VIEW_CAST, address, parameter, module, copy)
        if parameter is not None or (source.is_leaf and source.requires_grad):
            self.copies[address] = weakref.ref(copy)

    def named(self, storage: int, start: int) -> tuple[int | None, int | None]:
        """Text ids of the parameter and of the buffer in which a tensor begins, by its storage and first element."""
        return self._models.parameters_at.find_at(storage, start), self._models.buffers_at.find_at(storage, start)

    def of_plain_models(self) -> bool:
        """Whether all parameters and buffers are plain tensors."""
        return self._models.parameters_at.plain and self._models.buffers_at.plain

    def used(self, arguments: Iterable[Any], op: int) -> None:
        """Note that the op with this text id reads ``arguments``."""
        for argument in arguments:
            for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
                if is_tensor(tensor):
                    for part in parts_of(tensor):
                        self._note_use(part, op)

    def _note_use(self, tensor: torch.Tensor, op: int) -> None:
        address = self._log.storage_address(tensor)
        copy = self.copies.get(address)
        if copy is not None and copy() is not None:  # else its address was reused
            self._log.fact(Fact.CAST_USE, address, op)

    def forget_dead(self) -> None:
        """Forget copies that were freed."""
        self.copies = {address: copy for address, copy in self.copies.items() if copy() is not None}

    def before_swap(self, tensors: tuple[torch.Tensor, ...]) -> Undo:
        """Let go of ``tensors``, which are about to be swapped: each gets the other's storage."""
        # torch refuses to swap a tensor to which there are weak references.
        held = [address for address, copy in self.copies.items() if any(copy() is tensor for tensor in tensors)]
        for address in held:
            del self.copies[address]
        for tensor in tensors:
            for part in parts_of(tensor):
                self.drop(self._log.storage_address(part))

        def take() -> None:
            for tensor in tensors:
                for part in parts_of(tensor):
                    address = self._log.storage_address(part)
                    if address in held:
                        self.copies[address] = weakref.ref(part)

        return take

    def _held(self) -> dict[int, int]:
        """Reference count of each copy, by address."""
        self.collect()
        self.forget_dead()
        return {address: _holders(copy) for address, copy in self.copies.items()}

    def _cleared(self, held: dict[int, int], at: int) -> None:
        """Note that the cache was cleared; it held the copies that lost a reference."""
        for address, copy in self.copies.items():
            # The cache has a reference of its own to each copy in it, which clearing gives up.
            if _holders(copy) < held.get(address, 0):
                self._log.fact(Fact.CACHED, address, at=at)
        self.forget_dead()

    def install(self) -> Callable[[], None]:
        """Compare the copies before and after autocast's cache is cleared; returns the undo."""

        def wrap(original: Callable[[], None]) -> Callable[[], None]:
            def clear_autocast_cache() -> None:
                if threading.get_ident() != self._thread:  # autocast's cache is per thread
                    original()
                    return
                holders = before() or {}
                cleared_ns = time_ns()
                original()
                after(holders, cleared_ns)

            return clear_autocast_cache

        guarded = self._log.misses.guarded
        before, after = guarded(self._held), guarded(self._cleared)

        return patch_call(*CLEAR_CACHE, wrap)


def _holders(copy: weakref.ref[torch.Tensor] | SeenCopy) -> int:
    """Number of references to the tensor behind ``copy``; 0 if it was freed."""
    found = copy()
    if found is None:
        return 0
    return found.holders() if isinstance(found, SeenCopy) else use_count(found)
