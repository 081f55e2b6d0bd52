"""Recordings of one script side by side: what differs between its precisions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ampmem.analysis.estimate import break_even
from ampmem.analysis.summary import Step, Summary, summarize
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.events import Recording
from ampmem.output import Shown
from ampmem.units import format_bytes, format_count, format_peak
from ampmem.vocabulary import AUTOCAST_PRECISIONS, LOW_PRECISION, Mark, Precision

BASELINE = Precision.FP32
"""The precision that the others are compared with."""

_NEXT_TO_NOTHING = 0.0001
"""A ratio to less than this share of all live bytes means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Entry(Shown):
    """One column of the comparison.

    ``summary`` is ``None`` if nothing was recorded; ``failure`` says in one line why the script failed, ``None`` if it
    did not. ``plain_step_ns`` are durations of steps without instrumentation, empty when they were not measured.
    ``script`` is what was run, with its arguments; empty if unknown.
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
    """The duration of a step without instrumentation in ns; ``ratio`` is that of the medians to the baseline's."""

    median_ns: int
    fastest_ns: int
    slowest_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One recording of a comparison: its compared step, beside the baseline's.

    ``None`` means unknown; differences and ratios are to the baseline, and unknown without one.
    """

    entry: Entry
    step: Step | None
    """The last step that ended with an update in all entries; if a DataLoader made the batches, the last with a full
    batch. Without such a step the last of this entry, or the step in which it ran out of memory."""
    peak_difference: int | None
    """The step's peak less the baseline's in bytes; unknown for a step in which memory ran out."""
    activation_ratio: float | None
    """Activations after forward, as a ratio to the baseline's."""
    break_even: float | None
    """The batch size from which on autocast saves memory at the end of forward, measured against the baseline's
    activations; see :func:`ampmem.analysis.estimate.break_even`. Known only if a DataLoader made the batch: otherwise
    nothing says which dimension is the batch."""
    step_time: StepTime | None
    loss_difference: float | None
    """The largest ``|loss - baseline| / |baseline|`` over the common steps; infinite if one loss diverged."""

    @property
    def ended_step(self) -> Step | None:
        """The compared step; ``None`` if it did not end."""
        return self.step if self.step is not None and self.step.finished else None

    @property
    def peak(self) -> int | None:
        """The peak of the compared step in bytes: allocated where known, else requested."""
        return self.total(Mark.PEAK) if self.ended_step is None else self.ended_step.peak.said

    @property
    def peak_reserved(self) -> int | None:
        """The peak of reserved bytes in the compared step."""
        return None if self.step is None else self.step.peak_reserved

    @property
    def low_precision(self) -> float | None:
        """The share of the activations after forward that is in a 16-bit type."""
        return None if self.entry.summary is None else _low_precision(self.entry.summary)

    def live(self, mark: Mark) -> Breakdown | None:
        """The bytes of each category alive at ``mark`` of the compared step."""
        return None if self.step is None else _AT[mark](self.step)

    def total(self, mark: Mark) -> int | None:
        """The total bytes alive at ``mark`` of the compared step."""
        live = self.live(mark)
        return None if live is None else sum(live.values())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Recordings side by side.

    The baseline is the first recording whose precision is ``fp32``; there is none where the recordings differ in more
    than their precision.
    """

    columns: tuple[Compared, ...]
    """The recordings with their compared steps, in order."""
    baseline: int | None
    """Index of the baseline in ``columns``; ``None`` with :attr:`remarks`, which name the cause of a difference."""
    remarks: tuple[str, ...]
    """Why the recordings may not be comparable, in words; empty if they are."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The recordings in their order."""
        return tuple(column.entry for column in self.columns)

    @property
    def losses(self) -> dict[int, tuple[float | None, ...]]:
        """The losses by step, one per recording; empty if none is known."""
        by_step = [_loss_by_step(entry.summary) for entry in self.entries]
        if not any(loss is not None for losses in by_step for loss in losses.values()):
            return {}
        indices = sorted({index for losses in by_step for index in losses})
        return {index: tuple(losses.get(index) for losses in by_step) for index in indices}

    @property
    def which_step(self) -> str:
        """The compared step, in words."""
        return step_in_words(self.columns)

    def _in_short(self) -> str:
        sizes = ["?" if column.peak is None else format_peak(column.peak) for column in self.columns]
        each = [f"{entry.label} {size}" for entry, size in zip(self.entries, sizes, strict=True)]
        return f"{', '.join(each)} at the peak of {self.which_step}"


_AT: Mapping[Mark, Callable[[Step], Breakdown | None]] = {
    Mark.AFTER_FORWARD: lambda step: step.marks.after_forward,
    Mark.AFTER_BACKWARD: lambda step: step.marks.after_backward,
    Mark.AFTER_OPTIMIZER: lambda step: step.marks.after_optimizer,
    Mark.PEAK: lambda step: step.peak.categories,
}


def step_in_words(columns: Iterable[Compared]) -> str:
    """The compared step of ``columns`` in words, such as ``step 2``."""
    steps = {column.step.index for column in columns if column.step is not None}
    return f"step {steps.pop()}" if len(steps) == 1 else "the last step of each"


def entry_of(recording: Recording, *, label: str | None = None, summary: Summary | None = None) -> Entry:
    """``recording`` as a column, labelled with its precision by default.

    Without its ``summary`` the recording is summed up, which may raise.
    """
    failure = recording.run.failure
    return Entry(
        label=label or recording.precision.name,
        summary=summarize(recording) if summary is None else summary,
        failure=None if failure is None else failure.line,
        plain_step_ns=recording.plain_step_ns,
        script=" ".join((recording.run.script, *recording.run.arguments)),
        notes=recording.remarks,
    )


