"""The answer in sentences: the first thing that a table, a page and a notebook say."""

from __future__ import annotations

from ampmem.analysis.answer import Answer, Change, Composition, Effect, PeakOf
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.words import signed, times
from ampmem.units import format_bytes

_HALF = 0.55
"""A peak that falls to this share or less has about halved."""
_NAMED = 3
"""So many categories, or kinds of activations, are named; the rest is summed up."""
_WORDS = {
    Category.CAST_COPIES: "autocast's copies of weights",
    Category.MASTER_COPIES: "master copies",
    Category.OPTIMIZER_STATE: "optimizer state",
}
_UPDATE = "optimizer"
_IN = {_UPDATE: "the optimizer's update", "between": "the time between two steps"}


def composition_sentence(found: Composition) -> str:
    """``The peak is 9.3 GiB, in backward of step 2: 54 % activations, 21 % optimizer state, …``."""
    peak = found.peak
    shown, rest = found.parts[:_NAMED], found.parts[_NAMED:]
    parts = [f"{_share(part.bytes, peak.bytes)} {_name(part.category)}" for part in shown]
    if rest:
        parts.append(f"{_share(sum(part.bytes for part in rest), peak.bytes)} all else")
    return f"The peak is {format_bytes(peak.bytes)}, in {_phase(peak)} of step {found.step}: {', '.join(parts)}."


def answer_sentences(answer: Answer) -> list[str]:
    """What mixed precision made of the peak, and why: the first one says how much."""
    return [_headline(answer), *_instants(answer), *_changes(answer), *_in_float32(answer), *_cache(answer)]


def _headline(answer: Answer) -> str:
    before, after = answer.baseline, answer.mixed
    sizes = f"from {format_bytes(before.bytes)} ({before.label}) to {format_bytes(after.bytes)} ({after.label})"
    if answer.effect is Effect.NONE:
        return f"Mixed precision makes no difference to the peak: {_two(answer)}."
    percent = f"{signed_percent(answer.ratio - 1)}"
    if answer.effect is Effect.COSTS:
        return f"Mixed precision costs memory here: it takes the peak {sizes}, {percent}."
    half = "to about half" if answer.ratio <= _HALF else "not to half"
    return f"Mixed precision takes the peak {sizes}, {percent}, {half}."


def _two(answer: Answer) -> str:
    before, after = answer.baseline, answer.mixed
    return f"{format_bytes(before.bytes)} in {before.label}, {format_bytes(after.bytes)} in {after.label}"


def _instants(answer: Answer) -> list[str]:
    before, after = answer.baseline, answer.mixed
    if not answer.same_instant:
        return [
            f"The two peaks are different instants: that of {before.label} is in {_phase(before)}, "
            f"that of {after.label} in {_phase(after)}."
        ]
    if before.phase == _UPDATE:
        return [f"Both peaks are in {_phase(before)}, where autocast changes nothing."]
    return []


def _changes(answer: Answer) -> list[str]:
    notable = answer.notable
    if not notable:
        return []
    rest = sum(change.difference for change in answer.changes if change not in notable[:_NAMED])
    words = [_change(change) for change in notable[:_NAMED]]
    if rest:
        words.append(f"all else {signed(rest)}")
    return [f"Between the two peaks: {', '.join(words)}."]


def _change(change: Change) -> str:
    text = f"{_name(change.category)} {signed(change.difference)}"
    if change.category is Category.ACTIVATIONS and change.before:
        text += f" ({times(change.after / change.before)})"
    return text


def _in_float32(answer: Answer) -> list[str]:
    size = sum(group.bytes for group in answer.in_float32)
    if not size:
        return []
    shown, rest = answer.in_float32[:_NAMED], answer.in_float32[_NAMED:]
    parts = [f"{format_bytes(group.bytes)} {group.kind}" for group in shown]
    if rest:
        parts.append(f"{format_bytes(sum(group.bytes for group in rest))} for others")
    return [
        f"Of {format_bytes(answer.activations)} of activations at the end of forward {format_bytes(size)} stay FP32: "
        f"{', '.join(parts)}."
    ]


def _cache(answer: Answer) -> list[str]:
    other = answer.without_cache
    if other is None:
        return []
    difference = other.bytes - answer.mixed.bytes
    if not difference:
        return [f"Without autocast's cache of weights ({other.label}) the peak is the same."]
    return [f"Without autocast's cache of weights ({other.label}) the peak is {signed(difference)}."]


def signed_percent(share: float) -> str:
    """``−26 %``; a difference never reads as none."""
    percent = 100 * share
    text = f"{abs(percent):.0f}" if abs(percent) >= 1 else f"{abs(percent):.1g}"
    return f"{'−' if share < 0 else '+'}{text} %"


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole
    if percent < 1:
        return "<1 %"
    return f"{min(percent, 99) if part < whole else 100:.0f} %"


def _name(category: Category) -> str:
    return _WORDS.get(category, str(category))


def _phase(peak: PeakOf) -> str:
    return _IN.get(peak.phase, peak.phase)
