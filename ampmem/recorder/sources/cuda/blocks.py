"""What the profiler saw of the device's blocks: their exact sizes, and the autograd node around each.

The allocator reports every block it hands out or takes back to the profiler of the calling thread; the engine's threads
have that of the thread whose backward they run. What other threads do is in the trace alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class Uses(NamedTuple):
    """Allocs (``size`` requested bytes) and frees of the trace; ``entry`` is the index of each there."""

    entry: Column
    address: Column
    size: Column
    freed: NDArray[np.bool_]


def found_in(uses: Uses, seen: SeenBlocks) -> tuple[Column, Column]:
    """Indices of entries of the trace, and indices into ``seen``, of what is surely the same.

    At each address both are in order, and ``seen`` may lack what other threads did. Going through from the front gives
    the earliest entry that each can be, from the back the latest: where these are one, there is no other.
    """
    there, known = np.argsort(uses.address, kind="stable"), np.argsort(seen.address, kind="stable")
    addresses, counts = np.unique(seen.address, return_counts=True)
    used_at, used = np.unique(uses.address, return_counts=True)
    place = np.minimum(np.searchsorted(used_at, addresses), max(len(used_at) - 1, 0))
    if len(used_at) == 0 or len(addresses) == 0:
        return _NONE, _NONE
    as_many = (used_at[place] == addresses) & (used[place] == counts)  # as nearly always: each can be one only
    there_alike = there[np.isin(uses.address[there], addresses[as_many])]
    known_alike = known[np.isin(seen.address[known], addresses[as_many])]
    fits = (uses.freed[there_alike] == (seen.bytes[known_alike] < 0)) & (
        np.abs(seen.bytes[known_alike]) >= uses.size[there_alike]
    )
    if len(fits):
        starts = np.concatenate([[0], np.cumsum(counts[as_many])[:-1]])
        fits = np.repeat(np.logical_and.reduceat(fits, starts), counts[as_many])
    entries, which = [uses.entry[there_alike[fits]]], [known_alike[fits]]
    for address in addresses[~as_many].tolist():
        some = _surely_same(uses, there[uses.address[there] == address], seen, known[seen.address[known] == address])
        entries.append(some[0])
        which.append(some[1])
    return np.concatenate(entries), np.concatenate(which)


def _surely_same(uses: Uses, there: Column, seen: SeenBlocks, known: Column) -> tuple[Column, Column]:
    """The same at one address, where the profiler has not seen as many as the trace has."""
    rows = list(zip(uses.entry[there].tolist(), uses.size[there].tolist(), uses.freed[there].tolist(), strict=True))
    sizes = seen.bytes[known].tolist()
    early = _earliest(rows, sizes)
    late = _earliest(rows[::-1], sizes[::-1])[::-1]
    same = [(first, index) for index, first, last in zip(known.tolist(), early, late, strict=False) if first == last]
    entries, which = np.array(same, dtype=np.int64).reshape(-1, 2).T
    return entries, which


def _earliest(uses: Sequence[tuple[int, int, bool]], sizes: Sequence[int]) -> list[int]:
    """The first entry that each block can be; empty where they do not fit into each other."""
    found: list[int] = []
    rest = iter(uses)
    for size in sizes:
        for entry, asked, freed in rest:
            if freed == (size < 0) and abs(size) >= asked:
                found.append(entry)
                break
        else:
            return []
    return found
