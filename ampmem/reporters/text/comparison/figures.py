"""Recordings side by side: the categories at an instant, the figures, the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampmem.analysis.comparison import BASELINE, Comparison, Entry, StepTime
from ampmem.analysis.estimate import Prediction
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Breakdown
from ampmem.reporters.text.common.layout import Layout, number, side_by_side, words
from ampmem.reporters.text.common.plain_text import ABSENT, shorten, wrapped
from ampmem.reporters.text.common.words import AT_MARK, percent, share, short, signed, size_cells, times
from ampmem.reporters.text.estimate import fit_in_short
from ampmem.reporters.text.sections.marks import TOTAL, indented
from ampmem.units import format_bytes, format_duration, format_peak
from ampmem.vocabulary import AUTOCAST_ARMS, Mark

FIRST_LOSSES = 5
"""How many steps' losses are shown at the start; of more steps only the last one is shown too."""

USUAL_RATIO = "0.5x"
"""What the usual account of mixed precision says becomes of the activations."""

_LABEL = 15
_NAME = 12
"""So much of what a row is about is left at least."""


def render_instant(comparison: Comparison, mark: Mark, layout: Layout) -> str:
    """The categories at one instant: for each entry bytes and bytes per parameter."""
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
    """What each row is about, and its bytes; both kinds of precision copies are summed up where both are there."""
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
    """The label over at most two lines, and whether the arm failed."""
    arm, _, name = entry.label.partition(" ")
    lines = [shorten(part, _LABEL) for part in (arm, name) if part]
    return "\n".join([*lines, "failed"] if entry.failure is not None else lines)


def _per_entry(comparison: Comparison, rows: Sequence[tuple[str, Sequence[str]]], first: str, layout: Layout) -> str:
    """Rows with one cell per entry."""
    tables = side_by_side(
        words(first, least=_NAME),
        [name for name, _ in rows],
        [[number(_header(entry))] for entry in comparison.entries],
        [[[cells[i]] for _, cells in rows] for i in range(len(comparison.entries))],
        layout,
    )
    return "\n\n".join(tables)


def render_figures(comparison: Comparison, layout: Layout) -> str:
    """Peaks, times and ratios, a row each; then the rule of thumb that the activations are held against."""
    columns = comparison.columns
    whole = [None if entry.summary is None else entry.summary.whole.bytes for entry in comparison.entries]
    predictions = [None if entry.summary is None else entry.summary.prediction for entry in comparison.entries]
    said, requested = [column.peak for column in columns], [column.total(Mark.PEAK) for column in columns]
    name = "peak" if whole == said else f"peak of {comparison.which_step}"
    rows: list[tuple[str, list[str]]] = [(name, list(map(_size, said)))]

    def add(name: str, cells: Sequence[str]) -> None:
        if any(cell != ABSENT for cell in cells):
            rows.append((name, list(cells)))

    if said != requested:
        add("requested of it", list(map(_size, requested)))
    add(f"peak vs {BASELINE}", [signed(column.peak_difference) for column in columns])
    add("peak reserved", [_size(column.peak_reserved) for column in columns])
    for name, predicted in _PREDICTED:
        add(name, [ABSENT if prediction is None else predicted(prediction) for prediction in predictions])
    if whole != said:
        add("peak of the whole run", list(map(_size, whole)))
    add(f"activations vs {BASELINE}", [times(column.activation_ratio) for column in columns])
    low = [column.low_precision for column in columns]
    if any(low):
        add("activations in 16 bit", [ABSENT if each is None else share(each, 1) for each in low])
    add("break-even batch size", [_break_even(column.break_even) for column in columns])
    for name, figure in _STEP_TIMES:
        add(name, [ABSENT if column.step_time is None else figure(column.step_time) for column in columns])
    add(f"loss off {BASELINE} by up to", [percent(column.loss_difference) for column in columns])
    text = f"{layout.strong('figures')}\n\n{_per_entry(comparison, rows, '', layout)}"
    return "\n".join([text, *_when(comparison, layout), *_rule(comparison, layout)])


def _when(comparison: Comparison, layout: Layout) -> list[str]:
    """Of which instant the activations' rows are: the verdict above speaks of the peak."""
    columns = comparison.columns
    if all(column.activation_ratio is None and column.low_precision is None for column in columns):
        return []
    return wrapped("activations: here those after forward, not those at the peak", layout.width)


def _rule(comparison: Comparison, layout: Layout) -> list[str]:
    """What is usually said of activations, once; nothing where there is no ratio to hold against it."""
    if not any(
        column.activation_ratio is not None
        and column.entry.summary is not None
        and column.entry.summary.arm.name in AUTOCAST_ARMS
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
    ("in all on the GPU", lambda prediction: format_peak(prediction.likely_total)),
    ("in all, up to", lambda prediction: ABSENT if prediction.highest is None else format_peak(prediction.most_total)),
    ("the GPU has", lambda prediction: format_bytes(prediction.gpu_bytes)),
    ("which means that it", lambda prediction: fit_in_short(prediction)[0]),
)
"""For simulated runs; what is outside of the allocator is in the first."""


def _size(size: int | None) -> str:
    return ABSENT if size is None else format_peak(size)


def _break_even(batch_size: float | None) -> str:
    if batch_size is None:
        return ABSENT
    return f"{batch_size:.3g}" if batch_size < 100 else f"{batch_size:,.0f}"


def render_losses(comparison: Comparison, layout: Layout) -> str:
    """The loss of each step; empty where none is known."""
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
