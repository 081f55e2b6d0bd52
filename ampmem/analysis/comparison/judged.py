"""Findings of recordings side by side: what one run could only estimate is judged by the run that measured it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ampmem.analysis.comparison.answer import Effect, effect_of, index_of
from ampmem.analysis.comparison.compare import Comparison
from ampmem.analysis.findings import SEVERITIES, Finding
from ampmem.analysis.summary import Step, Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.units import format_apart, format_bytes
from ampmem.vocabulary import AUTOCAST_ARMS, Arm

_WORTH_SAYING = 0.001
"""A peak that is lower by a smaller share is not called lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One recording, and its step that is compared."""

    label: str
    summary: Summary
    step: Step
    break_even: float | None

    @property
    def peak(self) -> int:
        return self.step.peak.said

    @property
    def casts(self) -> int:
        """The most that cast copies took."""
        return self.summary.casts.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFinding:
    """A finding, and the labels of the recordings that have it."""

    finding: Finding
    labels: tuple[str, ...]


def shared_findings(comparison: Comparison) -> tuple[SharedFinding, ...]:
    """The judged findings of all recordings, each once, in the order in which one recording has them.

    What is saved may differ between precisions: then each has a line of its own.
    """
    found: dict[tuple[str, ...], SharedFinding] = {}
    for entry, findings in zip(comparison.entries, judged_findings(comparison), strict=True):
        for finding in findings:
            key = finding.code, finding.message, finding.change, finding.saves
            labels = found[key].labels if key in found else ()
            found[key] = SharedFinding(finding=found[key].finding if labels else finding, labels=(*labels, entry.label))
    # What the cache spares the one run is what it would spare the other.
    codes = {shared.finding.code for shared in found.values()}
    found = {key: shared for key, shared in found.items() if key[0] != _SPARED or _SPARES not in codes}
    return tuple(sorted(found.values(), key=lambda shared: SEVERITIES.index(shared.finding.severity)))


def judged_findings(comparison: Comparison) -> tuple[tuple[Finding, ...], ...]:
    """The findings of each recording; empty for one of nothing.

    An estimate of what another precision would be is left out, or said anew, where that precision was recorded, too.
    Where the recordings differ in more than their precision, each run's own are all there is.
    """
    return tuple(
        () if entry.summary is None else tuple(_judged(comparison, index, entry.summary.findings))
        for index, entry in enumerate(comparison.entries)
    )


def _judged(comparison: Comparison, index: int, findings: tuple[Finding, ...]) -> list[Finding]:
    mine = None if comparison.remarks else _run(comparison, index)
    if mine is None or mine.summary.arm.name not in AUTOCAST_ARMS:
        return list(findings)
    found = []
    for finding in findings:
        arms, judge = _JUDGES.get(finding.code, ((), None))
        other = index_of(comparison, arms)
        against = None if other is None else _run(comparison, other)
        judged = finding if judge is None or against is None else judge(finding, mine, against)
        if judged is not None:
            found.append(judged)
    return found


def _run(comparison: Comparison, index: int) -> _Run | None:
    """``None`` for a recording whose compared step did not end."""
    entry, step = comparison.entries[index], comparison.ended_step(index)
    if entry.summary is None or step is None:
        return None
    return _Run(label=entry.label, summary=entry.summary, step=step, break_even=comparison.break_even[index])


_Judge = Callable[[Finding, _Run, _Run], Finding | None]


def _autocast(finding: Finding, mine: _Run, full: _Run) -> Finding | None:
    """What autocast takes, against the FP32 run; nothing where it pays, which the verdict says."""
    effect = effect_of(full.peak, mine.peak)
    if effect is Effect.SAVES:
        return None
    more = mine.peak - full.peak
    if effect is Effect.COSTS:
        message = f"AMP takes {format_bytes(more)} more than {full.label} at the peak, as measured."
    elif -more >= _WORTH_SAYING * full.peak:
        message = f"AMP lowers the peak of {full.label} by {format_bytes(-more)} only, as measured."
    else:
        message = f"AMP does not lower the peak of {full.label}, as measured."
    return replace(
        finding,
        code="amp-saves-nothing",
        severity="warning" if effect is Effect.COSTS else "info",
        message=message,
        bytes=more if effect is Effect.COSTS else None,
        change=_change(mine),
        evidence=tuple(_forward(mine, full)),
    )


def _change(mine: _Run) -> str:
    if mine.step.peak.phase == "optimizer":
        return (
            "none in the precision: the peak is in the optimizer's update, and only activations larger than what that "
            "takes would move it"
        )
    if mine.step.peak.phase == "evaluation":
        return "none in the training batch: the peak is in evaluation, where nothing is kept for backward"
    if mine.break_even is not None and math.isfinite(mine.break_even):
        larger = f"batch_size >= {math.floor(mine.break_even) + 1}, from where on it saves at the end of forward"
    else:
        larger = "train on larger batches or longer sequences"
    return f"{larger}; or keep FP32 if memory is the reason for AMP"


def _forward(mine: _Run, full: _Run) -> list[str]:
    """What changes at the end of forward, where copies of weights and activations are all there."""
    after, before = mine.step.marks.after_forward, full.step.marks.after_forward
    if after is None or before is None:
        return []
    lines = []
    for category in (Category.CAST_COPIES, Category.ACTIVATIONS):
        first, second = format_apart(before[category], after[category])
        lines.append(f"{category} at the end of forward: {first} in {full.label}, {second} in {mine.label}")
    return lines


def _without_cache(finding: Finding, mine: _Run, other: _Run) -> Finding | None:
    """What the cache takes, against the run without it."""
    return _cheaper(finding, mine, other, f"without autocast's cache ({other.label}) the cast copies")


def _with_cache(finding: Finding, mine: _Run, other: _Run) -> Finding | None:
    """What the cache would save, against the run with it."""
    uses = "weights are used more than once before backward and each use keeps a cast copy of its own"
    return _cheaper(finding, mine, other, f"{uses}: with autocast's cache ({other.label}) they")


def _cheaper(finding: Finding, mine: _Run, other: _Run, whose: str) -> Finding | None:
    """What the other run's copies take less, if they do; what does not lower the peak is no advice."""
    saved, copies = mine.peak - other.peak, mine.casts - other.casts
    if copies <= 0:
        return None
    lower = saved > 0
    of_the_peak = f"and the run's peak is {format_bytes(saved)} lower" if lower else "but the run's peak is no lower"
    return replace(
        finding,
        message=f"{whose} take {format_bytes(copies)} less at their peak, {of_the_peak}.",
        severity=finding.severity if lower else "info",
        bytes=saved if lower else copies,
        off_peak=saved if lower else None,
    )


def _cache_pays(finding: Finding, mine: _Run, other: _Run) -> Finding | None:
    """What the run without the cache takes more."""
    cost, copies = other.peak - mine.peak, other.casts - mine.casts
    if copies <= 0:
        return None
    message = (
        f"weights are used more than once before backward: without autocast's cache ({other.label}) their cast copies "
        f"take {format_bytes(copies)} more at their peak, and the run's peak is "
    )
    message += f"{format_bytes(cost)} higher." if cost > 0 else "no higher."
    return replace(finding, message=message, bytes=copies)


_SPARED, _SPARES = "cache-off-costs", "cache-on-saves"

_JUDGES: Mapping[str, tuple[tuple[Arm, ...], _Judge]] = {
    "amp-saves": ((Arm.FP32,), _autocast),
    "amp-saves-nothing": ((Arm.FP32,), _autocast),
    "cache-off-saves": ((Arm.AMP_NOCACHE,), _without_cache),
    "cache-on-saves": ((Arm.AMP,), _with_cache),
    "cache-off-costs": ((Arm.AMP_NOCACHE,), _cache_pays),
}
"""By code: the arm that measured what the finding says, and what becomes of the finding then."""
