"""Recordings of one script laid side by side: what differs between its precision arms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from ampmem.analysis.activations import LOW_PRECISION
from ampmem.analysis.fit.break_even import break_even
from ampmem.analysis.summary import Step, Summary, summarize
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.events import Recording
from ampmem.output import Shown
from ampmem.units import format_bytes, format_count, format_peak
from ampmem.vocabulary import AUTOCAST_ARMS, Arm, Mark

_T = TypeVar("_T")

BASELINE = Arm.FP32
"""The arm that the others are measured against."""

_NEXT_TO_NOTHING = 0.0001
"""Of all that is alive: a ratio to less than this says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Entry(Shown):
    """One column of the comparison.

    ``summary`` is ``None`` when the arm left nothing to sum up; ``failure`` says in one line why the script
    did not get to its end, ``None`` when it did. ``plain_step_ns`` are durations of steps without
    instrumentation, empty when they were not measured. ``script`` is what was run, with its arguments.
    """

    label: str
    summary: Summary | None
    failure: str | None = None
    plain_step_ns: tuple[int, ...] = ()
    script: str = ""
    notes: tuple[str, ...] = ()

    def _in_short(self) -> str:
        said = "" if self.failure is None else ", failed"
        peak = "nothing recorded" if self.summary is None else f"peak {format_peak(self.summary.whole.bytes)}"
        return f"{self.label}, {peak}{said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Nanoseconds that a step takes without instrumentation; ``ratio`` is of the medians, to the baseline's."""

    median_ns: int
    fastest_ns: int
    slowest_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The live bytes at one instant, one value per entry; ``None`` where the entry has no such instant."""

    name: Mark
    live: tuple[Breakdown | None, ...]
    total: tuple[int | None, ...]
    per_parameter: tuple[float | None, ...]
    """Total bytes per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of one step, one value per entry."""

    step: int
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Recordings side by side.

    What is said of the entries is a tuple with one value for each, in their order, ``None`` for what is not
    known. Differences and ratios are to the baseline, the first entry whose arm is ``fp32``; without one, and where
    the entries differ in more than their precision, they are ``None``.
    """

    entries: tuple[Entry, ...]
    baseline: int | None
    """Index of the baseline in ``entries``; ``None`` with :attr:`remarks`, which say what a difference is due to."""
    steps: tuple[int | None, ...]
    """The step that is compared: the last that ended in all entries and whose update was done in all of them, of those
    with a full batch where a DataLoader made it; or else the last of each entry. An entry that ran out of memory before
    a step had ended has that one."""
    instants: tuple[Instant, ...]
    """``after_forward``, ``after_backward``, ``after_optimizer`` and ``peak`` of that step: the bytes requested."""
    peak_difference: tuple[int | None, ...]
    """Bytes of that step's peak less those of the baseline's; of a step in which memory ran out it is not known."""
    peak_reserved: tuple[int | None, ...]
    """The most that the allocator had reserved during that step."""
    activation_ratio: tuple[float | None, ...]
    """Activations after forward, as a ratio to the baseline's."""
    low_precision: tuple[float | None, ...]
    """The share of its activations after forward that an entry has in a 16-bit type."""
    break_even: tuple[float | None, ...]
    """The batch size from which on an entry under autocast saves memory at the end of forward, measured against
    the baseline's activations; see :func:`ampmem.analysis.fit.break_even.break_even`. Known only where a DataLoader
    made the batch: otherwise nothing says which dimension is it."""
    step_time: tuple[StepTime | None, ...]
    losses: tuple[StepLoss, ...]
    """Of every step that an entry has."""
    loss_difference: tuple[float | None, ...]
    """The largest ``|loss - baseline| / |baseline|`` of the steps that both have; infinite when one diverged."""
    remarks: tuple[str, ...]
    """Why the entries may not be comparable, in words; empty when nothing speaks against it."""

    def ended_step(self, index: int) -> Step | None:
        """The step of the entry at ``index`` that is compared; ``None`` where that did not end."""
        summary = self.entries[index].summary
        steps = () if summary is None else summary.steps
        return next((step for step in steps if step.index == self.steps[index] and step.finished), None)

    @property
    def peaks(self) -> tuple[int | None, ...]:
        """The peak of each compared step: what its allocator had handed out, where that is known."""
        steps = map(self.ended_step, range(len(self.entries)))
        requested = self.instant(Mark.PEAK).total
        return tuple(size if step is None else step.peak.said for size, step in zip(requested, steps, strict=True))

    def instant(self, name: Mark) -> Instant:
        """The instant of that name. Raises ``KeyError`` when there is none."""
        for instant in self.instants:
            if instant.name == name:
                return instant
        raise KeyError(name)

    def _in_short(self) -> str:
        sizes = ["?" if size is None else format_peak(size) for size in self.peaks]
        each = [f"{entry.label} {size}" for entry, size in zip(self.entries, sizes, strict=True)]
        steps = {step for step in self.steps if step is not None}
        which = f"step {steps.pop()}" if len(steps) == 1 else "the last step of each"
        return f"{', '.join(each)} at the peak of {which}"


