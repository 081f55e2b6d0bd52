"""The verdict, for the page's first screen: the sentences, the peaks on one scale, and the way from one to the other.

It is plain HTML, there before any script has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampmem.analysis.answer import Answer, Composition, Verdict
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.reporters.html.palette import label
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.views.bars import REQUESTED, Bar, End, falls, paint, stacked
from ampmem.reporters.text.answer import Wording, capital, listed, when, wording
from ampmem.reporters.text.common.words import signed
from ampmem.units import format_bytes, peaks_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From the baseline to the run under autocast, at their peaks or another instant of both, which ``when`` names."""

    title: str
    when: str
    rows: tuple[Bar, ...]
    unchanged: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictView:
    """All of it; ``instant`` is what the bars are of, ``legend`` has the categories that the bars show."""

    headline: str
    why: str
    more: str
    when: str
    bars: tuple[Bar, ...]
    legend: tuple[Bar, ...]
    waterfall: Waterfall | None
    instant: str = "At the peak"


def verdict_view(verdict: Verdict, said: Wording | None = None) -> VerdictView:
    """What the page opens with; in the words of ``said`` where there are any."""
    words = said or wording(verdict)
    known = [item for item in verdict.compositions if item is not None]
    return VerdictView(
        headline=visible(words.headline, MAX_PROSE) + ".",
        why=visible(f"{capital(words.why)}." if words.why else "", MAX_PROSE),
        more=visible(" ".join(words.more), MAX_PROSE),
        instant="At the failure" if len(known) == 1 and known[0].short is not None else "At the peak",
        when=visible(_instants(known)),
        bars=tuple(_bars(verdict)),
        legend=tuple(_legend(known)),
        waterfall=None if verdict.answer is None or verdict.unsound else _waterfall(verdict.answer),
    )


def _instants(known: Sequence[Composition]) -> str:
    """``of step 2, all in backward, on one scale``: what they share, and at which op, if that is one, too."""
    if len(known) < 2:
        return "".join(when(item.peak, item.step) for item in known)
    steps = {item.step for item in known}
    phases, ops = {item.peak.phase for item in known}, {item.peak.op for item in known}
    said = [f"of step {known[0].step}"] if len(steps) == 1 else []
    if len(phases) == 1:
        said.append(f"all {when(known[0].peak, where=len(ops) == 1)}")
    return ", ".join([*said, "on one scale"])


def _bars(verdict: Verdict) -> Iterable[Bar]:
    most = max((item.peak.bytes for item in verdict.compositions if item is not None), default=0) or 1
    for name, item, same in zip(verdict.labels, verdict.compositions, verdict.same_as, strict=True):
        shown = visible(name)
        if item is None:
            yield Bar(label=shown, note="nothing was recorded")
        elif same is not None and not (item.short or item.failed):
            yield Bar(label=shown, note=f"the same as {visible(verdict.labels[same])}")
        else:
            yield _bar(shown, item, most, verdict.answer)


def _bar(name: str, item: Composition, most: int, answer: Answer | None) -> Bar:
    size = item.peak.said
    difference = 0 if answer is None else size - answer.baseline.said
    # The baseline reads as it does beside the peak under autocast.
    other = size if answer is None else answer.baseline.said if difference else answer.mixed.said
    end = "out of memory" if item.short else "failed" if item.failed else ""
    return Bar(
        label=name,
        value=peaks_apart(size, other)[0],
        change=end or (signed(difference) if difference else ""),
        pieces=stacked({part.category: part.bytes for part in item.parts}, most),
    )


def _legend(known: Sequence[Composition]) -> Iterable[Bar]:
    sizes = {part.category: part.bytes for item in known for part in item.parts}
    for category in CATEGORIES:
        if category in sizes:
            value = format_bytes(sizes[category]) if len(known) == 1 else ""
            yield Bar(label=label(category), value=value, paint=paint(category))


def _waterfall(answer: Answer) -> Waterfall:
    before, after = answer.baseline, answer.mixed
    requested = "" if before.allocated is None else REQUESTED
    sizes, changes, alike = (before.bytes, after.bytes), answer.changes, answer.unchanged
    if answer.by_forward and answer.forward is not None:
        sizes, changes, alike = answer.forward, answer.forward_changes, answer.forward_unchanged
        instants, requested = "at the end of forward, an instant of both", ""
    elif answer.same_phase and answer.fewer_gradients:
        instants = f"between two instants, both {when(before, where=False)}"
    elif answer.same_phase:
        instants = f"at the peaks, both {when(before, where=before.op == after.op)}"
    else:
        instants = f"between two instants: {before.label} {when(before)}, {after.label} {when(after)}"
    return Waterfall(
        title=visible(f"From {before.label} to {after.label}"),
        when=visible(f"{instants}{requested}"),
        rows=falls(
            End(label=visible(before.label), bytes=sizes[0]),
            End(label=visible(after.label), bytes=sizes[1]),
            {change.category: change.difference for change in changes},
        ),
        unchanged=unchanged({change.category: change.before for change in alike}),
    )


def unchanged(sizes: Mapping[Category, int]) -> str:
    """That these bytes of each category are the same at both ends of a way; empty of none."""
    if not sizes:
        return ""
    names = listed([label(category).lower() for category in sizes])
    return f"{capital(names)}: no change, {format_bytes(sum(sizes.values()))}."
