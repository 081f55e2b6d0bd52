"""Findings about the training loop: what it keeps longer than needed, and what its updates allocate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TypeAlias

import numpy as np

from ampmem.analysis.findings.base import NOTABLE_BYTES, Finding, Section, TrainingRun, own_frame
from ampmem.analysis.parameters import own_elements
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, Mask
from ampmem.analysis.timeline.marks import PhaseRows, trains
from ampmem.analysis.timeline.predictions import kept_predictions
from ampmem.events import Action, Column, Fact, OptimizerRecord, Phase
from ampmem.names import FUNCTIONAL, shape_text
from ampmem.units import format_bytes, listed
from ampmem.vocabulary import Communication

_AT_ONCE = {"Adam": 2, "AdamW": 2}
"""Tensors of the parameter's size that an update with ``foreach=False`` has at once: the root of the second moment, and
the same divided by the bias correction. The denominator of the parameter before is alive too, as a local variable until
the next takes its place. Source: ``_single_tensor_adam`` of torch/optim/adam.py."""


_STATE_AT_ONCE = frozenset({"Adagrad"})
"""Optimizers that make their state before the first update."""


def foreach_temporaries(run: TrainingRun) -> Finding | None:
    """The run's peak is in a foreach update and contains the update's temporaries.

    The saving is the difference to the peak outside of all updates. Without temporaries (``fused``) an update needs no
    more than what it leaves behind; with ``foreach=False`` it handles one parameter at a time.
    """
    timeline = run.analysis.timeline
    temporaries = timeline.temporaries_by_phase(run.peak)["optimizer"]
    found = _updating(run)
    inside = _inside_updates(run)
    if found is None or not temporaries or not (run.peak_in(Phase.OPTIMIZER) if run.at_failure else inside[run.peak]):
        return None
    number, optimizer = found
    # At the failure the temporaries would not have been alive; at the peak, another instant may be the peak then.
    peak, outside = int(timeline.total[run.peak]), 0
    if not run.at_failure:
        start = timeline.position(run.steps[0].start_ns)
        end = timeline.position((run.unfinished or run.steps[-1]).end_ns)
        outside = int(timeline.total[start : end + 1][~inside[start : end + 1]].max(initial=0))
    most = temporaries if run.at_failure else peak - outside
    if not run.notable(most):
        return None
    choices: list[tuple[str, int]] = [("fused=True", most)] if optimizer.takes_fused else []
    if (one_by_one := _one_by_one(run, number, optimizer)) is not None:
        choices.append(("foreach=False", min(most, temporaries - one_by_one)))
    evidence = [f"{option}: {format_bytes(size)} less at the failure" for option, size in choices if size > 0]
    if not run.at_failure:
        if len(run.recording.optimizers) > 1:  # another optimizer's update may be the peak then
            most = run.off_peak(_temporaries_of(run, optimizer)) or 0
            choices = [(option, min(size, most)) for option, size in choices]
        evidence = [
            f"peak, in the update: {format_bytes(peak)}",
            f"largest total outside of updates: {format_bytes(outside)}",
            *(f"{option}: {_effect(size)}" for option, size in choices),
        ]
    best, saved = max(choices, key=lambda choice: choice[1], default=("foreach=False", 0))
    return Finding(
        section=Section.TIMELINE,
        message=f"{format_bytes(temporaries)} at {run.instant} are temporaries of {optimizer.class_name}'s foreach "
        "update.",
        bytes=temporaries,
        change=_setting(run, optimizer, best),
        evidence=tuple(evidence),
        off_peak=saved if saved > 0 else None,
    )


def _setting(run: TrainingRun, optimizer: OptimizerRecord, option: str) -> str:
    """Where to set ``option``: a state that the script loads before its first update has the setting of its run."""
    lifetimes, states = run.analysis.lifetimes, run.analysis.classes.of(Category.OPTIMIZER_STATE)
    there = run.recording.events.action[lifetimes.born] == Action.BASELINE
    if optimizer.class_name in _STATE_AT_ONCE or not (states & (lifetimes.phase == Phase.SETUP) & ~there).any():
        return f"{optimizer.class_name}(..., {option})"
    key, _, value = option.partition("=")
    return (
        f'group["{key}"] = {value} for each group in the param_groups of the state that the script loads, before '
        "optimizer.load_state_dict(...), which puts the saved setting back"
    )


def _temporaries_of(run: TrainingRun, optimizer: OptimizerRecord) -> Column:
    """For each allocation its bytes, if it is a temporary of an update by this class of optimizer."""
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    of_class = run.recording.naming(f"{optimizer.class_name}.step")
    mine = classes.of(Category.TEMPORARIES) & (lifetimes.phase == Phase.OPTIMIZER) & of_class[lifetimes.op]
    return np.where(mine, lifetimes.bytes, 0)


def _effect(saved: int) -> str:
    if abs(saved) < NOTABLE_BYTES:
        return "the same peak"
    return f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} at the peak"


def _updating(run: TrainingRun) -> tuple[int, OptimizerRecord] | None:
    """The optimizer, with its number, whose foreach update makes the peak; ``None`` if no foreach update does.

    The op of the temporaries names the class. Without such an op, as in a snapshot, all optimizers must use foreach.
    """
    records = run.recording.optimizers
    alive = run.analysis.lifetimes.alive_at(run.peak)
    mine = alive & run.analysis.classes.of(Category.TEMPORARIES) & (run.analysis.lifetimes.phase == Phase.OPTIMIZER)
    sizes: dict[str, int] = {}
    for allocation in np.flatnonzero(mine).tolist():
        name = run.text(run.analysis.lifetimes.op[allocation]).removesuffix(".step")
        sizes[name] = sizes.get(name, 0) + int(run.analysis.lifetimes.bytes[allocation])
    largest = max(sizes, key=lambda name: sizes[name], default="")
    named = [(number, record) for number, record in enumerate(records) if record.class_name == largest]
    rest = named if named else list(enumerate(records))
    return rest[0] if rest and all(record.implementation == "foreach" for _, record in rest) else None


def _one_by_one(run: TrainingRun, number: int, optimizer: OptimizerRecord) -> int | None:
    """The most bytes of temporaries that the update has with ``foreach=False``; ``None`` if unknown."""
    copies = _AT_ONCE.get(optimizer.class_name)
    if copies is None or (optimizer.bases or ("",))[-1] != "Optimizer":
        return None
    decay = optimizer.settings.get("weight_decay")
    copies += bool(decay) and optimizer.class_name == "Adam" and not optimizer.settings.get("decoupled_weight_decay")
    copies += bool(optimizer.settings.get("maximize"))
    sizes = [each.bytes for each in run.recording.parameters if each.trainable and each.optimizer in (None, number)]
    return max((copies * size + before for before, size in pairwise([0, *sizes])), default=0)


def _inside_updates(run: TrainingRun) -> Mask:
    """For each position whether it is inside an update; its end, when the temporaries are gone, is not inside."""
    updating = run.recording.events.phase == Phase.OPTIMIZER
    inside = np.zeros(len(updating) + 1, dtype=np.bool_)
    inside[1:-1] = updating[:-1] & updating[1:]
    return inside


_DROP = "drop the gradients before the next forward: "
_AUTOMATIC = (
    "/lightning/pytorch/loops/optimization/automatic.py",
    "/pytorch_lightning/loops/optimization/automatic.py",
)
"""The files in which Lightning calls the optimizer itself, so that the script has no line after the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """The gradients, one entry each; ``touched`` has (allocation, time) of every backward that wrote into one."""

    allocation: Column
    touched: tuple[Column, Column]


