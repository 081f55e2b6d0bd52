"""The losses and gradients of a run in a file, which the recorder writes, and the difference between two runs'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[Any]

LOSS, GRADIENT = "loss", "gradient"


class ResultsWriter:
    """Writes results in order, until it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def add(self, what: str, values: Values) -> None:
        """Add a loss or a gradient; ``what`` begins with :data:`LOSS` or :data:`GRADIENT`."""
        if not self._file.closed:
            np.save(self._file, np.array(what))
            np.save(self._file, values)

    def close(self) -> None:
        """Write the buffered results; later ones are not kept."""
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The difference between two runs; ``equal``: all losses and gradients have the same bits.

    The differences are the largest of any element, infinite if only one of two is a number; ``largest_loss`` and
    ``largest_gradient`` are the largest magnitudes in the first run. ``same_kind`` is false if the number of results or
    their shapes differ: then nothing else is known.
    """

    losses: int
    gradients: int
    equal: bool
    same_kind: bool
    loss_difference: float
    gradient_difference: float
    largest_loss: float
    largest_gradient: float


def results_difference(first: Path, second: Path) -> Deviation:
    """The difference of the results in ``second`` from those in ``first``."""
    counts = {LOSS: 0, GRADIENT: 0}
    furthest, largest = {LOSS: 0.0, GRADIENT: 0.0}, {LOSS: 0.0, GRADIENT: 0.0}
    equal = same_kind = True
    for ours, others in zip_longest(_results(first), _results(second)):
        if ours is None or others is None or _kind(ours) != _kind(others):
            equal = same_kind = False
            break
        kind = ours[0].split()[0]
        counts[kind] += 1
        largest[kind] = max(largest[kind], float(np.abs(ours[1][np.isfinite(ours[1])]).max(initial=0)))
        if ours[1].tobytes() != others[1].tobytes():
            equal = False
            furthest[kind] = max(furthest[kind], _furthest(ours[1], others[1]))
    return Deviation(
        losses=counts[LOSS],
        gradients=counts[GRADIENT],
        equal=equal,
        same_kind=same_kind,
        loss_difference=furthest[LOSS],
        gradient_difference=furthest[GRADIENT],
        largest_loss=largest[LOSS],
        largest_gradient=largest[GRADIENT],
    )


def _results(path: Path) -> Iterator[tuple[str, Values]]:
    with path.open("rb") as file:
        while True:
            try:
                what = np.load(file, allow_pickle=False)
            except EOFError:
                return
            yield str(what), np.load(file, allow_pickle=False)


def _kind(result: tuple[str, Values]) -> tuple[str, tuple[int, ...]]:
    return result[0], result[1].shape


def _furthest(first: Values, second: Values) -> float:
    wide = np.result_type(first, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(first.astype(wide) - second.astype(wide))
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return float(np.where(same, 0, np.where(np.isnan(apart), np.inf, apart)).max(initial=0))
