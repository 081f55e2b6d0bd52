"""Whether live memory at the end of each step grows: for the recorder of a running run, and for its readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

LEAST_STEPS = 20
"""With fewer steps there is no verdict."""
_BLOCKS = 5
_LEAST_BYTES = 512
"""The least growth per step in bytes; the caching allocator has no smaller block."""
_NOISES = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Live memory grows by ``per_step`` bytes per step from step ``first`` to step ``last``, by ``total`` in all.

    ``noise`` is the median distance of a step from the line through all steps, in bytes.
    """

    first: int
    last: int
    per_step: float
    total: int
    noise: float


def growth_of(steps: Sequence[int], alive: Sequence[int]) -> Growth | None:
    """The growth of the bytes ``alive`` at the ends of ``steps``; ``None`` without evidence of growth.

    The first tenth of the steps, at least two, is left out, as optimizers make their state then. The rest is cut into
    five blocks. There is growth if the median of each block is above that of the block before, and the rise from the
    first to the last block is at least three times the noise. A run that has settled does not grow: its last blocks are
    equal.
    """
    skip = max(2, len(steps) // 10)
    steps, alive = steps[skip:], alive[skip:]
    count = len(steps)
    if count + skip < LEAST_STEPS:
        return None
    edges = [count * i // _BLOCKS for i in range(_BLOCKS + 1)]
    parts = [slice(start, end) for start, end in pairwise(edges)]
    levels = [median(alive[part]) for part in parts]
    if any(later <= earlier for earlier, later in pairwise(levels)):
        return None
    middles = [median(steps[part]) for part in parts]
    slope = (levels[-1] - levels[0]) / (middles[-1] - middles[0])
    noise = median(abs(size - levels[0] - slope * (step - middles[0])) for step, size in zip(steps, alive, strict=True))
    rise = levels[-1] - levels[0]
    if slope < _LEAST_BYTES or rise < _NOISES * noise:
        return None
    total = max(alive[-1] - alive[0], 0)  # the last step may be a lower one
    return Growth(first=steps[0], last=steps[-1], per_step=slope, total=total, noise=noise)
