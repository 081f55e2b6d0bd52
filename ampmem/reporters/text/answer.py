"""The answer in sentences, with which tables, pages and notebooks begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampmem.analysis.answer import Answer, CategoryChange, Composition, Effect, PeakOf, Verdict
from ampmem.analysis.largest import Held
from ampmem.analysis.ops import plain_op
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.summary import PLACES, Peak, PeakPlace, Step, WholePeak
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.plain_text import shorten, signed, times, wrapped
from ampmem.units import format_bytes, format_close, format_count, format_peak, listed, peaks_apart, peaks_close


def asked(oom: FailedRequest) -> str:
    """The size of the request."""
    wanted, where = f"a block of {format_bytes(oom.asked)}", "" if oom.recorded else f" on cuda:{oom.device}"
    segment = "" if oom.asked == oom.segment else f" in a new segment of {format_bytes(oom.segment)}"
    return f"{wanted}{segment}{where}"


def asked_by(oom: FailedRequest) -> str:
    """The op and module of the request; empty if both are unknown."""
    if not oom.op and not oom.module:
        return ""
    return " in ".join(part for part in (oom.op or "an unknown op", oom.module) if part)


def lacking(oom: FailedRequest) -> str:
    """The bytes that were missing, and the free memory: ``1.0 GiB: the device had 0.5 GiB free``.

    Empty if the device refused the request although it had enough memory.
    """
    return f"{format_bytes(oom.lacking)}: {left(oom)}" if oom.lacking else ""


def left(oom: FailedRequest) -> str:
    """The free memory of the device, or the rest of this process's limit if that is less."""
    if oom.allowed is not None and oom.left < oom.device_free:
        return f"{format_bytes(oom.left)} were left of the {format_bytes(oom.allowed)} that this process may use"
    return f"the device had {format_bytes(oom.device_free)} free"


def device(oom: FailedRequest) -> str:
    """The device's memory in words: free, reserved by this process, and used by others."""
    limit = "" if oom.allowed is None else f" (which may use {format_bytes(oom.allowed)})"
    free, mine = f"{format_bytes(oom.device_free)} were free", f"{format_bytes(oom.reserved)} reserved by this process"
    index = "" if oom.recorded else f"cuda:{oom.device} (not the recorded device): "
    if oom.outside is None or oom.device_total is None:
        return f"{index}{free}, {mine}{limit}"
    others = f"{format_bytes(oom.outside)} used outside of its allocator"
    return f"{index}{format_bytes(oom.device_total)}, of which {free}, {mine}{limit} and {others}"


def to_come(oom: FailedRequest) -> str:
    """The gradients and the optimizer state that the step would still have allocated; empty if none, or unknown."""
    found = oom.to_come
    if found is None:
        return ""
    parts = []
    if found.gradients:
        parts.append(f"{format_bytes(found.gradients)} of gradients ({format_count(found.parameters)} parameters)")
    if found.optimizer_state:
        parts.append(f"{format_bytes(found.optimizer_state)} of optimizer state ({', '.join(found.optimizers)})")
    elif found.optimizer_state is None:
        parts.append("optimizer state of unknown size")
    return " and ".join(parts) if found.gradients or found.optimizer_state else ""


def free_blocks(oom: FailedRequest) -> str:
    """The largest free blocks in cached memory."""
    free = oom.largest_free
    return (
        f"{format_bytes(free.usable)} usable for the request, {format_bytes(free.other_streams)} of other streams, "
        f"{format_bytes(free.other_pools)} of other pools"
    )


def shortage(oom: FailedRequest) -> tuple[str, ...]:
    """Sentences on the request, the missing bytes, and what is still to come."""
    less = f": {format_bytes(oom.lacking)} were missing" if oom.lacking else ""
    coming = to_come(oom)
    return (f"In {oom.where}, {asked(oom)} was requested{less}.", *([f"Still to come: {coming}."] if coming else []))


def why_it_does_not_fit(oom: FailedRequest) -> str:
    """The missing bytes, and where in the run."""
    if not oom.lacking:
        return f"out of memory in {oom.where}"
    if oom.by_the_limit and oom.allowed is not None:
        limit = f"the {format_bytes(oom.allowed)} that this process may use"
        return f"{format_bytes(oom.lacking)} more than {limit} were needed in {oom.where}"
    return f"{format_bytes(oom.lacking)} were missing in {oom.where}"


