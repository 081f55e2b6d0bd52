"""Findings about the run as a whole: its sums, running out of memory, reserved memory, growth."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ampmem.allocator.settings import VARIABLES, Settings, parse_settings
from ampmem.allocator.trace import peak_reserved, trace_of_events
from ampmem.analysis.findings.base import NOTABLE_BYTES, Finding, Section, TrainingRun, own_frame
from ampmem.analysis.out_of_memory import failure_position
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.errors import UsageError
from ampmem.events import OTHER_THREADS, PLACED, Action, Fact, Phase, StepRecord
from ampmem.names import INPUT, of_all_layers
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import SourceKind


def residual(run: TrainingRun) -> Finding | None:
    """The sums of the categories or the segments differ from the allocator's own totals."""
    conservation = run.analysis.conservation
    if conservation.breach is None:
        return None
    return Finding(
        severity="warning",
        section=Section.PEAK,
        message=f"{conservation.breach}: memory was allocated or freed where ampmem did not see it, so some of the "
        "bytes shown are attributed wrongly or not at all.",
        bytes=max(conservation.residual_bytes or 0, conservation.reserved_residual_bytes or 0),
        change="do not trust this run's numbers; please report the script, or what it uses besides torch",
        evidence=(f"events compared: {conservation.events}",),
    )


def out_of_memory(run: TrainingRun) -> Finding | None:
    """A request failed; of several the last one counts, which is the one that ends a script."""
    oom = run.analysis.failed_request
    if oom is None:
        return None
    times = f" ({oom.failures} requests failed; this is the last)" if oom.failures > 1 else ""
    end = "" if oom.ended_the_run else " The script went on."
    device = "the device" if oom.recorded else f"cuda:{oom.device} (not the recorded device)"
    return Finding(
        severity="warning",
        section=Section.OUT_OF_MEMORY,
        message=f"{device} ran out of memory in {oom.where}, where {format_bytes(oom.asked)} were requested{times}: "
        f"{oom.explanation}.{end}",
        bytes=oom.asked,
        change=oom.changes[0],
        evidence=(f"requested by {_made_by(oom.op or 'an unknown op', oom.module or '', oom.stack)}",),
    )


def _made_by(op: str, module: str, stack: Sequence[str]) -> str:
    """The op, module and line that made or requested something, in words; empty ones are left out."""
    return " ".join([op, *([f"in {module}"] if module else []), *([f"at {own_frame(stack)}"] if stack else [])])


_SHARE = 0.05
_LEAST = 64 << 20
"""Less than this many bytes, or than the share above, is normal: segments have 20 MiB, and some are for small tensors
only."""
_AGREES = 0.01
"""A replay whose peak differs from the recorded one by more than this share proves nothing."""
_MOST_EVENTS = 200_000
"""A longer recording is not replayed, which would take seconds whenever it is shown."""
_SETTING = "expandable_segments:True"
_OTHERS = ("max_split_size_mb:128", "max_split_size_mb:512")
"""Other settings that are tried. They are advised only if they save more, as they keep large blocks whole, so other
requests may need new segments."""


def fragmentation(run: TrainingRun) -> Finding | None:
    """The peak of reserved memory exceeds the peak of allocated memory, and an allocator setting lowers it.

    A failed request has a finding of its own.
    """
    layers, recording = run.analysis.layers, run.recording
    if recording.run.source == SourceKind.CPU or layers is None or run.analysis.failed_request is not None:
        return None
    reserved = int(max(layers.level.max(initial=0), layers.reserved.max()))
    idle = reserved - int(layers.allocated.max())
    set_so = recording.allocator is not None and recording.allocator.expandable_segments
    least = max(_LEAST, _SHARE * reserved)
    if set_so or recording.segments.expandable.any() or idle < least:
        return None
    settings = _settings(run)
    peaks = {} if settings is None else _replayed(run, settings)
    proven = bool(peaks) and abs(peaks[""] - reserved) <= _AGREES * reserved
    # Of several settings with an equal peak the first.
    best = min((each for each in peaks if each), key=lambda each: peaks[each]) if proven else _SETTING
    saved = peaks[""] - peaks[best] if proven else 0
    if proven and saved < least:
        return None
    return Finding(
        severity="advice" if proven else "info",
        section=Section.TIMELINE,
        message=f"the allocator reserves up to {format_bytes(reserved)}, {format_bytes(idle)} more than is ever "
        "allocated at once: its free memory is in pieces that do not fit the requests.",
        bytes=idle,
        change=f"{_variable(run, best)} in the environment, before torch is imported",
        evidence=(
            f"most allocated at once: {format_bytes(reserved - idle)}",
            f"the recorded allocations in ampmem's model of the allocator: {format_bytes(peaks[''])} reserved, "
            + ", ".join(f"{format_bytes(peaks[each])} with {each}" for each in dict.fromkeys((best, _SETTING)))
            if proven
            else f"how much {_SETTING} would save is not known: the recorded allocations cannot be replayed, or the "
            "replay has another peak",
        ),
        off_reserved=saved or None,
    )


