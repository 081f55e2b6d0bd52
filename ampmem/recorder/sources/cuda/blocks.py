"""What the profiler saw of the device's blocks: their exact sizes, and the autograd node around each.

The allocator reports every block it hands out or takes back to the profiler of the calling thread; the engine's threads
have that of the thread whose backward they run. What other threads do is in the trace alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ampmem.events import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBlocks:
    """Blocks handed out (``bytes`` above 0) and taken back (below), in order; ``op`` indexes ``ops``, nodes' names."""

    time_ns: Column
    address: Column
    bytes: Column
    op: Column
    sequence: Column
    ops: tuple[str, ...] = ("",)

    def __len__(self) -> int:
        return len(self.time_ns)


_NONE = np.zeros(0, dtype=np.int64)
NO_BLOCKS = SeenBlocks(time_ns=_NONE, address=_NONE, bytes=_NONE, op=_NONE, sequence=_NONE)


class Use(NamedTuple):
    """An alloc (``size`` requested bytes) or a free of the trace."""

    entry: int
    address: int
    size: int
    freed: bool


def found_in(uses: Sequence[Use], seen: SeenBlocks) -> Iterator[tuple[int, int]]:
    """(index of an entry of the trace, index into ``seen``) of what is surely the same.

    At each address both are in order, and ``seen`` may lack what other threads did. Going through from the front gives
    the earliest entry that each can be, from the back the latest: where these are one, there is no other.
    """
    at: dict[int, list[Use]] = {}
    for use in uses:
        at.setdefault(use.address, []).append(use)
    seen_at: dict[int, list[tuple[int, int]]] = {}
    for index, (address, size) in enumerate(zip(seen.address.tolist(), seen.bytes.tolist(), strict=True)):
        seen_at.setdefault(address, []).append((index, size))
    for address, blocks in seen_at.items():
        there = at.get(address, [])
        if len(there) == len(blocks):  # as nearly always: each can be one only
            if all(
                use.freed == (size < 0) and abs(size) >= use.size for use, (_, size) in zip(there, blocks, strict=True)
            ):
                yield from zip((use.entry for use in there), (index for index, _ in blocks), strict=True)
            continue
        early = _earliest(there, blocks)
        late = _earliest(there[::-1], blocks[::-1])[::-1]
        for (index, _), first, last in zip(blocks, early, late, strict=False):
            if first == last:
                yield first, index


def _earliest(uses: Sequence[Use], blocks: Sequence[tuple[int, int]]) -> list[int]:
    """The first entry that each block can be; empty where they do not fit into each other."""
    found: list[int] = []
    rest = iter(uses)
    for _, size in blocks:
        for use in rest:
            if use.freed == (size < 0) and abs(size) >= use.size:
                found.append(use.entry)
                break
        else:
            return []
    return found
