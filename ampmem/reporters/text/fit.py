"""The text of ``ampmem fit``: the largest values that fit on a GPU, and the values from which autocast saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampmem.analysis.fit import BASELINE, BreakEven, FitResult, PrecisionFit, Remaining, SavingVerdict
from ampmem.names import is_warning, warning_text
from ampmem.reporters.text.layout import PLAIN, Layout, number, side_by_side
from ampmem.reporters.text.plain_text import ABSENT, signed, size_beside, wrapped_text
from ampmem.units import counted, format_alike, format_bytes, format_count, parse_bytes
from ampmem.vocabulary import Precision

DOES_NOT_FIT = "does not fit"
_PRECISIONS = {
    Precision.FP32: "FP32",
    Precision.AMP: "AMP",
    Precision.AMP_NOCACHE: "AMP without the weight cache",
    Precision.BF16: "weights in bfloat16",
    Precision.AS_IS: "the script as it is",
}
"""The names of the precisions in the headline."""
_SMALL = 0.1
"""A size below this share of a unit is written in a smaller unit."""


def render_fit_result(fit: FitResult, layout: Layout = PLAIN) -> str:
    """The runs as a table, then the conclusions."""
    sections = [
        layout.heading(headline(fit), indent=""),
        wrapped_text((f"{name:<8}{text}" for name, text in facts(fit)), layout.width, indent=" " * 8),
        _points(fit, layout),
        _section("what fits: the most memory in use on the device, of its total", fitting_lines(fit), layout),
        _section(f"peak allocated against {BASELINE}", break_even_lines(fit), layout),
        wrapped_text((f"note: {note}" for note in remarks(fit)), layout.width),
    ]
    return "\n\n".join(section for section in sections if section)


def headline(fit: FitResult) -> str:
    """The answer in one sentence: ``On 2 GiB AMP trains 43 a batch, FP32 32.``; equal precisions are named once.

    The values are the largest that were run and surely fit.
    """
    different = [precision for precision in fit.precisions if fit.same_as(precision) is None]
    different.sort(key=lambda precision: -(precision.largest_fitting or 0))
    if different[0].largest_fitting is None:
        return f"No value that was run surely fits on {device_in_words(fit.gpu.name, fit.gpu.total)}."
    if fit.without_effect:
        values = f"from {format_count(fit.values[0])} to {format_count(fit.values[-1])}"
        same = f"the peak is the same at each value that was run, {values}"
        return f"{fit.vary.name} has no effect: {same}. Does the script use it, and does it have enough data?"
    said: list[str] = []
    what = "fits a batch of " if "batch" in fit.vary.name.lower() else f"fits with {fit.vary.name} "
    for precision in different:
        most, or_more = precision.largest_fitting, " or more" if precision.smallest_not_fitting is None else ""
        value = "no value that was run" if most is None else f"{'' if said else what}{format_count(most)}{or_more}"
        said.append(f"{_PRECISIONS[precision.name]} {value}")
    return f"On {device_in_words(fit.gpu.name, fit.gpu.total)} {', '.join(said)}."


def device_in_words(gpu: str, total: int) -> str:
    """The name of a GPU, or of one that is named by its memory, of ``total`` bytes, the size: ``24 GiB``."""
    return gpu if size_beside(gpu) else format_bytes(total).replace(".0 ", " ")


def simulated_gpu(gpu: str, total: int) -> str:
    """The name of a simulated GPU of ``total`` bytes, and that size."""
    size = format_bytes(total)
    return f"{gpu} (simulated), {size}" if size_beside(gpu) else f"{size} (simulated)"


def facts(fit: FitResult) -> list[tuple[str, str]]:
    """The script, the varied argument, the GPU, the runs and the warnings, each with its name."""
    vary = fit.vary
    outside = ""
    if fit.gpu.outside is not None and fit.gpu.outside_at_most is not None:
        assumed = _range(fit, fit.gpu.outside, fit.gpu.outside_at_most)
        outside = f", {assumed} of it assumed in use outside of the allocator"
    if fit.gpu.allowed is not None:
        outside += f"; the script lets this process use {format_bytes(fit.gpu.allowed)} of it"
    high = "the first that does not fit" if vary.high is None else format_count(vary.high)
    return [
        ("script", fit.script),
        ("varied", f"{vary.name} from {format_count(vary.low)} to {high}"),
        ("gpu", f"{simulated_gpu(fit.gpu.name, fit.gpu.total)}{outside}"),
        ("runs", f"{format_count(fit.runs)}, of {fit.steps} steps each"),
        *(("warning", warning_text(note)) for note in fit.notes if is_warning(note)),
    ]


def fitting_lines(fit: FitResult) -> list[str]:
    """For each precision the largest value that fits and the smallest that does not; equal precisions share a line."""
    return [f"{precision.name}: {_same_as(fit, precision) or _fitting(fit, precision)}" for precision in fit.precisions]


def break_even_lines(fit: FitResult) -> list[str]:
    """For each other precision, where it allocates less at its peak than the baseline. It may still reserve more."""
    same = {precision.name: _same_as(fit, precision) for precision in fit.precisions}
    return [f"{each.precision}: {same[each.precision] or _break_even(fit, each)}" for each in fit.break_even]


def remarks(fit: FitResult) -> list[str]:
    """The odd points, such as a value that does not fit below one that does, then the runs' notes except warnings."""
    found = []
    for precision in fit.precisions:
        if precision.gaps:
            values = ", ".join(map(fit.vary.shown, precision.gaps))
            found.append(f"{precision.name}: {values} did not fit, although a larger value did")
        if precision.flat_from is not None and not (fit.same_as(precision) or fit.without_effect):
            found.append(
                f"{precision.name}: the peak is the same at {fit.vary.shown(precision.flat_from)} and at "
                f"{precision.largest_fitting}: does the script use {fit.vary.name}, and does it have enough data?"
            )
    return [*found, *(note for note in fit.notes if not is_warning(note))]