def _variable(run: TrainingRun, setting: str) -> str:
    """The environment variable to set, with the settings that it has already."""
    allocator = run.recording.allocator
    if allocator is None or not allocator.settings:
        return f"{VARIABLES[-1]}={setting}"
    return f"{allocator.variable or VARIABLES[-1]}={allocator.settings},{setting}"


def _settings(run: TrainingRun) -> Settings | None:
    """The allocator settings of a run that can be replayed; ``None`` for other runs."""
    recording = run.recording
    if len(recording.events) > _MOST_EVENTS:
        return None
    try:
        return parse_settings("" if recording.allocator is None else recording.allocator.settings)
    except UsageError:  # the model does not support these settings
        return None


def _replayed(run: TrainingRun, settings: Settings) -> dict[str, int]:
    """The peak of reserved bytes with ``settings`` (under the empty key), and with each tried setting added."""
    trace = trace_of_events(run.recording.events, run.recording.segments)
    tried = ("", _SETTING, *(_OTHERS if settings.max_split_size is None else ()))
    return {each: peak_reserved(trace, parse_settings(each, settings)) for each in tried}


_STEPS = 3
_KEY = re.compile(r"\[[^\]]*\]")
_ITEM = re.compile(r"\[[^\]]*\]$")
_MEANT_TO_STAY = (
    Category.PARAMETERS,
    Category.UNTRAINED,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.MASTER_COPIES,
    Category.CAST_COPIES,  # the finding copies-grow is about those
)


@dataclass(frozen=True, slots=True, order=True)
class _Site:
    """The place of an allocation, as far as known: text ids, 0 for unknown."""

    op: int
    module: int
    stack: int
    holder: str = ""
    """The holder at the end, such as ``kept[*]``, if nothing else is known about the allocation."""

    @property
    def known(self) -> bool:
        """Whether anything names the place."""
        return bool(self.op or self.module or self.stack or self.holder)


_NAMELESS = _Site(0, 0, 0)


def steady_growth(run: TrainingRun) -> Finding | None:
    """One place (op, module and stack) makes allocations in every step from the second on that are never freed.

    The last step's own results are alive at its end too, and so are batches loaded ahead; they count only if there are
    more of them from step to step. The finding begins at 1 KiB per step, however large the peak, since growth adds up.
    There is none if the recording's sums are wrong, since allocations that seem alive may be dead.
    """
    if len(run.steps) < _STEPS or run.analysis.conservation.breach is not None:
        return None
    steps = [step.index for step in run.steps[1:]]
    places = _steady(_left_behind(run), steps)
    known = {place: by_step for place, by_step in places.items() if place.known}
    known |= _steady(_held_at_the_end(run), steps)
    each = [sum(by_step[step] for by_step in known.values()) for step in steps]
    if each and min(each) >= NOTABLE_BYTES:
        return _leak(run, known, steps, each)
    if (parameters := _new_parameters(run, steps)) is not None:
        return parameters
    nothing = dict.fromkeys(steps, 0)
    nameless = [places.get(_NAMELESS, nothing)[step] for step in steps]
    lifetimes = run.analysis.lifetimes
    elsewhere = _grown(run, lifetimes.address == OTHER_THREADS)
    # Memory from before the recording never grows above 0, as later batches replace it.
    there = run.recording.events.action[lifetimes.born] != Action.ALLOC
    before = _grown(run, there & ~_meant(run) & (lifetimes.address != OTHER_THREADS))
    grown = [sum(parts) for parts in zip(nameless, elsewhere, before, strict=True)]
    if not grown or min(grown) < NOTABLE_BYTES:
        return None
    # Other sources have events of all threads.
    one_thread = run.recording.run.source in (SourceKind.CPU, SourceKind.SIMULATED)
    once = _growing(run, _own(run) & (lifetimes.died == ALIVE), Fact.VARIABLE, items=False)
    return _nameless(steps, grown, once, own=one_thread and not any(elsewhere))


