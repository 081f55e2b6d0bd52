"""Finds the category of each allocation by ordered rules: the first rule that matches decides.

A rule looks at the facts and lifetimes of all allocations at once and returns a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.jsonable import like
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.analysis.timeline.lifetimes import ALIVE, FOREVER, JoinedFacts, Lifetimes, Mask
from ampmem.analysis.timeline.marks import failure_ns, trains
from ampmem.analysis.timeline.predictions import kept_predictions
from ampmem.events import OTHER_THREADS, PLACED, Action, Column, Fact, ParameterRecord, Phase, Recording, StepRecord
from ampmem.vocabulary import SourceKind


def untrained(recording: Recording) -> frozenset[str]:
    """Names of the parameters that nothing trains; empty in a recording in which nothing is trained.

    A parameter is trained when an optimizer has it, or when a gradient of it was seen.
    """
    records = [record for record in recording.parameters if record.model]
    trained = trained_in(recording)
    if not records or not trained:
        return frozenset()
    models = {record.model for record in records if record.name in trained}
    outside = {record.name for record in records if record.model not in models}
    return frozenset(outside | _inside([record for record in records if record.model in models], trained))


def trained_in(recording: Recording) -> frozenset[str]:
    """Names of the parameters that an optimizer has or that had a gradient, and of all parameters in their memory."""
    facts = recording.facts
    names = {recording.texts[name] for name in np.unique(facts.name[facts.fact == Fact.GRADIENT])}
    names &= {record.name for record in recording.parameters}  # inputs may have gradients too
    names |= {record.name for record in recording.parameters if record.held or record.optimizer is not None}
    return frozenset(
        names | {record.shares for record in recording.parameters if record.name in names and record.shares}
    )


def _inside(records: Sequence[ParameterRecord], trained: frozenset[str]) -> set[str]:
    """Parameters below modules of a trained model that ran with gradients off only, or are copies and never ran.

    Such a module has several parameters: a single one may be a frozen layer that another module runs.
    """
    below: dict[str, list[ParameterRecord]] = {}
    for record in records:
        parts = record.name.split(".")
        for end in range(len(parts) - 1, 0, -1):  # the paths of its module and of all modules above it
            below.setdefault(".".join(parts[:end]), []).append(record)
    still = [path for path, mine in below.items() if not any(r.name in trained or r.in_graph for r in mine)]
    several = [path for path in still if len({record.name.rpartition(".")[0] for record in below[path]}) > 1]
    learned = {_shapes(path, mine) for path, mine in below.items() if any(r.name in trained for r in mine)}
    return {
        record.name
        for path in several
        if any(record.in_graph is False for record in below[path]) or _shapes(path, below[path]) in learned
        for record in below[path]
    }


def _shapes(path: str, records: Sequence[ParameterRecord]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The parameters below ``path``, each with its name there and its shape."""
    return tuple((record.name.removeprefix(path), record.shape) for record in records)