def gradients_through_forward(run: TrainingRun) -> Finding | None:
    """Gradients are alive in forward that no backward has written into since the last update, so nothing needs them.

    There are two causes. If ``zero_grad`` comes after forward, they are freed without being written again. If they are
    zeroed in place, the next backward writes into the same memory. The latter looks like accumulation over several
    backwards, which needs the memory, so it is a finding only if every step has one backward.
    """
    gradients = _gradients(run)
    late, kept = gradients.allocation[:0], gradients.allocation[:0]
    sizes, phases, (updates, _) = run.analysis.lifetimes.bytes, run.recording.phases, _updates(run)
    having = set(phases.step[phases.phase == Phase.FORWARD].tolist())
    # One step is enough, as all do the same, and its cost is fixed.
    last = [step.index for step in run.steps if step.index in having][-1:]
    for forward in (start for step in last for start in run.starts_in(step, Phase.FORWARD)):
        if not len(updates) or forward <= updates[0]:
            continue
        idle = gradients.allocation[_idle(run, gradients, forward)]
        again = np.isin(idle, gradients.touched[0][gradients.touched[1] > forward])
        freed = run.analysis.lifetimes.died[idle] != ALIVE
        if sizes[idle[~again & freed]].sum() > sizes[late].sum():
            late = idle[~again & freed]
        if _one_backward_per_step(run) and sizes[idle[again]].sum() > sizes[kept].sum():
            kept = idle[again]
    if len(late) == 0 and len(kept) == 0:
        return None
    if sizes[late].sum() >= sizes[kept].sum():
        how = "are still alive when forward starts, although the optimizer has used them already; they are freed later."
        return _gradients_finding(run, gradients, late, how, _DROP + _after_the_update(run, late))
    how = "stay alive from step to step, through forward: they are zeroed in place, or not at all."
    return _gradients_finding(
        run, gradients, kept, how, f"{_whose(run, kept)}.zero_grad(set_to_none=True) before forward"
    )


