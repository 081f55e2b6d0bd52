"""The ranks of a job as text: the verdict, the table of ranks, the places of the peaks, and several precisions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from ampmem.analysis.answer import NO_DIFFERENCE, verdict_of
from ampmem.analysis.comparison import Comparison
from ampmem.analysis.ops import plain_op
from ampmem.analysis.ranks.merge import Jobs
from ampmem.analysis.ranks.ranks import (
    Absence,
    Alike,
    CategorySpread,
    Circumstance,
    Excess,
    GroupKind,
    Job,
    MissingRank,
    Rank,
    RankGroup,
    RankPeak,
    Ranks,
    Spread,
    Worst,
)
from ampmem.analysis.summary import PLACES, PeakPlace
from ampmem.analysis.timeline.categories import Category
from ampmem.names import NOT_ENDED, is_warning, layers_named, of_all_layers, warning_text
from ampmem.recording import rank_of, rank_pattern
from ampmem.reporters.base import EVERYTHING, NOTHING, Detail
from ampmem.reporters.text.answer import (
    Wording,
    capital,
    in_phase,
    made_of,
    name,
    percent_of,
    wording,
    wording_lines,
)
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.layout import PLAIN, Column, Layout, narrowest, number, side_by_side, table, words
from ampmem.reporters.text.plain_text import ABSENT, or_absent, wrapped, wrapped_text
from ampmem.reporters.text.run import describe_device, keyed, precision_in_words, render_next, warning_lines
from ampmem.units import counted, format_bytes, format_count, format_peak, listed, peaks_close
from ampmem.vocabulary import SourceKind


def numbers(ranks: Sequence[int]) -> str:
    """Rank numbers in short: ``3``, ``0-6``, ``0-2, 5, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs
    )


def ranks_named(ranks: Sequence[int]) -> str:
    """The ranks by number: ``rank 3``, ``ranks 0-6``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {numbers(ranks)}"


def place(ranks: Sequence[Rank]) -> str:
    """The ranks' common place in the device mesh: ``dp 0, tp 1``."""
    meshes = [dict.fromkeys(f"{axis.name} {axis.coordinate}" for axis in rank.mesh) for rank in ranks]
    return ", ".join(axis for axis in meshes[0] if all(axis in mesh for mesh in meshes))


def group_name(group: RankGroup) -> str:
    """The name of a group: ``stage 1``, ``dp 0``."""
    return f"{'stage' if group.kind is GroupKind.STAGE else group.axis} {group.coordinate}"


_DIFFERENCES = 5
"""The number of differences that are named."""
_NAMED_SHARE = 0.05
"""Differences below this share of the largest are not named."""
_TWICE = 2
"""From this ratio on, the ratio is given instead of percent."""
_LARGER = 1.01
"""A peak in another step is mentioned if it is this many times as large."""
_CIRCUMSTANCES = {
    Circumstance.STAGE: "stage",
    Circumstance.BATCH_SIZE: "batch size",
    Circumstance.BACKWARDS: "number of backwards",
    Circumstance.PARAMETERS: "number of parameters",
    Circumstance.OPTIMIZER: "optimizer",
}


def ranks_wording(ranks: Ranks) -> Wording:
    """The merged view in words: a headline, the difference by category, and further sentences."""
    if ranks.unsound:
        return Wording(
            headline="No verdict",
            why=f"the sums of {ranks_named(ranks.unsound)} differ from the allocator's, see the warning",
        )
    if ranks.launches:
        return Wording(headline="No verdict on one job", why="these are ranks of several launches, see the warning")
    compared, count, size = _compared(ranks), len(ranks.compared), ranks.job.world_size
    short = [rank for rank in ranks.ranks if rank.out_of_memory is not None]
    if short:
        first = max(short, key=lambda rank: rank.out_of_memory or 0)
        more = f", as did {ranks_named([rank.rank for rank in short if rank is not first])}" if len(short) > 1 else ""
        where = f"at {format_bytes(first.out_of_memory)}"
        return Wording(headline=f"Rank {first.rank} of {size} ran out of memory {where}{more}", more=(compared.text,))
    few = [f"{count} of the {size} ranks are compared."] if 1 < count != size else []
    return replace(compared, more=(*compared.more, *_larger(ranks), *few))


