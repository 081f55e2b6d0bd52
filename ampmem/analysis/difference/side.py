"""One of two runs that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampmem.analysis.difference.groups import Group, Groups, Moment
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A run, under a ``label``; ``groups`` and ``arguments`` are ``None`` where its summary is all that there is."""

    label: str
    summary: Summary
    groups: Groups | None
    arguments: tuple[str, ...] | None = None
    """Of its script."""
    file: Path | None = None
    """The recording, where it is in a file."""

    def held(self, category: Category | None) -> tuple[Group, ...] | None:
        """What it held at its peak, or of ``category`` where that was largest; ``None`` where that is not known."""
        if self.groups is None:
            return None
        return self.groups.peak if category is None else self.groups.most[category]

    def total(self, category: Category | None) -> int:
        """How many bytes those are, as they were requested."""
        return self.summary.peak.bytes if category is None else self.summary.most[category]

    def moment(self, category: Category | None) -> Moment | None:
        """When that was; ``None`` where it is not known."""
        if category is not None:
            return None if self.groups is None else self.groups.moments[category]
        peak = self.summary.peak
        return Moment(step=peak.step, phase=peak.phase, op=peak.op, module=peak.module)

    def doubts(self) -> tuple[str, ...]:
        """What speaks against trusting its numbers."""
        breach, oom = self.summary.conservation.breach, self.summary.ended_by
        found = [] if breach is None else [f"{self.label}: {breach}"]
        if oom is not None:
            found.append(f"{self.label} ran out of memory in {oom.where}: its bytes are those of the part before")
        return tuple(found)