_PLACES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The columns that a rule may look at, one entry per allocation.

    ``facts`` has bit ``1 << fact`` set for every fact. ``step_end_ns`` is when the step of the birth ended,
    ``next_backward_ns`` when the first backward after the birth began, and ``failure_ns`` when memory ran out in the
    step of the birth and ended the run; ``FOREVER`` for never.
    """

    facts: Column
    elsewhere: Mask
    """Whether the allocation is the block that stands for the other threads."""
    unseen: Mask
    """Whether the phase of birth is unknown: born before the recording, or in a trace without phases."""
    phase: Column
    step: Column
    died_step: Column
    op: Column
    """Text id of the op that allocated."""
    line: Column
    """A number for the op, module and line of the script that allocated."""
    kernels: Mask
    """For each text whether it names an op of torch's own, not the autograd node of a Python function."""
    module: Column
    bytes: Column
    born_ns: Column
    died_ns: Column
    step_end_ns: Column
    next_backward_ns: Column
    failure_ns: Column
    predictions: Mask
    """Whether a variable keeps the memory of earlier batches of an evaluation, and more of it before each batch."""
    prefetched: Mask
    """Whether the memory is of the next step's batch, made before this step has ended."""
    untrained: Mask
    """Whether the memory belongs to untrained parameters only, in a run that trains a model."""
    last_step: int
    """Index of the last step that ended."""
    soon: int
    """How many steps after its own a temporary is dead: the output of inference is the input of the next step."""

    def has(self, *facts: Fact) -> Mask:
        """Which allocations have any of ``facts``."""
        mask: Mask = (self.facts & sum(1 << fact for fact in facts)) != 0
        return mask

    def born_in(self, *phases: Phase) -> Mask:
        """Which allocations were born in any of ``phases``."""
        return np.isin(self.phase, phases)

    def outlives(self, instant_ns: Column) -> Mask:
        """Which allocations are alive just before ``instant_ns``; none where that instant never comes."""
        mask: Mask = (instant_ns != FOREVER) & (self.died_ns >= instant_ns)
        return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule: ``applies`` says which allocations are in ``category``; ``names`` are their naming facts, best first."""

    category: Category
    names: tuple[Fact, ...]
    applies: Callable[[View], Mask]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The category code of each allocation, and the name and module (text ids) from the fact that decided."""

    category: Column
    name: Column
    module: Column

    def of(self, category: Category) -> Mask:
        """Which allocations are in ``category``."""
        mask: Mask = self.category == CODES[category]
        return mask


def having(fact: Fact) -> Callable[[View], Mask]:
    """The rule for all memory with a ``fact``, except memory that an earlier rule has decided."""
    return lambda view: view.has(fact)


def is_elsewhere(view: View) -> Mask:
    """The block of memory held by threads that are not recorded."""
    return view.elsewhere


def is_untrained(view: View) -> Mask:
    """Memory of parameters that nothing trains: an EMA of the weights, a teacher, an idle model."""
    return view.untrained & view.has(Fact.PARAMETER)


def is_gradient(view: View) -> Mask:
    """Memory that is, or becomes, a ``.grad``; not the batch, which has the indices of sparse gradients."""
    batch = view.has(Fact.INPUT) & view.born_in(Phase.SETUP, Phase.DATA, Phase.BETWEEN)
    return view.has(Fact.GRADIENT) & ~batch


def is_cached(view: View) -> Mask:
    """Memory that a module's attribute holds from before the last step, such as a mask made in the first forward."""
    return view.has(Fact.ATTRIBUTE) & ~view.has(Fact.INPUT) & (view.step < view.last_step)


def is_input(view: View) -> Mask:
    """The batch: a root module's arguments that no module made, the DataLoader's allocations, saved outside tensors.

    The next step's batch may be made before this step's backward.
    """
    made_by_module: Mask = view.born_in(Phase.FORWARD, Phase.EVALUATION) & (view.module != 0)
    given = view.has(Fact.INPUT) & ~made_by_module
    saved = view.has(Fact.SAVED) & view.born_in(Phase.SETUP, Phase.BETWEEN)
    return given | view.born_in(Phase.DATA) | saved | view.prefetched


def is_workspace(view: View) -> Mask:
    """A library's workspace, or scratch that an op of forward did not free within the step.

    cuBLAS has a workspace for each thread that multiplies matrices, and autograd's engine has threads of its own. So
    scratch kept by a node of backward is a workspace if it is as large as one of forward.
    """
    kept = (view.facts == 0) & view.outlives(view.step_end_ns)
    hidden: Mask = view.born_in(Phase.FORWARD, Phase.EVALUATION) & view.kernels[view.op] & kept
    again: Mask = view.born_in(Phase.BACKWARD) & kept & (view.op != 0) & np.isin(view.bytes, view.bytes[hidden])
    return view.has(Fact.WORKSPACE) | hidden | again


def is_activation(view: View) -> Mask:
    """Memory kept for backward: saved, recomputed, or still alive when backward starts or memory runs out."""
    until = np.minimum(view.next_backward_ns, view.failure_ns)
    waiting = view.born_in(Phase.FORWARD) & view.outlives(until)
    return view.has(Fact.SAVED, Fact.RECOMPUTED) | waiting