def _compared(ranks: Ranks) -> Wording:
    """The words about ranks that can be compared."""
    if ranks.worst is None:
        return Wording(headline=f"No rank of {ranks.job.world_size} can be compared")
    if len(ranks.compared) == 1:
        only = f"Only rank {ranks.worst.rank} of {ranks.job.world_size} can be shown, and nothing can be compared"
        return Wording(headline=f"{only}: its peak is {format_peak(ranks.worst.bytes)}, {_when(ranks)}")
    if len(ranks.alike) == 1:
        peak, within = ranks.rank(ranks.worst.rank).peak, ranks.alike[0].within
        assert peak is not None
        who = every_rank(ranks) or f"The {len(ranks.compared)} ranks that are compared"
        same = f"the same within {format_bytes(within)}" if within else "the same"
        headline = f"{who} need {same}, {format_peak(ranks.worst.bytes)} at the peak, {_when(ranks)}"
        return Wording(headline=headline, why=made_of(peak.categories, peak.bytes))
    return _of_worst(ranks, ranks.worst, next(each for each in ranks.alike if ranks.worst.rank in each.ranks))


def every_rank(ranks: Ranks) -> str:
    """``Both ranks``, ``All 8 ranks``; empty if not all are compared."""
    count = len(ranks.compared)
    if count != ranks.job.world_size:
        return ""
    return "Both ranks" if count == 2 else f"All {format_count(count)} ranks"


def _of_worst(ranks: Ranks, worst: Worst, alike: Alike) -> Wording:
    """The worst rank compared with the median rank, or with the least if the median is as large."""
    excess, other = worst.over_median, f"the median rank ({worst.over_median.rank})"
    if excess.rank in alike.ranks or excess.rank == worst.over_least.rank:
        excess, other = worst.over_least, f"rank {worst.over_least.rank}"
        if len(ranks.compared) > 2:
            other += ", which needs the least"
    least = worst.bytes - excess.bytes
    if excess.bytes < NO_DIFFERENCE * worst.bytes:
        mine, others = peaks_close(worst.bytes, least)
        others = f"{format_bytes(excess.bytes)} less" if mine == others else others
        sizes = f"{mine} on {ranks_named(alike.ranks)} and {others} on {other}"
        headline = f"The ranks hardly differ at their peaks, {_when(ranks)}: {sizes}"
        # A category of one may make up for another.
        differ = any(abs(part.bytes) >= NO_DIFFERENCE * worst.bytes for part in excess.parts)
        but = (f"But rank {worst.rank} has {_parts(excess)}.", *_beside(worst, excess))
        return Wording(headline=headline, more=but if differ else ())
    one = len(alike.ranks) == 1
    headline = (
        f"{capital(ranks_named(alike.ranks))} of {ranks.job.world_size} {'is' if one else 'are'} the worst, with "
        f"{format_peak(worst.bytes)}{'' if one else ' each'} at the peak, {_when(ranks)}"
    )
    if least and worst.bytes >= _TWICE * least:
        headline += f", {worst.bytes / least:,.1f} times that of {other}"
    elif least:
        headline += f", {percent_of(worst.bytes / least - 1).removeprefix('+')} above {other}"
    has = f"{'it has' if one else 'they have'} {_parts(excess)}"
    return Wording(headline=headline, why=has, more=_beside(worst, excess))


def _parts(excess: Excess) -> str:
    """``1.1 GiB more of activations, 0.1 GiB more of parameters and 0.2 GiB less of gradients``."""
    largest = sorted(excess.parts, key=lambda part: -abs(part.bytes))
    least = _NAMED_SHARE * abs(largest[0].bytes) if largest else 0
    shown = [part for part in largest[:_DIFFERENCES] if abs(part.bytes) >= least]
    others = [part for part in excess.parts if part not in shown]
    if len(others) == 1 and abs(others[0].bytes) >= least:
        shown, others = [*shown, *others], []
    words = [f"{_amount(part.bytes)} in {name(part.category)}" for part in excess.parts if part in shown]
    rest = sum(part.bytes for part in others)
    words += [f"{_amount(rest)} in all else"] if rest else []
    rounding = excess.bytes - sum(part.bytes for part in excess.parts)
    if rounding and (not words or abs(rounding) >= least):
        words.append(f"{_amount(rounding)} in rounding")
    return listed(words)


