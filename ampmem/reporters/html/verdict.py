"""The verdict at the top of the page: sentences, the peaks on one scale, and the steps between them.

It is plain HTML, shown before any script has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ampmem.analysis.answer import Answer, Composition, Verdict
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.reporters.html.palette import FILLS, LAYERS, Fill, label
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.text.answer import Wording, capital, when, wording
from ampmem.reporters.text.plain_text import signed
from ampmem.units import format_bytes, listed, peaks_apart

_HATCHES = {"/": "slashes", ".": "dots"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """A category's look, as a style and as CSS classes of the page."""

    style: str
    classes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPiece:
    """A part of a bar; without ``paint`` it is grey. ``name`` is an additional CSS class."""

    left: float
    width: float
    title: str = ""
    paint: Paint | None = None
    name: str = ""

    @property
    def style(self) -> str:
        """The part's place and colour as CSS."""
        place = f"left: {self.left:.3f}%; width: {self.width:.3f}%"
        return place if self.paint is None else f"{place}; {self.paint.style}"

    @property
    def classes(self) -> str:
        """The part's CSS classes."""
        return " ".join(filter(None, ("piece", self.name, "" if self.paint is None else self.paint.classes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row: a label, a bar, and its value as text; ``note`` replaces the bar."""

    label: str
    value: str = ""
    change: str = ""
    note: str = ""
    pieces: tuple[BarPiece, ...] = ()
    whole: bool = False
    paint: Paint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The start or the end of a waterfall, in bytes; ``parts`` are its categories, without the rounding of blocks."""

    label: str
    bytes: int
    parts: Mapping[Category, int]


def stacked(sizes: Mapping[Category, int], whole: int) -> tuple[BarPiece, ...]:
    """The categories' bytes as parts side by side, in the stacking order of the timeline."""
    return beside(((label(each), sizes.get(each, 0), paint(each)) for each in CATEGORIES), whole)


def beside(parts: Iterable[tuple[str, int, Paint]], whole: int) -> tuple[BarPiece, ...]:
    """The parts that are not empty, each with its title, bytes and look, side by side in a bar of ``whole`` bytes."""
    pieces, start = [], 0
    for title, size, look in parts:
        if size:
            pieces.append(_piece(start, size, whole, title, look))
            start += size
    return tuple(pieces)


def _piece(start: int, size: int, whole: int, title: str, look: Paint, name: str = "") -> BarPiece:
    """A part from ``start`` over ``size`` of the ``whole`` bytes of a bar; ``name`` is an additional CSS class."""
    text = f"{title}: {format_bytes(size)}"
    return BarPiece(left=100 * start / whole, width=100 * size / whole, title=text, paint=look, name=name)


def paint(category: Category) -> Paint:
    """The look of ``category``."""
    return painted(FILLS[category])


def painted(fill: Fill) -> Paint:
    """The look of ``fill``."""
    style = f"--fill: light-dark({fill.light}, {fill.dark})"
    return Paint(style=style, classes=f"fill {_HATCHES.get(fill.pattern, '')}".rstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The steps from the baseline to the run under autocast, at the instant ``when``: their peaks or another one."""

    title: str
    when: str
    rows: tuple[Bar, ...]
    unchanged: str


def waterfall(before: End, after: End, instants: str) -> Waterfall:
    """The steps from ``before`` to ``after``, at these ``instants``.

    They are in stacking order, so that a bar's colour is where the eye looks for it; the ends are whole bars. What the
    categories leave open between ends in allocated bytes is the rounding of blocks.
    """
    same = {key: size for key, size in before.parts.items() if size == after.parts.get(key, 0) != 0}
    sizes = {key: after.parts.get(key, 0) - before.parts.get(key, 0) for key in CATEGORIES}
    changes = [(label(key), paint(key), size) for key, size in sizes.items() if size]
    rounding = after.bytes - before.bytes - sum(sizes.values())
    if rounding:
        changes.append(("Rounding of blocks", painted(LAYERS["rounding"]), rounding))
    # The highest value on the way from one end to the other.
    whole = max(1, *accumulate([size for _, _, size in changes], initial=before.bytes))
    texts = zip((before, after), peaks_apart(before.bytes, after.bytes), strict=True)
    ends = [(end, text, BarPiece(left=0, width=100 * end.bytes / whole, name="whole")) for end, text in texts]
    first, last = (Bar(label=visible(end.label), value=text, pieces=(bar,), whole=True) for end, text, bar in ends)
    rows, now = [first], before.bytes
    for name, look, size in changes:
        change = _piece(min(now, now + size), abs(size), whole, name, look, "less" if size < 0 else "more")
        rows.append(Bar(label=name, value=signed(size), pieces=(change,), paint=look))
        now += size
    names, alike = listed([label(key).lower() for key in same]), format_bytes(sum(same.values()))
    return Waterfall(
        title=visible(f"From {before.label} to {after.label}"),
        when=visible(instants),
        rows=(*rows, last),
        unchanged=f"{capital(names)}: no change, {alike}." if same else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictView:
    """The verdict as data; ``instant`` is the bars' instant, ``legend`` has the categories in the bars."""

    headline: str
    why: str
    more: str
    when: str
    bars: tuple[Bar, ...]
    legend: tuple[Bar, ...]
    waterfall: Waterfall | None
    instant: str = "At the peak"


def verdict_view(verdict: Verdict, said: Wording | None = None) -> VerdictView:
    """The verdict at the top of the page, in the words of ``said`` if given."""
    known = [item for item in verdict.compositions if item is not None]
    return VerdictView(
        **sentences(said or wording(verdict)),
        instant="At the failure" if len(known) == 1 and known[0].short is not None else "At the peak",
        when=visible(_instants(known)),
        bars=tuple(_bars(verdict)),
        legend=legend_of((item.parts for item in known), with_sizes=len(known) == 1),
        waterfall=None if verdict.answer is None or verdict.unsound else _waterfall(verdict.answer),
    )


def sentences(words: Wording) -> dict[str, str]:
    """The headline, the reason and the further sentences of a verdict, as the page shows them."""
    return {
        "headline": visible(words.headline, MAX_PROSE) + ".",
        "why": visible(f"{capital(words.why)}." if words.why else "", MAX_PROSE),
        "more": visible(" ".join(words.more), MAX_PROSE),
    }


def legend_of(each: Iterable[Mapping[Category, int]], *, with_sizes: bool = False) -> tuple[Bar, ...]:
    """The categories that any of the bars has."""
    sizes = {category: size for one in each for category, size in one.items() if size}
    shown = [category for category in CATEGORIES if category in sizes]
    values = {category: format_bytes(sizes[category]) for category in shown if with_sizes}
    return tuple(Bar(label=label(each), value=values.get(each, ""), paint=paint(each)) for each in shown)


def _instants(known: Sequence[Composition]) -> str:
    """The instant of the peaks in words: ``of step 2, all in backward, on one scale``; with the op if all share it."""
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
    # The baseline's bar is drawn as it is beside the peak under autocast.
    other = size if answer is None else answer.baseline.said if difference else answer.mixed.said
    end = "out of memory" if item.short else "failed" if item.failed else ""
    return Bar(
        label=name,
        value=peaks_apart(size, other)[0],
        change=end or (signed(difference) if difference else ""),
        pieces=stacked(item.parts, most),
    )


def _waterfall(answer: Answer) -> Waterfall:
    before, after = answer.baseline, answer.mixed
    sizes, changes = (before.said, after.said), (*answer.changes, *answer.unchanged)
    if answer.by_forward and answer.forward is not None:
        sizes, changes = answer.forward, (*answer.forward_changes, *answer.forward_unchanged)
        instants = "at the end of forward of both"
    elif answer.same_phase and answer.fewer_gradients:
        instants = f"between two instants, both {when(before, where=False)}"
    elif answer.same_phase:
        instants = f"at the peaks, both {when(before, where=before.op == after.op)}"
    else:
        instants = f"between two instants: {before.label} {when(before)}, {after.label} {when(after)}"
    return waterfall(
        End(label=before.label, bytes=sizes[0], parts={change.category: change.before for change in changes}),
        End(label=after.label, bytes=sizes[1], parts={change.category: change.after for change in changes}),
        instants,
    )