def what_follows(remaining: Remaining) -> str:
    """The work left, to follow a finished run: ``; left: fp32 between 48 and 64, amp above 8``; empty at the end."""
    searched = []
    for precision, (fits, too_large) in remaining.searched.items():
        bounds = f"above {fits}" if too_large is None else f"between {fits} and {too_large}"
        searched.append(f"{precision} {'not run yet' if fits is None else bounds}")
    if searched:
        return f"; still to find: {', '.join(searched)}"
    if remaining.crossings:
        return f"; still to find: the value from which less is allocated than in {BASELINE}"
    return f"; {counted(remaining.runs, 'more run')} for the curve" if remaining.runs else ""


def _points(fit: FitResult, layout: Layout) -> str:
    first, shown, precisions = number(fit.vary.name), sizes_of(fit), different_precisions(fit)
    groups = [[number(f"{name}\nallocated"), number("\nreserved", of=name)] for name in precisions]
    of_precisions = [[cells(precision, value, shown) for value in fit.values] for precision in precisions.values()]
    tables = side_by_side(first, list(map(str, fit.values)), groups, of_precisions, layout)
    return "\n\n".join([layout.strong("peak of each run"), *tables])


def different_precisions(fit: FitResult) -> dict[str, PrecisionFit]:
    """The different precisions; precisions with equal peaks share a key: ``amp, amp-nocache``."""
    different = [precision for precision in fit.precisions if fit.same_as(precision) is None]
    alike = [
        [precision.name, *(other.name for other in fit.precisions if fit.same_as(other) is precision)]
        for precision in different
    ]
    return {", ".join(names): precision for names, precision in zip(alike, different, strict=True)}


def sizes_of(fit: FitResult) -> Callable[[int], str]:
    """The function that writes the peaks of all runs in one unit."""
    found = (memory for precision in fit.precisions for memory in precision.memory.values() if memory is not None)
    return format_alike((memory.allocated, memory.reserved) for memory in found)


def room(fit: FitResult) -> tuple[int, int] | None:
    """The memory that the device leaves to the allocator in bytes: the lower bound, and the upper bound.

    ``None`` if nothing fits, as no run tells the memory outside of the allocator then.
    """
    if fit.gpu.outside is None or fit.gpu.outside_at_most is None:
        return None
    limit = fit.gpu.total if fit.gpu.allowed is None else fit.gpu.allowed
    return max(min(fit.gpu.total - fit.gpu.outside_at_most, limit), 0), min(fit.gpu.total - fit.gpu.outside, limit)


def room_in_words(fit: FitResult) -> str:
    """The memory that the allocator can take, and why; empty if unknown."""
    found = room(fit)
    if found is None or fit.gpu.outside is None or fit.gpu.outside_at_most is None:
        return ""
    whole, outside = sizes_of(fit)(fit.gpu.total), _range(fit, fit.gpu.outside, fit.gpu.outside_at_most)
    said = f"Of the {whole} that the device has, {outside} is in use outside of the allocator, such as the CUDA context"
    if fit.gpu.allowed is not None and found[1] == fit.gpu.allowed:
        said += f", and the script lets this process use {_range(fit, fit.gpu.allowed, fit.gpu.allowed)}"
    if found[0] == found[1]:
        return f"{said}: the allocator can take {_range(fit, *found)}."
    return (
        f"{said}: the allocator can surely take {_range(fit, found[0], found[0])}, and at most "
        f"{_range(fit, found[1], found[1])}. What lies between is the shaded zone, in which a run may fit."
    )