def _steady(places: dict[_Site, dict[int, int]], steps: Sequence[int]) -> dict[_Site, dict[int, int]]:
    """The ``places`` that leave bytes behind in each of ``steps``."""
    return {place: by_step for place, by_step in places.items() if all(by_step.get(step, 0) > 0 for step in steps)}


def _leak(run: TrainingRun, places: dict[_Site, dict[int, int]], steps: Sequence[int], each: Sequence[int]) -> Finding:
    ordered = sorted(places, key=lambda place: -places[place][steps[-1]])
    holders = {place.holder for place in ordered}
    held = f", held by {holders.pop()}" if len(holders) == 1 and "" not in holders else ""
    most = "" if ordered[0].holder else f" Most of it was made by {_place_in_words(run, ordered[0])}."
    what, change = _kind_of(run, places)
    return Finding(
        severity="warning",
        section=Section.TIMELINE,
        message=f"every step leaves memory behind, the last one {format_bytes(each[-1])}{held}: {what}.{most}",
        bytes=each[-1],
        change=change,
        evidence=(
            _by_step(steps, each),
            *(
                f"{_place_in_words(run, place)}: {format_bytes(size)} ({format_count(size)} bytes) per step"
                for place in ordered[:3]
                for size in (places[place][steps[-1]],)
            ),
        ),
    )


_NUMBERS = (
    "append numbers, not tensors: losses.append(loss.item()), or loss.detach().cpu(); "
    "clear lists and caches that grow from step to step"
)
_CLEARED = "clear it in each step, or keep only the last entries"
_REGISTERED = "register hooks once, before the loop, or remove each one: handle = ...; handle.remove()"
_DIFFERENTIABLE = (
    "torch.autograd.grad(..., create_graph=True) in place of backward(create_graph=True), or x.grad = None after the "
    "step for whatever has such a gradient: it holds the graph, and the graph holds x, so only the garbage collector "
    "frees them"
)


_LARGER = 1.05
"""Factor by which a step's peak must exceed those of all earlier steps to be told from them."""


def larger_step(run: TrainingRun) -> Finding | None:
    """A step takes more than all before it, or ran out of memory where they fitted: its largest newcomer.

    The second step is compared with none: the optimizer's state is new in it.
    """
    analysis, steps = run.analysis, run.recording.steps
    sizes = [int(analysis.timeline.total[position]) for position in analysis.peaks]
    place = len(steps) - 1
    if run.unfinished is None:
        higher = [at for at in range(2, len(steps)) if sizes[at] > _LARGER * max(sizes[:at])]
        place = max(higher, key=lambda at: sizes[at] - max(sizes[:at]), default=0)
        if len(higher) == len(steps) - 2 > 1:
            return None  # each step takes more than the one before: that is growth
    if place < 2 or (run.unfinished is not None and not run.recording.ooms):
        return None
    good = max(at for at in range(place) if _LARGER * sizes[at] >= max(sizes[:place]))
    before, now = analysis.peaks[good], analysis.peaks[place] if run.unfinished is None else failure_position(analysis)
    was, live = analysis.timeline.breakdown(before), analysis.timeline.breakdown(now)
    most = max(live, key=lambda category: live[category] - was[category])
    added = live[most] - was[most]
    batches = steps[good].batch_size, steps[place].batch_size
    shapes = [_largest_input(run, steps[at]) for at in (good, place)]
    other = ""
    if None not in batches and len(set(batches)) > 1:
        other = f"; the batch size is {batches[1]}, and was {batches[0]}"
    elif all(shapes) and len(set(shapes)) > 1:
        other = f"; the largest input is {shapes[1]}, and was {shapes[0]}"
    if not (run.notable(added) or other):
        return None
    what = (
        f"{format_bytes(added)} more in `{most}` ({'; '.join(_newcomers(run, analysis.classes.of(most), before, now))})"
    )
    graphs, others = _graphs(run, place, now), _graphs(run, good, before)
    other += f"; {graphs} graphs are alive, and {others} then" if graphs > max(others, 1) else ""
    return Finding(
        severity="info",
        section=Section.STEPS,
        message=f"step {steps[place].index} {'ran out of memory' if run.unfinished else 'takes more'}, where step "
        f"{steps[good].index} peaked at {format_bytes(sizes[good])}: "
        f"{what if run.notable(added) else 'no category is larger'}{other}.",
        bytes=None,
        change=f"look at what step {steps[place].index} does that those before do not do",
        evidence=tuple(
            f"{category}: {format_bytes(was[category])}, then {format_bytes(size)}"
            for category, size in live.items()
            if size != was[category]
        ),
    )


