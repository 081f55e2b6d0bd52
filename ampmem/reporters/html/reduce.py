"""Fewer points for a chart, with every extreme kept exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ampmem.events import Column

MAX_POINTS = 1500
"""A stack of a dozen areas with this many points zooms without a wait."""


def extreme_instants(total: Column, always: int, max_points: int = MAX_POINTS) -> NDArray[np.intp]:
    """Indices into ``total``, ascending and unique: the first lowest and first highest of each bucket, both ends,
    and ``always``.

    ``total`` has shape ``(instants,)``. The buckets are runs of instants of almost equal length, as
    many as keep the result within ``max_points`` (at least 5). All series of a stack are then taken at
    these same instants, so the stack is exact wherever it is drawn, and the global peak is drawn.
    """
    count = len(total)
    if count <= max_points:
        return np.arange(count)
    buckets = (max_points - 3) // 2
    edges = np.linspace(0, count, buckets + 1).astype(np.intp)
    chosen = {0, always, count - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        chosen.add(start + int(total[start:end].argmin()))
        chosen.add(start + int(total[start:end].argmax()))
    return np.array(sorted(chosen), dtype=np.intp)
