"""A comparison as text: the answer first, then the details asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampmem.analysis.answer import shared_findings, verdict_of
from ampmem.analysis.comparison import BASELINE, Comparison, Entry, StepTime
from ampmem.analysis.estimate import Prediction
from ampmem.analysis.static_model.verdict import TOTAL, StaticComponent
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown
from ampmem.names import is_warning
from ampmem.reporters.base import EVERYTHING, NOTHING, Detail
from ampmem.reporters.text.answer import Wording, wording, wording_lines
from ampmem.reporters.text.estimate import fit_in_short
from ampmem.reporters.text.layout import PLAIN, Layout, number, side_by_side, words
from ampmem.reporters.text.memory import indented
from ampmem.reporters.text.out_of_memory import request_in_short
from ampmem.reporters.text.plain_text import (
    ABSENT,
    AT_MARK,
    or_absent,
    per_parameter,
    percent,
    share,
    short,
    shorten,
    signed,
    size_cells,
    times,
    wrapped,
)
from ampmem.reporters.text.run import (
    conserved,
    describe_device,
    describe_precision,
    keyed,
    render_labelled,
    render_next,
    render_warnings,
    steps_in_words,
    versions_and_model,
)
from ampmem.reporters.text.static_model import judgement, not_explained, recipe_in_words, tensors_in_words
from ampmem.units import format_bytes, format_duration, format_peak
from ampmem.vocabulary import AUTOCAST_PRECISIONS, Mark

FIRST_LOSSES = 5
"""The number of first steps whose losses are shown; of further ones only the last is shown."""

USUAL_RATIO = "0.5x"
"""The ratio of activations that the usual rule about mixed precision gives."""

_LABEL = 15
_NAME = 12
"""The least width of a row's name."""


def render_instant(comparison: Comparison, mark: Mark, layout: Layout) -> str:
    """The categories at one instant: bytes and bytes per parameter of each entry."""
    each = [column.live(mark) for column in comparison.columns]
    rows = _rows(each)
    known = [0 if entry.summary is None else entry.summary.parameters.known_count for entry in comparison.entries]

    def cells(entry: int, size: Callable[[Breakdown], int]) -> list[str]:
        live = each[entry]
        found = size_cells(None if live is None else size(live), known[entry])
        return found if known[entry] or not any(known) else [*found, ABSENT]

    groups = [
        [number(_header(entry)), *([number("B/\nparam", rank=1, of=_header(entry))] if any(known) else [])]
        for entry in comparison.entries
    ]
    tables = side_by_side(
        words("", least=_NAME),
        [name for name, _ in rows],
        groups,
        [[cells(i, size) for _, size in rows] for i in range(len(groups))],
        layout,
        strong=(TOTAL,),
    )
    caption = map(layout.strong, wrapped(f"{AT_MARK[mark]}, {comparison.which_step}", layout.width))
    return "\n\n".join(["\n".join(caption), *tables])


def _rows(each: Sequence[Breakdown | None]) -> list[tuple[str, Callable[[Breakdown], int]]]:
    """The name and the bytes of each row; both kinds of precision copies have a sum if both are there."""
    shown = [category for category in CATEGORIES if any(live is not None and live[category] for live in each)]
    grouped = all(copy in shown for copy in PRECISION_COPIES)
    rows: list[tuple[str, Callable[[Breakdown], int]]] = []
    for category in shown:
        if grouped and category == PRECISION_COPIES[0]:
            rows.append(("precision_copies", lambda live: sum(live[copy] for copy in PRECISION_COPIES)))
        name = indented(category) if grouped else str(category)
        rows.append((name, lambda live, key=category: live[key]))  # type: ignore[misc]
    rows.append((TOTAL, lambda live: sum(live.values())))
    return rows


def _header(entry: Entry) -> str:
    """The label in at most two lines, and whether the precision failed."""
    precision, _, name = entry.label.partition(" ")
    lines = [shorten(part, _LABEL) for part in (precision, name) if part]
    return "\n".join([*lines, "failed"] if entry.failure is not None else lines)


def _per_entry(comparison: Comparison, rows: Sequence[tuple[str, Sequence[str]]], first: str, layout: Layout) -> str:
    """A table with one cell per entry."""
    tables = side_by_side(
        words(first, least=_NAME),
        [name for name, _ in rows],
        [[number(_header(entry))] for entry in comparison.entries],
        [[[cells[i]] for _, cells in rows] for i in range(len(comparison.entries))],
        layout,
    )
    return "\n\n".join(tables)


