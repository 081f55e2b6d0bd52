"""What the page says about one recording, with the numbers and the words of ``ampmem show``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.casts import Casts
from ampmem.analysis.comparison import Entry
from ampmem.analysis.findings.base import Finding, Section, told_elsewhere
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.summary import PeakPlace, RunPeak, Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown, Category
from ampmem.analysis.timeline.timeline import PHASES
from ampmem.events import Column
from ampmem.names import NOT_KNOWN, RAN_ON_PREDICTED, has_times, is_warning
from ampmem.reporters.html.data import (
    BreakdownView,
    CastsView,
    CellRow,
    CompositionView,
    FindingView,
    Headline,
    MarkView,
    OutOfMemoryView,
    PeakView,
    RunView,
    ShownAtView,
    SizeRow,
    StepView,
)
from ampmem.reporters.html.stream.layers import address_map_view
from ampmem.reporters.html.stream.stream import stream_view
from ampmem.reporters.html.views.activations import activations_view
from ampmem.reporters.html.views.out_of_memory import out_of_memory_view
from ampmem.reporters.html.views.static_model import static_model_view
from ampmem.reporters.text.answer import capital, place_of
from ampmem.reporters.text.common.describe import (
    describe_allocator,
    describe_arm,
    describe_devices,
    describe_loss,
    describe_optimizers,
    describe_update,
    parameters_in_short,
)
from ampmem.reporters.text.common.plain_text import per_parameter
from ampmem.reporters.text.common.shortage import asked, to_come
from ampmem.reporters.text.common.words import IN_SHORT, short
from ampmem.reporters.text.estimate import fit_in_short, sentences
from ampmem.reporters.text.sections.casts import parameters_in_layers
from ampmem.reporters.text.sections.marks import has_copies
from ampmem.reporters.text.warnings import warnings
from ampmem.units import format_bytes, format_count, format_duration, format_peak
from ampmem.vocabulary import AUTOCAST_ARMS, STEP_MARKS, Mark, SourceKind

MAX_PHASE_RUNS = 20_000
MAX_PARAMETERS = 200
MAX_LEDGER_STEPS = 50
MAX_HEADLINES = 5


def run_view(entry: Entry, summary: Summary, analysis: Analysis, limit: int) -> RunView:
    """The view of one recording; ``entry``, ``summary`` and ``analysis`` are all of the same.

    ``limit`` is how many bytes of the page its events may take.
    """
    notes = analysis.recording.notes
    steps = tuple(_steps(summary, analysis, timed=_timed(summary, notes)))
    run_peak = _peak(summary.peak, steps)
    marks = tuple(_marks(analysis))
    out_of_memory = out_of_memory_view(summary.out_of_memory, summary, analysis)
    instant = None if run_peak is None else ShownAtView(position=run_peak.position, name="peak")
    if out_of_memory is not None and _told_by_the_failure(summary):
        instant = ShownAtView(position=out_of_memory.position, name="failure")
    at, when = (0, "peak") if instant is None else (instant.position, instant.name)
    stream = stream_view(analysis, [step.peak for step in steps], at, limit, when=when)
    return RunView(
        label=entry.label,
        arm=summary.arm.name,
        title=entry.script,
        facts=tuple(_facts(summary)),
        notes=(
            *sentences(None if summary.ended_by else summary.prediction),
            *(note for note in notes if not is_warning(note)),
        ),
        warnings=warnings(summary, notes),
        headlines=headlines(summary, None),
        out_of_memory=out_of_memory,
        findings=findings_view(summary, summary.findings),
        parameters=summary.parameters.known_count,
        source=summary.source,
        timed=_timed(summary, notes),
        steps=steps,
        peak=run_peak,
        instant=instant,
        phase_runs=_phase_runs(analysis.recording.events.phase),
        marks=marks,
        composition=None if run_peak is None or _told_by_the_failure(summary) else _composition(summary.peak),
        breakdown=breakdown_view(summary.last_step, casts=summary.arm.name in AUTOCAST_ARMS),
        static_model=static_model_view(summary),
        activations=activations_view(summary, _of_activations(marks, out_of_memory)),
        casts=_casts(summary.casts),
        allocator=summary.allocator,
        conservation=summary.conservation,
        address_map=None if stream.addresses else address_map_view(analysis, at),
        stream=stream,
    )


def headlines(summary: Summary, to_baseline: Headline | None) -> tuple[Headline, ...]:
    """The most telling numbers that are known; ``to_baseline`` compares this run with another."""
    return tuple(_headlines(summary, to_baseline))[:MAX_HEADLINES]


def _facts(summary: Summary) -> Iterator[str]:
    if summary.parameters.count:
        yield parameters_in_short(summary)
    if optimizers := describe_optimizers(summary):
        yield f"optimizer {optimizers}" if optimizers.startswith(NOT_KNOWN) else optimizers
    yield f"{summary.device.name} ({summary.device.type}), events from {summary.source}"
    if summary.caching_allocator is not None:
        yield f"allocator: {describe_allocator(summary.caching_allocator)}"
        if devices := describe_devices(summary.caching_allocator):
            yield f"devices: {devices}"
    if summary.world_size > 1:
        yield f"rank {summary.rank} of {summary.world_size}"
    yield f"precision: {describe_arm(summary)}"
    count = sum(step.finished for step in summary.steps)
    yield f"{count} step{'' if count == 1 else 's'}{'' if summary.steps[-1].finished else ' that ended'}"
    yield f"{format_count(summary.conservation.events)} allocator events"
    yield f"torch {summary.torch}, ampmem {summary.ampmem}"


def _headlines(summary: Summary, to_baseline: Headline | None) -> Iterator[Headline]:
    if summary.ended_by is not None:
        yield from _of_failure(summary.ended_by)
        return
    peak, allocator, count = summary.peak, summary.allocator, summary.parameters.known_count
    requested = "" if peak.allocated is None else f", {format_peak(peak.bytes)} of it requested"
    when = f"step {peak.step}, in {peak.phase}{requested}"
    whole = summary.whole
    name = "Peak" if whole.where is PeakPlace.STEP else "Peak of the steps"
    yield Headline(label=name, value=format_peak(peak.said), detail=when, bytes=peak.said)
    if whole.where is PeakPlace.NOT_RECORDED:
        detail = f"of the whole run, {place_of(whole)}"
        yield Headline(label="Peak", value=format_peak(whole.bytes), detail=detail, bytes=whole.bytes)
    if (outside := summary.outside_steps) is not None:
        where = f"{'after the last' if outside.after else 'before the first'}, in {outside.phase}"
        value = format_peak(outside.said)
        yield Headline(label="Outside of the steps", value=value, detail=where, bytes=outside.said)
    if summary.prediction is not None:
        value, detail = fit_in_short(summary.prediction)
        if RAN_ON_PREDICTED in summary.notes:
            detail += ", in the whole run"
        yield Headline(label="On the GPU", value=value, detail=detail, bytes=summary.prediction.margin)
    if allocator.reserved is not None:
        said = format_peak(allocator.reserved)
        yield Headline(label="Reserved", value=said, detail="by the allocator, at the peak", bytes=allocator.reserved)
    if allocator.cached is not None:
        yield _size("Cached", allocator.cached, "reserved but not in use, at the peak")
    if count:
        each = per_parameter(peak.bytes, count)
        yield Headline(label="Bytes per parameter", value=each, detail="at the peak", bytes=None)
    if to_baseline is not None:
        yield to_baseline
    precision_copies = sum(peak.categories[category] for category in PRECISION_COPIES)
    yield _size("Activations", peak.categories[Category.ACTIVATIONS], "at the peak")
    if precision_copies or summary.source != SourceKind.SNAPSHOT or summary.arm.name in AUTOCAST_ARMS:
        yield _size("Precision copies", precision_copies, "at the peak")
    residual = summary.conservation.residual_bytes
    yield Headline(
        label="Residual",
        value=format_bytes(residual),
        detail=f"categories against the allocator, {format_count(summary.conservation.events)} events",
        bytes=residual,
    )


def _of_failure(oom: FailedRequest) -> Iterator[Headline]:
    """All of one instant: what there was, what was asked for, and what is still to come."""
    yield _size("At the failure", sum(oom.alive.values()), f"in tensors, in {oom.where}")
    if oom.lacking:
        yield _size("Lacking", oom.lacking, f"for {asked(oom)}")
    yield _size("Reserved", oom.reserved, f"by the allocator; {format_bytes(oom.cached)} of it not in use")
    if oom.by_the_limit and oom.allowed is not None:
        yield _size("Left of the limit", oom.left, f"of {format_bytes(oom.allowed)}")
    else:
        yield _size(
            "Free on the device",
            oom.device_free,
            "" if oom.outside is None or oom.device_total is None else f"of {format_bytes(oom.device_total)}",
        )
    coming = oom.to_come
    if coming is not None and (coming.gradients or coming.optimizer_state):
        yield _size("Still to come", coming.gradients + (coming.optimizer_state or 0), to_come(oom))


def _told_by_the_failure(summary: Summary) -> bool:
    """Whether what was alive when memory ran out says it all: not where the recorded steps had ended by then."""
    return summary.ended_by is not None and not summary.ended_by.later


def _size(label: str, size: int, detail: str) -> Headline:
    return Headline(label=label, value=format_bytes(size), detail=detail, bytes=size)


def findings_view(summary: Summary, findings: Sequence[Finding]) -> tuple[FindingView, ...]:
    """What is said of ``findings``, which are those of ``summary`` or what became of them beside another run.

    What the section of the request that failed says already is left out.
    """
    there = {
        Section.CASTS: summary.casts.copies,
        Section.STATIC_MODEL: summary.static_recipe,
        Section.ACTIVATIONS: summary.activations,
    }
    absent = frozenset(section for section, content in there.items() if not content)
    return tuple(_finding(finding, absent) for finding in told_elsewhere(summary.out_of_memory, findings))


def _finding(finding: Finding, absent: frozenset[Section]) -> FindingView:
    """``absent`` are sections that this page does not have."""
    return FindingView(
        code=finding.code,
        severity=finding.severity,
        message=capital(finding.message),
        change=finding.change,
        evidence=finding.evidence,
        saves=finding.saves,
        jump=Section.PEAK if finding.section in absent else finding.section,
    )


def _timed(summary: Summary, notes: Sequence[str]) -> bool:
    """Whether a step took as long as it would; a simulated one takes what this machine needs to simulate it."""
    return has_times(notes) and summary.source is not SourceKind.SIMULATED


def _steps(summary: Summary, analysis: Analysis, *, timed: bool) -> Iterator[StepView]:
    timeline = analysis.timeline
    updates = any(
        not step.finished or step.skipped_update or step.marks.after_optimizer is not None for step in summary.steps
    )
    for step, record, peak in zip(summary.steps, analysis.recording.steps, analysis.peaks, strict=True):
        yield StepView(
            index=step.index,
            finished=step.finished,
            first=timeline.position(record.start_ns),
            last=timeline.position(record.end_ns),
            peak=peak,
            peak_bytes=step.peak.bytes,
            said=format_peak(step.peak.said),
            rounded=step.peak.said != step.peak.bytes,
            peak_reserved=step.peak_reserved,
            phase=step.peak.phase,
            loss=describe_loss(step),
            loss_scale=short(step.loss_scale),
            update=describe_update(step) if updates else "",
            took=format_duration(step.duration_ns) if timed else "",
        )


def _peak(peak: RunPeak, steps: Sequence[StepView]) -> PeakView | None:
    if not peak.bytes:
        return None
    position = next(step.peak for step in steps if step.index == peak.step and step.peak_bytes == peak.bytes)
    return PeakView(
        position=position,
        bytes=peak.bytes,
        said=format_peak(peak.said),
        rounded=peak.said != peak.bytes,
        step=peak.step,
        phase=peak.phase,
    )


def _phase_runs(phase: Column) -> tuple[tuple[int, str], ...]:
    """Where the events of another phase begin; empty when that is too often to be seen."""
    if not len(phase):
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(phase)) + 1])
    if len(starts) > MAX_PHASE_RUNS:
        return ()
    return tuple((start, PHASES[code - 1]) for start, code in zip(starts.tolist(), phase[starts].tolist(), strict=True))


def _marks(analysis: Analysis) -> Iterator[MarkView]:
    for step, marks in zip(analysis.recording.steps, analysis.marks, strict=True):
        instants = (marks.after_forward, marks.after_backward, marks.after_optimizer)
        for mark, instant in zip(STEP_MARKS, instants, strict=True):
            if instant is not None:
                yield MarkView(step=step.index, name=IN_SHORT[mark], position=analysis.timeline.position(instant))


def _of_activations(marks: Sequence[MarkView], out_of_memory: OutOfMemoryView | None) -> int:
    """The position of the last end of forward, else of the failure: what ``Summary.activations`` are of."""
    ends = [mark.position for mark in marks if mark.name == IN_SHORT[Mark.AFTER_FORWARD]]
    return ends[-1] if ends else 0 if out_of_memory is None else out_of_memory.position


def _composition(peak: RunPeak) -> CompositionView:
    rows = [SizeRow(key=str(category), bytes=size) for category, size in peak.categories.items() if size]
    return CompositionView(
        rows=tuple(sorted(rows, key=lambda row: -row.bytes)),
        temporaries_by_phase=peak.temporaries_by_phase,
        communication_by_part={part.value: size for part, size in peak.communication_by_part.items()},
        total=peak.bytes,
    )


def breakdown_view(step: Step, *, casts: bool) -> BreakdownView:
    """The categories at the marks of ``step`` and at its peak: the rows of ``ampmem show``."""
    marks = step.marks
    live = (marks.after_forward, marks.after_backward, marks.after_optimizer, step.peak.categories)
    return BreakdownView(
        step=step.index, columns=tuple(IN_SHORT.values()), rows=tuple(_breakdown_rows(live, casts=casts))
    )


def _breakdown_rows(live: Sequence[Breakdown | None], *, casts: bool) -> Iterator[CellRow]:
    for category in CATEGORIES:
        if category == PRECISION_COPIES[0] and (casts or has_copies(live)):
            yield _row("precision_copies", live, PRECISION_COPIES)
        if any(one is not None and one[category] for one in live):
            yield _row(str(category), live, (category,))
    yield _row("total", live, CATEGORIES)


def _row(key: str, live: Sequence[Breakdown | None], categories: Sequence[Category]) -> CellRow:
    return CellRow(
        key=key, cells=tuple(None if one is None else sum(one[category] for category in categories) for one in live)
    )


def _casts(casts: Casts) -> CastsView | None:
    if not casts.copies:
        return None
    groups = parameters_in_layers(casts.by_parameter)
    return CastsView(
        copies=casts.copies,
        bytes=casts.bytes,
        peak_bytes=casts.peak_bytes,
        cache_hits=casts.cache_hits,
        by_parameter=tuple(together for _, together in groups[:MAX_PARAMETERS]),
        parameters_left_out=sum(count for count, _ in groups[MAX_PARAMETERS:]),
        steps=casts.steps[-MAX_LEDGER_STEPS:],
        steps_left_out=max(0, len(casts.steps) - MAX_LEDGER_STEPS),
    )
