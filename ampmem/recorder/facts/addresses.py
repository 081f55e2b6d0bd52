"""Where tensors lie: facts are about addresses, and the device whose memory is recorded says which is whose."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ampmem.recorder.facts.parts import PLAIN

_storage_of, _first_of = torch.Tensor.untyped_storage, torch.Tensor.data_ptr
"""Torch's own, whatever the class of a tensor makes of them."""


class Blocks(NamedTuple):
    """What a source knows to be alive: address and bytes of the blocks that no hook has seen, and the bytes of all."""

    unseen: dict[int, int]
    total: int


class Addresses(Protocol):
    """What can be asked of the recorded device."""

    def storage_address(self, tensor: torch.Tensor) -> int:
        """The address of the first byte of ``tensor``'s storage; 0 when it has none that can be read."""

    def data_address(self, tensor: torch.Tensor) -> int:
        """The address of ``tensor``'s first element; 0 when it has none that can be read."""


class RealAddresses:
    """Those of tensors in memory. Meta, fake and functorch tensors have no storage of their own.

    A lazy module's parameter has none yet, and says so with a ``ValueError``.
    """

    @staticmethod
    def storage_address(tensor: torch.Tensor) -> int:
        """The address of the first byte of ``tensor``'s storage; 0 when it has none that can be read."""
        try:
            storage = _storage_of(tensor)
            if type(tensor) in PLAIN:
                return storage.data_ptr()
            # A fake tensor's pointer is one that torch warns of.
            return storage.data_ptr() if storage.device.type != "meta" else 0
        except (RuntimeError, NotImplementedError, ValueError):
            return 0

    @staticmethod
    def data_address(tensor: torch.Tensor) -> int:
        """The address of ``tensor``'s first element; 0 when it has none that can be read."""
        try:
            return _first_of(tensor) if RealAddresses.storage_address(tensor) else 0
        except (RuntimeError, NotImplementedError, ValueError):
            return 0
