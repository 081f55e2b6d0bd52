"""What the model asks of the CUDA driver: memory, and addresses for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ampmem.allocator.rounding import round_up
from ampmem.allocator.settings import SMALL_BUFFER

AddressSource: TypeAlias = Callable[[int], int]
"""Gives the address of the next ``cudaMalloc`` of so many bytes."""

FIRST_ADDRESS = 0x7F00_0000_0000
UNLIMITED = 1 << 44
"""Stands in for the device's memory where none is given: more than any device has."""


class Call(StrEnum):
    """What the allocator asked of the driver, in the words of a torch snapshot's trace."""

    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCall:
    """One successful call to the driver."""

    call: Call
    address: int
    size: int
    stream: int


class Driver:
    """A device's memory. ``in_use`` counts what the allocator took; ``outside`` what others hold.

    ``calls`` has every successful call, in order; ``observer`` is told each as it is made.

    Where the driver puts memory cannot be known, so addresses rise from one call to the next unless an
    address source says otherwise. They matter only between free blocks of equal size.
    """

    __slots__ = ("_next", "_source", "calls", "in_use", "observer", "outside", "total")

    def __init__(self, total: int | None, outside: int = 0, source: AddressSource | None = None) -> None:
        self.total = UNLIMITED if total is None else total
        self.outside = outside
        self.in_use = 0
        self.calls: list[DriverCall] = []
        self.observer: Callable[[DriverCall], None] | None = None
        self._source = source
        self._next = FIRST_ADDRESS

    @property
    def free(self) -> int:
        """Bytes that nobody holds (``cudaMemGetInfo``)."""
        return self.total - self.outside - self.in_use

    def malloc(self, size: int, stream: int) -> int | None:
        """The address of ``size`` new bytes (``cudaMalloc``), or ``None`` where there are not enough."""
        if size > self.free:
            return None
        address = self.reserve_addresses(size) if self._source is None else self._source(size)
        self._took(Call.SEGMENT_ALLOC, address, size, stream)
        return address

    def map(self, address: int, size: int, stream: int) -> bool:
        """Put memory behind addresses (``cuMemCreate`` and ``cuMemMap``), or say that there is not enough."""
        if size > self.free:
            return False
        self._took(Call.SEGMENT_MAP, address, size, stream)
        return True

    def give_back(self, call: Call, address: int, size: int, stream: int) -> None:
        """``cudaFree`` or ``cuMemUnmap``."""
        self.in_use -= size
        self._made(call, address, size, stream)

    def reserve_addresses(self, size: int) -> int:
        """Address space without memory (``cuMemAddressReserve``)."""
        address = self._next
        self._next += round_up(size, SMALL_BUFFER)
        return address

    def _took(self, call: Call, address: int, size: int, stream: int) -> None:
        self.in_use += size
        self._made(call, address, size, stream)

    def _made(self, call: Call, address: int, size: int, stream: int) -> None:
        made = DriverCall(call=call, address=address, size=size, stream=stream)
        self.calls.append(made)
        if self.observer is not None:
            self.observer(made)