def _largest_input(run: TrainingRun, step: StepRecord) -> str:
    """The shape of the largest tensor that a model got in ``step``, as text; empty if there is none."""
    facts = run.analysis.facts
    mine = (facts.fact == Fact.INPUT) & (facts.time_ns >= step.start_ns) & (facts.time_ns <= step.end_ns)
    sizes = np.where(mine, run.analysis.lifetimes.bytes[facts.allocation], 0)
    return run.text(facts.shape[sizes.argmax()]) if mine.any() else ""


def _newcomers(run: TrainingRun, mine: Mask, before: int, now: int) -> Iterator[str]:
    """Of the allocations in ``mine`` the largest new one, and what the module and the holder with most more have."""
    lifetimes, facts = run.analysis.lifetimes, run.analysis.facts
    was, live = (np.where(mine & lifetimes.alive_at(at), lifetimes.bytes, 0) for at in (before, now))
    fresh = (live > 0) & (was == 0)
    yield f"largest: {', '.join(run.largest(fresh, 1))}"
    more: Counter[str] = Counter()
    changed = live != was
    for module, size in zip(lifetimes.module[changed].tolist(), (live - was)[changed].tolist(), strict=True):
        more[of_all_layers(run.text(module)).strip("*")] += size
    rows = np.isin(facts.fact, (*PLACED, Fact.ATTRIBUTE)) & fresh[facts.allocation]
    held: Counter[str] = Counter()
    for name, allocation in np.unique(np.stack([facts.name[rows], facts.allocation[rows]]), axis=1).T.tolist():
        held[_ITEM.sub("", run.text(name))] += int(live[allocation])
    del more[""]
    for words, sizes in (("in {}", more), ("held by `{}`", held)):
        for name, size in sizes.most_common(1):
            if run.notable(size):
                yield f"{format_bytes(size)} of it {words.format(name)}"


def _graphs(run: TrainingRun, place: int, peak: int) -> int:
    """How many forwards' graphs are alive when forward of the step at ``place`` ends; if it does not, at its peak."""
    facts, born = run.analysis.facts, run.analysis.lifetimes.born_ns
    over = run.analysis.marks[place].after_forward
    position = peak if over is None else run.analysis.timeline.position(over)
    starts = np.unique(facts.time_ns[facts.fact == Fact.INPUT])
    return len(np.unique(np.searchsorted(starts, born[run.kept_by_autograd(position)])))


def _kind_of(run: TrainingRun, places: Collection[_Site]) -> tuple[str, str]:
    """What keeps the memory that the steps left at ``places``, and what to change."""
    lifetimes, saved = run.analysis.lifetimes, run.with_fact(Fact.SAVED) > 0
    left = _own(run) & (lifetimes.died == ALIVE) & (lifetimes.step >= run.steps[0].index)
    there = np.zeros(len(lifetimes), dtype=np.bool_)
    for place in places:
        there |= (lifetimes.op == place.op) & (lifetimes.module == place.module) & (lifetimes.stack == place.stack)
    there &= left
    if (there & saved & (lifetimes.phase == Phase.BACKWARD)).any():
        return "backward made a graph (create_graph=True), and a gradient in it holds it in a cycle", _DIFFERENTIABLE
    counts = [int((there & (lifetimes.step == step.index)).sum()) for step in run.steps]
    if all(later > earlier for earlier, later in pairwise(counts)):
        more = f"each step makes more of it than the one before ({', '.join(map(str, counts[-3:]))} tensors)"
        return f"{more}, as a hook does that is registered in each step", _REGISTERED
    attribute, variable = _growing(run, there, Fact.ATTRIBUTE), _growing(run, left, Fact.VARIABLE)
    facts, items = run.analysis.facts, np.array([bool(_ITEM.search(text)) for text in run.recording.texts])
    in_lists = run.marked(facts.allocation[(facts.fact == Fact.VARIABLE) & items[facts.name]])
    if attribute:
        return f"a module adds it to its attribute `{attribute}`, and nothing empties that", _CLEARED
    kept = f" in `{variable}`" if variable else ""
    if 2 * run.bytes_of(there & saved & ~in_lists) > run.bytes_of(there):
        return f"it is the graph of results that the script keeps{kept}", _NUMBERS
    return f"the script keeps it{kept}" if kept else "nothing has freed it by the end of the recording", _NUMBERS


