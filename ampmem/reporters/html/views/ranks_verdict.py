"""The verdict on the ranks of a job: which is the worst, and in what the difference to the others lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampmem.analysis.ranks.ranks import Excess, Rank, RankPeak, Ranks
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.reporters.html.palette import label
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.views.bars import REQUESTED, Bar, End, falls, paint, stacked
from ampmem.reporters.html.views.verdict import VerdictView, Waterfall, unchanged
from ampmem.reporters.text.answer import capital, in_phase
from ampmem.reporters.text.common.words import signed
from ampmem.reporters.text.ranks.verdict import ranks_wording
from ampmem.units import peaks_apart


def ranks_verdict_view(ranks: Ranks) -> VerdictView:
    """What the page of a job opens with."""
    words = ranks_wording(ranks)
    shown = tuple(_shown(ranks))
    return VerdictView(
        headline=visible(words.headline, MAX_PROSE) + ".",
        why=visible(f"{capital(words.why)}." if words.why else "", MAX_PROSE),
        more=visible(" ".join(words.more), MAX_PROSE),
        when=visible(_step(ranks)),
        bars=tuple(_bars(ranks, shown)),
        legend=tuple(_legend([peak for _, _, peak in shown])),
        waterfall=_waterfall(ranks),
    )


def _step(ranks: Ranks) -> str:
    return "each rank's last step" if ranks.step is None else f"of step {ranks.step}, each rank's own, on one scale"


def _shown(ranks: Ranks) -> Iterable[tuple[str, Rank, RankPeak]]:
    """The worst rank, that in the middle and the one with the least; of equal ones only the first."""
    worst = ranks.worst
    if worst is None:
        return
    names = {worst.rank: "most", worst.over_median.rank: "median", worst.over_least.rank: "least"}
    before: list[int] = []
    for number in (worst.rank, worst.over_median.rank, worst.over_least.rank):
        rank = ranks.rank(number)
        if rank.peak is not None and rank.peak.said not in before:
            before.append(rank.peak.said)
            yield names[number], rank, rank.peak


def _bars(ranks: Ranks, shown: Sequence[tuple[str, Rank, RankPeak]]) -> Iterable[Bar]:
    most = max((peak.said for _, _, peak in shown), default=0) or 1
    for name, rank, peak in shown:
        difference = peak.said - most
        yield Bar(
            label=f"Rank {rank.rank}, {name}" if len(shown) > 1 else f"Rank {rank.rank}",
            value=peaks_apart(peak.said, most)[0],
            change=signed(difference) if difference else "",
            pieces=stacked(peak.categories, most),
        )


def _legend(peaks: Sequence[RankPeak]) -> Iterable[Bar]:
    for category in CATEGORIES:
        if any(peak.categories[category] for peak in peaks):
            yield Bar(label=label(category), paint=paint(category))


def _waterfall(ranks: Ranks) -> Waterfall | None:
    """From the rank in the middle to the worst; where that is as large, from the one with the least."""
    worst = ranks.worst
    if worst is None or ranks.unsound or ranks.launches:
        return None
    excess = next((each for each in (worst.over_median, worst.over_least) if each.bytes), None)
    return None if excess is None else _from(ranks, excess, ranks.rank(worst.rank))


def _from(ranks: Ranks, excess: Excess, worst: Rank) -> Waterfall | None:
    other = ranks.rank(excess.rank)
    if other.peak is None or worst.peak is None:
        return None
    differing = {part.category for part in excess.parts}
    same_in_both = {key: size for key, size in worst.peak.categories.items() if size and key not in differing}
    same = other.peak.phase == worst.peak.phase
    requested = "" if worst.peak.allocated is None else REQUESTED
    return Waterfall(
        title=f"From rank {other.rank} to rank {worst.rank}",
        when=(f"both {in_phase(worst.peak.phase)}" if same else "between two instants") + requested,
        rows=falls(
            End(label=f"Rank {other.rank}", bytes=other.peak.bytes),
            End(label=f"Rank {worst.rank}", bytes=worst.peak.bytes),
            {part.category: part.bytes for part in excess.parts},
        ),
        unchanged=unchanged(same_in_both),
    )