def _gradients_finding(run: TrainingRun, gradients: _Gradients, mine: Column, how: str, change: str) -> Finding:
    size = int(run.analysis.lifetimes.bytes[mine].sum())
    return Finding(
        section=Section.TIMELINE,
        message=f"{format_bytes(size)} of gradients {how}",
        bytes=size,
        change=change,
        evidence=(f"gradients: {len(mine)}", *run.largest(run.marked(mine))),
        off_peak=run.off_peak_of_spans(*_spans(run, gradients)),
    )


def _whose(run: TrainingRun, mine: Column) -> str:
    """The owner of the ``zero_grad`` that drops all gradients: an optimizer's leaves out what it does not update."""
    facts, texts, parameters = run.analysis.facts, run.recording.texts, run.recording.parameters
    if all(each.optimizer is None for each in parameters):
        return "optimizer"  # the recording does not say which optimizer updates what
    rows = (facts.fact == Fact.GRADIENT) & np.isin(facts.allocation, mine)
    names = {texts[name] for name in np.unique(facts.name[rows])}
    of_none = {each.name for each in parameters if each.optimizer is None and each.shares is None}
    return "model" if names & of_none else "optimizer"


def _after_the_update(run: TrainingRun, mine: Column) -> str:
    texts = (text.replace("\\", "/") for text in run.recording.texts)
    if any(file in text for text in texts for file in _AUTOMATIC):
        return "optimizer.zero_grad() in the LightningModule's optimizer_step, after super().optimizer_step(...)"
    if len(run.recording.optimizers) > 1:
        return "zero_grad() of every optimizer at the end of the step, after the last update"
    return f"{_whose(run, mine)}.zero_grad() right after optimizer.step()"


def _spans(run: TrainingRun, gradients: _Gradients) -> tuple[Column, Column, Column]:
    """The first and last position of every span in which a gradient is idle, and its bytes.

    A gradient is idle from the end of the first update after a backward wrote into it until the next backward has
    written or it is freed. With several optimizers it is idle from the end of the step's last update, where all
    gradients are dropped.
    """
    lifetimes, timeline = run.analysis.lifetimes, run.analysis.timeline
    mine = np.isin(gradients.touched[0], gradients.allocation)
    allocation = np.concatenate([gradients.allocation, gradients.touched[0][mine]])
    since = np.concatenate([lifetimes.born_ns[gradients.allocation], gradients.touched[1][mine]])
    order = np.lexsort((since, allocation))
    allocation, since = allocation[order], since[order]
    last = np.where(lifetimes.died == ALIVE, len(run.recording.events), lifetimes.died)[allocation]
    again = np.append(allocation[1:] == allocation[:-1], False)
    last[again] = timeline.time_ns.searchsorted(since[1:][again[:-1]], side="left")
    starts, ends = _updates(run)
    update = _dropped_after(run, starts)[np.searchsorted(starts, since, side="right")]
    first = timeline.time_ns.searchsorted(np.append(ends, FOREVER)[update], side="left") + 1
    # A gradient that was alive before the recording and dies before an update reads it was used earlier.
    there = run.recording.events.action[lifetimes.born[allocation]] == Action.BASELINE
    there[1:] &= allocation[1:] != allocation[:-1]
    used = there & (first > last) & (~again | _one_backward_per_step(run))
    first[used] = lifetimes.born[allocation[used]] + 1
    some = first <= last
    if len(run.recording.optimizers) > 1 and not _one_backward_per_step(run):
        some &= ~again  # a backward for another optimizer wrote into it before the step ended
    return first[some], last[some], lifetimes.bytes[allocation[some]]


def _dropped_after(run: TrainingRun, starts: Column) -> Column:
    """For each update the update after which the change drops its gradients; the number past the last means never."""
    updates = np.arange(len(starts))
    if len(run.recording.optimizers) > 1:
        ends = np.array([step.end_ns for step in run.recording.steps])
        step = ends.searchsorted(starts, side="left")
        updates = step.searchsorted(step, side="right") - 1
    return np.append(updates, len(starts))


def _updates(run: TrainingRun) -> tuple[Column, Column]:
    """The start and end of each update in ns. If a step calls a closure first, the update starts after it."""
    phases = run.recording.phases
    follows = np.append(phases.phase[1:], Phase.BETWEEN)
    update = (phases.phase == Phase.OPTIMIZER) & (follows != Phase.FORWARD) & (follows != Phase.BACKWARD)
    return phases.time_ns[update], np.append(phases.time_ns[1:], FOREVER)[update]