def is_idle(view: View) -> Mask:
    """Memory of a parameter in a module that did not run, in a run that trains a model."""
    return view.untrained & view.has(Fact.PARAMETER_COPY)


def is_held(view: View) -> Mask:
    """Memory that an object, such as a key-value cache, holds after a step of inference or the recording."""
    return view.has(Fact.HELD) & ~_is_newest(view) & ~_in_use(view)


def is_temporary(view: View) -> Mask:
    """Memory seen to be born and freed soon (in its step or the next ones), or in use when memory ran out.

    What is alive at the end is short-lived if such memory was so before.
    """
    return _freed_soon(view) | _is_newest(view) | _in_use(view)


def _in_use(view: View) -> Mask:
    """Memory of the phase in which memory ran out; variables of the frames that failed hold it, too."""
    return view.born_in(Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION) & view.outlives(view.failure_ns)


def _is_newest(view: View) -> Mask:
    """Memory that is alive at the end, but that the same line made and freed soon in an earlier step."""
    lasts: Mask = (view.died_ns == FOREVER) & (view.step >= view.last_step) & (view.op != 0) & ~view.unseen
    earlier = _freed_soon(view) & (view.step < view.last_step) & ~view.has(Fact.HELD)
    return lasts & np.isin(view.line, view.line[earlier])


def _freed_soon(view: View) -> Mask:
    # An evaluation before the first step is part of its first iteration, as that of a reference model.
    step = np.where(view.born_in(Phase.EVALUATION), np.maximum(view.step, 0), view.step)
    soon: Mask = (view.died_ns != FOREVER) & (view.died_step - step <= view.soon) & ~view.unseen
    return soon


RULES: tuple[Rule, ...] = (
    Rule(category=Category.OTHER, names=(), applies=is_elsewhere),
    Rule(category=Category.UNTRAINED, names=(Fact.PARAMETER,), applies=is_untrained),
    Rule(category=Category.MASTER_COPIES, names=(Fact.MASTER_COPY,), applies=having(Fact.MASTER_COPY)),
    Rule(category=Category.PARAMETERS, names=(Fact.PARAMETER,), applies=having(Fact.PARAMETER)),
    Rule(category=Category.GRADIENTS, names=(Fact.GRADIENT,), applies=is_gradient),
    Rule(category=Category.OPTIMIZER_STATE, names=(Fact.OPTIMIZER_STATE,), applies=having(Fact.OPTIMIZER_STATE)),
    Rule(category=Category.UNTRAINED, names=(Fact.PARAMETER_COPY,), applies=is_idle),
    # Of a module that did not run, in a run that trains nothing.
    Rule(category=Category.PARAMETERS, names=(Fact.PARAMETER_COPY,), applies=having(Fact.PARAMETER_COPY)),
    Rule(category=Category.BUFFERS, names=(Fact.BUFFER,), applies=having(Fact.BUFFER)),
    Rule(category=Category.BUFFERS, names=(Fact.ATTRIBUTE,), applies=is_cached),
    Rule(category=Category.COMMUNICATION, names=(Fact.COMMUNICATION,), applies=having(Fact.COMMUNICATION)),
    Rule(category=Category.CAST_COPIES, names=(Fact.CAST_COPY,), applies=having(Fact.CAST_COPY)),
    Rule(category=Category.INPUTS, names=(Fact.INPUT,), applies=is_input),
    Rule(category=Category.KEPT_PREDICTIONS, names=(), applies=lambda view: view.predictions),
    Rule(category=Category.WORKSPACE, names=(Fact.WORKSPACE,), applies=is_workspace),
    Rule(category=Category.ACTIVATIONS, names=(Fact.SAVED, Fact.RECOMPUTED), applies=is_activation),
    # What a collective was given or has filled, and nothing needs for another reason.
    Rule(category=Category.COMMUNICATION, names=(Fact.COLLECTIVE,), applies=having(Fact.COLLECTIVE)),
    Rule(category=Category.OTHER, names=(Fact.HELD,), applies=is_held),
    Rule(category=Category.TEMPORARIES, names=(Fact.SCRATCH,), applies=is_temporary),
)
"""The rules in order of precedence; an allocation that no rule matches is ``other``."""