def distinct(entries: Sequence[Entry], names: Sequence[str]) -> tuple[Entry, ...]:
    """``entries`` with distinct labels: equal ones get their name added, and a number if needed."""
    shared = Counter(entry.label for entry in entries)
    labels = [
        f"{entry.label} {name}".strip() if shared[entry.label] > 1 else entry.label
        for entry, name in zip(entries, names, strict=True)
    ]
    again = Counter(labels)
    numbered = [f"{label} #{i}" if again[label] > 1 else label for i, label in enumerate(labels, start=1)]
    return tuple(replace(entry, label=label) for entry, label in zip(entries, numbered, strict=True))


def compare(entries: Sequence[Entry], *, step: int | None = None) -> Comparison:
    """Compare ``entries``; ``step`` is the step to compare, by default the one that :class:`Compared` describes."""
    summaries = [entry.summary for entry in entries]
    remarks = _remarks(entries)
    baseline = None if remarks else _baseline(summaries)
    steps = _compared_steps(summaries, step)
    base, base_step = (None, None) if baseline is None else (entries[baseline], steps[baseline])
    columns = tuple(_column(entry, step, base, base_step) for entry, step in zip(entries, steps, strict=True))
    return Comparison(columns=columns, baseline=baseline, remarks=remarks)


def _column(entry: Entry, step: Step | None, base: Entry | None, base_step: Step | None) -> Compared:
    """``entry`` and its compared ``step``, beside the baseline's."""
    mine, full = (None if each is None or not each.finished else each.peak.said for each in (step, base_step))
    autocast = entry.summary is not None and entry.summary.precision.name in AUTOCAST_PRECISIONS
    losses = None if base is None else _loss_by_step(base.summary)
    return Compared(
        entry=entry,
        step=step,
        peak_difference=None if mine is None or full is None else mine - full,
        activation_ratio=_activation_ratio(step, base_step),
        break_even=_break_even(step, base_step) if autocast else None,
        step_time=_step_time(entry, None if base is None else _median(base)),
        loss_difference=None if losses is None else _loss_difference(_loss_by_step(entry.summary), losses),
    )


def _activation_ratio(step: Step | None, base: Step | None) -> float | None:
    """The activations' ratio to the baseline's; ``None`` if those are next to nothing (a loss alone has 4 bytes)."""
    mine, full = (None if each is None else each.marks.after_forward for each in (step, base))
    if mine is None or full is None or full[Category.ACTIVATIONS] < _NEXT_TO_NOTHING * sum(full.values()):
        return None
    return _ratio(mine[Category.ACTIVATIONS], full[Category.ACTIVATIONS])


def _baseline(summaries: Sequence[Summary | None]) -> int | None:
    """The index of the first summary whose precision is :data:`BASELINE`."""
    return next((i for i, item in enumerate(summaries) if item is not None and item.precision.name == BASELINE), None)


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
    """The steps of ``done`` with the largest batch that a DataLoader made; all where no batch size is known.

    ``known`` are the steps of each recording by index; a recording may lack some.
    """
    having = {index: [steps[index] for steps in known if index in steps] for index in done}
    loaded = [index for index in done if all(step.batch_loaded and step.batch_size for step in having[index])]
    sizes = {index: min(step.batch_size or 0 for step in having[index]) for index in loaded}
    return [index for index in loaded if sizes[index] == max(sizes.values())] or done


def _step_of(summary: Summary, index: int) -> Step:
    """The step ``index`` if it ended, else the step in which memory ran out."""
    return next((step for step in summary.steps if step.index == index and step.finished), summary.last_step)


def _ratio(mine: float, base: float) -> float | None:
    return mine / base if base else None


def _low_precision(summary: Summary) -> float | None:
    if not any(step.marks.after_forward for step in summary.steps):
        return None
    total = sum(group.bytes for group in summary.activations)
    if total and all(group.dtype is None for group in summary.activations):
        return None
    return _ratio(sum(group.bytes for group in summary.activations if group.dtype in LOW_PRECISION), total)


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


def _loss_by_step(summary: Summary | None) -> dict[int, float | None]:
    return {} if summary is None else {step.index: step.loss for step in summary.steps}


def _loss_difference(mine: dict[int, float | None], base: dict[int, float | None]) -> float | None:
    """The largest relative difference of losses; missing steps and baseline losses of 0 do not count."""
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
    sized = all(
        summary.precision.name != Precision.BF16 for _, summary in known
    )  # in bf16 the same parameters take half
    facts: tuple[tuple[str, dict[str, str]], ...] = (
        ("parameters", {entry.label: _parameters(summary, sized=sized) for entry, summary in known}),
        ("scripts", {entry.label: entry.script for entry, _ in known if entry.script}),
        ("devices", {entry.label: f"{summary.device.name} ({summary.source})" for entry, summary in known}),
        ("versions of torch", {entry.label: summary.torch for entry, summary in known}),
    )
    return tuple(
        f"the {what} differ, so this compares more than precision: "
        + "; ".join(f"{label}: {value}" for label, value in values.items())
        for what, values in facts
        if len(set(values.values())) > 1
    )


def _parameters(summary: Summary, *, sized: bool) -> str:
    parameters = summary.parameters
    return f"{format_count(parameters.count)}{f' in {format_bytes(parameters.bytes)}' if sized else ''}"
