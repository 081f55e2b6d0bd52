"""The allocations of a recording of a GPU beside those of the simulation, one by one."""

import os
from pathlib import Path

from ampmem.allocator.snapshot import ALLOC, read_snapshot
from ampmem.importer.unpickle import load_plain
from published.runs import PublishedRun, Sequence, Simulated


def snapshot_of(run: PublishedRun) -> Path | None:
    """Its file in the folder that ``AMPMEM_SNAPSHOTS`` names; ``None`` where it is not there."""
    folder = os.environ.get("AMPMEM_SNAPSHOTS")
    path = Path(folder, f"{run.snapshot}.pickle") if folder and run.snapshot else None
    return path if path is not None and path.exists() else None


def compared_with_snapshot(run: PublishedRun, simulated: Simulated) -> Sequence | None:
    """``None`` where there is no recording at hand."""
    path = snapshot_of(run)
    if path is None:
        return None
    real = [event.size for event in read_snapshot(load_plain(path)).events if event.action == ALLOC]
    return compared(real, list(simulated.sizes))


def compared(real: list[int], simulated: list[int]) -> Sequence:
    """The sizes of the allocations of the two, in order."""
    pairs = zip(real, simulated, strict=False)
    differing = (place for place, (one, other) in enumerate(pairs) if one != other)
    shorter = min(len(real), len(simulated)) if len(real) != len(simulated) else -1
    return Sequence(
        real=len(real),
        simulated=len(simulated),
        common=longest_common(real, simulated),
        first_difference=next(differing, shorter),
    )


def longest_common(one: list[int], other: list[int]) -> int:
    """Length of the longest common subsequence, a bit for each place in ``one``.

    Source: H. Hyyrö, "Bit-parallel LCS-length computation revisited", 2004.
    """
    places: dict[int, int] = {}
    for place, size in enumerate(one):
        places[size] = places.get(size, 0) | 1 << place
    every = (1 << len(one)) - 1
    unmatched = every
    for size in other:
        here = unmatched & places.get(size, 0)
        unmatched = (unmatched + here | unmatched - here) & every
    return len(one) - unmatched.bit_count()
