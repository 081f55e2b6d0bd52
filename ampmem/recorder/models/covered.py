"""Which memory parameters have so far: two may share a part of one storage, which must count once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from ampmem.recorder.facts.parts import parts_of

_MOST_RUNS = 100_000
"""A tensor in more pieces than that is not looked at: it counts as if it shared nothing."""


class Covered:
    """The addresses that belong to the parameters seen so far."""

    def __init__(self, data_address: Callable[[torch.Tensor], int]) -> None:
        self._data_address = data_address
        self._starts: list[int] = []
        self._ends: list[int] = []

    def place(self, parameter: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """The ranges of addresses in which ``parameter`` lies; empty where that cannot be told."""
        parts = [(self._data_address(part), part) for part in parts_of(parameter)]
        return tuple(
            (address + start, address + end) for address, part in parts if address for start, end in _runs(part)
        )

    def overlap(self, place: tuple[tuple[int, int], ...], size: int) -> int:
        """How many of the ``size`` bytes at ``place`` are those of parameters before, or lie there more than once."""
        return size - sum(self._take(start, end) for start, end in place) if place else 0

    def _take(self, start: int, end: int) -> int:
        """Add this range; how many bytes of it are new."""
        first = last = bisect_left(self._ends, start)
        new, low, high = end - start, start, end
        while last < len(self._starts) and self._starts[last] <= end:
            new -= max(0, min(end, self._ends[last]) - max(start, self._starts[last]))
            low, high = min(low, self._starts[last]), max(high, self._ends[last])
            last += 1
        self._starts[first:last], self._ends[first:last] = [low], [high]
        return new


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The ranges of bytes, from its first element on, in which the elements of a strided ``tensor`` lie."""
    dimensions = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    block, pieces = 1, 1
    while dimensions and dimensions[0][0] == block:
        block *= dimensions.pop(0)[1]
    for _, size in dimensions:
        pieces *= size
    if pieces > _MOST_RUNS or not tensor.numel():
        return
    starts = [0]
    for stride, size in dimensions:
        starts = [start + number * stride for number in range(size) for start in starts]
    width = tensor.element_size()
    for start in starts:
        yield start * width, (start + block) * width