def _growing(run: TrainingRun, left: Mask, fact: Fact, *, items: bool = True) -> str:
    """The list of which most different items have ``fact``, among what is ``left``; empty if there is none.

    Without ``items`` it may also be a variable with different values.
    """
    facts = run.analysis.facts
    rows = (facts.fact == fact) & left[facts.allocation]
    pairs = np.unique(np.stack([facts.name[rows], facts.allocation[rows]]), axis=1).T.tolist()
    names = [run.text(name) for name, _ in pairs]
    lists = Counter(_ITEM.sub("", name) for name in names if not items or _ITEM.search(name))
    return next((name for name, count in lists.most_common(1) if count > 1), "")


def _new_parameters(run: TrainingRun, steps: Sequence[int]) -> Finding | None:
    """The finding that an optimizer's parameters, and their state if it has any, grow with every step."""
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    stays = lifetimes.died == ALIVE
    state, parameters = classes.of(Category.OPTIMIZER_STATE) & stays, classes.of(Category.PARAMETERS) & stays
    names = [record.name for record in run.recording.parameters if record.held]
    grown, growing = _grown(run, state | parameters), state if state.any() else parameters
    made = np.flatnonzero(growing & (lifetimes.step == steps[-1]))
    if not names or not len(made) or min(_grown(run, growing)) < NOTABLE_BYTES:
        return None
    last = int(made[-1])
    by = _made_by(run.text(lifetimes.op[last]), "", run.text(lifetimes.stack[last]).splitlines())
    return Finding(
        severity="warning",
        section=Section.TIMELINE,
        message=f"every step gives an optimizer new parameters: they {'and their state ' if state.any() else ''}took "
        f"{format_bytes(grown[-1])} more in the last one. The newest is `{names[-1]}`"
        f"{f', whose state {by} made' if by and state.any() else ''}.",
        bytes=grown[-1],
        change="add each parameter once, before the loop; make a new optimizer if the parameters are to be replaced",
        evidence=(_by_step(steps, grown),),
    )


def _nameless(steps: Sequence[int], grown: Sequence[int], once: str, *, own: bool) -> Finding:
    """The finding for growth of unknown place.

    ``own`` says that the recorded thread allocated it all, and ``once`` is the variable that held it once.
    """
    who = "its holder was not seen, so it may be another thread's or a library's, and need not be a leak."
    where = "look at what runs beside the training (loaders, threads, libraries)"
    if own:
        who = (
            "the recorded thread allocates it in ops that were not recorded; its holder was not seen, so it need not "
            "be a leak."
        )
        where = "look at what the training keeps outside of forward and backward (lists, dictionaries, caches)"
    if once:
        who = f"the variable `{once}` held it once; what holds it now was not seen, as the function of a hook."
        where = "look for a function that keeps it (a hook registered in each step)"
    return Finding(
        severity="info",
        section=Section.TIMELINE,
        message=f"memory of unknown origin grows with every step, in the last one by {format_bytes(grown[-1])}: {who}",
        bytes=grown[-1],
        change=f"{where}, and record more steps",
        evidence=(_by_step(steps, grown),),
    )


def _by_step(steps: Sequence[int], each: Sequence[int]) -> str:
    return f"left behind by steps {steps[0]} to {steps[-1]}: {', '.join(map(format_bytes, each))}"


def _left_behind(run: TrainingRun) -> dict[_Site, dict[int, int]]:
    """Bytes that were never freed, by place and step; without the block that stands for other threads.

    At most the growth of the place from the end of the step before: a batch loaded a step ahead is not freed in its
    step, but nothing grows.
    """
    places = _places(run)
    own = _own(run)
    growth, found = _growth(run, own, places), _never_freed(run, own, places)
    for place, by_step in found.items():
        for step, grown in zip(run.steps, growth[place], strict=True):
            by_step[step.index] = min(by_step.get(step.index, 0), grown)
    return found


