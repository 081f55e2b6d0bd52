"""The text of ``ampmem check``, and of a test that fails because of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ampmem.analysis.budgets.budget import ALLOCATED, DEVICE, GROWTH, PEAK, RESERVED
from ampmem.analysis.budgets.check import AT_PEAK, PEAK_IS, TRIALS_NOT_JUDGED, Broken, CheckResult, Judged, Limit
from ampmem.analysis.difference.difference import GroupChange, changes_between, folded
from ampmem.names import is_warning, warning_text
from ampmem.reporters.text.difference import changes_table, elsewhere, what
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, table_with_lines, words
from ampmem.reporters.text.plain_text import ABSENT, shorten, signed, wrapped, wrapped_text
from ampmem.units import counted, format_apart, format_bytes, format_count, format_peak, peaks_apart

CHANGES = 5
"""The number of rows for a broken limit."""
FRAMES = 6
"""The number of frames of the largest change's stack, the innermost."""

MOVED = "more than at the baseline's instant, but the baseline had most of it, too, at another instant"
"""The note for changes that did not grow."""
_INDENT = 4


def render_check(result: CheckResult, layout: Layout = PLAIN) -> str:
    """The answer, the table of limits, and for each broken limit the groups that grew."""
    sections = [
        "\n".join(_answer(result, layout)),
        _limits(result, layout),
        *_details(result, layout),
        wrapped_text(remarks(result), layout.width),
    ]
    return "\n\n".join(section for section in sections if section)


def render_checks(results: Sequence[CheckResult], layout: Layout = PLAIN) -> str:
    """Several results, such as a job's ranks: broken ones first and in full, of kept ones only the answer."""
    if len(results) == 1:
        return render_check(results[0], layout)
    # Those that were not judged come first, then those most over a limit.
    failed = [result for result in results if not result.ok]
    failed.sort(key=lambda each: (not each.problems, min((one.limit - one.after for one in each.broken), default=0)))
    kept = "\n".join(line for result in results if result.ok for line in _answer(result, layout))
    if not failed:
        return kept
    worst = f"{format_count(len(failed))} of {format_count(len(results))} fail; the worst is {failed[0].label}."
    said = "\n".join(map(layout.alarm, wrapped(worst, layout.width)))
    return "\n\n".join([said, *(render_check(result, layout) for result in failed), *([kept] if kept else [])])


def answer(result: CheckResult) -> str:
    """The result in one sentence: ``train.ampmem: broken: peak 12.0 GiB, 2.0 GiB over its budget of 10.0 GiB``."""
    parts = []
    if result.broken:
        more = len(result.broken) - 1
        others = f", and {counted(more, 'more limit')}" if more else ""
        parts.append(f"broken: {over(result, result.broken[0])}{others}")
    if result.problems:
        parts.append(f"not judged: {result.problems[0]}")
    return f"{result.label}: {'; '.join(parts) or f'kept: {_headline_of_kept(result)}'}"


def over(result: CheckResult, broken: Broken) -> str:
    """``peak 12.0 GiB, 2.0 GiB over its budget of 10.0 GiB``, or ``reserved may be up to 1.2 GiB …``."""
    apart = _apart(broken.key)
    there, limit = apart(broken.after, broken.limit)
    step = " in each step" if broken.key == GROWTH else ""
    if broken.limit_of is Limit.BUDGET:
        if broken.least is not None and broken.least <= broken.limit:
            return f"{broken.key} may be up to {there} ({format_peak(broken.least)} at least); its budget is {limit}"
        excess = format_bytes(broken.after - broken.limit)
        return f"{broken.key} {there}{step}, {excess} over its budget of {limit}"
    assert broken.before is not None and result.baseline is not None
    there, before = apart(broken.after, broken.before)
    more = format_bytes(broken.after - broken.before)
    spare = broken.limit - broken.before
    allowed = f", of which {format_bytes(spare)} are allowed ({result.baseline.allow})" if spare else ""
    return f"{broken.key} {there}, {more} more than the {before} of {result.baseline.label}{allowed}"


def _apart(key: str) -> Callable[[int, int], tuple[str, str]]:
    """The function that writes two sizes of ``key``: peaks of the allocator with the decimals of all peaks."""
    return peaks_apart if key in (PEAK, ALLOCATED, RESERVED, DEVICE) else format_apart