def _gradients(run: TrainingRun) -> _Gradients:
    """The gradients except shared memory that stays alive, such as buckets, whose other users are unknown."""
    facts = run.analysis.facts
    rows = np.flatnonzero(facts.fact == Fact.GRADIENT)
    named = rows[facts.name[rows] != 0]  # the first facts may come before the parameter's name is known
    pairs = np.unique(np.stack([facts.allocation[named], facts.name[named]]), axis=1)
    owners = np.bincount(pairs[0], minlength=len(run.analysis.lifetimes))
    phases = run.recording.phases
    # Facts before the first phase belong to no phase.
    phase = np.append(phases.phase, -1)[np.searchsorted(phases.time_ns, facts.time_ns[rows], side="right") - 1]
    written = rows[phase == Phase.BACKWARD]
    freed = run.analysis.lifetimes.died != ALIVE
    mine = np.flatnonzero(run.analysis.classes.of(Category.GRADIENTS) & ((owners <= 1) | freed))
    return _Gradients(allocation=mine, touched=(facts.allocation[written], facts.time_ns[written]))


def _idle(run: TrainingRun, gradients: _Gradients, forward: int) -> Mask:
    """Which gradients are alive at ``forward`` with an update since the last backward that wrote into them."""
    lifetimes = run.analysis.lifetimes
    alive = lifetimes.alive_at(run.analysis.timeline.position(forward))[gradients.allocation]
    last = lifetimes.born_ns.copy()
    allocation, time_ns = gradients.touched
    before = time_ns < forward
    np.maximum.at(last, allocation[before], time_ns[before])
    updates, _ = _updates(run)
    update = updates[np.searchsorted(updates, forward) - 1]
    idle: Mask = alive & (last[gradients.allocation] < update)
    return idle


def _one_backward_per_step(run: TrainingRun) -> bool:
    phases = run.recording.phases
    steps = phases.step[phases.phase == Phase.BACKWARD]
    index, count = np.unique(steps, return_counts=True)
    once = set(index[count == 1].tolist())
    return all(step.index in once for step in run.steps)


_CHANGE = (
    "del the variable (outputs, logits) once the loss is computed, if nothing reads it later; keep losses as numbers, "
    "loss.item()"
)
_SOMETHING = "variables of the script"
_OR_SCHEDULE = ", or the schedule of its pipeline"
_CHANGE_OF_PIPELINE = "del what the script holds (outputs, losses) after the update; what the schedule holds stays"
_NAMED = 3
"""The most variables that are named."""
_LIBRARIES = "/site-packages/"


_SHRUNK = "a number that PyTorch shrank from a full tensor, as mse_loss does, keeps the memory of the full tensor"


