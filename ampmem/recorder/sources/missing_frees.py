"""Which blocks died on another thread, when only the sum of what died is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def reused(events: Iterable[tuple[int, int]], blocks: Mapping[int, int]) -> list[int]:
    """Those of ``blocks`` that were dead before the ``events`` (address, signed bytes) allocate at their addresses."""
    alive, found = set(blocks), []
    for address, size in events:
        if address in alive:
            alive.discard(address)
            if size > 0:
                found.append(address)
    return found


def freed_elsewhere(
    missing: int, sizes: Mapping[int, int], proven: Iterable[int], others: Mapping[int, int]
) -> list[int]:
    """Addresses of blocks that together have ``missing`` bytes; as many as can be told.

    Those that are ``proven`` dead come first. Of the ``others`` (address to bytes, oldest first) those count that
    make up all the rest: one block, several of one size, or several that were allocated in a row.
    """
    found: list[int] = []
    for address in proven:
        if sizes[address] <= missing:
            found.append(address)
            missing -= sizes[address]
    rest = {address: size for address, size in others.items() if address not in found}
    return found + (_of_one_size(missing, rest) or _in_a_row(missing, rest) if missing else [])


def _of_one_size(missing: int, blocks: Mapping[int, int]) -> list[int]:
    by_size: dict[int, list[int]] = {}
    for address, size in blocks.items():
        by_size.setdefault(size, []).append(address)
    for size in sorted(by_size, reverse=True):  # the largest: the fewest blocks
        count, left = divmod(missing, size)
        if not left and 0 < count <= len(by_size[size]):
            return by_size[size][:count]
    return []


def _in_a_row(missing: int, blocks: Mapping[int, int]) -> list[int]:
    row = list(blocks.items())
    first, total = 0, 0
    for last, (_, size) in enumerate(row):
        total += size
        while total > missing:
            total -= row[first][1]
            first += 1
        if total == missing:
            return [address for address, _ in row[first : last + 1]]
    return []
