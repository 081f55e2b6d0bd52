"""A recording with all that is known of its allocations: what the rest of the analysis is derived from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown
from ampmem.analysis.timeline.classify import Classes
from ampmem.analysis.timeline.lifetimes import JoinedFacts, Lifetimes
from ampmem.analysis.timeline.marks import Instants
from ampmem.analysis.timeline.timeline import Timeline
from ampmem.events import Fact, ParameterRecord, Recording
from ampmem.output import Shown


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryHistory(Shown):
    """A recording with its allocations, their categories and their sums; ``marks`` has one entry per step."""

    recording: Recording
    lifetimes: Lifetimes
    facts: JoinedFacts
    classes: Classes
    timeline: Timeline
    marks: tuple[Instants, ...]
    untrained: frozenset[str] = frozenset()
    """Names of the parameters that nothing trains, beside a model that is trained."""

    @property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """The recording's parameters, but for those of models that nothing trains."""
        return tuple(record for record in self.recording.parameters if record.name not in self.untrained)

    def _in_short(self) -> str:
        return f"{len(self.lifetimes.born):,} allocations of {self.recording!r}"

    def born_at(self, position: int) -> tuple[str, str]:
        """Op and module of the allocation whose alloc was the event before ``position``; empty what is not known."""
        texts = self.recording.texts
        for allocation in np.flatnonzero(self.lifetimes.born == position - 1).tolist():
            return texts[self.lifetimes.op[allocation]], texts[self.lifetimes.module[allocation]]
        return "", ""

    def inferred_at(self, position: int) -> Breakdown:
        """Bytes alive at ``position`` that are in their category by conclusion: no hook saw what they are."""
        facts, size = self.facts, self.lifetimes.bytes
        concluded = np.zeros(len(self.lifetimes), dtype=np.bool_)
        concluded[facts.allocation[facts.fact == Fact.INFERRED]] = True
        concluded &= self.lifetimes.alive_at(position)
        return {category: int(size[concluded & self.classes.of(category)].sum()) for category in CATEGORIES}