def _amount(size: int) -> str:
    return f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'}"


def _beside(worst: Worst, excess: Excess) -> tuple[str, ...]:
    """The circumstances in which the two ranks differ, such as phase and batch size, and which may be the reason."""
    found = []
    mine, other = f"rank {worst.rank}", f"rank {excess.rank}"
    phases = next((each for each in excess.contrasts if each.what is Circumstance.PHASE), None)
    if phases is not None:
        found.append(
            f"Their peaks are at different instants: {mine}'s is {in_phase(phases.worst or '')}, "
            f"{other}'s {in_phase(phases.other or '')}."
        )
    words = [
        f"{_CIRCUMSTANCES[each.what]} ({_value(each.what, each.worst)} and {_value(each.what, each.other)})"
        for each in excess.contrasts
        if each is not phases
    ]
    if words:
        found.append(f"{capital(mine)} and {other} also differ in their {listed(words)}.")
    return tuple(found)


def _value(what: Circumstance, value: str | None) -> str:
    if value is None:
        return "none" if what is Circumstance.OPTIMIZER else "not known"
    return format_count(int(value)) if what is Circumstance.PARAMETERS else value


def _when(ranks: Ranks) -> str:
    """The step of the ranks' peaks, and the phase if all share it."""
    phases = {rank.peak.phase for rank in ranks.compared if rank.peak is not None}
    step = "the last step of each" if ranks.step is None else f"step {ranks.step}"
    return in_phase(phases.pop(), step) if len(phases) == 1 else f"in {step}"


def _larger(ranks: Ranks) -> Sequence[str]:
    """The largest peak of any step, and of any run outside of its steps, if it is another peak."""
    if ranks.worst is None:
        return ()
    found = []
    most = max(ranks.ranks, key=lambda rank: rank.largest.said)
    if most.largest.said >= _LARGER * ranks.worst.bytes:
        found.append(f"In step {most.largest.step} rank {most.rank} needed more: {format_peak(most.largest.said)}.")
    most = max(ranks.ranks, key=lambda rank: rank.whole.bytes)
    if most.whole.where is not PeakPlace.STEP and most.whole.bytes > max(most.largest.said, ranks.worst.bytes):
        size = format_peak(most.whole.bytes)
        found.append(f"{capital(PLACES[most.whole.where])} rank {most.rank} needed more: {size}, its whole run's peak.")
    return found


_NAME = 12
_MOST_ROWS = 16
"""The most rows of places, and of classes of ranks, by default; the worst are shown."""


def render_places(ranks: Ranks, layout: Layout, *, every: bool = False) -> str:
    """A row for all ranks whose peak is at the same place; empty if no rank can be compared."""
    alike: dict[tuple[str, ...], list[Rank]] = {}
    for rank in ranks.compared:
        assert rank.peak is not None
        own, whole = rank.parameters.count, rank.parameters.global_count
        cells = (
            rank.peak.phase,
            of_all_layers(rank.peak.module or ABSENT),
            plain_op(rank.peak.op) if rank.peak.op else ABSENT,
            format_count(own) if whole is None else f"{format_count(own)} of {format_count(whole)}",
            or_absent(rank.reserved, format_peak),
            or_absent(rank.batch_size, str),
            str(rank.finished_steps),
        )
        alike.setdefault(cells, []).append(rank)
    if not alike:
        return ""
    rows = []
    for (phase, _, *others), those in alike.items():  # ranks whose peaks are in equal layers
        modules = list(dict.fromkeys(rank.peak.module for rank in those if rank.peak is not None and rank.peak.module))
        where = layers_named(modules) if modules else ABSENT
        rows.append([numbers([rank.rank for rank in those]), phase, where, *others])
    shown = rows if every else rows[:_MOST_ROWS]
    columns = [
        words("rank", least=_NAME, wraps=True),
        words("peak in"),
        words("module", least=_NAME),
        words("op", least=_NAME, rank=2),
        number("parameters"),
        number("reserved", rank=1),
        number("batch", rank=3),
        number("steps", rank=4),
    ]
    kept = [i for i in range(len(columns)) if any(row[i] != ABSENT for row in shown)]
    text = table([columns[i] for i in kept], [[row[i] for i in kept] for row in shown], layout)
    found = [layout.strong("where each peak is"), "", text]
    if left_out := sum(map(len, [*alike.values()][len(shown) :])):
        found += wrapped(f"{left_out} more ranks; --all shows each", layout.width)
    return "\n".join(found)