def render_figures(comparison: Comparison, layout: Layout) -> str:
    """Peaks, times and ratios, a row each; then the rule of thumb for the activations."""
    columns = comparison.columns
    whole = [None if entry.summary is None else entry.summary.whole.bytes for entry in comparison.entries]
    predictions = [None if entry.summary is None else entry.summary.prediction for entry in comparison.entries]
    said, requested = [column.peak for column in columns], [column.total(Mark.PEAK) for column in columns]
    name = "peak" if whole == said else f"peak of {comparison.which_step}"
    rows: list[tuple[str, list[str]]] = [(name, [or_absent(size, format_peak) for size in said])]

    def add(name: str, cells: Sequence[str]) -> None:
        if any(cell != ABSENT for cell in cells):
            rows.append((name, list(cells)))

    if said != requested:
        add("of which requested", [or_absent(size, format_peak) for size in requested])
    add(f"peak vs {BASELINE}", [signed(column.peak_difference) for column in columns])
    add("peak reserved", [or_absent(column.peak_reserved, format_peak) for column in columns])
    for name, predicted in _PREDICTED:
        add(name, [ABSENT if prediction is None else predicted(prediction) for prediction in predictions])
    if whole != said:
        add("peak of the whole run", [or_absent(size, format_peak) for size in whole])
    add(f"activations vs {BASELINE}", [times(column.activation_ratio) for column in columns])
    low = [column.low_precision for column in columns]
    if any(low):
        add("activations in 16 bit", [ABSENT if each is None else share(each, 1) for each in low])
    add("break-even batch size", [_break_even(column.break_even) for column in columns])
    for name, figure in _STEP_TIMES:
        add(name, [ABSENT if column.step_time is None else figure(column.step_time) for column in columns])
    add(f"loss vs {BASELINE}, up to", [percent(column.loss_difference) for column in columns])
    text = f"{layout.strong('figures')}\n\n{_per_entry(comparison, rows, '', layout)}"
    return "\n".join([text, *_when(comparison, layout), *_rule(comparison, layout)])


def _when(comparison: Comparison, layout: Layout) -> list[str]:
    """The note that the activations' rows are after forward, unlike the verdict above, which is about the peak."""
    columns = comparison.columns
    if all(column.activation_ratio is None and column.low_precision is None for column in columns):
        return []
    return wrapped("activations: those after forward, not those at the peak", layout.width)


def _rule(comparison: Comparison, layout: Layout) -> list[str]:
    """The usual rule for activations, once; empty without a ratio to compare with it."""
    if not any(
        column.activation_ratio is not None
        and column.entry.summary is not None
        and column.entry.summary.precision.name in AUTOCAST_PRECISIONS
        for column in comparison.columns
    ):
        return []
    return wrapped(f"rule of thumb: under autocast activations take {USUAL_RATIO} of {BASELINE}'s", layout.width)


_STEP_TIMES: tuple[tuple[str, Callable[[StepTime], str]], ...] = (
    ("step time, median", lambda time: format_duration(time.median_ns)),
    ("step time, fastest", lambda time: format_duration(time.fastest_ns)),
    ("step time, slowest", lambda time: format_duration(time.slowest_ns)),
    (f"step time vs {BASELINE}", lambda time: times(time.ratio)),
)


_PREDICTED: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
    ("total on the GPU", lambda prediction: format_peak(prediction.likely_total)),
    ("total, up to", lambda prediction: ABSENT if prediction.highest is None else format_peak(prediction.most_total)),
    ("memory of the GPU", lambda prediction: format_bytes(prediction.gpu_bytes)),
    ("so the run", lambda prediction: fit_in_short(prediction)[0]),
)
"""The rows of simulated runs; memory outside of the allocator is in the first."""


def _break_even(batch_size: float | None) -> str:
    if batch_size is None:
        return ABSENT
    return f"{batch_size:.3g}" if batch_size < 100 else f"{batch_size:,.0f}"


def render_losses(comparison: Comparison, layout: Layout) -> str:
    """The losses of each step; empty if none is known."""
    rows = [
        (str(step), list(map(short, losses)))
        for step, losses in comparison.losses.items()
        if any(loss is not None for loss in losses)
    ]
    if not rows:
        return ""
    if len(rows) > FIRST_LOSSES + 1:
        gap = ("…", ["…"] * len(comparison.entries))
        rows = [*rows[:FIRST_LOSSES], gap, rows[-1]]
    return f"{layout.strong('losses')}\n\n{_per_entry(comparison, rows, 'step', layout)}"