def view_of(
    lifetimes: Lifetimes, facts: JoinedFacts, recording: Recording, untrained: frozenset[str] = frozenset()
) -> View:
    """The columns for the rules; ``untrained`` names the parameters that nothing trains."""
    phases, steps = recording.phases, recording.steps
    bits = np.zeros(len(lifetimes), dtype=np.int64)
    for fact in Fact:
        bits[facts.allocation[facts.fact == fact]] |= 1 << fact
    backward = np.append(phases.time_ns[phases.phase == Phase.BACKWARD], FOREVER)
    kept = kept_predictions(lifetimes, facts, recording)
    return like(
        View,
        lifetimes,
        facts=bits,
        elsewhere=lifetimes.address == OTHER_THREADS,
        unseen=_unseen(lifetimes, recording),
        line=_lines(lifetimes),
        kernels=np.array([text.startswith("aten::") for text in recording.texts], dtype=np.bool_),
        step_end_ns=_step_ends(lifetimes.step, steps),
        next_backward_ns=backward[np.searchsorted(backward, lifetimes.born_ns, side="left")],
        failure_ns=_failures(lifetimes, recording),
        predictions=np.logical_or.reduce(
            [np.zeros(len(lifetimes), dtype=np.bool_), *(each.allocations for each in kept)]
        ),
        prefetched=_prefetched(lifetimes, facts, recording),
        untrained=_untrained(lifetimes, facts, recording, untrained),
        last_step=max((record.index for record in steps if record.finished), default=0),
        soon=1 if trains(recording) else 2,
    )


def _prefetched(lifetimes: Lifetimes, facts: JoinedFacts, recording: Recording) -> Mask:
    """Which allocations are prefetched batches: made outside of modules and used by a later step only.

    The batch after the last step has no later step: it is recognised by the line that made earlier batches, or in a
    recording of one step by the size of that step's batch.
    """
    outside = np.isin(lifetimes.phase, (Phase.FORWARD, Phase.BETWEEN)) & (lifetimes.module == 0) & (lifetimes.step >= 0)
    ends = _step_ends(lifetimes.step, recording.steps)
    used = np.isin(facts.fact, (Fact.INPUT, Fact.SAVED))
    later = used & (facts.time_ns >= ends[facts.allocation])
    now, then = np.zeros((2, len(lifetimes)), dtype=np.bool_)
    now[facts.allocation[used & ~later]] = True
    then[facts.allocation[later]] = True
    line = _lines(lifetimes)
    before = now & np.isin(lifetimes.phase, (Phase.SETUP, Phase.BETWEEN))
    before[facts.allocation[facts.fact == Fact.PARAMETER]] = False
    loads = np.isin(recording.texts, _LOADS)[lifetimes.op] & (lifetimes.died == ALIVE) & (len(recording.steps) == 1)
    again = loads & np.isin(lifetimes.bytes, lifetimes.bytes[before])
    fetched: Mask = outside & ~now & (np.isin(line, line[outside & ~now & then]) | again)
    return fetched


_LOADS = tuple(f"aten::{op}" for op in ("_to_copy", "rand", "randn", "randint", "stack"))
"""Ops that make a batch."""


def _lines(lifetimes: Lifetimes) -> Column:
    """For each allocation a number for the line of code that made it: equal numbers, equal op, module and stack."""
    # Without stacks the size stands for the line.
    size = np.where(lifetimes.stack == 0, lifetimes.bytes, 0)
    where = np.stack([lifetimes.op, lifetimes.module, lifetimes.phase, lifetimes.stack, size])
    return np.unique(where, axis=1, return_inverse=True)[1].reshape(-1)