def render_groups(ranks: Ranks, layout: Layout) -> str:
    """The pipeline stages, and the places on each axis of the mesh.

    An axis is left out if no peak changes along it, or if each place has only one rank.
    """
    texts = []
    for (_, axis), those in groupby(ranks.groups, key=lambda group: (group.kind, group.axis)):
        groups = [(group, (group.peak.min, group.peak.median, group.peak.max)) for group in those]
        if len({sizes for _, sizes in groups}) == 1 or all(len(group.ranks) == 1 for group, _ in groups):
            continue
        columns = [words(axis or "stage", least=_NAME), words("ranks", least=_NAME, wraps=True)]
        columns += map(number, ("least", "median", "most", "worst rank"))
        rows = [
            [group_name(group), numbers(group.ranks), *map(format_peak, sizes), str(group.peak.worst)]
            for group, sizes in groups
        ]
        caption = "by stage" if axis is None else "by axis of the mesh"
        texts.append("\n".join([layout.strong(f"peaks {caption}"), "", table(columns, rows, layout)]))
    return "\n\n".join(texts)


_UNITS = (("B", 1), ("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3), ("TiB", 1024**4))
_MOST = "*"
_WORST = " worst"
_FEET = {"least": "min", "median": "median", "most": "max", "spread": "spread"}
_REST, _ROUNDING = "all else", "rounding"


def render_matrix(ranks: Ranks, layout: Layout, *, every: bool = False) -> str:
    """The table of ranks, its caption and its marks explained; empty if no rank can be compared."""
    if ranks.peak is None or ranks.worst is None:
        return ""
    largest = sorted(ranks.alike, key=lambda each: -_peak(ranks, each).said)
    left_out = [] if every else largest[_MOST_ROWS:]
    shown = [each for each in ranks.alike if each not in left_out]
    unit, size = next((unit for unit in reversed(_UNITS) if ranks.peak.max >= 8 * unit[1]), _UNITS[0])
    text = _fitting(ranks, shown, size, layout)
    lines = [layout.heading(f"{instants_of(ranks)}, in {unit}"), "", text]
    if left_out:
        sizes = sorted(_peak(ranks, each).said for each in left_out)
        count = counted(sum(len(each.ranks) for each in left_out), "more rank")
        span = f"from {format_peak(sizes[0])} to {format_peak(sizes[-1])}"
        lines += wrapped(f"{count}, {span}; --all shows each", layout.width)
    if _MOST in text:
        lines += wrapped(f"{_MOST} the largest of its column, if the ranks differ by 1 % or more", layout.width)
    return "\n".join(lines)


def instants_of(ranks: Ranks) -> str:
    """The instants at which the ranks are compared."""
    return f"each rank at its own peak of {'its last step' if ranks.step is None else f'step {ranks.step}'}"


def _peak(ranks: Ranks, alike: Alike) -> RankPeak:
    """The peak of the first of the class's ranks."""
    peak = ranks.rank(alike.ranks[0]).peak
    assert peak is not None
    return peak


def _fitting(ranks: Ranks, shown: Sequence[Alike], unit: int, layout: Layout) -> str:
    """The table with as many categories as fit: the largest are kept, the rest is summed up."""
    by_weight = sorted(ranks.categories, key=lambda each: (each.max, each.spread), reverse=True)
    for count in range(len(by_weight), -1, -1):
        kept = by_weight[:count]
        own = [each for each in ranks.categories if each in kept]
        columns, rows = _table(ranks, shown, own, unit)
        if narrowest(columns, rows) <= layout.width or not count:
            break
    worst = next((row[0] for row in rows if row[0].endswith(_WORST)), "")
    return table(columns, rows, layout, strong=(worst,))


def _table(
    ranks: Ranks, shown: Sequence[Alike], own: Sequence[CategorySpread], unit: int
) -> tuple[list[Column], list[list[str]]]:
    assert ranks.peak is not None
    rest = len(own) < len(ranks.categories)
    places = len({_place(ranks, each) for each in shown}) > 1
    columns = [words("rank", least=_NAME, wraps=True)]
    columns += [words("mesh", least=_NAME, rank=1)] * places
    columns += [number("peak"), *(number(each.category.replace("_", "\n")) for each in own), *([number(_REST)] * rest)]
    rounded = any(_peak(ranks, each).allocated is not None for each in ranks.alike)
    columns += [number(_ROUNDING)] * rounded
    rows = []
    for each in shown:
        peak = _peak(ranks, each)
        # The rounding of the allocator's blocks is in no category.
        rounding = [_cell(peak.said - peak.bytes, unit)] * rounded
        rows.append([*_row(ranks, each, own, unit, places=places, rest=rest), *rounding])
    for foot, field in _FEET.items() if len(ranks.alike) > 2 else ():
        most, *others = [getattr(each, field) for each in (ranks.peak, *own)]
        sizes = [_cell(most, unit, decimals=_decimals(unit)), *(_cell(size, unit) for size in others)]
        rows.append([foot, *([""] * places), *sizes, *([""] * (rest + rounded))])
    return columns, rows


def _row(
    ranks: Ranks, alike: Alike, own: Sequence[CategorySpread], unit: int, *, places: bool, rest: bool
) -> list[str]:
    assert ranks.peak is not None and ranks.worst is not None
    peak = _peak(ranks, alike)
    one = len(ranks.alike) == 1
    worst = _WORST if ranks.worst.rank in alike.ranks and not one else ""
    cells = [f"{numbers(alike.ranks)}{worst}", *([_place(ranks, alike)] * places)]
    cells.append(_cell(peak.said, unit, ranks.peak, decimals=_decimals(unit)))
    cells += [_cell(peak.categories[each.category], unit, each) for each in own]
    named: set[Category] = {each.category for each in own}
    if rest:
        cells.append(_cell(sum(size for key, size in peak.categories.items() if key not in named), unit))
    return cells


def _place(ranks: Ranks, alike: Alike) -> str:
    return place([ranks.rank(number) for number in alike.ranks])


def _decimals(unit: int) -> int:
    """The number of decimals that a peak has everywhere."""
    return 3 if unit >= dict(_UNITS)["GiB"] else 1


def _cell(size: int, unit: int, of: Spread | None = None, *, decimals: int = 1) -> str:
    """``size`` in units, with a mark in front if it is its column's largest; only 0 reads as 0."""
    text = f"{size:,}" if unit == 1 or not size else f"{size / unit:,.{decimals}f}"
    text = "<0.1" if size and text == "0.0" else text
    return f"{_MOST if of is not None and of.marks(size) else ''}{text}"


_FIGURE = re.compile(r"\d[\d.,]*( [KMGTP]?i?B\b)?")


def render_ranks(
    ranks: Ranks, *, files: Sequence[str] = (), every: bool = False, layout: Layout = PLAIN, heading: str = ""
) -> str:
    """The merged view as text without a final newline; ``every`` gives each rank a row of its own.

    ``files`` are the recordings, for the next commands. ``heading`` names the job if it is one of several.
    """
    sections = [
        layout.strong(heading),
        "\n".join(wording_lines(ranks_wording(ranks), layout)),
        "\n".join(line for text in doubts(ranks) for line in warning_lines(text, layout)),
        "\n".join(layout.alarm(line) for text in absences(ranks) for line in wrapped(text, layout.width)),
        render_matrix(ranks, layout, every=every),
        render_groups(ranks, layout),
        render_places(ranks, layout, every=every),
        "" if heading else _job(ranks.job, layout),
        wrapped_text(_foot(ranks), layout.width),
        "" if not files else _next(ranks, files, layout, more=not every),
    ]
    return "\n\n".join(section for section in sections if section)


def doubts(ranks: Ranks) -> Iterator[str]:
    """The warnings: ranks of several launches, killed ranks, wrong sums, and each recorder's warning with its ranks."""
    if ranks.launches:
        yield (
            f"these are ranks of {len(ranks.launches)} launches of the script: "
            f"{'; '.join(ranks_named(those) for those in ranks.launches)}. Differences between them need not be "
            "due to their places in the job"
        )
    yield from _killed(ranks)
    if ranks.unsound:
        worst = max(ranks.rank(number).residual_bytes or 0 for number in ranks.unsound)
        yield (
            f"{ranks_named(ranks.unsound)}: the sums differ from the allocator's by up to {format_bytes(worst)}. Some "
            "of the memory below is attributed wrongly or not at all."
        )
    for note, whose in _notes(ranks):
        if is_warning(note):
            yield f"{whose}: {warning_text(note)}"


def _killed(ranks: Ranks) -> Iterator[str]:
    """The sentences about killed ranks, whose recordings have no end, by their last finished step."""
    read = {rank.rank: rank.last_step for rank in ranks.ranks}
    by_step: dict[int | None, list[int]] = {}
    for rank in ranks.not_ended:
        by_step.setdefault(read.get(rank), []).append(rank)
    for step, those in by_step.items():
        when = "before any step had ended" if step is None else f"in the step after step {step}"
        was, machine, recording = "were", "their machines", "their recordings have"
        if len(those) == 1:
            was, machine, recording = "was", "its machine", "its recording has"
        yield f"{ranks_named(those)} {was} killed, or {machine} went away, {when}: {recording} no end"


def absences(ranks: Ranks) -> Iterator[str]:
    """The missing ranks and why, the failed ranks, and why the ranks may not be comparable, a sentence each."""
    for why in Absence:
        those = [each for each in ranks.missing if each.why is why]
        if why is Absence.NO_FILE and ranks.job.source == SourceKind.SIMULATED:
            continue  # one rank was simulated without the others
        if why in (Absence.NO_FILE, Absence.LIES_BESIDE):
            yield from [_not_given(why, those)] if those else []
        for each in those if why is Absence.NOTHING_RECORDED else ():
            yield f"rank {each.rank} is left out: {each.detail}"
        yield from (_early(ranks, each) for each in those if why is Absence.ENDED_EARLY)
    yield from _behind(ranks)
    for rank in ranks.compared:
        if rank.failure is not None:
            after = "" if rank.last_step is None else f" after step {rank.last_step}"
            yield f"rank {rank.rank} failed{after}: {rank.failure}"
    yield from (f"note: {remark}" for remark in ranks.remarks)


def _behind(ranks: Ranks) -> Iterator[str]:
    """The compared ranks that stopped before others did."""
    last = {rank.rank: rank.last_step for rank in ranks.ranks if rank.last_step is not None}
    furthest = max(last.values(), default=0)
    by_step: dict[int, list[int]] = {}
    for rank in ranks.compared:
        if last.get(rank.rank, furthest) < furthest:
            by_step.setdefault(last[rank.rank], []).append(rank.rank)
    got_on = [number for number, step in last.items() if step == furthest]
    for step, those in sorted(by_step.items()):
        later = f"{ranks_named(got_on)} went on to step {furthest}"
        yield f"{ranks_named(those)} recorded no step after step {step}; {later}"


def _not_given(why: Absence, those: Sequence[MissingRank]) -> str:
    who = ranks_named([each.rank for each in those])
    verb = "has" if len(those) == 1 else "have"
    if why is Absence.NO_FILE:
        return f"{who} {verb} no file"
    files = [each.file for each in those if each.file is not None]
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    was, files_are = ("was", "its file is") if len(those) == 1 else ("were", "their files are")
    return f"{who} {was} not given, although {files_are} there: {shown}"


def _early(ranks: Ranks, missing: MissingRank) -> str:
    ended = "no step" if missing.step is None else f"no step after step {missing.step}"
    said = f"rank {missing.rank} is left out: it ended {ended}"
    if missing.rank in ranks.not_ended:
        return f"{said}, see the warning"
    why = "its recording does not say why, it may have been killed" if missing.detail is None else missing.detail
    return f"{said}; {why}"


def _job(job: Job, layout: Layout) -> str:
    rows = [
        ("script", job.script or "?"),
        ("ranks", str(job.world_size)),
        ("device", describe_device(job)),
        ("precision", precision_in_words(job.precision, job.source)),
        ("torch", f"{job.torch}, ampmem {job.ampmem}"),
    ]
    return "\n".join([layout.strong("the job"), *keyed(rows, layout)])


def _foot(ranks: Ranks) -> Iterator[str]:
    known = [rank.rank for rank in ranks.ranks if rank.residual_bytes == 0 and rank.rank not in ranks.unsound]
    if known:
        yield f"conservation: the sums of {ranks_named(known)} equal the allocator's at every event"
    for note, whose in _notes(ranks):
        if not is_warning(note):
            yield f"note ({whose}): {note}"


def _notes(ranks: Ranks) -> list[tuple[str, str]]:
    """The notes and the ranks that have them, with notes that differ only in figures as one."""
    found: dict[str, list[tuple[int, str]]] = {}
    for rank in ranks.ranks:
        for note in rank.notes:
            if note != NOT_ENDED:  # one sentence covers all of those
                found.setdefault(_FIGURE.sub("", note), []).append((rank.rank, note))
    once = []
    for variants in found.values():
        first, note = variants[0]
        figures = f"; the figures are those of rank {first}" if any(other != note for _, other in variants) else ""
        once.append((note, f"{ranks_named([rank for rank, _ in variants])}{figures}"))
    return once


def _next(ranks: Ranks, files: Sequence[str], layout: Layout, *, more: bool) -> str:
    """The commands for a page, for all tables, and for the worst rank alone."""
    alone = None
    if ranks.worst is not None and len(ranks.ranks) > 1:
        which = "one rank" if len(ranks.alike) == 1 else "the worst rank"
        alone = (ranks.rank(ranks.worst.rank).file, f"{which} by itself")
    jobs = {None if (named := rank_of(Path(file))) is None else named.job for file in files}
    job = jobs.pop()
    # The pattern would match other files, too.
    unlike = jobs or job is None or any(each.why is Absence.LIES_BESIDE for each in ranks.missing)
    pattern = "" if unlike or job is None else rank_pattern(job, ranks.job.world_size)
    return render_next(files, layout, more=more, pattern=pattern, alone=alone)


def render_jobs(
    jobs: Jobs, *, details: frozenset[Detail] = NOTHING, files: Sequence[str] = (), layout: Layout = PLAIN
) -> str:
    """The merged view of one job, or of one in each precision, as text without a final newline."""
    every = details == EVERYTHING
    if jobs.comparison is None:
        return render_ranks(jobs.jobs[0], files=files, every=every, layout=layout)
    said = jobs_wording(jobs, jobs.comparison)
    sections = [
        render_comparison(jobs.comparison, details=details, layout=layout, said=said),
        _peaks(jobs.jobs, layout),
        *(render_ranks(job, every=every, layout=layout, heading=heading(job)) for job in jobs.jobs),
        render_next(files, layout, more=not every),
    ]
    return "\n\n".join(section for section in sections if section)


def jobs_wording(jobs: Jobs, comparison: Comparison) -> Wording:
    """The verdict on the worst ranks; none if the sums of any rank differ from the allocator's."""
    unsound = [f"{ranks_named(job.unsound)} of {heading(job)}" for job in jobs.jobs if job.unsound]
    if unsound:
        return Wording(headline="No verdict", why=f"the sums of {listed(unsound)} differ from the allocator's")
    mixed = [heading(job) for job in jobs.jobs if job.launches]
    if mixed:
        return Wording(headline="No verdict", why=f"the ranks of {listed(mixed)} are of several launches")
    said = wording(verdict_of(comparison))
    headline = f"On the worst rank of each precision, {said.headline[:1].lower()}{said.headline[1:]}"
    return replace(said, headline=headline)


def heading(job: Ranks) -> str:
    """The job's precision."""
    return " ".join(filter(None, (job.job.precision.name, job.job.precision.dtype)))


def _peaks(jobs: Sequence[Ranks], layout: Layout) -> str:
    """The peaks of each rank in each precision, ranks with equal ones in one row."""
    peaks = [{rank.rank: rank.peak.said for rank in job.compared if rank.peak is not None} for job in jobs]
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({rank for of_job in peaks for rank in of_job}):
        cells = tuple(format_peak(of_job[rank]) if rank in of_job else ABSENT for of_job in peaks)
        rows.setdefault(cells, []).append(rank)
    tables = side_by_side(
        words("rank", least=_NAME, wraps=True),
        [numbers(ranks) for ranks in rows.values()],
        [[number(heading(job).replace(" ", "\n"))] for job in jobs],
        [[[cells[i]] for cells in rows] for i in range(len(jobs))],
        layout,
    )
    return "\n\n".join([layout.strong("the peak of each rank"), *tables])