def entry_of(recording: Recording, *, label: str | None = None, summary: Summary | None = None) -> Entry:
    """``recording`` as a column, labelled with its arm by default.

    Sums it up, and raises what that raises, unless its ``summary`` is there already.
    """
    failure = recording.run.failure
    return Entry(
        label=label or recording.arm.name,
        summary=summarize(recording) if summary is None else summary,
        failure=None if failure is None else failure.line,
        plain_step_ns=recording.plain_step_ns,
        script=" ".join((recording.run.script, *recording.run.arguments)),
        notes=recording.remarks,
    )


def distinct(entries: Sequence[Entry], names: Sequence[str]) -> tuple[Entry, ...]:
    """``entries`` with labels that differ: those that share one get their name added, and a number if need be."""
    shared = Counter(entry.label for entry in entries)
    labels = [
        f"{entry.label} {name}".strip() if shared[entry.label] > 1 else entry.label
        for entry, name in zip(entries, names, strict=True)
    ]
    again = Counter(labels)
    numbered = [f"{label} #{i}" if again[label] > 1 else label for i, label in enumerate(labels, start=1)]
    return tuple(replace(entry, label=label) for entry, label in zip(entries, numbered, strict=True))


def compare(entries: Sequence[Entry], *, step: int | None = None) -> Comparison:
    """Lay ``entries`` side by side; ``step`` is the one to compare, found by itself when it is left out."""
    summaries = [entry.summary for entry in entries]
    remarks = _remarks(entries)
    baseline = None if remarks else _baseline(summaries)
    steps = _compared_steps(summaries, step)
    instants = _instants(summaries, steps)
    peaks = [step.peak.said if step and step.finished else None for step in steps]
    return Comparison(
        entries=tuple(entries),
        baseline=baseline,
        steps=tuple(None if step is None else step.index for step in steps),
        instants=instants,
        peak_difference=_to_baseline(peaks, baseline, lambda mine, base: mine - base),
        peak_reserved=tuple(None if step is None else step.peak_reserved for step in steps),
        activation_ratio=_activation_ratio(instants[0], baseline),
        low_precision=tuple(None if item is None else _low_precision(item) for item in summaries),
        break_even=_break_evens(summaries, steps, baseline),
        step_time=_step_times(entries, baseline),
        losses=_losses(summaries),
        loss_difference=_loss_differences(summaries, baseline),
        remarks=remarks,
    )


