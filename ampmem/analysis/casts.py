"""What autocast made from the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.categories import Category
from ampmem.events import Fact, Recording

_AUTOCAST_ARMS = ("amp", "amp-nocache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCasts:
    """The cast copies of one parameter, over the whole recording."""

    name: str
    copies: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """All cast copies of the recording; ``peak_bytes`` is the most that lived at once."""

    copies: int
    bytes: int
    peak_bytes: int
    cache_hits: int | None
    by_parameter: tuple[ParameterCasts, ...]


def casts(analysis: Analysis) -> Casts:
    """Count the cast copies, and name the parameters that they are made from, largest first."""
    mine = analysis.classes.of(Category.CAST_COPIES)
    sizes = analysis.lifetimes.bytes[mine]
    names, row = np.unique(analysis.classes.name[mine], return_inverse=True)
    copies = np.bincount(row, minlength=len(names))
    total = np.zeros(len(names), dtype=np.int64)
    np.add.at(total, row, sizes)
    by_parameter = [
        ParameterCasts(name=analysis.recording.texts[name], copies=int(number), bytes=int(size))
        for name, number, size in zip(names, copies, total, strict=True)
    ]
    return Casts(
        copies=len(sizes),
        bytes=int(sizes.sum()),
        peak_bytes=int(analysis.timeline.series(Category.CAST_COPIES).max()),
        cache_hits=None,
        by_parameter=tuple(sorted(by_parameter, key=lambda item: (-item.bytes, item.name))),
    )


def cast_eligible(recording: Recording) -> int | None:
    """Elements of the parameters that autocast was seen to cast; ``None`` when there was no autocast to see."""
    if recording.arm.name not in _AUTOCAST_ARMS:
        return None
    ids = np.unique(recording.facts.name[recording.facts.fact == Fact.CAST_COPY])
    seen = {recording.texts[index] for index in ids}
    return sum(parameter.elements for parameter in recording.parameters if parameter.name in seen)
