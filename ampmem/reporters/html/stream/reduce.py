"""Fewer points than events, with every extreme kept exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ampmem.events import Column


def extreme_positions(total: Column, buckets: int) -> NDArray[np.intp]:
    """Where in ``total`` the first lowest and the first highest of each bucket are; ascending and unique.

    The buckets are runs of equal length, but for the last.
    """
    width = max(1, -(-len(total) // max(1, buckets)))
    whole = len(total) // width * width
    rows = total[:whole].reshape(-1, width)
    starts = np.arange(0, whole, width)
    found = [starts + rows.argmin(axis=1), starts + rows.argmax(axis=1)]
    if whole < len(total):
        rest = total[whole:]
        found.append(np.array([whole + rest.argmin(), whole + rest.argmax()]))
    return np.unique(np.concatenate(found))
