"""From which batch size on mixed precision saves memory.

Autocast trades two things at the end of forward: the cast copies of the parameters come on top, and the
activations get smaller. The copies are as many for any batch, the activations grow with it, so

    break-even batch size = batch size * copies / saved

where ``saved`` is what the activations take less than in FP32, at that batch size, and ``copies`` what the
copies take. It is measured from a pair of runs (FP32 and autocast), or estimated from one.
"""

from __future__ import annotations


def break_even(batch_size: int, copies: int, saved: int) -> float | None:
    """The batch size at which autocast saves as much as ``copies`` bytes, when it saves ``saved`` at ``batch_size``.

    ``None`` where no batch size pays: autocast saves nothing of the activations. 0.0 where copies cost nothing.
    """
    if batch_size <= 0 or saved <= 0:
        return None
    return batch_size * copies / saved


def first_saving(batch_size: int, copies: int, saved: int) -> int | None:
    """The first whole batch size above :func:`break_even`, and so the first at which autocast saves; 1 or more."""
    if batch_size <= 0 or saved <= 0:
        return None
    return batch_size * copies // saved + 1