_CAPTION = "static memory in bytes per parameter: what the rule of thumb says, and what was measured"
_EXPLAINED = "the rule of thumb plus the named differences equals what was measured in each, to the byte"
_SHOWN = (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD)
_RULE_LABEL = 12
_RULE_NAME = 60


def render_static_models(entries: Sequence[Entry], layout: Layout = PLAIN) -> str:
    """Bytes per parameter at the end of forward and after backward, then the reasons; empty without a verdict."""
    known = [(entry.label, entry.summary) for entry in entries if entry.summary is not None]
    lost = [(label, summary) for label, summary in known if summary.static_recipe and not summary.static_model]
    judged = [(label, summary) for label, summary in known if summary.static_model and summary.parameters.known_count]
    lines = [layout.strong(line) for line in wrapped(_CAPTION, layout.width)] if judged else []
    for label, summary in judged:
        if summary.static_recipe is not None:
            lines += wrapped(f"{shorten(label, 40)}: {recipe_in_words(summary.static_recipe)}", layout.width)
    for label, summary in lost:
        lines += wrapped(f"{shorten(label, 40)}: {judgement(summary)}", layout.width)
    if not judged:
        return "\n".join(lines)
    tables = [text for mark in _SHOWN for text in _tables(mark, judged, layout)]
    return "\n\n".join(["\n".join(lines), *tables, _reasons(judged, layout)])


def _tables(mark: Mark, judged: Sequence[tuple[str, Summary]], layout: Layout) -> list[str]:
    found = [{row.component: row for row in summary.static_model if row.mark == mark} for _, summary in judged]
    components = list(dict.fromkeys(name for rows in found for name in rows))
    shown = [name for name in components if any(_counts(rows.get(name)) for rows in found)]
    if not shown:
        return []
    first = words(AT_MARK[mark].replace("at the end of", "end of"))
    groups = [
        [
            number(f"{shorten(label, _RULE_LABEL)}\nrule"),
            number("\nmeasured", of=shorten(label, _RULE_LABEL)),
        ]
        for label, _ in judged
    ]
    cells = [
        [_cells(rows.get(name), summary) for name in shown] for rows, (_, summary) in zip(found, judged, strict=True)
    ]
    return side_by_side(first, shown, groups, cells, layout, strong=(TOTAL,))


def _counts(row: StaticComponent | None) -> bool:
    return row is not None and bool(row.model_bytes or row.measured_bytes)


def _cells(row: StaticComponent | None, summary: Summary) -> list[str]:
    if row is None:
        return [ABSENT, ABSENT]
    count = summary.parameters.known_count
    return [per_parameter(row.model_bytes, count), per_parameter(row.measured_bytes, count)]


def _reasons(judged: Sequence[tuple[str, Summary]], layout: Layout) -> str:
    """Each reason once, with the bytes in every recording that has it."""
    reasons: dict[str, dict[int, list[str]]] = {}
    broken: list[str] = []
    for label, summary in judged:
        for row in summary.static_model:
            if row.mark not in _SHOWN or row.component == TOTAL:
                continue
            for term in row.terms:
                of = tensors_in_words(term, min(_RULE_NAME, layout.width - 4))
                reason = f"{row.component} {AT_MARK[row.mark]}: {term.why}" + (f" ({of})" if of else "")
                reasons.setdefault(reason, {}).setdefault(term.bytes, []).append(shorten(label, _RULE_LABEL))
            if not row.explained:
                broken.append(f"{row.component} {AT_MARK[row.mark]} ({label}): {not_explained(row)}")
    lines = [layout.strong("why they differ")]
    for reason, sizes in reasons.items():
        amounts = ", ".join(f"{signed(size)} ({', '.join(labels)})" for size, labels in sizes.items())
        lines += wrapped(f"{reason}: {amounts}", layout.width)
    problems = [f"{label}: {summary.static_problem}" for label, summary in judged if summary.static_problem]
    faults = "; ".join([*problems, *broken])
    verdict = f"the model does not hold: {faults}" if faults else _EXPLAINED
    return "\n".join([*lines, *wrapped(verdict, layout.width)])


_NOTE_LABEL = 40