def remarks(result: CheckResult) -> Iterator[str]:
    """Further problems, shrunk sizes, differing conditions and warnings of the result, a line each."""
    for problem in result.problems[1:]:
        yield f"not judged: {problem}"
    baseline = result.baseline
    if baseline is not None:
        less = [f"{each.key} {signed((each.after or 0) - (each.before or 0))}" for each in result.shrunk]
        if less:
            yield f"smaller than in {baseline.label}: {', '.join(less)}"
        for each in baseline.conditions:
            differ = f"{each.what} is {each.after} here and {each.before} in {baseline.label}"
            yield f"note: {differ}, which may explain a difference"
        if any(broken.grew and not broken.grouped for broken in result.broken):
            yield (
                "note: one of the two is a summary, so growth is shown by category and module, not by line; a "
                "recording as the baseline (--baseline main.ampmem) shows the lines"
            )
    if TRIALS_NOT_JUDGED in result.notes:
        yield f"note: {TRIALS_NOT_JUDGED}"
    yield from (f"note: {note}" for note in result.notes if note.startswith(PEAK_IS))
    for note in result.notes:
        if is_warning(note):
            yield f"warning: {warning_text(note)}"


def _headline_of_kept(result: CheckResult) -> str:
    budgets = [each for each in result.judged if each.limit_of is Limit.BUDGET and each.after is not None]
    said = []
    if budgets:
        closest = max(budgets, key=lambda each: Fraction(each.after or 0, each.limit) if each.limit else 0)
        there, limit = _apart(closest.key)(closest.after or 0, closest.limit)
        many = f"{format_count(len(budgets))} budgets, the closest is " if len(budgets) > 1 else ""
        least = "" if closest.least is None else f" at most ({format_peak(closest.least)} at least)"
        said.append(f"{many}{closest.key}, {there} of {limit}{least}")
    if result.baseline is not None:
        sizes = [(each.before or 0, each.after or 0) for each in result.judged if each.limit_of is Limit.BASELINE]
        larger = " by more than is allowed" if any(after > before for before, after in sizes) else ""
        equal = all(before == after for before, after in sizes)
        label = result.baseline.label
        said.append(f"all sizes equal those of {label}" if equal else f"no size is larger than in {label}{larger}")
    return "; ".join(said) or "nothing is limited"


def _answer(result: CheckResult, layout: Layout) -> list[str]:
    style = layout.strong if result.ok else layout.alarm
    return [style(line) for line in wrapped(answer(result), layout.width)]


def noteworthy(result: CheckResult) -> list[Judged]:
    """The limits worth a row: all budgets, and the sizes that differ from the baseline."""
    return [each for each in result.judged if each.limit_of is Limit.BUDGET or each.after != each.before]


def _limits(result: CheckResult, layout: Layout) -> str:
    shown = noteworthy(result)
    if not shown:
        return ""
    columns = [words("", least=16), words("source", rank=2), number("limit"), number("measured"), words("")]
    return table(columns, [limit_row(each) for each in shown], layout)


