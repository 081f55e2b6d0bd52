"""Files and shared memory that are mapped: one mapping holds the storages of many tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from ampmem.recorder.sources.storages import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """Mapped memory, the storages in it (address and bytes of each), and in the same way what lies around them."""

    address: int
    bytes: int
    storages: tuple[tuple[int, int], ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """All of it."""
        return self.rest + self.storages


class Mappings:
    """Divides each mapping into the storages that were seen in it; what lies around them is one more part."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._seen: dict[int, int] = {}
        """Address of each storage that was seen to its bytes; those that no block is known for."""
        self._sorted: list[int] = []
        self.parts: set[int] = set()
        """The addresses of all parts."""

    def __contains__(self, address: int) -> bool:
        return address in self._mappings

    def expect(self, seen: Iterable[Seen]) -> None:
        """These storages were seen since the last call: some may lie in mappings that are still to be added."""
        inside = [storage for mapping in self._mappings.values() for storage in mapping.storages]
        self._seen = dict(inside) | {each.address: each.bytes for each in seen}
        self._sorted = sorted(self._seen)

    def add(self, address: int, size: int) -> tuple[tuple[int, int], ...]:
        """``size`` bytes are mapped at ``address``; their parts."""
        mapping = self._mappings[address] = self._divide(address, size)
        self.parts.update(start for start, _ in mapping.parts)
        return mapping.parts

    def remove(self, address: int) -> list[int]:
        """The mapping at ``address`` is no more; the addresses of its parts. None where there is no such mapping."""
        mapping = self._mappings.pop(address, None)
        starts = [] if mapping is None else [start for start, _ in mapping.parts]
        self.parts.difference_update(starts)
        return starts

    def around(self, address: int) -> Mapping | None:
        """The mapping in which ``address`` lies."""
        for mapping in self._mappings.values():
            if mapping.address <= address < mapping.address + mapping.bytes:
                return mapping
        return None

    def _divide(self, address: int, size: int) -> Mapping:
        end, reached, rest_at = address + size, address, None
        storages: list[tuple[int, int]] = []
        for start in self._sorted[bisect_left(self._sorted, address) :]:
            if start >= end:
                break
            if start < reached or start + self._seen[start] > end:  # a view of what is a part already
                continue
            if start > reached and rest_at is None:
                rest_at = reached
            storages.append((start, self._seen[start]))
            reached = start + self._seen[start]
        if reached < end and rest_at is None:
            rest_at = reached
        left = size - sum(each for _, each in storages)
        rest = () if rest_at is None else ((rest_at, left),)
        return Mapping(address=address, bytes=size, storages=tuple(storages), rest=rest)