def _activation_ratio(after_forward: Instant, baseline: int | None) -> tuple[float | None, ...]:
    """Against the baseline's activations; ``None`` where these are next to nothing: a loss alone has 4 B."""
    activations = [None if live is None else live[Category.ACTIVATIONS] for live in after_forward.live]
    base, total = (None, None) if baseline is None else (activations[baseline], after_forward.total[baseline])
    if base is not None and total is not None and base < _NEXT_TO_NOTHING * total:
        return (None,) * len(activations)
    return _to_baseline(activations, baseline, _ratio)


def _baseline(summaries: Sequence[Summary | None]) -> int | None:
    """The first of them that is in the arm of :data:`BASELINE`."""
    return next((i for i, item in enumerate(summaries) if item is not None and item.arm.name == BASELINE), None)


def _compared_steps(summaries: Sequence[Summary | None], given: int | None) -> list[Step | None]:
    ended = [[step for step in summary.steps if step.finished] for summary in summaries if summary is not None]
    known = [{step.index: step for step in steps} for steps in ended if steps]
    common = set.intersection(*(set(steps) for steps in known)) if known else set()
    done = [index for index in common if not any(steps[index].skipped_update for steps in known)]
    if done or given is not None:
        chosen = max(of_full_batches(done, known)) if given is None else given
        return [None if item is None else _step_of(item, chosen) for item in summaries]
    return [None if item is None else item.last_step for item in summaries]


def of_full_batches(done: Sequence[int], known: Sequence[Mapping[int, Step]]) -> Sequence[int]:
    """Those of ``done`` with the largest batch that a DataLoader made; all where nothing says how large one was.

    ``known`` are the steps of each recording, by their index; one may lack some.
    """
    having = {index: [steps[index] for steps in known if index in steps] for index in done}
    loaded = [index for index in done if all(step.batch_loaded and step.batch_size for step in having[index])]
    sizes = {index: min(step.batch_size or 0 for step in having[index]) for index in loaded}
    return [index for index in loaded if sizes[index] == max(sizes.values())] or done


def _step_of(summary: Summary, index: int) -> Step:
    """The step with that index if it ended, or else the one in which memory ran out."""
    return next((step for step in summary.steps if step.index == index and step.finished), summary.last_step)


def _instants(summaries: Sequence[Summary | None], steps: Sequence[Step | None]) -> tuple[Instant, ...]:
    at: tuple[tuple[Mark, Callable[[Step], Breakdown | None]], ...] = (
        (Mark.AFTER_FORWARD, lambda step: step.marks.after_forward),
        (Mark.AFTER_BACKWARD, lambda step: step.marks.after_backward),
        (Mark.AFTER_OPTIMIZER, lambda step: step.marks.after_optimizer),
        (Mark.PEAK, lambda step: step.peak.categories),
    )
    counts = [0 if summary is None else summary.parameters.known_count for summary in summaries]
    instants = []
    for name, breakdown in at:
        live = tuple(None if step is None else breakdown(step) for step in steps)
        total = tuple(None if one is None else sum(one.values()) for one in live)
        ratios = tuple(
            None if size is None or not count else size / count for size, count in zip(total, counts, strict=True)
        )
        instants.append(Instant(name=name, live=live, total=total, per_parameter=ratios))
    return tuple(instants)


def _to_baseline(
    values: Sequence[int | None], baseline: int | None, relate: Callable[[int, int], _T]
) -> tuple[_T | None, ...]:
    base = None if baseline is None else values[baseline]
    return tuple(None if value is None or base is None else relate(value, base) for value in values)


def _ratio(mine: float, base: float) -> float | None:
    return mine / base if base else None


def _low_precision(summary: Summary) -> float | None:
    if not any(step.marks.after_forward for step in summary.steps):
        return None
    total = sum(group.bytes for group in summary.activations)
    if total and all(group.dtype is None for group in summary.activations):
        return None
    return _ratio(sum(group.bytes for group in summary.activations if group.dtype in LOW_PRECISION), total)


