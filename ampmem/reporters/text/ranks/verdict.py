"""The merged view in sentences: which rank is the worst, and in what the difference lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampmem.analysis.answer import NO_DIFFERENCE
from ampmem.analysis.ranks.ranks import Alike, Circumstance, Contrast, Excess, Part, Ranks, Worst
from ampmem.analysis.summary import PLACES, PeakPlace
from ampmem.reporters.text.answer import Wording, capital, in_phase, listed, made_of, name, percent_of
from ampmem.reporters.text.ranks.names import named, numbers
from ampmem.units import format_bytes, format_count, format_peak, peaks_close

_DIFFERENCES = 5
"""Of what one has more or less, so many."""
_NAMED_SHARE = 0.05
"""What is less than this share of the largest of them is not named."""
_TWICE = 2
"""From so many times as much on that is said, and no longer how many per cent it is more."""
_LARGER = 1.01
"""A peak of another step that is so many times as large is worth a sentence."""
_CIRCUMSTANCES = {
    Circumstance.STAGE: "stage",
    Circumstance.BATCH_SIZE: "batch size",
    Circumstance.BACKWARDS: "number of backwards",
    Circumstance.PARAMETERS: "number of parameters",
    Circumstance.OPTIMIZER: "optimizer",
}


def ranks_wording(ranks: Ranks) -> Wording:
    """The merged view in words: a headline, in what the difference lies, and what else there is, in sentences."""
    if ranks.unsound:
        return Wording(
            headline="No verdict",
            why=f"the sums of {named(ranks.unsound)} are not the allocator's own, see the warning",
        )
    if ranks.launches:
        return Wording(headline="No verdict on one job", why="these are ranks of several launches, see the warning")
    said = _compared(ranks)
    short = [rank for rank in ranks.ranks if rank.out_of_memory is not None]
    if short:
        first = max(short, key=lambda rank: rank.out_of_memory or 0)
        more = f", as did {named([rank.rank for rank in short if rank is not first])}" if len(short) > 1 else ""
        headline = (
            f"Rank {first.rank} of {ranks.job.world_size} ran out of memory at {format_bytes(first.out_of_memory)}"
        )
        return Wording(headline=f"{headline}{more}", more=(said.text,))
    return replace(said, more=(*said.more, *_larger(ranks), *_count(ranks)))


def _compared(ranks: Ranks) -> Wording:
    """What is said of the ranks that can be compared."""
    if ranks.worst is None:
        return Wording(headline=f"No rank of {ranks.job.world_size} can be compared")
    if len(ranks.compared) == 1:
        only = f"Only rank {ranks.worst.rank} of {ranks.job.world_size} can be shown, and not compared"
        return Wording(headline=f"{only}: its peak is {format_peak(ranks.worst.bytes)}, {_when(ranks)}")
    if len(ranks.alike) == 1:
        return Wording(headline=_all_alike(ranks, ranks.worst), why=_made_of(ranks, ranks.worst))
    return _of_worst(ranks, ranks.worst, next(each for each in ranks.alike if ranks.worst.rank in each.ranks))


def _all_alike(ranks: Ranks, worst: Worst) -> str:
    count, within = len(ranks.compared), ranks.alike[0].within
    every = "Both ranks" if count == 2 else f"All {count} ranks"
    who = every if count == ranks.job.world_size else f"The {count} ranks that are compared"
    same = f"the same within {format_bytes(within)}" if within else "the same"
    return f"{who} need {same}, {format_peak(worst.bytes)} at the peak, {_when(ranks)}"


def _made_of(ranks: Ranks, worst: Worst) -> str:
    peak = ranks.rank(worst.rank).peak
    assert peak is not None
    parts = [(category, size) for category, size in peak.categories.items() if size]
    return made_of(sorted(parts, key=lambda part: -part[1]), peak.bytes)


def _of_worst(ranks: Ranks, worst: Worst, alike: Alike) -> Wording:
    """The worst beside the median rank; beside the one that needs the least, where the median is as bad."""
    excess, other = worst.over_median, f"the median rank ({worst.over_median.rank})"
    if excess.rank in alike.ranks or excess.rank == worst.over_least.rank:
        excess, other = worst.over_least, f"rank {worst.over_least.rank}"
        if len(ranks.compared) > 2:
            other += ", which needs the least"
    least = worst.bytes - excess.bytes
    if excess.bytes < NO_DIFFERENCE * worst.bytes:
        mine, others = peaks_close(worst.bytes, least)
        others = f"{format_bytes(excess.bytes)} less" if mine == others else others
        sizes = f"{mine} on {named(alike.ranks)} and {others} on {other}"
        headline = f"The ranks hardly differ at their peaks, {_when(ranks)}: {sizes}"
        return Wording(headline=headline, more=_and_why(worst, excess))
    one = len(alike.ranks) == 1
    headline = (
        f"The worst rank{' is' if one else 's are'} {numbers(alike.ranks)} of {ranks.job.world_size} with "
        f"{format_peak(worst.bytes)}{'' if one else ' each'} at the peak, {_when(ranks)}"
    )
    if least:
        headline += f", {_beyond(worst.bytes, least)} {other}"
    return Wording(headline=headline, why=_lies_in(excess, one=one), more=_beside(worst, excess))


def _beyond(most: int, least: int) -> str:
    """``12 % above``, or from twice as much on ``2.1 times that of``."""
    if most >= _TWICE * least:
        return f"{most / least:,.1f} times that of"
    return f"{percent_of(most / least - 1).removeprefix('+')} above"


def _and_why(worst: Worst, excess: Excess) -> tuple[str, ...]:
    """In what they differ all the same, where a category of one makes up for another."""
    if not any(abs(part.bytes) >= NO_DIFFERENCE * worst.bytes for part in excess.parts):
        return ()
    return (f"But rank {worst.rank} has {_parts(excess)}.", *_beside(worst, excess))


def _lies_in(excess: Excess, *, one: bool) -> str:
    return f"{'it has' if one else 'they have'} {_parts(excess)}"


def _parts(excess: Excess) -> str:
    """``1.1 GiB more of activations, 0.1 GiB more of parameters and 0.2 GiB less of gradients``."""
    largest = sorted(excess.parts, key=lambda part: -abs(part.bytes))
    least = _NAMED_SHARE * abs(largest[0].bytes) if largest else 0
    shown = [part for part in largest[:_DIFFERENCES] if abs(part.bytes) >= least]
    others = [part for part in excess.parts if part not in shown]
    if len(others) == 1 and abs(others[0].bytes) >= least:
        shown, others = [*shown, *others], []
    words = [_more_of(part) for part in excess.parts if part in shown]
    rest = sum(part.bytes for part in others)
    words += [f"{_amount(rest)} of all else"] if rest else []
    rounding = excess.bytes - sum(part.bytes for part in excess.parts)
    if rounding and (not words or abs(rounding) >= least):
        words.append(f"{_amount(rounding)} of rounding")
    return listed(words)


def _more_of(part: Part) -> str:
    return f"{_amount(part.bytes)} of {name(part.category)}"


def _amount(size: int) -> str:
    return f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'}"


def _beside(worst: Worst, excess: Excess) -> tuple[str, ...]:
    """What else differs between the two ranks: facts that may be why, or not."""
    found = []
    mine, other = f"rank {worst.rank}", f"rank {excess.rank}"
    phases = next((each for each in excess.contrasts if each.what is Circumstance.PHASE), None)
    if phases is not None:
        found.append(
            f"Their peaks are different instants: {mine}'s is {in_phase(phases.worst or '')}, "
            f"{other}'s {in_phase(phases.other or '')}."
        )
    words = [_contrast(each) for each in excess.contrasts if each is not phases]
    if words:
        found.append(f"{capital(mine)} and {other} differ in their {listed(words)}, too.")
    return tuple(found)


def _contrast(contrast: Contrast) -> str:
    values = [_value(contrast.what, value) for value in (contrast.worst, contrast.other)]
    return f"{_CIRCUMSTANCES[contrast.what]} ({values[0]} and {values[1]})"


def _value(what: Circumstance, value: str | None) -> str:
    if value is None:
        return "none" if what is Circumstance.OPTIMIZER else "not known"
    return format_count(int(value)) if what is Circumstance.PARAMETERS else value


def _when(ranks: Ranks) -> str:
    """Of which step each rank's peak is, and in which phase where that is the same of all."""
    phases = {rank.peak.phase for rank in ranks.compared if rank.peak is not None}
    step = "the last step of each" if ranks.step is None else f"step {ranks.step}"
    return in_phase(phases.pop(), step) if len(phases) == 1 else f"in {step}"


def _larger(ranks: Ranks) -> Sequence[str]:
    """The largest peak of any step, and of any run outside of its steps, where that is another one."""
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


def _count(ranks: Ranks) -> Sequence[str]:
    count = len(ranks.compared)
    if count == ranks.job.world_size or count < 2:
        return ()
    return (f"{count} of the {ranks.job.world_size} ranks are compared.",)