def render(
    comparison: Comparison,
    *,
    details: frozenset[Detail] = NOTHING,
    files: Sequence[str] = (),
    layout: Layout = PLAIN,
    said: Wording | None = None,
) -> str:
    """The comparison as text without a final newline: a first screen, the figures, then ``details``.

    ``files`` are the recordings, for the next commands; ``said`` comes first, by default the verdict.
    """
    entries = comparison.entries
    sections = [
        "\n".join(wording_lines(said or wording(verdict_of(comparison)), layout)),
        *(
            render_warnings(summary, entry.notes, of=_label(entry), layout=layout)
            for entry, summary in _with_summary(entries)
        ),
        _troubles(comparison, layout),
        *_measured(comparison, details, layout),
        _head(comparison, layout),
        *_details(comparison, details, layout),
        _foot(comparison, layout),
        render_next(files, layout, more=details != EVERYTHING),
    ]
    return "\n\n".join(section for section in sections if section)


def _with_summary(entries: Sequence[Entry]) -> list[tuple[Entry, Summary]]:
    """The entries with a summary."""
    return [(entry, entry.summary) for entry in entries if entry.summary is not None]


def _label(entry: Entry) -> str:
    return shorten(entry.label, _NOTE_LABEL)


def _troubles(comparison: Comparison, layout: Layout) -> str:
    """The failures, and why the recordings may not be comparable: to be read before any figure."""
    lines: list[str] = []
    for entry in comparison.entries:
        if entry.failure is not None:
            kept = "" if entry.summary is None else f"; it recorded {steps_in_words(entry.summary)}"
            lines += wrapped(f"{_label(entry)} failed: {entry.failure}{kept}", layout.width)
        elif entry.summary is None:
            lines += wrapped(f"{_label(entry)}: nothing was recorded", layout.width)
        if entry.summary is not None and entry.summary.out_of_memory is not None:
            text = f"{_label(entry)} ran out of memory in {request_in_short(entry.summary.out_of_memory)}"
            lines += wrapped(text, layout.width)
    for remark in comparison.remarks:
        lines += wrapped(f"note: {remark}", layout.width)
    return "\n".join(map(layout.alarm, lines))


def _measured(comparison: Comparison, details: frozenset[Detail], layout: Layout) -> Iterator[str]:
    """The text about recordings that have a summary: the peak, the findings, the figures."""
    if not _with_summary(comparison.entries):
        return
    yield render_instant(comparison, Mark.PEAK, layout)
    yield render_labelled(shared_findings(comparison), layout, evidence=Detail.EVIDENCE in details)
    yield render_figures(comparison, layout)


def _head(comparison: Comparison, layout: Layout) -> str:
    """The script and the device, and the precision of each run; of runs that differ in more, only the common rows."""
    known = [
        [("script", entry.script or "?"), ("device", describe_device(summary)), *versions_and_model(summary)]
        for entry, summary in _with_summary(comparison.entries)
    ]
    first, *others = known or [[("script", comparison.entries[0].script or "?")]]
    rows = [row for row in first if not comparison.remarks or all(row in other for other in others)]
    rows += [
        ("precision" if i == 0 else "", _described(entry, baseline=i == comparison.baseline))
        for i, entry in enumerate(comparison.entries)
    ]
    return "\n".join([layout.strong("the runs"), *keyed(rows, layout)])


def _described(entry: Entry, *, baseline: bool) -> str:
    words = [_label(entry)]
    if entry.summary is not None:
        precision = describe_precision(entry.summary)
        words = [precision if entry.label == entry.summary.precision.name else f"{_label(entry)}: {precision}"]
    if entry.failure is not None:
        words.append("(failed)")
    if baseline:
        words.append("(the others are compared with it)")
    return " ".join(words)


def _details(comparison: Comparison, details: frozenset[Detail], layout: Layout) -> Iterator[str]:
    """The details asked for."""
    if not _with_summary(comparison.entries):
        return
    if Detail.MARKS in details:
        for mark in (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD, Mark.AFTER_OPTIMIZER):
            if any(column.live(mark) for column in comparison.columns):
                yield render_instant(comparison, mark, layout)
    if Detail.STATIC_MODEL in details:
        yield render_static_models(comparison.entries, layout)
    if Detail.LOSSES in details:
        yield render_losses(comparison, layout)


def _foot(comparison: Comparison, layout: Layout) -> str:
    lines: list[str] = []
    for entry, summary in _with_summary(comparison.entries):
        lines += wrapped(f"conservation: {_label(entry)}: {conserved(summary)}", layout.width)
    for note, labels in _notes(comparison.entries).items():
        if not is_warning(note):  # warnings come first
            said = f"note ({', '.join(shorten(label, _NOTE_LABEL) for label in labels)}): {note}"
            lines += wrapped(said, layout.width)
    return "\n".join(lines)


def _notes(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """The notes, and the recordings that have each."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        for note in entry.notes:
            found.setdefault(note, []).append(entry.label)
    return found