def limit_row(judged: Judged) -> list[str]:
    """The cells of a limit: its key, its source (budget or baseline), the limit, the size, and the result."""
    of = str(judged.limit_of)
    if judged.after is None:
        return [judged.key, of, _apart(judged.key)(judged.limit, judged.limit)[0], ABSENT, "not judged"]
    there, limit = _apart(judged.key)(judged.after, judged.limit)
    step = " a step" if judged.key == GROWTH else ""
    outcome = "not judged"
    if judged.over:
        broken = "MAY BE BROKEN, by up to" if judged.least is not None and judged.least <= judged.limit else "BROKEN by"
        outcome = f"{broken} {format_bytes(judged.after - judged.limit)}"
    elif judged.kept:
        outcome = "kept" if judged.least is None else f"kept, {format_peak(judged.least)} at least"
    return [judged.key, of, f"{limit}{step}", f"{there}{step}", outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The explanation of a broken limit. ``is_new`` is false if it has explained another limit already."""

    broken: Broken
    caption: str
    is_new: bool


def explained(result: CheckResult) -> Iterator[Explained]:
    """One explanation per key: a key's budget and baseline may break for the same reasons.

    Limits without an explanation are left out.
    """
    told: dict[tuple[object, ...], str] = {}
    for broken in {each.key: each for each in result.broken}.values():
        places = (broken.grew + broken.moved) or broken.held
        caption = _growth_line(result, broken)
        if broken.held:
            why = "" if result.baseline is None else f"; nothing grew since {result.baseline.label}"
            caption = f"{broken.key}: what is alive {broken.instant}, largest first{why}"
        if places and places in told:
            yield Explained(broken=broken, caption=f"{caption}, the same as for {told[places]}", is_new=False)
        elif places:
            told[places] = broken.key
            yield Explained(broken=broken, caption=caption, is_new=True)


def instants_compared(broken: Broken) -> str:
    """The two instants that are compared, if they differ; else empty."""
    if broken.moment_before is None or broken.moment_after is None:
        return ""
    what = "peak" if broken.instant.startswith(AT_PEAK) else "most"
    return elsewhere(what, broken.moment_before, broken.moment_after)


def _details(result: CheckResult, layout: Layout) -> Iterator[str]:
    for each in explained(result):
        if not each.is_new:
            yield "\n".join(wrapped(each.caption, layout.width))
        else:
            yield (_largest if each.broken.held else _grown)(each.broken, each.caption, layout)


def _grown(broken: Broken, caption: str, layout: Layout) -> str:
    """The groups that grew, and the stack of the largest change."""
    title = [layout.strong(line) for line in wrapped(caption, layout.width)]
    title += wrapped(instants_compared(broken), layout.width) if instants_compared(broken) else []
    if not broken.grouped:
        return "\n".join([*title, "", _by_module(broken.grew, layout)])
    rows = []
    if broken.grew:
        stack = _stack(folded(broken.grew)[0].largest.stack, layout)
        rows = ["", changes_table(broken.grew, layout, most=CHANGES), *stack]
    if broken.moved:
        rows += ["", *wrapped(f"{MOVED}:", layout.width), "", changes_table(broken.moved, layout, most=CHANGES)]
    return "\n".join([*title, *rows])


def _growth_line(result: CheckResult, broken: Broken) -> str:
    """``activations: what grew since main.ampmem, when activations are largest: 1.2 GiB more, and 0.1 GiB less …``."""
    came = sum(change.grown for change in broken.grew)
    moved = sum(change.grown for change in broken.moved)
    parts = [f"{format_bytes(came)} more"] if came else ["not explained by any line, as none has grown"]
    parts += [f"{format_bytes(moved)} were in the baseline at another instant"] if moved else []
    parts += [f"and {format_bytes(-broken.shrank)} less elsewhere"] if broken.shrank else []
    since = "" if result.baseline is None or broken.key == GROWTH else f" since {result.baseline.label},"
    return f"{broken.key}: what grew{since} {broken.instant}: {', '.join(parts)}"


def _by_module(changes: Sequence[GroupChange], layout: Layout) -> str:
    """The table of changes by category and module, which are all that a summary's JSON has."""
    folds = folded(changes)
    columns = [number("change"), number("before", rank=1), number("after"), words("category")]
    columns += [words("module", least=16)] if any(fold.module is not None for fold in folds) else []
    rows = []
    for fold in folds[:CHANGES]:
        several = f" ({len(fold.changes)})" if len(fold.changes) > 1 else ""
        sizes = [signed(fold.grown), format_bytes(fold.before), format_bytes(fold.after)]
        rows.append([*sizes, str(fold.largest.category), f"{fold.module or ABSENT}{several}"][: len(columns)])
    left = folds[CHANGES:]
    more = f"\n… and {format_count(len(left))} smaller: {signed(sum(fold.grown for fold in left))}" if left else ""
    return f"{table(columns, rows, layout)}{more}"


def _largest(broken: Broken, caption: str, layout: Layout) -> str:
    """The largest live groups, for a broken limit without a baseline, or since which nothing grew."""
    lines = [layout.strong(line) for line in wrapped(caption, layout.width)]
    folds = folded(changes_between((), broken.held))
    columns = [number("bytes"), words("category"), words("what", least=16)]
    rows = [[format_bytes(fold.after), str(fold.largest.category), what(fold)] for fold in folds[:CHANGES]]
    frames = [fold.largest.source_line for fold in folds[:CHANGES]]
    room = layout.width - _INDENT
    below = [[layout.faint(f"{'':{_INDENT}}{shorten(f'at {each}', room)}")] if each else [] for each in frames]
    lines += ["", *table_with_lines(columns, rows, below, layout)]
    left = folds[CHANGES:]
    if left:
        lines.append(f"… and {format_count(len(left))} smaller: {format_bytes(sum(fold.after for fold in left))}")
    return "\n".join([*lines, *_stack(folds[0].largest.stack, layout)])


def _stack(stack: Sequence[str], layout: Layout) -> list[str]:
    """The stack of the first row, innermost frame last; empty if it has only the line shown already."""
    if len(stack) < 2:
        return []
    left = len(stack) - FRAMES
    shown = [*([f"… {format_count(left)} more frames above"] if left > 0 else []), *stack[-FRAMES:]]
    lines = [f"{'':{_INDENT}}{shorten(frame, layout.width - _INDENT)}" for frame in shown]
    return ["", "the first row was allocated at", *map(layout.faint, lines)]