def _range(fit: FitResult, low: int, high: int) -> str:
    """One size, or two different ones, in the unit of the runs' peaks."""
    shown = sizes_of(fit)
    first, last = shown(low), shown(high)
    return first if first == last else f"{first.rpartition(' ')[0]} to {last}"


def cells(precision: PrecisionFit, value: int, shown: Callable[[int], str]) -> tuple[str, str]:
    """The allocated and reserved peaks of a run as words; ``shown`` writes a size in bytes."""
    if value not in precision.memory:
        return ABSENT, ABSENT
    memory = precision.memory[value]
    if memory is None:
        return DOES_NOT_FIT, ""
    reserved = shown(memory.reserved)
    return shown(memory.allocated), reserved if memory.surely else f"{reserved}, may fit"


def _section(title: str, lines: Sequence[str], layout: Layout) -> str:
    return f"{layout.heading(title)}\n{wrapped_text(lines, layout.width)}" if lines else ""


def _fitting(fit: FitResult, precision: PrecisionFit) -> str:
    """``--batch-size=8 fits (1.2 to 1.9 of 2.0 GiB), 16 may fit (1.5 to 2.1 of 2.0 GiB), 32 does not``."""
    fits, may = precision.largest_fitting, precision.largest_that_may_fit
    if fits is None and may is None:
        return f"{fit.vary.shown(fit.vary.low)} does not fit; nothing smaller was run"
    said = []
    if fits is not None:
        said.append(f"{fit.vary.shown(fits)} fits ({_in_use(fit, precision, fits)})")
    if may is not None:
        said.append(f"{may if said else fit.vary.shown(may)} may fit ({_in_use(fit, precision, may)})")
    if fits is None:
        said.append("no value that was run surely fits")
    largest = max(fits or 0, may or 0)
    failing = [point.value for point in precision.points if not point.may_fit and point.value > largest]
    return f"{', '.join(said)}{f', {min(failing)} does not' if failing else '; nothing larger was run'}"


def _in_use(fit: FitResult, precision: PrecisionFit, value: int) -> str:
    memory = precision.memory[value]
    assert memory is not None
    if memory.allowed is None:
        return of_whole(fit.gpu.total, *dict.fromkeys((memory.used, memory.most)))
    most = memory.reserved if memory.highest is None else memory.highest - memory.outside_at_most
    taken = of_whole(memory.allowed, *dict.fromkeys((memory.reserved, most)))
    return f"the allocator takes {taken} that the script lets this process use"


def of_whole(whole: int, *parts: int) -> str:
    """``parts`` (one size or two) as parts of ``whole``: ``1.98 of 2.00 GiB``, ``1.9 to 2.1 of 2.0 GiB``."""
    shown = format_alike((part, whole) for part in parts)
    found = dict.fromkeys(shown(part).partition(" ")[0] for part in parts)
    return f"{' to '.join(found)} of {shown(whole)}"


def _same_as(fit: FitResult, precision: PrecisionFit) -> str:
    """``the same as amp``; empty if no precision before this one has equal peaks."""
    other = fit.same_as(precision)
    return f"the same as {other.name}" if other else ""


def _break_even(fit: FitResult, each: BreakEven) -> str:
    shown = fit.vary.shown
    match each.verdict:
        case SavingVerdict.UNKNOWN:
            return "no value fits in both"
        case SavingVerdict.ALWAYS:
            return f"allocates less at every value that was run in both ({_span(fit, each)})"
        case SavingVerdict.NEVER:
            return f"does not allocate less at any value that was run in both ({_span(fit, each)})"
        case _:
            assert each.costs_at is not None and each.saves_at is not None
            cost, save = (_at(fit, each, value) for value in (each.costs_at, each.saves_at))
            more = "as much" if each.by_value[each.costs_at] == 0 else "more"
            if each.verdict is SavingVerdict.REVERSED:
                return f"allocates less at {shown(each.saves_at)} ({save}), but {more} at {each.costs_at} ({cost})"
            return f"allocates {more} at {shown(each.costs_at)} ({cost}), less at {each.saves_at} ({save})"


def _at(fit: FitResult, each: BreakEven, value: int) -> str:
    """The difference at ``value`` in the unit of the peaks, or in a smaller one if it is small."""
    difference, shown = each.by_value[value], sizes_of(fit)
    unit = parse_bytes(f"1 {shown(0).rpartition(' ')[2]}")
    if abs(difference) < _SMALL * unit:
        return signed(difference)
    return f"{'+' if difference > 0 else ''}{shown(difference)}"


def _span(fit: FitResult, each: BreakEven) -> str:
    values = list(each.by_value)
    return ", ".join(f"{_at(fit, each, value)} at {value}" for value in dict.fromkeys((values[0], values[-1])))