def outputs_kept(run: TrainingRun) -> Finding | None:
    """Results of forward are alive at the last step's peak although no backward needs them.

    From the start of the last backward in its step on, during which it is alive, a result that autograd did not save is
    not needed; one that it saved, from that backward's end on. Only results of notable size
    (:meth:`TrainingRun.notable`) that an op was seen to return count. There is no finding if the sums are wrong, since
    allocations that seem alive may be dead, nor if torch.func kept unknown tensors.
    """
    if not run.peaks or run.analysis.conservation.breach is not None or FUNCTIONAL in run.recording.notes:
        return None
    if run.at_failure and run.analysis.failed_request is not None and not run.analysis.failed_request.ended_the_run:
        return None  # the last step, which this finding is about, came later
    position = run.peak if run.at_failure else run.peaks[-1]
    unneeded, since = _unneeded(run)
    unneeded &= ~_unused_graph(run)
    kept = unneeded & (since <= position) & run.analysis.lifetimes.alive_at(position)
    size = run.bytes_of(kept)
    if not run.notable(size):
        return None
    held = _holders(run, unneeded)
    variables = _variables(run, held, kept)
    shown = variables[:_NAMED]
    dropped = _held_by(run, held, shown)
    names = [each.in_words(short=True) for each in shown]
    others = size - run.bytes_of(kept & dropped) >= NOTABLE_BYTES
    if names and (len(variables) > _NAMED or others):
        names.append("others")
    gone = unneeded & dropped if shown else unneeded
    return Finding(
        section=Section.ALLOCATIONS,
        message=f"{format_bytes(size)} of forward results are alive at {run.instant}, although backward does not "
        f"need them: they are held by {listed(names) or _SOMETHING}{_OR_SCHEDULE if run.pipelined else ''}.",
        bytes=size,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _change(shown),
        evidence=(*(f"{format_bytes(each.bytes)}: held by {each.in_words()}" for each in shown), *run.largest(kept)),
        off_peak=run.off_peak(run.analysis.lifetimes.bytes * gone, since, place=len(run.steps) - 1),
        # What no variable is seen to hold may be held by the graph of one that is named.
        least=bool(names) and others and bool((kept & ~_held_by_variables(run, held)).any()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    """A variable of the script that holds ``bytes``, and where it was assigned; line 0 if unknown."""

    name: str
    file: str
    line: int
    function: str
    bytes: int
    number: bool
    """Whether the variable is a single number, such as a loss, that holds the memory of a larger tensor."""

    def in_words(self, *, short: bool = False) -> str:
        """The variable and its assignment in words; ``short`` leaves out the folders of its file."""
        file = self.file.replace("\\", "/").rpartition("/")[2] if short else self.file
        where = f"{file}:{self.line}" if self.line else file
        if self.function.startswith("<"):
            return f"the variable `{self.name}` ({where})"
        return f"the local variable `{self.name}` of {self.function} ({where})"

    @property
    def is_item(self) -> bool:
        """Whether the variable is an item of a dictionary, such as a model's output, which may hold the loss, too."""
        return self.name.endswith("']") and _LIBRARIES not in self.file.replace("\\", "/")

    @property
    def dropped(self) -> str:
        """The variable to delete in the script; empty for an item, and in a library's code."""
        if "[" in self.name or _LIBRARIES in self.file.replace("\\", "/"):
            return ""
        root, _, _ = self.name.partition(".")
        return self.name if root == "self" else root


_Held: TypeAlias = Sequence[tuple[str, str, int, bool]]
"""(name, place, allocation, whether the variable is a single number) of each variable that holds an allocation."""


def _holders(run: TrainingRun, mine: Mask) -> _Held:
    """The variables that hold the allocations in ``mine``: for each, those that the latest look at the script found."""
    facts = run.analysis.facts
    about = (facts.fact == Fact.VARIABLE) & mine[facts.allocation]
    last = np.zeros(len(mine), dtype=np.int64)
    np.maximum.at(last, facts.allocation[about], facts.time_ns[about])
    rows = np.flatnonzero(about & (facts.time_ns == last[facts.allocation]))
    columns = (facts.name[rows], facts.module[rows], facts.allocation[rows], facts.shape[rows])
    found = np.unique(np.stack(columns), axis=1).T.tolist()
    return [(run.text(n), run.text(m), allocation, run.text(s) == shape_text(())) for n, m, allocation, s in found]


def _variables(run: TrainingRun, held: _Held, kept: Mask) -> list[_Variable]:
    """The variables that hold allocations in ``kept``, the largest first."""
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    for name, place, allocation, _ in held:
        if kept[allocation]:
            sizes.setdefault((name, place), {})[allocation] = int(run.analysis.lifetimes.bytes[allocation])
    numbers = {(name, place) for name, place, allocation, number in held if number and kept[allocation]}
    found = [
        _variable(name, place, sum(each.values()), number=(name, place) in numbers)
        for (name, place), each in sizes.items()
        if sum(each.values()) >= NOTABLE_BYTES
    ]
    return sorted(found, key=lambda each: (-each.bytes, each.name, each.line))


def _held_by_variables(run: TrainingRun, held: _Held) -> Mask:
    """The allocations that any variable was seen to hold."""
    return run.marked([allocation for _, _, allocation, _ in held])


def _held_by(run: TrainingRun, held: _Held, shown: Sequence[_Variable]) -> Mask:
    """The allocations that only the variables in ``shown`` hold."""
    names = {(each.name, (each.file, each.function)) for each in shown}
    mine = _held_by_variables(run, held)
    mine[[allocation for name, place, allocation, _ in held if (name, _scope(place)) not in names]] = False
    return mine


def _scope(place: str) -> tuple[str, str]:
    """The file and the function of ``place``, whose line depends on when the script was looked at."""
    where, _, function = place.rpartition(" ")
    return where.rpartition(":")[0], function.rpartition("<locals>.")[2]


def _variable(name: str, place: str, size: int, *, number: bool) -> _Variable:
    (file, function), line = _scope(place), place.rpartition(" ")[0].rpartition(":")[2]
    return _Variable(
        name=name, file=file, line=int(line) if line.isdigit() else 0, function=function, bytes=size, number=number
    )


def _change(variables: Sequence[_Variable]) -> str:
    if not variables:
        return _CHANGE
    if all(each.number for each in variables):
        names = list(dict.fromkeys(each.name for each in variables))
        return f"{'; '.join(f'{name} = {name} * 1' for name in names)} before backward: {_SHRUNK}"
    deleted = list(dict.fromkeys(each.dropped for each in variables if each.dropped))
    items = list(dict.fromkeys(each.name for each in variables if each.is_item))
    others = list(dict.fromkeys(f"`{each.name}`" for each in variables if not (each.dropped or each.is_item)))
    ways = [f"del {', '.join(deleted)}" if deleted else "", *(f"{name} = None" for name in items)]
    what = listed([*filter(None, ways), *([f"drop {listed(others)}"] if others else [])])
    return f"{what} after the loss, if nothing reads {'it' if len(deleted + items + others) == 1 else 'them'} later"


def _unneeded(run: TrainingRun) -> tuple[Mask, Column]:
    """The results of forward that outlive their use, and for each the position from which on nothing needs it."""
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    made = (lifetimes.phase == Phase.FORWARD) & (lifetimes.step >= 0) & (run.with_fact(Fact.OUTPUT) > 0)
    made &= classes.of(Category.ACTIVATIONS) | classes.of(Category.TEMPORARIES)
    since_ns, used = _last_use(run)
    made &= (since_ns != FOREVER) & (lifetimes.died_ns > since_ns) & ~used
    # An allocation of an earlier step that never dies is a leak, which is another finding.
    made &= (lifetimes.died != ALIVE) | (lifetimes.step == run.steps[-1].index)
    return made, run.analysis.timeline.positions(since_ns) + 1


def _last_use(run: TrainingRun) -> tuple[Column, Mask]:
    """When each allocation is last needed in its step, in ns, and whether a later step uses it, such as a state.

    That is in the last backward that ends while it is alive; without one, ``FOREVER``, or after the step the step's
    end.
    """
    lifetimes, facts, steps = run.analysis.lifetimes, run.analysis.facts, run.steps
    backwards = PhaseRows(run.recording.phases).backwards()
    starts, ends = (
        np.array([0, *times], dtype=np.int64) for times in (zip(*backwards, strict=True) if backwards else ((), ()))
    )
    step_ends = np.array([*(step.end_ns for step in steps), FOREVER], dtype=np.int64)
    step_end = step_ends[np.searchsorted(step_ends, lifetimes.born_ns, side="left")]
    last = np.searchsorted(ends, np.minimum(lifetimes.died_ns, step_end), side="right") - 1
    # Backward needs to its end what autograd saved, and the loss, which no variable may hold.
    until_the_end = run.ever_kept_by_autograd | (lifetimes.bytes < NOTABLE_BYTES)
    since = np.where(until_the_end, ends[last], starts[last])
    # What a later backward frees is part of a graph that was retained for it.
    freed_in = np.searchsorted(starts, lifetimes.died_ns, side="right") - 1
    since[(freed_in > last) & (lifetimes.died_ns < ends[freed_in])] = FOREVER
    since = np.where(
        starts[last] >= lifetimes.born_ns, since, np.where(lifetimes.died_ns > step_end, step_end, FOREVER)
    )
    later = np.isin(facts.fact, (Fact.SAVED, Fact.INPUT)) & (facts.time_ns > step_end[facts.allocation])
    return since, run.marked(facts.allocation[later])


def no_grad_missing(run: TrainingRun) -> Finding | None:
    """Forwards saved results for a backward that never came, as an evaluation without ``torch.no_grad()`` does."""
    graph, lifetimes = _unused_graph(run), run.analysis.lifetimes
    alive, at = _alive(run, graph)
    if not alive.any():
        return None
    stacks = np.unique(lifetimes.stack[graph & (lifetimes.module != 0)]).tolist()
    frames = zip(*(run.text(stack).splitlines() for stack in stacks), strict=False)
    common = takewhile(lambda frame: frame.count(frame[0]) == len(frame), frames)
    calls = [frame for frame, *_ in common if not frame.endswith(".forward")]  # the script's call of its model
    where, _, function = own_frame(calls or [""]).replace("\\", "/").rpartition("/")[2].partition(" ")
    line = f"the forward at {where}{f' in {function}' if function.isidentifier() else ''}" if where else "a forward"
    # Without a graph a result is freed once the next one is made; a cast copy, when its autocast region is left.
    over = _phase_ends(run)
    chain = np.flatnonzero(graph & ~run.analysis.classes.of(Category.CAST_COPIES))
    over[chain[:-2]] = lifetimes.born_ns[chain[2:]]
    held = run.with_fact(Fact.VARIABLE) > 0  # those stay
    return Finding(
        severity="advice",
        section=Section.ACTIVATIONS,
        message=f"{format_bytes(run.bytes_of(alive))} at {at} are activations that no backward uses: {line} ran with "
        "gradients on.",
        bytes=run.bytes_of(alive),
        change=f"with torch.no_grad(): around {line}",
        evidence=run.largest(alive),
        off_peak=run.off_peak(lifetimes.bytes * (graph & ~held), run.analysis.timeline.positions(over)),
        least=True,
    )


def _unused_graph(run: TrainingRun) -> Mask:
    """What forwards saved through which no backward ran: none freed it, and none allocated for its lines.

    Each forward counts as a whole, so a part of a model whose result the loss leaves out is none; nor is a step that
    was skipped, whose lines other steps went through backward with.
    """
    lifetimes, classes, facts = run.analysis.lifetimes, run.analysis.classes, run.analysis.facts
    phases, lines = run.recording.phases, lifetimes.stack[(lifetimes.phase == Phase.BACKWARD) & (lifetimes.stack != 0)]
    saved = (run.with_fact(Fact.SAVED) > 0) & (lifetimes.phase == Phase.FORWARD)
    saved &= classes.of(Category.ACTIVATIONS) | classes.of(Category.CAST_COPIES)
    row = np.searchsorted(phases.time_ns, lifetimes.died_ns, side="right") - 1
    freed_in = np.append(phases.phase, Phase.SETUP)[row]
    used = saved & ((freed_in == Phase.BACKWARD) | np.isin(lifetimes.stack, lines))
    if FUNCTIONAL in run.recording.notes or (trains(run.recording) and not len(lines)):
        used = saved
    starts = np.unique(facts.time_ns[facts.fact == Fact.INPUT])
    call = np.searchsorted(starts, lifetimes.born_ns)
    unused: Mask = saved & ~np.isin(call, call[used])
    return unused


def _alive(run: TrainingRun, mine: Mask) -> tuple[Mask, str]:
    """The allocations of ``mine`` at the peak, or if there are none, where they take the most; and that instant."""
    alive = mine & run.analysis.lifetimes.alive_at(run.peak)
    if alive.any():
        return alive, run.instant
    return mine & run.analysis.lifetimes.alive_at(run.most_alive(run.analysis.lifetimes.bytes * mine)), "their most"


_EVALUATION_OF_TRAINER = "Trainer.evaluation_loop"
"""The function of Hugging Face's Trainer that keeps what each batch of an evaluation returned, for its metrics."""
_CHANGE_OF_TRAINER = (
    "TrainingArguments(eval_accumulation_steps=1), which moves the results of each batch to the CPU; "
    "Trainer(preprocess_logits_for_metrics=...) keeps less of them"
)


def predictions_kept(run: TrainingRun) -> Finding | None:
    """A variable keeps the results of each batch of an evaluation, so memory grows with each batch.

    The saving is a lower bound: what is made of them after the last batch would be gone, too.
    """
    lifetimes, mine = run.analysis.lifetimes, run.analysis.classes.of(Category.KEPT_PREDICTIONS)
    alive, at = _alive(run, mine)
    if not alive.any():
        return None
    kept = kept_predictions(lifetimes, run.analysis.facts, run.recording)
    most = max(kept, key=lambda each: run.bytes_of(alive & each.allocations))
    variable = _variable(most.name, most.place, run.bytes_of(alive & most.allocations), number=False)
    since = run.analysis.timeline.positions(_phase_ends(run)) + 1
    change = f"compute the metric for each batch and keep its number, not `{most.name}`"
    if most.place.endswith(_EVALUATION_OF_TRAINER):
        change = _CHANGE_OF_TRAINER
    elif run.recording.run.device_type != "cpu":
        change = f"move each result to the CPU before it is kept (.cpu()), or {change}"
    return Finding(
        severity="advice",
        section=Section.ALLOCATIONS,
        message=f"{format_bytes(run.bytes_of(alive))} at {at} are results of earlier batches of an evaluation: "
        f"{variable.in_words(short=True)} keeps them, {format_bytes(most.grown)} more with each batch.",
        bytes=run.bytes_of(alive),
        change=change,
        evidence=(f"{format_bytes(variable.bytes)}: held by {variable.in_words()}", *run.largest(alive)),
        off_peak=run.off_peak(
            lifetimes.bytes * mine, np.where(lifetimes.phase == Phase.BETWEEN, lifetimes.born + 1, since)
        ),
        least=True,
    )


def reduce_buckets(run: TrainingRun) -> Finding | None:
    """The buckets of DistributedDataParallel are alive beside the gradients, which could be views of them.

    Then the buckets, which stay, are the gradients' memory. That is known if they have room for all gradients.
    """
    buckets, gradients = _for(run, Communication.REDUCE_BUCKETS), run.analysis.classes.of(Category.GRADIENTS)
    sizes = np.where(gradients, run.analysis.lifetimes.bytes, 0)
    most = run.bytes_of(gradients & run.analysis.lifetimes.alive_at(run.most_alive(sizes)))
    size = run.bytes_of(buckets & run.analysis.lifetimes.alive_at(run.peak))
    if not size:
        return None
    # New gradients, as those of a layer's weight and bias, are copied into a bucket and freed before backward makes the
    # next but one, or ends.
    since, born = run.analysis.timeline.positions(_phase_ends(run)), run.analysis.lifetimes.born[gradients]
    since[gradients] = np.minimum(since[gradients], np.append(born, [since.max(initial=0)] * 2)[2:] + 1)
    return Finding(
        section=Section.PEAK,
        message=f"{format_bytes(size)} at {run.instant} are the buckets in which DistributedDataParallel reduces the "
        "gradients, beside the gradients themselves.",
        bytes=size,
        change="DistributedDataParallel(..., gradient_as_bucket_view=True): the gradients are views of the buckets",
        evidence=run.largest(buckets & run.analysis.lifetimes.alive_at(run.peak)),
        off_peak=run.off_peak(sizes, since) if most <= size else None,
        least=True,
    )


def unreduced_gradients(run: TrainingRun) -> Finding | None:
    """Whole gradients of sharded parameters outlive the backward that made them, since it does not reduce them."""
    lifetimes, ends = run.analysis.lifetimes, _phase_ends(run)
    whole = _for(run, Communication.UNSHARDED_GRADIENTS) & (lifetimes.died_ns > ends)
    kept = whole & lifetimes.alive_at(run.peak)
    size = run.bytes_of(kept)
    if not size:
        return None
    shards = sum(record.bytes for record in run.recording.parameters if record.trainable)
    return Finding(
        section=Section.PEAK,
        message=f"{format_bytes(size)} at {run.instant} are whole gradients of sharded parameters, which a backward "
        "under set_requires_gradient_sync(False), or no_sync(), leaves unreduced: each rank has them in full.",
        bytes=size,
        change="leave out set_requires_gradient_sync(False): then each micro-batch reduces its gradients, which takes "
        "communication, and each rank keeps its share of them",
        evidence=run.largest(kept),
        # If no backward reduces, no update has gradients, and the change would also make the optimizer's state.
        off_peak=run.off_peak(
            np.where(whole, lifetimes.bytes, 0), run.analysis.timeline.positions(ends) + 1, but=shards
        )
        if run.analysis.classes.of(Category.GRADIENTS).any()
        else None,
        least=True,
    )


def _phase_ends(run: TrainingRun) -> Column:
    """For each allocation the end of the phase in which it was made, in ns; ``FOREVER`` for the last phase."""
    phases = run.recording.phases.time_ns
    ends: Column = np.append(phases, FOREVER)[np.searchsorted(phases, run.analysis.lifetimes.born_ns, side="right")]
    return ends


def _for(run: TrainingRun, purpose: Communication) -> Mask:
    """The allocations for this purpose of communication."""
    return run.analysis.classes.of(Category.COMMUNICATION) & run.recording.naming(purpose)[run.analysis.classes.name]


def state_not_there_yet(run: TrainingRun) -> Finding | None:
    """The loss scaler skipped every update, so the optimizer state is still to come.

    An optimizer that was never called is unknown, and so is its state.
    """
    steps = run.steps
    if not steps or not all(step.skipped_update for step in steps):
        return None
    if run.live(Category.OPTIMIZER_STATE, run.analysis.timeline.position(steps[-1].end_ns)):
        return None
    to_come = _modelled(run)
    if run.recording.optimizers and to_come == 0:
        return None
    come = f"{format_bytes(to_come)} of it" if to_come else "all of it (Adam: 8 bytes per parameter)"
    return Finding(
        severity="info",
        section=Section.STATIC_MODEL,
        message=f"the loss scaler has skipped every update so far, so there is no optimizer state yet: {come} will "
        "come with the first update that is not skipped.",
        bytes=to_come or None,
        change="record more steps: ampmem profile --steps N, until an update is not skipped",
        evidence=(f"skipped updates: {len(steps)} of {len(steps)} steps",),
    )


def _modelled(run: TrainingRun) -> int:
    """The bytes of optimizer state that the static model has for the trained parameters."""
    verdict = run.analysis.verdict
    parts = () if verdict is None or verdict.step not in [step.index for step in run.steps] else verdict.components
    per_element = [part.model_bytes_per_param for part in parts if part.component == str(Category.OPTIMIZER_STATE)]
    trained = sum(own_elements(record) for record in run.recording.parameters if record.trainable)
    return round(per_element[-1] * trained) if per_element else 0
