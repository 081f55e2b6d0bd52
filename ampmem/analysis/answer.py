"""The answer to the first question, as data: what a peak is made of, and what mixed precision made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampmem.analysis.activations import ActivationGroup
from ampmem.analysis.compare import Comparison
from ampmem.analysis.findings.base import Finding
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.analysis.timeline.timeline import PhaseName
from ampmem.vocabulary import AUTOCAST_ARMS, Arm, Mark

_NO_DIFFERENCE = 0.01
"""Peaks that differ by less than this share of the baseline's are the same."""
_NOTABLE = 0.02
"""What is less than this share of the larger peak is no reason."""


class Effect(StrEnum):
    """What mixed precision did to the peak."""

    SAVES = "saves"
    COSTS = "costs"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOf:
    """The peak of one recording, in the step that is compared; ``phase`` is when it was."""

    label: str
    bytes: int
    phase: PhaseName


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a category has at the two peaks, in bytes."""

    category: Category
    before: int
    after: int

    @property
    def difference(self) -> int:
        """Bytes that are there more."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class InFloat32:
    """Bytes of activations of one kind that are float32 under autocast, at the end of forward."""

    kind: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What mixed precision made of the peak.

    ``changes`` are the categories that differ between the two peaks, the largest first: all of them add up to the
    difference. ``activations`` are those under autocast at the end of forward, in bytes, ``in_float32`` what of them
    is float32, the most first; empty where autograd keeps none. ``without_cache`` is the peak without autocast's cache
    of weights; ``None`` where that was not recorded.
    """

    baseline: PeakOf
    mixed: PeakOf
    effect: Effect
    changes: tuple[Change, ...]
    activations: int
    in_float32: tuple[InFloat32, ...]
    without_cache: PeakOf | None

    @property
    def ratio(self) -> float:
        """The peak under autocast, as a share of the baseline's."""
        return self.mixed.bytes / self.baseline.bytes

    @property
    def same_instant(self) -> bool:
        """Whether both peaks are in the same phase of the step."""
        return self.baseline.phase == self.mixed.phase

    @property
    def notable(self) -> tuple[Change, ...]:
        """The changes that are large enough to be reasons."""
        least = _NOTABLE * max(self.baseline.bytes, self.mixed.bytes)
        return tuple(change for change in self.changes if abs(change.difference) >= least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a peak is in one category, in bytes."""

    category: Category
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the peak of a single recording is made of, the largest part first, and the finding with the most bytes."""

    peak: PeakOf
    step: int
    parts: tuple[Part, ...]
    saving: Finding | None


def composition(summary: Summary, label: str = "") -> Composition:
    """What the peak of ``summary`` is made of."""
    peak = summary.peak
    parts = [Part(category=category, bytes=peak.categories[category]) for category in CATEGORIES]
    savings = [finding for finding in summary.findings if finding.severity != "info" and (finding.bytes or 0) > 0]
    return Composition(
        peak=PeakOf(label=label or summary.arm.name, bytes=peak.bytes, phase=peak.phase),
        step=peak.step,
        parts=tuple(sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes)),
        saving=max(savings, key=lambda finding: finding.bytes or 0, default=None),
    )


def answer(comparison: Comparison) -> Answer | None:
    """What mixed precision made of the peak; ``None`` where there is no FP32, or no autocast, to tell it by."""
    base, mixed = comparison.baseline, _index_of(comparison, AUTOCAST_ARMS)
    if base is None or mixed is None:
        return None
    before, after = _peak(comparison, base), _peak(comparison, mixed)
    summary = comparison.entries[mixed].summary
    if before is None or after is None or summary is None:
        return None
    uncached = None
    if summary.arm.name == Arm.AMP:
        other = _index_of(comparison, (Arm.AMP_NOCACHE,))
        uncached = None if other is None else _peak(comparison, other)
    return Answer(
        baseline=before,
        mixed=after,
        effect=_effect(before.bytes, after.bytes),
        changes=_changes(comparison, base, mixed),
        activations=sum(group.bytes for group in summary.activations),
        in_float32=_in_float32(summary.activations),
        without_cache=uncached,
    )


def _index_of(comparison: Comparison, arms: Sequence[Arm]) -> int | None:
    """The first recording in the first of ``arms`` that there is, whose compared step ended."""
    for arm in arms:
        for index, entry in enumerate(comparison.entries):
            if entry.summary is not None and entry.summary.arm.name == arm and _peak(comparison, index) is not None:
                return index
    return None


def _peak(comparison: Comparison, index: int) -> PeakOf | None:
    """The peak of the step that is compared; ``None`` of one that did not end."""
    entry, number = comparison.entries[index], comparison.steps[index]
    steps = () if entry.summary is None else entry.summary.steps
    step = next((step for step in steps if step.index == number and step.finished), None)
    return None if step is None else PeakOf(label=entry.label, bytes=step.peak.bytes, phase=step.peak.phase)


def _effect(before: int, after: int) -> Effect:
    if abs(after - before) < _NO_DIFFERENCE * before:
        return Effect.NONE
    return Effect.SAVES if after < before else Effect.COSTS


def _changes(comparison: Comparison, base: int, mixed: int) -> tuple[Change, ...]:
    live = comparison.instant(Mark.PEAK).live
    before, after = live[base], live[mixed]
    if before is None or after is None:
        return ()
    changes = [_change(category, before, after) for category in CATEGORIES]
    return tuple(sorted((change for change in changes if change.difference), key=lambda item: -abs(item.difference)))


def _change(category: Category, before: Breakdown, after: Breakdown) -> Change:
    return Change(category=category, before=before[category], after=after[category])


def _in_float32(groups: Sequence[ActivationGroup]) -> tuple[InFloat32, ...]:
    return tuple(InFloat32(kind=group.kind, bytes=group.bytes) for group in groups if group.dtype == "float32")
