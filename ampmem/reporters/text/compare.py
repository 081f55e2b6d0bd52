"""A comparison as plain tables, never wider than :data:`~ampmem.reporters.text.table.WIDTH` columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampmem.analysis.compare import BASELINE, Comparison, Entry, Instant, StepTime
from ampmem.analysis.fit.estimate import Prediction
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown
from ampmem.names import is_warning
from ampmem.reporters.text.estimate import fit_in_short
from ampmem.reporters.text.out_of_memory import in_short
from ampmem.reporters.text.plain_text import ABSENT, WIDTH, chunks, shorten, table, wrapped
from ampmem.reporters.text.static_models import render_static_models
from ampmem.reporters.text.table import conserved, describe_arm, describe_optimizers, indented, size_cells
from ampmem.reporters.text.warnings import render_warnings
from ampmem.reporters.text.words import AT_MARK, percent, short, signed, times
from ampmem.units import format_bytes, format_count, format_duration
from ampmem.vocabulary import AUTOCAST_ARMS, Mark

FIRST_LOSSES = 5
"""How many steps' losses are shown at the start; of more steps only the last one is shown too."""

USUAL_RATIO = "0.5x"
"""What the usual account of mixed precision says becomes of the activations."""

_LABEL = 15


def render(comparison: Comparison) -> str:
    """The comparison as text, without a newline at its end."""
    sections = [_warnings(comparison.entries), _head(comparison)]
    if any(entry.summary is not None for entry in comparison.entries):
        sections += [_block(comparison, instant) for instant in comparison.instants if any(instant.live)]
        sections += [render_static_models(comparison.entries), _figures(comparison), _losses(comparison)]
    sections.append(_foot(comparison))
    return "\n\n".join(section for section in sections if section)


def _warnings(entries: Sequence[Entry]) -> str:
    found = [
        render_warnings(entry.summary, entry.notes, of=shorten(entry.label, 40))
        for entry in entries
        if entry.summary is not None
    ]
    return "\n".join(filter(None, found))


def _head(comparison: Comparison) -> str:
    known = [entry for entry in comparison.entries if entry.summary is not None]
    first = known[0] if known else comparison.entries[0]
    rows = [("script", first.script or "?")]
    if first.summary is not None:
        rows += _run(first.summary)
    rows += [
        ("arms" if i == 0 else "", _described(entry, baseline=i == comparison.baseline))
        for i, entry in enumerate(comparison.entries)
    ]
    return "\n".join(f"{key:<12}{shorten(value, WIDTH - 12)}" for key, value in rows)


def _run(summary: Summary) -> list[tuple[str, str]]:
    parameters = summary.parameters
    return [
        ("device", f"{summary.device.name} ({summary.device.type}), events from {summary.source}"),
        ("torch", f"{summary.torch}, ampmem {summary.ampmem}"),
        ("parameters", f"{format_count(parameters.count)} in {format_bytes(parameters.bytes)}"),
        ("optimizer", describe_optimizers(summary) or "none stepped"),
    ]


def _described(entry: Entry, *, baseline: bool) -> str:
    label = shorten(entry.label, 40)
    words = [label]
    if entry.summary is not None:
        arm = describe_arm(entry.summary)
        words = [arm if entry.label == entry.summary.arm.name else f"{label}: {arm}"]
    if entry.failure is not None:
        words.append("(failed)")
    if baseline:
        words.append("(what the others are compared with)")
    return " ".join(words)


def _block(comparison: Comparison, instant: Instant) -> str:
    """The categories at one instant: for each entry bytes and bytes per parameter."""
    shown = [category for category in CATEGORIES if any(live is not None and live[category] for live in instant.live)]
    rows: list[tuple[str, Callable[[Breakdown], int]]] = []
    for category in CATEGORIES:
        if category == PRECISION_COPIES[0]:
            rows.append(("precision_copies", lambda live: sum(live[copy] for copy in PRECISION_COPIES)))
        if category in shown:
            rows.append((indented(category), lambda live, key=category: live[key]))  # type: ignore[misc]
    rows.append(("total", lambda live: sum(live.values())))

    def cells(entry: int, size: Callable[[Breakdown], int]) -> list[str]:
        live, summary = instant.live[entry], comparison.entries[entry].summary
        if live is None or summary is None:
            return [ABSENT, ABSENT]
        return size_cells(size(live), summary.parameters.count)

    tables = []
    for chunk in chunks(len(comparison.entries)):
        headers = ["", *(word for i in chunk for word in (_header(comparison.entries[i]), "B/\nparam"))]
        lines = [[name, *(cell for i in chunk for cell in cells(i, size))] for name, size in rows]
        tables.append(table(lines, headers, ["left"] + ["right"] * (2 * len(chunk))))
    return "\n\n".join([_caption(comparison, instant), *tables])


def _caption(comparison: Comparison, instant: Instant) -> str:
    steps = {step for step in comparison.steps if step is not None}
    which = f"step {steps.pop()}" if len(steps) == 1 else "the last step of each"
    return f"{AT_MARK[instant.name]}, {which}"


def _header(entry: Entry) -> str:
    """The label over at most two lines, and whether the arm failed."""
    arm, _, name = entry.label.partition(" ")
    lines = [shorten(part, _LABEL) for part in (arm, name) if part]
    return "\n".join([*lines, "failed"] if entry.failure is not None else lines)