def _unseen(lifetimes: Lifetimes, recording: Recording) -> Mask:
    """The allocations alive when the recording started; in a snapshot also those without a stack or phase."""
    before: Mask = recording.events.action[lifetimes.born] == Action.BASELINE
    if recording.run.source != SourceKind.SNAPSHOT:
        return before
    without_stack = (lifetimes.stack == 0) & (lifetimes.op == 0)
    no_phases = not np.isin(recording.phases.phase, _PLACES).any()
    unseen: Mask = before | ((lifetimes.phase == Phase.BETWEEN) & (without_stack | no_phases))
    return unseen


def _untrained(lifetimes: Lifetimes, facts: JoinedFacts, recording: Recording, names: frozenset[str]) -> Mask:
    """Which allocations are of parameters that are all in ``names``, or of modules that never ran.

    A parameter that was freed and has no record lived within a step, as that of a copy of the model that ran once.
    """
    trained = trained_in(recording)
    if not trained:
        return np.zeros(len(lifetimes), dtype=np.bool_)
    alive = (facts.fact == Fact.PARAMETER) & (lifetimes.died[facts.allocation] == ALIVE)
    seen = np.unique(facts.name[alive | (facts.fact == Fact.GRADIENT)])
    trained |= {recording.texts[name] for name in seen} - names
    trained |= {record.name for record in recording.parameters} - names
    ids = [index for index, text in enumerate(recording.texts) if text in trained]
    mine: Mask = np.ones(len(lifetimes), dtype=np.bool_)
    mine[facts.allocation[(facts.fact == Fact.PARAMETER) & np.isin(facts.name, ids)]] = False
    return mine


def _failures(lifetimes: Lifetimes, recording: Recording) -> Column:
    """The instant in ns at which memory ran out in each allocation's step, after its birth, and ended the run."""
    failed = failure_ns(recording)
    if failed is None:
        return np.full(len(lifetimes), FOREVER, dtype=np.int64)
    phases = recording.phases
    # What an earlier batch of an evaluation has left is not in use.
    last = phases.time_ns[phases.phase == Phase.EVALUATION].max(initial=0)
    mine = (lifetimes.born_ns >= recording.steps[-1].start_ns) & (lifetimes.born_ns <= failed)
    mine &= (lifetimes.phase != Phase.EVALUATION) | (lifetimes.born_ns >= last)
    return np.where(mine, failed, FOREVER)


def _step_ends(step: Column, steps: Sequence[StepRecord]) -> Column:
    """The end of each allocation's step in ns; ``FOREVER`` for a step that did not end."""
    if not steps:
        return np.full(len(step), FOREVER, dtype=np.int64)
    index = np.array([record.index for record in steps], dtype=np.int64)
    ends = np.array([record.end_ns for record in steps], dtype=np.int64)
    order = np.argsort(index)
    place = np.minimum(np.searchsorted(index[order], step), len(index) - 1)
    return np.where(index[order][place] == step, ends[order][place], FOREVER)


def classify(view: View, facts: JoinedFacts) -> Classes:
    """The category of every allocation."""
    count = len(view.facts)
    category = np.full(count, CODES[Category.OTHER], dtype=np.int64)
    name = np.zeros(count, dtype=np.int64)
    module = np.zeros(count, dtype=np.int64)
    undecided = np.ones(count, dtype=np.bool_)
    for rule in RULES:
        mine = undecided & rule.applies(view)
        category[mine] = CODES[rule.category]
        undecided &= ~mine
        for fact in reversed(rule.names):
            first = _first_of(fact, facts, count)
            named = mine & (first != ALIVE)
            name[named] = facts.name[first[named]]
            if fact not in PLACED:
                module[named] = facts.module[first[named]]
    return Classes(category=category, name=name, module=module)


def _first_of(fact: Fact, facts: JoinedFacts, count: int) -> Column:
    """Index of each allocation's first ``fact`` in ``facts``; -1 if it has none."""
    first = np.full(count, ALIVE, dtype=np.int64)
    rows = np.flatnonzero(facts.fact == fact)[::-1]
    first[facts.allocation[rows]] = rows  # numpy keeps the last of repeated indices: the earliest fact
    return first
