"""Which blocks died on another thread, when only the sum of what died is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def fates(events: Iterable[tuple[int, int]], blocks: Mapping[int, int]) -> tuple[list[int], set[int]]:
    """What the ``events`` to come (address, signed bytes) say of ``blocks``.

    Those at whose addresses memory is handed out again were dead before; those that they free are alive until then.
    """
    undecided, reused, freed = set(blocks), [], set()
    for address, size in events:
        if address in undecided:
            undecided.discard(address)
            if size > 0:
                reused.append(address)
            else:
                freed.add(address)
    return reused, freed


def proven_dead(missing: int, blocks: Mapping[int, int], dead: Iterable[int]) -> list[int]:
    """Those of the ``blocks`` at the addresses ``dead`` that fit into ``missing`` bytes of frees."""
    found: list[int] = []
    for address in dead:
        if blocks[address] <= missing:
            found.append(address)
            missing -= blocks[address]
    return found


def told_by_size(missing: int, blocks: Mapping[int, int]) -> list[int]:
    """Those of the ``blocks`` (address to bytes, oldest first) that make up ``missing`` bytes; none where none do.

    That is one block, or several of one size, or several that were allocated in a row.
    """
    return (_of_one_size(missing, blocks) or _in_a_row(missing, blocks)) if missing else []


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