def _break_evens(
    summaries: Sequence[Summary | None], steps: Sequence[Step | None], baseline: int | None
) -> tuple[float | None, ...]:
    base = None if baseline is None else steps[baseline]
    return tuple(
        _break_even(step, base) if item is not None and item.arm.name in AUTOCAST_ARMS else None
        for item, step in zip(summaries, steps, strict=True)
    )


def _break_even(step: Step | None, base: Step | None) -> float | None:
    if step is None or base is None or not step.batch_size or step.batch_size != base.batch_size:
        return None
    if not (step.batch_loaded and base.batch_loaded):
        return None
    mine, full = step.marks.after_forward, base.marks.after_forward
    if mine is None or full is None:
        return None
    saved = full[Category.ACTIVATIONS] - mine[Category.ACTIVATIONS]
    return break_even(step.batch_size, mine[Category.CAST_COPIES] - full[Category.CAST_COPIES], saved)


def _step_times(entries: Sequence[Entry], baseline: int | None) -> tuple[StepTime | None, ...]:
    base = None if baseline is None else _median(entries[baseline])
    return tuple(_step_time(entry, base) for entry in entries)


def _step_time(entry: Entry, base: int | None) -> StepTime | None:
    middle = _median(entry)
    if middle is None:
        return None
    return StepTime(
        median_ns=middle,
        fastest_ns=min(entry.plain_step_ns),
        slowest_ns=max(entry.plain_step_ns),
        ratio=None if base is None else _ratio(middle, base),
    )


def _median(entry: Entry) -> int | None:
    return round(median(entry.plain_step_ns)) if entry.plain_step_ns else None


def _losses(summaries: Sequence[Summary | None]) -> tuple[StepLoss, ...]:
    """The losses of every step; empty where none is known."""
    by_step = [_loss_by_step(summary) for summary in summaries]
    if not any(loss is not None for losses in by_step for loss in losses.values()):
        return ()
    indices = sorted({index for losses in by_step for index in losses})
    return tuple(StepLoss(step=index, losses=tuple(losses.get(index) for losses in by_step)) for index in indices)


def _loss_by_step(summary: Summary | None) -> dict[int, float | None]:
    return {} if summary is None else {step.index: step.loss for step in summary.steps}


def _loss_differences(summaries: Sequence[Summary | None], baseline: int | None) -> tuple[float | None, ...]:
    if baseline is None:
        return (None,) * len(summaries)
    base = _loss_by_step(summaries[baseline])
    return tuple(_loss_difference(_loss_by_step(summary), base) for summary in summaries)


def _loss_difference(mine: dict[int, float | None], base: dict[int, float | None]) -> float | None:
    """Steps that one of the two does not have, and those where the baseline's loss is 0, say nothing."""
    differences = []
    for index, loss in mine.items():
        other = base.get(index)
        if loss is None or not other or not (math.isfinite(loss) or math.isfinite(other)):
            continue
        both = math.isfinite(loss) and math.isfinite(other)
        differences.append(abs(loss - other) / abs(other) if both else math.inf)
    return max(differences, default=None)


def _remarks(entries: Sequence[Entry]) -> tuple[str, ...]:
    known = [(entry, entry.summary) for entry in entries if entry.summary is not None]
    facts: tuple[tuple[str, dict[str, str]], ...] = (
        ("parameters", {entry.label: _parameters(summary) for entry, summary in known}),
        ("scripts", {entry.label: entry.script for entry, _ in known}),
        ("devices", {entry.label: f"{summary.device.name} ({summary.source})" for entry, summary in known}),
        ("versions of torch", {entry.label: summary.torch for entry, summary in known}),
    )
    return tuple(
        f"the {what} differ, so this compares more than precision: "
        + "; ".join(f"{label}: {value}" for label, value in values.items())
        for what, values in facts
        if len(set(values.values())) > 1
    )


def _parameters(summary: Summary) -> str:
    parameters = summary.parameters
    return f"{format_count(parameters.count)} in {format_bytes(parameters.bytes)}"