def _held_at_the_end(run: TrainingRun) -> dict[_Site, dict[int, int]]:
    """Bytes known by their holder only, by holder and step.

    Holders are looked for at the end of the recording, so memory released before has none. Their growth in a step is at
    most that of all such memory together.
    """
    lifetimes = run.analysis.lifetimes
    nameless = (lifetimes.op == 0) & (lifetimes.module == 0) & (lifetimes.stack == 0)
    outside = _own(run) & nameless & np.isin(lifetimes.phase, (Phase.SETUP, Phase.DATA, Phase.BETWEEN))
    growth = _growth(run, outside, lambda allocation: _NAMELESS)[_NAMELESS]
    found = _never_freed(run, outside & (run.with_fact(Fact.HELD) > 0), _holders(run))
    for step, left in zip(run.steps, growth, strict=True):
        for by_step in sorted(found.values(), key=lambda by_step: -by_step.get(step.index, 0)):
            by_step[step.index] = min(by_step.get(step.index, 0), max(left, 0))
            left -= by_step[step.index]
    return found


def _own(run: TrainingRun) -> Mask:
    """The allocations of the recorded thread during the recording that training does not keep."""
    lifetimes, events = run.analysis.lifetimes, run.recording.events
    mine: Mask = events.action[lifetimes.born] == Action.ALLOC
    mine &= ~_meant(run) & (lifetimes.address != OTHER_THREADS)
    return mine


def _never_freed(run: TrainingRun, allocations: Mask, places: Callable[[int], _Site]) -> dict[_Site, dict[int, int]]:
    lifetimes, first = run.analysis.lifetimes, run.first_end
    found: dict[_Site, dict[int, int]] = {}
    for allocation in np.flatnonzero(allocations & (lifetimes.died == ALIVE) & (first < len(run.steps))).tolist():
        by_step = found.setdefault(places(allocation), {})
        step = run.steps[first[allocation]].index
        by_step[step] = by_step.get(step, 0) + int(lifetimes.bytes[allocation])
    return found


def _grown(run: TrainingRun, allocations: Mask) -> list[int]:
    """For each step from the second on, the growth of ``allocations`` from the end of the step before."""
    growth = _growth(run, allocations, _places(run))
    return [sum(column) for column in zip(*growth.values(), strict=True)][1:] or [0] * (len(run.steps) - 1)


def _meant(run: TrainingRun) -> Mask:
    classes = run.analysis.classes
    of_inputs = run.recording.naming(INPUT)[classes.name]
    meant: Mask = np.isin(classes.category, [CODES[name] for name in _MEANT_TO_STAY])
    meant &= ~(classes.of(Category.GRADIENTS) & of_inputs)
    return meant


def _growth(run: TrainingRun, allocations: Mask, places: Callable[[int], _Site]) -> defaultdict[_Site, list[int]]:
    """For each place the growth of its ``allocations`` in each step, from the end of the step before."""
    lifetimes, ends, first = run.analysis.lifetimes, run.step_ends, run.first_end
    gone = np.searchsorted(ends, lifetimes.died, side="right")  # the first step end at which it is dead
    gone[lifetimes.died == ALIVE] = len(ends)
    found: defaultdict[_Site, list[int]] = defaultdict(lambda: [0] * len(ends))
    for allocation in np.flatnonzero(allocations & (first < gone)).tolist():
        grown, size = found[places(allocation)], int(lifetimes.bytes[allocation])
        grown[first[allocation]] += size
        if gone[allocation] < len(ends):
            grown[gone[allocation]] -= size
    return found


def _places(run: TrainingRun) -> Callable[[int], _Site]:
    """A function that gives the place of an allocation."""
    lifetimes = run.analysis.lifetimes
    return lambda allocation: _Site(
        int(lifetimes.op[allocation]), int(lifetimes.module[allocation]), int(lifetimes.stack[allocation])
    )


def _holders(run: TrainingRun) -> Callable[[int], _Site]:
    """A function that gives the holder of an allocation: ``kept[0]`` and ``kept[1]`` belong to one list."""
    facts = run.analysis.facts
    rows = np.flatnonzero(facts.fact == Fact.HELD)
    names = dict(zip(facts.allocation[rows].tolist(), facts.name[rows].tolist(), strict=True))
    return lambda allocation: _Site(0, 0, 0, _KEY.sub("[*]", run.text(names[allocation])))


def _place_in_words(run: TrainingRun, place: _Site) -> str:
    if place.holder:
        return f"held by {place.holder}, allocated outside of forward, backward and update"
    return _made_by(run.text(place.op) or "unknown op", run.text(place.module), run.text(place.stack).splitlines())
