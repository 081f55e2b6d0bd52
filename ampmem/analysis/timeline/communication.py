"""The memory of distributed training, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER
from ampmem.events import Column
from ampmem.vocabulary import Communication

PARTS: tuple[Communication, ...] = tuple(Communication)

ByPart: TypeAlias = Mapping[Communication, int]
"""Bytes of each part."""

_NOTHING: ByPart = dict.fromkeys(PARTS, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationParts:
    """The allocations of the category: from ``born`` to ``died`` (positions) ``bytes``, each of ``part``.

    ``part`` is an index into :data:`PARTS`, or their number where none is known.
    """

    born: Column
    died: Column
    bytes: Column
    part: Column

    def at(self, position: int) -> ByPart:
        """Live bytes of every part at ``position``."""
        if not len(self.born):  # as in most runs, of which some have very many steps
            return _NOTHING
        alive = (self.born <= position) & (self.died > position)
        sums = np.zeros(len(PARTS) + 1, dtype=np.int64)
        np.add.at(sums, self.part[alive], self.bytes[alive])
        return dict(zip(PARTS, sums.tolist(), strict=False))


def communication_of(history: MemoryHistory) -> CommunicationParts:
    """Those of ``history``."""
    lifetimes, classes = history.lifetimes, history.classes
    mine = np.flatnonzero(classes.of(Category.COMMUNICATION))
    places = {part.value: index for index, part in enumerate(PARTS)}
    texts = history.recording.texts
    names = classes.name[mine].tolist()
    return CommunicationParts(
        born=lifetimes.born[mine] + 1,
        died=np.where(lifetimes.died[mine] == ALIVE, FOREVER, lifetimes.died[mine] + 1),
        bytes=lifetimes.bytes[mine],
        part=np.array([places.get(texts[name], len(PARTS)) for name in names], dtype=np.int64),
    )
