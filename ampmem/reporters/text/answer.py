"""The answer in sentences: the first thing that a table, a page and a notebook say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.answer import Answer, Change, Composition, Effect, PeakOf, Verdict
from ampmem.analysis.findings import Finding
from ampmem.analysis.ops import plain_op
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.words import signed, times
from ampmem.units import format_apart, format_bytes

_HALF = 0.55
"""What falls to this share or less has about halved."""
_NAMED = 3
"""So many categories, or kinds of activations, are named; the rest is summed up."""
_NAMED_SHARE = 0.05
"""What is less than this share of the activations is not named."""
_MOST = 0.5
"""This share of something is most of it."""
_LABELS = 4
"""Of so many recordings each is named."""
_WORDS = {
    Category.CAST_COPIES: "the weights' copies",
    Category.MASTER_COPIES: "master copies",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.OTHER: "what nothing names",
}
_IN = {"optimizer": "the optimizer's update", "between": "the time between two steps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """A verdict in words: a headline and why it is so, both without a stop, and what else there is, in sentences."""

    headline: str
    why: str = ""
    more: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All of it as one paragraph."""
        return " ".join((f"{self.headline}: {self.why}." if self.why else f"{self.headline}.", *self.more))


def wording(verdict: Verdict) -> Wording:
    """``verdict`` in words."""
    if verdict.unsound:
        return Wording(
            headline="No verdict",
            why=f"the sums of {listed(verdict.unsound)} are not the allocator's own, see the warning",
        )
    if verdict.answer is not None:
        return _answered(verdict.answer)
    if len(verdict.compositions) == 1:
        return _of_one(verdict.compositions[0])
    return _of_several(verdict)


def _answered(answer: Answer) -> Wording:
    more = (*_instants(answer), *_at_the_peaks(answer), *_unchanged(answer), *_forward(answer), *_cache(answer))
    return Wording(headline=_headline(answer), why=_why(answer), more=more)


def _headline(answer: Answer) -> str:
    before, after = format_apart(answer.baseline.bytes, answer.mixed.bytes)
    if before == after:
        return f"Mixed precision does not change the peak, {before}"
    if answer.effect is Effect.NONE:
        return f"Mixed precision hardly changes the peak, {before} without it and {after} with it"
    sizes = f"{_from_to(before, after)}, {percent_of(answer.ratio - 1)}"
    if answer.effect is Effect.COSTS:
        return f"Mixed precision raises the peak from {sizes}"
    return f"Mixed precision takes the peak from {sizes}, {'to about half' if answer.ratio <= _HALF else 'not to half'}"


def _from_to(before: str, after: str) -> str:
    """``12.6 to 9.3 GiB``: the unit once where it is the same."""
    (first, unit), (_, other) = before.rsplit(" ", 1), after.rsplit(" ", 1)
    return f"{first if unit == other else before} to {after}"


def _why(answer: Answer) -> str:
    """What the activations did, and the copies of weights: what autocast changes by itself."""
    if answer.in_update:
        return "both peaks are in the optimizer's update, which autocast does not touch"
    copies = _difference(answer, Category.CAST_COPIES)
    added = [f"{_WORDS[Category.CAST_COPIES]} add {format_bytes(copies)}"] * (copies >= answer.least_notable)
    parts = [*_activations(answer), *added] if answer.effect is Effect.SAVES else [*added, *_activations(answer)]
    return ", and ".join(parts)


def _activations(answer: Answer) -> list[str]:
    change = answer.activations
    if change is None or not change.before:
        return []
    ratio = change.after / change.before
    sizes = _from_to(*format_apart(change.before, change.after))
    if ratio <= _HALF:
        return [f"activations at the end of forward fall to about half ({sizes})"]
    fall = f"fall to {times(ratio)}" if ratio < 1 else "do not fall"
    stay, enough = _in_float32(answer, change)
    because = f"{', because' if enough else ';'} {stay}" if stay else ""
    return [f"activations at the end of forward {fall} ({sizes}){because}"]


def _in_float32(answer: Answer, change: Change) -> tuple[str, bool]:
    """``1.5 GiB of the loss and 0.6 GiB of norms stay FP32``, and whether most of what is above half comes of that.

    Empty where little of the activations is float32. Each of its bytes would be half a byte in low precision.
    """
    least = _NAMED_SHARE * sum(group.bytes for group in answer.groups)
    shown = [group for group in answer.in_float32 if group.bytes >= least][:_NAMED]
    words = listed([f"{format_bytes(group.bytes)} of {group.kind}" for group in shown])
    all_of_it = sum(group.bytes for group in answer.in_float32)
    return f"{words} stay FP32" if words else "", all_of_it >= _MOST * (2 * change.after - change.before)


def _instants(answer: Answer) -> list[str]:
    before, after = answer.baseline, answer.mixed
    if answer.same_phase:
        fewer = answer.fewer_gradients
        if abs(fewer) < answer.least_notable:
            return []
        earlier = (
            f"{format_bytes(abs(fewer))} {'fewer' if fewer > 0 else 'more'} gradients are there at {after.label}'s"
        )
        return [f"Both peaks are in {_IN.get(before.phase, before.phase)}, but not at the same instant: {earlier}."]
    return [f"The peaks are different instants: {before.label}'s is {when(before)}; {after.label}'s is {when(after)}."]