_HALF = 0.55
"""A ratio up to this one reads as "about halved"."""
_NAMED = 3
"""The number of categories, or kinds of activations, that are named; the rest is summed up."""
_NAMED_SHARE = 0.05
"""Kinds with a smaller share of the activations are not named."""
_MOST = 0.5
"""From this share on, a part is most of the whole."""
_CHANGES = 4
"""The number of changes that are named."""
_VISIBLE = 0.0001
"""Differences below this share of the peak are not mentioned."""
_SHARE_OF_DIFFERENCE = 0.25
"""A change with this share of the difference is mentioned, however small the difference is."""
_PARTS = 5
"""The number of a peak's categories that are named."""
_PART = 0.05
"""The smallest share of the peak of a category that is named."""
_HELD_SHARE = 0.01
"""The smallest share of the peak of a holder that is named."""
_HOLDERS = 4
"""The number of holders that are named."""
_HOLDER = 40
"""The longest name of a holder."""
_LEAST_HALF = 0.45
"""A ratio below this one reads as "more than halved"."""
_LABELS = 4
"""The number of recordings up to which each is named."""
_WORDS = {
    Category.CAST_COPIES: "cast copies",
    Category.MASTER_COPIES: "master copies",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.KEPT_PREDICTIONS: "kept predictions",
    Category.UNTRAINED: "untrained models",
}
_SINGULAR = (Category.OPTIMIZER_STATE, Category.WORKSPACE, Category.COMMUNICATION, Category.OTHER)
_SINCE = {
    Category.OPTIMIZER_STATE: ", which the first update made",
    Category.WORKSPACE: ", which libraries keep from the step before",
    Category.GRADIENTS: ", which the step before left",
}
"""The reason for which a category is larger in the second step."""
_OF = {
    Category.OTHER: "other memory",
    Category.PARAMETERS: "memory around it that no parameter uses, as it is a view of a larger buffer",
}
"""What a holder holds of a category, if not that by its name."""
_UPDATE = "optimizer"
_DATA = "data"
_PHASES = {_UPDATE: "in the optimizer's update", "between": "between the phases", _DATA: "while loading data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """A verdict in words: a headline and its reason, both without a full stop, and further sentences."""

    headline: str
    why: str = ""
    more: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The headline with its reason, as a sentence."""
        return f"{self.headline}: {self.why}." if self.why else f"{self.headline}."

    @property
    def text(self) -> str:
        """The whole verdict as one paragraph."""
        return " ".join((self.first, *self.more))


def wording(verdict: Verdict) -> Wording:
    """``verdict`` in words."""
    if verdict.unsound:
        return Wording(
            headline="No verdict",
            why=f"the sums of {listed(verdict.unsound)} differ from the allocator's, see the warning",
        )
    if verdict.answer is not None:
        return _answered(verdict, verdict.answer)
    if len(verdict.compositions) == 1:
        return _of_one(verdict.compositions[0])
    return _of_several(verdict)


def _own_peaks(verdict: Verdict) -> list[str]:
    """The compared step and why, if the peak of a whole run is elsewhere; else empty."""
    known = [
        (label, item, item.whole)
        for label, item in zip(verdict.labels, verdict.compositions, strict=True)
        if item is not None and item.whole is not None
    ]
    if all(whole.bytes == item.peak.said for _, item, whole in known):
        return []
    steps = {item.step for _, item, _ in known}
    which = "the last step of each"
    if len(steps) == 1:
        which = f"step {steps.pop()} of each, as it needs a common step"
    own = [f"{label} {format_peak(whole.bytes)} {place_of(whole)}" for label, _, whole in known[:_LABELS]]
    if len(known) > _LABELS:
        own.append(f"{len(known) - _LABELS} more")
    return [f"The comparison uses {which}; the peak of each whole run: {', '.join(own)}."]


def place_of(whole: WholePeak) -> str:
    """The place of a run's peak: ``in step 2``, ``after the last step``."""
    return f"in step {whole.step}" if whole.where is PeakPlace.STEP else PLACES[whole.where]


def _answered(verdict: Verdict, answer: Answer) -> Wording:
    measured = (*_instants(answer), *_at_the_peaks(answer), *_unchanged(answer), *_forward(answer))
    more = (*measured, *_cache(answer), *_weights(answer))
    failed = [item.peak.label for item in verdict.compositions if item is not None and (item.failed or item.short)]
    after = [f"{listed(failed)} failed after that step."] if failed else []
    return Wording(headline=_headline(answer), why=_why(answer), more=(*more, *_own_peaks(verdict), *after))


def _headline(answer: Answer) -> str:
    before, after = peaks_apart(answer.baseline.said, answer.mixed.said)
    if before == after:
        return f"Mixed precision does not change the peak, {before}"
    if answer.effect is Effect.NONE:
        before, after = peaks_close(answer.baseline.said, answer.mixed.said)
        sizes = f"{before} without and with it" if before == after else f"{before} without it and {after} with it"
        return f"Mixed precision hardly changes the peak, {sizes}"
    sizes = f"{_from_to(before, after)}, {percent_of(answer.ratio - 1)}"
    if answer.effect is Effect.COSTS:
        return f"Mixed precision raises the peak from {sizes}"
    half = "to about half" if answer.ratio <= _HALF else "not to half"
    return f"Mixed precision lowers the peak from {sizes}, {half}"


def _from_to(before: str, after: str) -> str:
    """``12.6 to 9.3 GiB``, with the unit only once if both have the same."""
    (first, unit), (_, other) = before.rsplit(" ", 1), after.rsplit(" ", 1)
    return f"{first if unit == other else before} to {after}"


def _why(answer: Answer) -> str:
    """The differences between the two peaks, the largest first, with the reason for the activations."""
    if answer.in_update:
        return "both peaks are in the optimizer's update, which autocast does not touch"
    before, after = answer.baseline, answer.mixed
    if answer.by_forward:
        first, then = (in_phase(each.phase).removeprefix("in ").removeprefix("while ") for each in (before, after))
        untouched = ", which autocast does not touch" if after.phase == _UPDATE else ""
        return f"the peak moves from {first} to {then}{untouched}"
    return _all_changed(answer, answer.changes)


def _all_changed(answer: Answer, changes: Sequence[CategoryChange]) -> str:
    """The differences in ``changes``, the largest first; empty if none is worth mentioning."""
    notable, rest = _notable(answer, changes)
    parts = [_changed(answer, change) for change in notable]
    if rest:
        parts.append(f"all else {'adds' if rest > 0 else 'falls by'} {format_bytes(abs(rest))}")
    return "; ".join(parts)


def _notable(answer: Answer, changes: Sequence[CategoryChange]) -> tuple[Sequence[CategoryChange], int]:
    """The changes worth mentioning, and the sum of the others; 0 if there are no others."""
    whole = abs(sum(change.difference for change in changes))
    least = min(answer.least_notable, _SHARE_OF_DIFFERENCE * whole) or answer.least_notable
    shown = [change for change in changes if abs(change.difference) >= least][:_CHANGES]
    others = [change for change in changes if change not in shown]
    rest = sum(change.difference for change in others)
    if abs(rest) < least:
        return shown, 0
    return ([*shown, *others], 0) if len(others) == 1 else (shown, rest)


def _changed(answer: Answer, change: CategoryChange) -> str:
    size, what = format_bytes(abs(change.difference)), name(change.category)
    if change.category is Category.ACTIVATIONS and change.before:
        return _activations(answer, change, size)
    verb = f"{'add' if change.difference > 0 else 'fall'}{'s' if change.category in _SINGULAR else ''}"
    return f"{what} {verb} {'by ' if change.difference < 0 else ''}{size}"


def _activations(answer: Answer, change: CategoryChange, size: str) -> str:
    ratio = change.after / change.before
    if ratio > 1:
        stay, _ = _in_float32(answer)
        return f"activations add {size}{', and ' * bool(stay)}{stay}"
    if not change.after:
        return f"activations fall by {size}, to none"
    if ratio <= _HALF:
        return f"activations fall by {size}, to {'about half' if ratio > _LEAST_HALF else times(ratio)}"
    fall = f"activations fall by {size}, to {times(ratio)}"
    stay, enough = _in_float32(answer)
    return f"{fall}{', because' if enough else ';'} {stay}" if stay else fall


def _in_float32(answer: Answer) -> tuple[str, bool]:
    """The float32 activations: ``1.5 GiB of the loss and 0.6 GiB of norms …``, and whether they are the reason.

    They are the reason if most of what exceeds half comes from them, as each of their bytes would be half a byte in low
    precision. Empty if few activations are float32.
    """
    change = answer.activations
    least = _NAMED_SHARE * sum(group.bytes for group in answer.groups)
    shown = [group for group in answer.in_float32 if group.bytes >= least][:_NAMED]
    if change is None or not shown:
        return "", False
    words = listed([f"{format_bytes(group.bytes)} of {group.kind}" for group in shown])
    all_of_it = sum(group.bytes for group in answer.in_float32)
    # A sentence about the end of forward names it already.
    when_that_is = "" if answer.by_forward else " at the end of forward"
    return f"{words} are FP32{when_that_is}", all_of_it >= _MOST * (2 * change.after - change.before)


def _instants(answer: Answer) -> list[str]:
    before, after = answer.baseline, answer.mixed
    if answer.same_phase:
        fewer = answer.fewer_gradients
        if not any(change.category is Category.GRADIENTS for change in _notable(answer, answer.changes)[0]):
            return []
        size = f"{format_bytes(abs(fewer))} {'fewer' if fewer > 0 else 'more'}"
        earlier = f"at {after.label}'s {size} gradients are alive"
        return [f"Both peaks are {in_phase(before.phase)}, but not at the same instant: {earlier}."]
    if _UPDATE in (before.phase, after.phase):
        return []  # as it is given as the reason already
    return [
        f"The peaks are at different instants: {before.label}'s is {when(before)}; {after.label}'s is {when(after)}."
    ]


def _at_the_peaks(answer: Answer) -> list[str]:
    """The differences between two peaks in the optimizer's update, which do not explain the result."""
    notable, rest = _notable(answer, answer.changes)
    least = _VISIBLE * answer.baseline.bytes
    notable = [change for change in notable if abs(change.difference) >= least]
    if not answer.in_update or not notable:
        return []
    words = [f"{name(change.category)} {signed(change.difference)}" for change in notable]
    return [f"At the peak: {', '.join([*words, *[f'all else {signed(rest)}'] * (abs(rest) >= least and rest != 0)])}."]


def _unchanged(answer: Answer) -> list[str]:
    notable = [change for change in answer.unchanged if change.before >= answer.least_notable]
    if not notable or answer.effect is Effect.NONE:
        return []
    size = sum(change.before for change in notable)
    verb = "is" if len(notable) == 1 and notable[0].category is not Category.PARAMETERS else "are"
    words = capital(listed([name(change.category) for change in notable]))
    return [f"{words} {verb} the same in both: {format_bytes(size)}."]


def _forward(answer: Answer) -> list[str]:
    """The totals at the end of forward, if they explain the peaks or mixed precision saves nothing."""
    if answer.forward is None or (answer.effect is Effect.SAVES and not answer.by_forward):
        return []
    before, after = answer.forward
    if before == after:
        return [f"At the end of forward the total is the same: {format_bytes(before)}."]
    first, second = format_close(before, after)
    if first == second:
        return [f"At the end of forward the total is the same but for {format_bytes(abs(after - before))}: {first}."]
    why = _all_changed(answer, answer.forward_changes) if answer.by_forward else ""
    return [f"At the end of forward the total goes from {_from_to(first, second)}{f': {why}' if why else ''}."]


def _cache(answer: Answer) -> list[str]:
    other = answer.without_cache
    if other is None:
        return []
    difference = other.said - answer.mixed.said
    size = f"{format_bytes(abs(difference))} {'higher' if difference > 0 else 'lower'}" if difference else "the same"
    return [f"Without autocast's cache of weights ({other.label}) the peak is {size}."]


def _weights(answer: Answer) -> list[str]:
    """The peak with weights in bfloat16 instead of autocast, and the rule of :mod:`ampmem.analysis.static_model`."""
    other = answer.in_bfloat16
    if other is None:
        return []
    rule = "parameters, gradients and states take half as much, without FP32 master copies"
    return [f"With weights in bfloat16 ({other.label}) the peak is {format_bytes(other.said)}: {rule}."]


def _of_one(found: Composition | None) -> Wording:
    if found is None:
        return Wording(headline="Nothing was recorded")
    size = format_peak(found.peak.said)
    if found.short:
        headline = f"Out of memory at {size}"
    else:
        peak = "peak of the recorded steps" if found.of_steps else "peak"
        until = f"Until the script failed, the {peak}" if found.failed else f"The {peak}"
        headline = f"{until} is {size}{_requested_part(found.peak)}, {when(found.peak, found.step)}"
    why = made_of(found.parts, found.peak.bytes)
    more = () if found.short is None else shortage(found.short)
    return Wording(
        headline=headline,
        why=why,
        more=(*more, *_second_step(found), *_outside(found), *_held_by(found.holders, found.peak.bytes), *_help(found)),
    )


def _requested_part(peak: PeakOf) -> str:
    """`` allocated, 1.9 GiB of it requested``; without the requested part if it reads the same; empty on a CPU."""
    if peak.allocated is None:
        return ""
    requested = format_peak(peak.bytes)
    return " allocated" if requested == format_peak(peak.allocated) else f" allocated, {requested} of it requested"


def _outside(found: Composition) -> Iterator[str]:
    """The memory needed outside of the recorded steps, if that was more: no table has it."""
    if found.outside is not None:
        where = "after the last step" if found.outside.after else "before the first step"
        size, parts = format_peak(found.outside.said), made_of(found.outside.categories, found.outside.bytes)
        yield (
            f"The highest total of the whole recording is {size}, {where}, {when(found.outside)} ({parts}); the "
            "tables cover the steps."
        )
    if found.whole is not None and found.whole.where is PeakPlace.NOT_RECORDED:
        yield (
            f"The peak of the whole run is {format_peak(found.whole.bytes)}, {place_of(found.whole)}; the tables and "
            "the findings cover the recorded steps (--steps records more, --phase evaluation an evaluation)."
        )


def _second_step(found: Composition) -> list[str]:
    """What the second step has at its peak that the first one did not have; at the end of forward if phases differ."""
    if found.second is None:
        return []
    (first, second), least = found.second, _SHARE_OF_DIFFERENCE * _more(found.second)
    before, after, where = first.peak.categories, second.peak.categories, ""
    if first.peak.phase != second.peak.phase and first.marks.after_forward and second.marks.after_forward:
        before, after, where = first.marks.after_forward, second.marks.after_forward, "at the end of forward "
    more = {each: after[each] - before[each] for each in CATEGORIES if after[each] - before[each] >= least}
    words = [
        f"{name(each)} {'adds' if each in _SINGULAR else 'add'} {format_bytes(more[each])}{_SINCE.get(each, '')}"
        for each in sorted(more, key=lambda each: -more[each])[:_NAMED]
    ]
    what = f"Step {second.index} needs {format_bytes(_more(found.second))} more than step {first.index}"
    return [f"{what}: {where}{'; '.join(words)}." if words else f"{what}."]


def _more(steps: tuple[Step, Step]) -> int:
    return steps[1].peak.said - steps[0].peak.said


def _held_by(holders: Sequence[Held], whole: int) -> list[str]:
    """Who holds what of a total of ``whole`` bytes, of memory that is not the training's own."""
    return [
        f"{shorten(each.holder, _HOLDER)}{' of ' * bool(each.place)}{each.place} holds {format_bytes(each.bytes)} of "
        f"{_OF.get(each.category) or name(each.category)}."
        for each in holders
        if each.holder and each.bytes >= _HELD_SHARE * whole
    ][:_HOLDERS]


def made_of(live: Breakdown, whole: int) -> str:
    """The categories of ``live``, the largest first: ``32 % optimizer state, 16 % parameters, 5 % all else``.

    The unnamed rest is not larger than the smallest named part; communication is named from the same share on as
    others, whatever their number.
    """
    parts = sorted(((category, live[category]) for category in CATEGORIES if live[category]), key=lambda part: -part[1])
    notable = [part for part in parts if part[1] >= _PART * whole]
    shown = notable[:_PARTS] + [part for part in notable[_PARTS:] if part[0] is Category.COMMUNICATION]
    rest = [part for part in parts if part not in shown]
    while rest and (len(rest) == 1 or not shown or sum(size for _, size in rest) > shown[-1][1]):
        shown.append(rest.pop(0))
    words = [f"{portion(size, whole)} {name(category)}" for category, size in shown]
    return ", ".join([*words, *([f"{portion(sum(size for _, size in rest), whole)} all else"] if rest else [])])


def _help(found: Composition) -> tuple[str, ...]:
    saving = found.saving
    grows = tuple(capital(each.message) for each in found.news)
    if saving is None or not saving.saved:
        return grows
    steps = " in the recorded steps" if found.of_steps else ""
    where = "" if saving.off_peak else " of reserved memory" if saving.off_reserved else " at the failure"
    size = f"{saving.at_least}{format_bytes(saving.saved)}"
    return (*grows, f"Largest saving found{steps}, {size}{where}: {saving.change} ({saving.code}).")


def _of_several(verdict: Verdict) -> Wording:
    """The peaks side by side, for recordings that do not show the effect of mixed precision."""
    found = list(zip(verdict.labels, verdict.compositions, strict=True))
    if not any(verdict.compositions):
        return Wording(headline="Nothing was recorded")
    own = tuple(_own_peaks(verdict))
    words = [_in_short(label, item) for label, item in found[:_LABELS]]
    if len(found) > _LABELS:
        words.append(f"{len(found) - _LABELS} more")
    steps = {item.step for item in verdict.compositions if item is not None}
    which = f" of step {steps.pop()}" if own and len(steps) == 1 else ""
    return Wording(headline=f"Peaks{which}: {', '.join(words)}", more=own)


def _in_short(label: str, found: Composition | None) -> str:
    if found is None:
        return f"{label} has none, nothing was recorded"
    size = format_peak(found.peak.said)
    if found.short:
        return f"{label} ran out of memory at {size}"
    return f"{label} {size}{' until it failed' if found.failed else ''}"


def percent_of(difference: float) -> str:
    """``-26 %`` for -0.26; a difference never reads as 0."""
    percent = 100 * abs(difference)
    text = f"{percent:.0f}" if percent >= 1 else f"{percent:.1g}"
    return f"{'-' if difference < 0 else '+'}{text} %"


def portion(part: int, whole: int) -> str:
    """The share ``part`` of ``whole`` bytes: ``54 %``; a part never reads as all, or as nothing."""
    percent = 100 * part / whole
    if percent < 1:
        return "<1 %"
    return f"{min(percent, 99) if part < whole else 100:.0f} %"


def name(category: Category) -> str:
    """The name of a category in a sentence."""
    return _WORDS.get(category, str(category))


def when(peak: PeakOf | Peak, step: int | None = None, *, where: bool = True) -> str:
    """The instant of a peak: ``in backward of step 2, at ConvolutionBackward0``; ``where`` adds the op.

    An optimizer's step is not an op of the forward or backward that runs in its closure.
    """
    op = peak.op if where and peak.phase != _UPDATE else None
    at = f", at {plain_op(op)}" if op and not op.endswith(".step") else ""
    return f"{in_phase(peak.phase, '' if step is None else f'step {step}')}{at}"


def in_phase(phase: str, step: str = "") -> str:
    """The phase in words: ``in backward``, ``in backward of step 2``, ``while loading data, in step 2``."""
    words = _PHASES.get(phase, f"in {phase}")
    if not step:
        return words
    return f"{words}, in {step}" if phase == _DATA else f"{words} of {step}"


def capital(text: str) -> str:
    """``text`` with a capital at its start."""
    return text[:1].upper() + text[1:]


def wording_lines(said: Wording, layout: Layout) -> list[str]:
    """The lines of a verdict: how much and why in bold, then the rest."""
    lines = list(map(layout.strong, wrapped(said.first, layout.width, indent="")))
    return [*lines, *(wrapped(" ".join(said.more), layout.width, indent="") if said.more else [])]
