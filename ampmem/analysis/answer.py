"""The answer at the top of reports: the composition of a peak, the effect of mixed precision, and its findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ampmem.analysis.activations import PlainGroup, plain_groups
from ampmem.analysis.comparison import Compared, Comparison
from ampmem.analysis.findings import SEVERITIES
from ampmem.analysis.findings.base import Finding
from ampmem.analysis.jsonable import like
from ampmem.analysis.largest import Held
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.summary import MeasuredPeak, OutsidePeak, Peak, PeakPlace, Step, Summary, WholePeak
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.analysis.timeline.timeline import PhaseName
from ampmem.names import ran_on
from ampmem.units import format_apart, format_bytes
from ampmem.vocabulary import AUTOCAST_PRECISIONS, Mark, Precision

NO_DIFFERENCE = 0.01
"""Peaks that differ by less than this share of the baseline's count as equal."""
_NOTABLE = 0.01
"""A difference below this share of the larger peak is not given as a reason."""


_PAIR = 2


class Effect(StrEnum):
    """How mixed precision changed the peak."""

    SAVES = "saves"
    COSTS = "costs"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOf(MeasuredPeak):
    """The peak of one recording, in the compared step.

    ``phase`` is the phase of the peak; ``op`` and ``module`` are those of the alloc that reached it, where known.
    ``bytes`` were requested; ``allocated`` is the allocator's peak of allocated bytes, where known.
    """

    label: str
    bytes: int
    phase: PhaseName
    op: str | None
    module: str | None
    allocated: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryChange:
    """The bytes of a category at two instants."""

    category: Category
    before: int
    after: int

    @property
    def difference(self) -> int:
        """The bytes after less those before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The effect of mixed precision on the peak.

    ``changes`` are the categories that differ between the two peaks, the largest first: all of them add up to the
    difference. ``unchanged`` are the other categories in bytes. ``forward`` is the total that is alive at the end of
    forward, before and after, ``forward_changes`` and ``forward_unchanged`` are the categories there, and
    ``activations`` the bytes that autograd holds then; ``None``, or empty, where a run has no such instant. ``groups``
    are the activations under autocast by kind in words and type, the largest first. ``without_cache`` is the peak
    without autocast's cache of weights, ``in_bfloat16`` the one with weights in bfloat16; ``None`` where that was not
    recorded.
    """

    baseline: PeakOf
    mixed: PeakOf
    changes: tuple[CategoryChange, ...]
    unchanged: tuple[CategoryChange, ...]
    forward: tuple[int, int] | None
    forward_changes: tuple[CategoryChange, ...]
    forward_unchanged: tuple[CategoryChange, ...]
    activations: CategoryChange | None
    groups: tuple[PlainGroup, ...]
    without_cache: PeakOf | None
    in_bfloat16: PeakOf | None

    @property
    def ratio(self) -> float:
        """The peak under autocast divided by the baseline's."""
        return self.mixed.said / self.baseline.said

    @property
    def effect(self) -> Effect:
        """How mixed precision changed the peak: lower, higher or equal."""
        return effect_of(self.baseline.said, self.mixed.said)

    @property
    def same_phase(self) -> bool:
        """Whether both peaks are in the same phase."""
        return self.baseline.phase == self.mixed.phase

    @property
    def by_forward(self) -> bool:
        """Whether the change is explained by the end of forward instead of by the peaks.

        Peaks in different phases hold different things in any precision: the activations may be gone and the gradients
        there. The end of forward is the same instant in both runs.
        """
        return not self.same_phase and self.forward is not None

    @property
    def fewer_gradients(self) -> int:
        """Bytes of gradients that are missing at the peak under autocast, though both runs make the same ones."""
        return sum(item.before - item.after for item in self.changes if item.category is Category.GRADIENTS)

    @property
    def in_update(self) -> bool:
        """Whether both peaks are in the optimizer's update."""
        return self.same_phase and self.mixed.phase == "optimizer"

    @property
    def least_notable(self) -> float:
        """The smallest difference in bytes that counts as a reason."""
        return _NOTABLE * max(self.baseline.bytes, self.mixed.bytes)

    @property
    def in_float32(self) -> tuple[PlainGroup, ...]:
        """The activations that stay float32 under autocast, the largest group first."""
        return tuple(group for group in self.groups if group.dtype == "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The categories of a recording's peak; ``step`` is the step of the peak.

    ``saving`` is the finding whose change would take the most off the peak, or off what was alive when memory ran out;
    ``None`` where no finding says so. ``failed`` says that the script failed. ``short`` is the failed request that
    ended it: then ``peak``, ``step`` and ``parts`` are of that instant. ``outside`` is the peak outside of the recorded
    steps, where that is higher; ``part`` says that the script ran on unrecorded after those steps. ``whole`` is the
    peak of the whole run, which may be another one; ``None`` where memory ran out. ``holders`` hold what is not the
    training's own; empty for a step without the peak. ``second`` are the script's first two steps, if the second needs
    more. ``news`` are the findings that memory grows with every step, and that a step takes more than those before.
    """

    peak: PeakOf
    step: int
    parts: Breakdown
    saving: Finding | None
    failed: bool
    short: FailedRequest | None
    outside: OutsidePeak | None
    part: bool
    whole: WholePeak | None = None
    holders: tuple[Held, ...] = ()
    second: tuple[Step, Step] | None = None
    news: tuple[Finding, ...] = ()

    @property
    def of_steps(self) -> bool:
        """Whether ``peak`` is that of the recorded steps alone: the run's peak may be, or is, another one."""
        return self.part or (self.whole is not None and self.whole.where is not PeakPlace.STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict at the top of a report about one or several recordings.

    ``answer`` is ``None`` without an FP32 run or a run under autocast, or where the recordings differ in more than
    their precision. ``compositions`` has one entry per recording, ``None`` for an empty one. ``same_as`` is, for each,
    the first recording whose compared step has the same peak in every category. ``unsound`` are the labels of the
    recordings whose sums differ from the allocator's: their numbers cannot be trusted.
    """

    answer: Answer | None
    labels: tuple[str, ...]
    compositions: tuple[Composition | None, ...]
    same_as: tuple[int | None, ...]
    unsound: tuple[str, ...]


def verdict_of_one(summary: Summary | None, *, label: str = "", failed: bool = False) -> Verdict:
    """The verdict on the largest peak of a single recording; ``summary`` is ``None`` for an empty recording."""
    label = label or ("" if summary is None else summary.precision.name)
    of_all, unsound = None, False
    if summary is not None:
        of_all = _composition(summary, summary.peak, summary.peak.step, label=label, failed=failed)
        of_all, unsound = replace(of_all, outside=summary.outside_steps), summary.conservation.breach is not None
    return Verdict(
        answer=None, labels=(label,), compositions=(of_all,), same_as=(None,), unsound=(label,) if unsound else ()
    )


def verdict_of(comparison: Comparison) -> Verdict:
    """The verdict on several recordings: each is judged by its compared step."""
    return Verdict(
        answer=_answer(comparison),
        labels=tuple(entry.label for entry in comparison.entries),
        compositions=tuple(map(_compared, comparison.columns)),
        same_as=_same_as(comparison),
        unsound=tuple(
            entry.label
            for entry in comparison.entries
            if entry.summary is not None and entry.summary.conservation.breach is not None
        ),
    )


def _compared(column: Compared) -> Composition | None:
    """The composition of the compared step's peak; ``None`` for an empty recording."""
    entry, step = column.entry, column.step
    if entry.summary is None or step is None:
        return None
    return _composition(entry.summary, step.peak, step.index, label=entry.label, failed=entry.failure is not None)


def effect_of(before: int, after: int) -> Effect:
    """The effect of going from a peak of ``before`` bytes to one of ``after`` bytes."""
    if abs(after - before) < NO_DIFFERENCE * before:
        return Effect.NONE
    return Effect.SAVES if after < before else Effect.COSTS


def _composition(summary: Summary, peak: Peak, step: int, *, label: str, failed: bool) -> Composition:
    short, live, at = summary.ended_by, peak.categories, like(PeakOf, peak, label=label)
    if short is not None:  # the composition at the failure need not be that of the peak
        live, step = short.alive, step if short.step is None else short.step
        at = replace(at, phase=short.phase, op=short.op, module=short.module)
    return Composition(
        peak=replace(at, bytes=sum(live.values()), allocated=None if short else at.allocated),
        step=step,
        parts=live,
        news=tuple(each for each in summary.findings if each.code in ("steady-growth", "larger-step")),
        saving=max(
            # What would have helped after the recorded steps is unknown.
            (each for each in summary.findings if _matters(each, summary) and not (short and short.later)),
            key=lambda each: each.saved,
            default=None,
        ),
        failed=failed,
        short=short,
        outside=None,
        part=ran_on(summary.notes) and summary.prediction is None,
        whole=None if short else summary.whole,
        holders=summary.holders if short or peak is summary.peak else (),
        second=_second(summary.steps),
    )


def _second(steps: Sequence[Step]) -> tuple[Step, Step] | None:
    """The script's first two steps, if both ended and the second one's peak is higher."""
    if len(steps) < _PAIR or steps[0].index or not steps[1].finished:
        return None
    first, second = steps[:_PAIR]
    return (first, second) if second.peak.said > (1 + NO_DIFFERENCE) * first.peak.said else None


def _matters(finding: Finding, summary: Summary) -> bool:
    """Whether the finding saves memory that matters: reserved memory does not if half of the device is free."""
    prediction = summary.prediction
    roomy = prediction is not None and 2 * (prediction.margin or 0) > prediction.gpu_bytes
    return finding.saved > 0 and not (finding.off_reserved and roomy)


def _answer(comparison: Comparison) -> Answer | None:
    base, mixed = comparison.baseline, index_of(comparison, AUTOCAST_PRECISIONS)
    if base is None or mixed is None:
        return None
    full, low = comparison.columns[base], comparison.columns[mixed]
    before, after, summary = _peak(full), _peak(low), low.entry.summary
    if before is None or after is None or summary is None:
        return None
    other = index_of(comparison, (Precision.AMP_NOCACHE,)) if summary.precision.name == Precision.AMP else None
    low_weights = index_of(comparison, (Precision.BF16,))
    changes, of_forward = _changes(full, low, Mark.PEAK), _changes(full, low, Mark.AFTER_FORWARD)
    whole = full.total(Mark.AFTER_FORWARD), low.total(Mark.AFTER_FORWARD)
    return Answer(
        baseline=before,
        mixed=after,
        changes=_differing(changes),
        unchanged=_alike(changes),
        forward=None if whole[0] is None or whole[1] is None else (whole[0], whole[1]),
        forward_changes=_differing(of_forward),
        forward_unchanged=_alike(of_forward),
        activations=next((item for item in of_forward if item.category is Category.ACTIVATIONS), None),
        groups=plain_groups(summary.activations),
        without_cache=None if other is None else _peak(comparison.columns[other]),
        in_bfloat16=None if low_weights is None else _peak(comparison.columns[low_weights]),
    )


def index_of(comparison: Comparison, precisions: Sequence[Precision]) -> int | None:
    """The index of the first recording in the first of ``precisions`` whose compared step ended."""
    for precision in precisions:
        for index, column in enumerate(comparison.columns):
            summary = column.entry.summary
            if summary is not None and summary.precision.name == precision and column.ended_step is not None:
                return index
    return None


def _peak(column: Compared) -> PeakOf | None:
    """The peak of the compared step; ``None`` if that step did not end."""
    return None if column.ended_step is None else like(PeakOf, column.ended_step.peak, label=column.entry.label)


def _changes(full: Compared, low: Compared, mark: Mark) -> tuple[CategoryChange, ...]:
    before, after = full.live(mark), low.live(mark)
    if before is None or after is None:
        return ()
    return tuple(CategoryChange(category=each, before=before[each], after=after[each]) for each in CATEGORIES)


def _differing(changes: Sequence[CategoryChange]) -> tuple[CategoryChange, ...]:
    return tuple(sorted((item for item in changes if item.difference), key=lambda item: -abs(item.difference)))


def _alike(changes: Sequence[CategoryChange]) -> tuple[CategoryChange, ...]:
    return tuple(item for item in changes if item.before and not item.difference)


def _same_as(comparison: Comparison) -> tuple[int | None, ...]:
    live = [column.live(Mark.PEAK) for column in comparison.columns]
    return tuple(
        None if mine is None else next((first for first in range(index) if live[first] == mine), None)
        for index, mine in enumerate(live)
    )


# Findings of recordings side by side: an estimate from one run is replaced by what another run measured.

_WORTH_SAYING = 0.001
"""A peak that is lower by less than this share is not called lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedRun:
    """One recording and its compared step."""

    label: str
    summary: Summary
    step: Step
    break_even: float | None

    @property
    def peak(self) -> int:
        return self.step.peak.said

    @property
    def casts(self) -> int:
        """The peak of the cast copies in bytes."""
        return self.summary.casts.peak_bytes


def shared_findings(comparison: Comparison) -> list[tuple[Finding, list[str]]]:
    """The judged findings of all recordings, each once with the labels of the recordings that share it.

    They are in the order in which one recording has them. Where the saved bytes differ between precisions, each
    precision has a line of its own.
    """
    found: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for entry, findings in zip(comparison.entries, judged_findings(comparison), strict=True):
        for finding in findings:
            key = finding.code, finding.message, finding.change, finding.saves
            found.setdefault(key, (finding, []))[1].append(entry.label)
    # The cache saves the same in both runs: once measured, once as an estimate.
    codes = {code for code, *_ in found}
    shown = [shared for (code, *_), shared in found.items() if code != _SPARED or _SPARES not in codes]
    return sorted(shown, key=lambda shared: SEVERITIES.index(shared[0].severity))


def judged_findings(comparison: Comparison) -> tuple[tuple[Finding, ...], ...]:
    """The findings of each recording, judged by the other recordings; empty for an empty recording.

    An estimate about another precision is dropped or replaced by the measurement where that precision was recorded too.
    Where the recordings differ in more than their precision, each keeps its own findings.
    """
    return tuple(
        () if entry.summary is None else tuple(_judged_findings(comparison, index, entry.summary.findings))
        for index, entry in enumerate(comparison.entries)
    )


def _judged_findings(comparison: Comparison, index: int, findings: tuple[Finding, ...]) -> list[Finding]:
    mine = None if comparison.remarks else _compared_run(comparison, index)
    if mine is None or mine.summary.precision.name not in AUTOCAST_PRECISIONS:
        return list(findings)
    found = []
    for finding in findings:
        precisions, judge = _JUDGES.get(finding.code, ((), None))
        other = index_of(comparison, precisions)
        against = None if other is None else _compared_run(comparison, other)
        judged = finding if judge is None or against is None else judge(finding, mine, against)
        if judged is not None:
            found.append(judged)
    return found


def _compared_run(comparison: Comparison, index: int) -> _ComparedRun | None:
    """The recording at ``index`` with its compared step; ``None`` if that step did not end."""
    column = comparison.columns[index]
    entry, step = column.entry, column.ended_step
    if entry.summary is None or step is None:
        return None
    return _ComparedRun(label=entry.label, summary=entry.summary, step=step, break_even=column.break_even)


_Judge = Callable[[Finding, _ComparedRun, _ComparedRun], Finding | None]


def _autocast(finding: Finding, mine: _ComparedRun, full: _ComparedRun) -> Finding | None:
    """The finding that autocast (``mine``) saves nothing, or costs memory, compared with the FP32 run ``full``.

    ``None`` if autocast saves memory, which the verdict says already.
    """
    effect = effect_of(full.peak, mine.peak)
    if effect is Effect.SAVES:
        return None
    more = mine.peak - full.peak
    if effect is Effect.COSTS:
        message = f"AMP needs {format_bytes(more)} more than {full.label} at the peak (measured)."
    elif -more >= _WORTH_SAYING * full.peak:
        message = f"AMP lowers the peak of {full.label} by only {format_bytes(-more)} (measured)."
    else:
        message = f"AMP does not lower the peak of {full.label} (measured)."
    return replace(
        finding,
        code="amp-saves-nothing",
        severity="warning" if effect is Effect.COSTS else "info",
        message=message,
        bytes=more if effect is Effect.COSTS else None,
        change=_change_measured(mine, full),
        evidence=tuple(_forward(mine, full)),
    )


def _change_measured(mine: _ComparedRun, full: _ComparedRun) -> str:
    """The advice for a run under autocast that saves nothing, by the phase of its peak."""
    if mine.step.peak.phase == "optimizer":
        return (
            "no precision lowers it: the peak is in the optimizer's update, and would move only if activations needed "
            "more than the update does"
        )
    if mine.step.peak.phase == "evaluation":
        return "no training batch size lowers it: the peak is in evaluation, where nothing is saved for backward"
    after, before = mine.step.marks.after_forward, full.step.marks.after_forward
    if after is not None and before is not None and after[Category.ACTIVATIONS] > before[Category.ACTIVATIONS]:
        return (
            "larger batches make it worse: with autocast the activations take more, as where weights are in 16 bits "
            "already and autocast runs ops in float32; keep the script's own precision if memory is the reason for AMP"
        )
    if mine.break_even is not None and math.isfinite(mine.break_even):
        larger = (
            f"batch_size >= {math.floor(mine.break_even) + 1}, from which on AMP saves memory at the end of forward"
        )
    else:
        larger = "train on larger batches or longer sequences"
    return f"{larger}; or keep FP32 if memory is the reason for AMP"


def _forward(mine: _ComparedRun, full: _ComparedRun) -> list[str]:
    """The cast copies and the activations of both runs at the end of forward, where all of them are alive."""
    after, before = mine.step.marks.after_forward, full.step.marks.after_forward
    if after is None or before is None:
        return []
    lines = []
    for category in (Category.CAST_COPIES, Category.ACTIVATIONS):
        first, second = format_apart(before[category], after[category])
        lines.append(f"{category} at the end of forward: {first} in {full.label}, {second} in {mine.label}")
    return lines


def _cheaper(finding: Finding, mine: _ComparedRun, other: _ComparedRun) -> Finding | None:
    """``finding`` with the saving that the run ``other``, with the cache switched the other way, has measured.

    It stays advice only if the other run's peak is lower; ``None`` if that run's cast copies take no less.
    """
    saved, copies = mine.peak - other.peak, mine.casts - other.casts
    if copies <= 0:
        return None
    lower, whose = saved > 0, f"without autocast's cache ({other.label}) the cast copies"
    if finding.code == _SPARES:
        uses = "weights are used more than once before backward and each use keeps its own cast copy"
        whose = f"{uses}: with autocast's cache ({other.label}) they"
    of_the_peak = f"and the run's peak is {format_bytes(saved)} lower" if lower else "but the run's peak is not lower"
    return replace(
        finding,
        message=f"{whose} take {format_bytes(copies)} less at their peak, {of_the_peak}.",
        severity=finding.severity if lower else "info",
        bytes=saved if lower else copies,
        off_peak=saved if lower else None,
    )


def _cache_pays(finding: Finding, mine: _ComparedRun, other: _ComparedRun) -> Finding | None:
    """``finding`` with the bytes that the run without autocast's cache (``other``) takes more; ``None`` if none."""
    cost, copies = other.peak - mine.peak, other.casts - mine.casts
    if copies <= 0:
        return None
    message = (
        f"weights are used more than once before backward: without autocast's cache ({other.label}) their cast copies "
        f"take {format_bytes(copies)} more at their peak, and the run's peak is "
    )
    message += f"{format_bytes(cost)} higher." if cost > 0 else "not higher."
    return replace(finding, message=message, bytes=copies)


def _widens(finding: Finding, mine: _ComparedRun, without: _ComparedRun) -> Finding | None:
    """What autocast costs a model in 16 bits; ``None`` where it costs nothing."""
    more = mine.peak - without.peak
    change = f"leave autocast out: the peak of {without.label} is lower by that (measured)"
    return replace(finding, severity="advice", change=change, off_peak=more, least=False) if more > 0 else None


_SPARED, _SPARES = "cache-off-costs", "cache-on-saves"

_JUDGES: Mapping[str, tuple[tuple[Precision, ...], _Judge]] = {
    "amp-saves": ((Precision.FP32,), _autocast),
    "amp-saves-nothing": ((Precision.FP32,), _autocast),
    "autocast-widens": ((Precision.FP32,), _widens),
    "cache-off-saves": ((Precision.AMP_NOCACHE,), _cheaper),
    _SPARES: ((Precision.AMP,), _cheaper),
    _SPARED: ((Precision.AMP_NOCACHE,), _cache_pays),
}
"""By finding: the precision that measures what the finding estimates, and the function that updates the finding."""