def _at_the_peaks(answer: Answer) -> list[str]:
    notable = [change for change in answer.changes if abs(change.difference) >= answer.least_notable]
    if not notable:
        return []
    rest = sum(change.difference for change in answer.changes if change not in notable[:_NAMED])
    words = [f"{name(change.category)} {signed(change.difference)}" for change in notable[:_NAMED]]
    if rest:
        words.append(f"all else {signed(rest)}")
    return [f"{'At the peak' if answer.same_phase else 'Between the two'}: {', '.join(words)}."]


def _unchanged(answer: Answer) -> list[str]:
    notable = [change for change in answer.unchanged if change.before >= answer.least_notable]
    if not notable or answer.effect is Effect.NONE:
        return []
    size = sum(change.before for change in notable)
    verb = "is" if len(notable) == 1 and notable[0].category is not Category.PARAMETERS else "are"
    words = capital(listed([name(change.category) for change in notable]))
    return [f"{words} {verb} the same in both: {format_bytes(size)}."]


def _forward(answer: Answer) -> list[str]:
    """What becomes of the end of forward, where that is not the peak and mixed precision does not pay."""
    if answer.forward is None or answer.effect is Effect.SAVES:
        return []
    before, after = answer.forward
    if before == after:
        return [f"At the end of forward the total is the same: {format_bytes(before)}."]
    return [f"At the end of forward the total goes from {_from_to(*format_apart(before, after))}."]


def _cache(answer: Answer) -> list[str]:
    other = answer.without_cache
    if other is None:
        return []
    difference = other.bytes - answer.mixed.bytes
    if not difference:
        return [f"Without autocast's cache of weights ({other.label}): the same."]
    size = f"{format_bytes(abs(difference))} {'higher' if difference > 0 else 'lower'}"
    return [f"Without autocast's cache of weights ({other.label}) the peak is {size}."]


def _of_one(found: Composition | None) -> Wording:
    if found is None:
        return Wording(headline="Nothing was recorded")
    size = format_bytes(found.peak.bytes)
    headline = f"Out of memory at {size}" if found.short else f"The peak is {size}, {when(found.peak, found.step)}"
    return Wording(headline=headline, why=_made_of(found), more=_help(found.saving))


def _made_of(found: Composition) -> str:
    shown, rest = found.parts[:_NAMED], found.parts[_NAMED:]
    parts = [f"{share(part.bytes, found.peak.bytes)} {name(part.category)}" for part in shown]
    if rest:
        parts.append(f"{share(sum(part.bytes for part in rest), found.peak.bytes)} all else")
    return ", ".join(parts)


def _help(saving: Finding | None) -> tuple[str, ...]:
    if saving is None or saving.off_peak is None:
        return ()
    return (f"Largest saving found, up to {format_bytes(saving.off_peak)}: {saving.change} ({saving.code}).",)


def _of_several(verdict: Verdict) -> Wording:
    """The peaks side by side: there is nothing that says what mixed precision did."""
    found = list(zip(verdict.labels, verdict.compositions, strict=True))
    words = [_in_short(label, item) for label, item in found[:_LABELS]]
    if len(found) > _LABELS:
        words.append(f"{len(found) - _LABELS} more")
    return Wording(headline=f"Peaks: {', '.join(words)}")


def _in_short(label: str, found: Composition | None) -> str:
    if found is None:
        return f"{label} has none, nothing was recorded"
    size = format_bytes(found.peak.bytes)
    if found.short:
        return f"{label} ran out of memory at {size}"
    return f"{label} {size}{' until it failed' if found.failed else ''}"


def percent_of(difference: float) -> str:
    """``-26 %`` of -0.26; a difference never reads as none."""
    percent = 100 * abs(difference)
    text = f"{percent:.0f}" if percent >= 1 else f"{percent:.1g}"
    return f"{'-' if difference < 0 else '+'}{text} %"


def share(part: int, whole: int) -> str:
    """How much of ``whole`` bytes ``part`` is: ``54 %``; a part never reads as all, or as none."""
    percent = 100 * part / whole
    if percent < 1:
        return "<1 %"
    return f"{min(percent, 99) if part < whole else 100:.0f} %"


def name(category: Category) -> str:
    """A category in a sentence."""
    return _WORDS.get(category, str(category))


def _difference(answer: Answer, category: Category) -> int:
    return next((change.difference for change in answer.changes if change.category is category), 0)


def when(peak: PeakOf, step: int | None = None, *, where: bool = True) -> str:
    """When a peak is: ``in backward of step 2, at ConvolutionBackward0``; the latter unless ``where`` is off."""
    of = "" if step is None else f" of step {step}"
    at = f", at {plain_op(peak.op)}" if where and peak.op and peak.phase != "optimizer" else ""
    return f"in {_IN.get(peak.phase, peak.phase)}{of}{at}"


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def capital(text: str) -> str:
    """``text`` with a capital at its start."""
    return text[:1].upper() + text[1:]