def _per_entry(comparison: Comparison, rows: Sequence[tuple[str, Sequence[str]]], first: str) -> str:
    """Rows with one cell per entry."""
    tables = []
    for chunk in chunks(len(comparison.entries)):
        headers = [first, *(_header(comparison.entries[i]) for i in chunk)]
        lines = [[name, *(cells[i] for i in chunk)] for name, cells in rows]
        tables.append(table(lines, headers, ["left"] + ["right"] * len(chunk)))
    return "\n\n".join(tables)


def _figures(comparison: Comparison) -> str:
    peak = comparison.instant(Mark.PEAK)
    whole = [None if entry.summary is None else entry.summary.peak.bytes for entry in comparison.entries]
    rows: list[tuple[str, list[str]]] = []
    predictions = [None if entry.summary is None else entry.summary.prediction for entry in comparison.entries]
    untimed = () if any(predictions) else _STEP_TIMES[:1]
    for name, figure in _STEP_TIMES if any(comparison.step_time) else untimed:
        rows.append((name, [ABSENT if time is None else figure(time) for time in comparison.step_time]))
    rows.append(("peak", list(map(_size, peak.total))))
    rows.append((f"peak vs {BASELINE}", list(map(signed, comparison.peak_difference))))
    if any(size is not None for size in comparison.peak_reserved):
        rows.append(("peak reserved", list(map(_size, comparison.peak_reserved))))
    for name, predicted in _PREDICTED if any(predictions) else ():
        rows.append((name, [ABSENT if prediction is None else predicted(prediction) for prediction in predictions]))
    if tuple(whole) != peak.total:
        rows.append(("peak of all steps", list(map(_size, whole))))
    rows.append(
        (f"activations vs {BASELINE}", list(map(_activations, comparison.entries, comparison.activation_ratio)))
    )
    if any(comparison.low_precision):
        rows.append(("activations in 16 bit", list(map(percent, comparison.low_precision))))
    if any(size is not None for size in comparison.break_even):
        rows.append(("saves from batch size", list(map(_break_even, comparison.break_even))))
    return _per_entry(comparison, rows, "")


_STEP_TIMES: tuple[tuple[str, Callable[[StepTime], str]], ...] = (
    ("step time, median", lambda time: format_duration(time.median_ns)),
    ("fastest", lambda time: format_duration(time.fastest_ns)),
    ("slowest", lambda time: format_duration(time.slowest_ns)),
    (f"vs {BASELINE}", lambda time: times(time.ratio)),
)


_PREDICTED: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
    ("in all on the GPU", lambda prediction: format_bytes(prediction.at_peak_reserved.total)),
    ("the GPU has", lambda prediction: format_bytes(prediction.gpu_bytes)),
    ("which means that it", lambda prediction: fit_in_short(prediction)[0]),
)
"""For simulated runs; what is outside of the allocator is in the first."""


def _size(size: int | None) -> str:
    return ABSENT if size is None else format_bytes(size)


def _break_even(batch_size: float | None) -> str:
    return ABSENT if batch_size is None else f"{batch_size:.3g}"


def _activations(entry: Entry, ratio: float | None) -> str:
    autocast = entry.summary is not None and entry.summary.arm.name in AUTOCAST_ARMS
    return times(ratio) + (f"; told {USUAL_RATIO}" if autocast and ratio is not None else "")


def _losses(comparison: Comparison) -> str:
    rows = [
        (str(row.step), list(map(short, row.losses)))
        for row in comparison.losses
        if any(loss is not None for loss in row.losses)
    ]
    if not rows:
        return ""
    if len(rows) > FIRST_LOSSES + 1:
        gap = ("…", ["…"] * len(comparison.entries))
        rows = [*rows[:FIRST_LOSSES], gap, rows[-1]]
    if comparison.baseline is not None:
        rows.append((f"off {BASELINE} by up to", list(map(percent, comparison.loss_difference))))
    return _per_entry(comparison, rows, "loss of step")


def _foot(comparison: Comparison) -> str:
    lines = []
    for entry in comparison.entries:
        if entry.failure is not None:
            kept = "" if entry.summary is None else f"; it has {_steps(entry.summary)}"
            lines += wrapped(f"{shorten(entry.label, 40)} failed: {entry.failure}{kept}")
        elif entry.summary is None:
            lines += wrapped(f"{shorten(entry.label, 40)}: nothing was recorded")
        if entry.summary is not None and entry.summary.out_of_memory is not None:
            lines += wrapped(f"{shorten(entry.label, 40)} ran out of memory in {in_short(entry.summary.out_of_memory)}")
    lines += [_conservation(entry, entry.summary) for entry in comparison.entries if entry.summary is not None]
    for remark in comparison.remarks:
        lines += wrapped(f"note: {remark}")
    for note, labels in _notes(comparison.entries).items():
        if is_warning(note):
            continue  # said at the start
        lines += wrapped(f"note ({', '.join(shorten(label, 40) for label in labels)}): {note}")
    return "\n".join(lines)


def _steps(summary: Summary) -> str:
    count = sum(step.finished for step in summary.steps)
    return f"{count} step{'' if count == 1 else 's'}" + ("" if summary.steps[-1].finished else " that ended")


def _conservation(entry: Entry, summary: Summary) -> str:
    return f"conservation: {shorten(entry.label, 40)}: {conserved(summary)}"


def _notes(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """What the recordings have to say, and which of them say it."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for note in entry.notes:
            found.setdefault(note, []).append(entry.label)
    return found
