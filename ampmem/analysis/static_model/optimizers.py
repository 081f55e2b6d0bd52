"""What each parameter's optimizer is known to keep of it: a model whose states are those that were seen.

A class is known by its name, but a name is no proof: another library's ``AdamW`` may keep something else. So a known
model is taken for a parameter only when the states seen of it are the model's, in type too. The groups of one optimizer
may have different options, so each parameter is asked for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ampmem.analysis.parameters import own_elements
from ampmem.analysis.static_model.evidence import ITEMSIZES, itemsize
from ampmem.analysis.static_model.states import SCALAR
from ampmem.analysis.static_model.static_model import (
    ADAFACTOR,
    ADAM_8BIT,
    OptimizerModel,
    StateTensor,
    adafactor_state,
    adam8bit_state,
    is_bitsandbytes,
    optimizer_forms,
    optimizer_model,
)
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.tensors import dtype_bytes
from ampmem.events import Column, Fact, OptimizerRecord, ParameterRecord
from ampmem.names import StateName

NONE = OptimizerModel(key="none", title="no optimizer of torch.optim", states=(), source="this recording")
"""Of a run in which none was seen: what the script updates with, if it does, keeps no state that is known."""

_AS_SEEN = "as-seen"
"""The key of a model that is made of what was seen of an optimizer, of which its name says nothing."""

_Sizes = dict[str, set["int | None"]]
"""By state, bytes per element; ``None`` for those of what is optimized, 0 for what has no whole number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizers:
    """The models of a run's optimizers: ``of`` by parameter, and ``default`` for those that no optimizer has."""

    of: Mapping[str, OptimizerModel]
    default: OptimizerModel
    titles: tuple[str, ...]
    """Of those in use, that of the first optimizer first."""

    def model_of(self, parameter: ParameterRecord) -> OptimizerModel:
        """The model of the optimizer that has ``parameter``."""
        return self.of.get(parameter.name, self.default)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What was seen of one parameter's state: all its keys, and the sizes of tensors that are no scalars, or may be."""

    keys: set[str] = field(default_factory=set)
    sizes: _Sizes = field(default_factory=dict)
    small: _Sizes = field(default_factory=dict)


def optimizers_of(history: MemoryHistory) -> Optimizers:
    """The model of each parameter that an optimizer has updated, or left out an update of."""
    recording = history.recording
    seen = _seen(history)
    stateless = _updated_with_a_gradient(history)
    of: dict[str, OptimizerModel] = {}
    default: OptimizerModel | None = None
    theirs: dict[int | None, list[ParameterRecord]] = {}
    for record in history.parameters:
        theirs.setdefault(record.optimizer, []).append(record)
    for index, optimizer in enumerate(recording.optimizers):
        mine = theirs.get(index, [])
        of |= _models(optimizer, mine, seen, stateless)
        default = default or _usual(of, mine)
    default = default or _unassigned(recording.optimizers)
    titles = dict.fromkeys((default.title, *(model.title for model in of.values())))
    return Optimizers(of=of, default=default, titles=tuple(titles))


def state_to_come(history: MemoryHistory, position: int, parameters: Collection[str]) -> int | None:
    """Bytes of optimizer state that the named trainable ``parameters`` do not have at ``position`` and will get.

    Goes by the classes of the optimizers and by the states seen; scalars such as ``step`` are left out. ``None`` where
    no optimizer is known, or not what it keeps.
    """
    recording = history.recording
    if not (recording.optimizers or recording.waiting):
        return None
    models, masters, there = _models_by_number(history), _masters(history), _states_at(history, position)
    size = 0
    for record in recording.parameters:
        if record.name not in parameters or record.optimizer not in models:
            continue
        model, keys = models[record.optimizer], there.get(record.name, set())
        if model is None:
            return None
        if model in (ADAFACTOR, ADAM_8BIT):
            size += 0 if keys else _whole_state(model, record)
        else:
            missing = tuple(state for state in model.states if state.name not in keys)
            per_element = replace(model, states=missing).bytes_per_element(masters.get(record.name, itemsize(record)))
            size += round(per_element * own_elements(record))
    return size


def _models_by_number(history: MemoryHistory) -> Mapping[int | None, OptimizerModel | None]:
    """What each optimizer keeps of a parameter once it has updated it, those that wait after those that stepped.

    In the middle of a first update the state of most parameters is all that tells; ``None`` where that says nothing.
    """
    recording, of = history.recording, optimizers_of(history).of
    found: dict[int | None, OptimizerModel | None] = {}
    for number, optimizer in enumerate((*recording.optimizers, *recording.waiting)):
        named = _named(optimizer)
        mine = [of[record.name] for record in recording.parameters if record.optimizer == number and record.name in of]
        most = max((named, *mine), key=lambda model: len(model.states))
        updated = any(marks.after_optimizer is not None for marks in history.marks)
        found[number] = None if most.key == _AS_SEEN and not (most.states and updated) else most
    return found


def _whole_state(model: OptimizerModel, record: ParameterRecord) -> int:
    if model == ADAM_8BIT:
        return adam8bit_state(own_elements(record))
    return adafactor_state(record.shape, itemsize(record)) if own_elements(record) else 0


def _states_at(history: MemoryHistory, position: int) -> Mapping[str, set[str]]:
    """By parameter the keys of its states that are alive at ``position``."""
    facts, texts = history.facts, history.recording.texts
    alive = history.lifetimes.alive_at(position)
    found: dict[str, set[str]] = {}
    for text in np.unique(facts.name[(facts.fact == Fact.OPTIMIZER_STATE) & alive[facts.allocation]]).tolist():
        name = StateName.read(texts[text])
        found.setdefault(name.parameter, set()).add(name.state)
    return found


def _unassigned(optimizers: Sequence[OptimizerRecord]) -> OptimizerModel:
    """What the first optimizer keeps where no parameter is known to be its."""
    if not optimizers:
        return NONE
    return _named(optimizers[0])


def _named(optimizer: OptimizerRecord) -> OptimizerModel:
    """What the names of its classes say, while no state of it has been seen."""
    classes = (optimizer.class_name, *optimizer.bases)
    named = optimizer_model(classes, optimizer.settings)
    if named is None or (named == ADAM_8BIT and not is_bitsandbytes(classes)):
        return _as_seen(optimizer, _Seen())
    return named


def _models(
    optimizer: OptimizerRecord, mine: Sequence[ParameterRecord], seen: Mapping[str, _Seen], stateless: frozenset[str]
) -> dict[str, OptimizerModel]:
    """The model of each of ``mine``, which ``optimizer`` has."""
    classes = (optimizer.class_name, *optimizer.bases)
    forms = optimizer_forms(classes)
    empty = next((form for form in forms if not form.states), None)
    found: dict[str, OptimizerModel] = {}
    _settle_small([seen[record.name] for record in mine if record.name in seen])
    for record in mine:
        state = seen.get(record.name, _Seen())
        known = [form for form in forms if _is_kept(form, state)]
        if known:
            found[record.name] = max(known, key=lambda form: len(form.states))
        elif state.sizes:
            found[record.name] = _as_seen(optimizer, state)
        elif empty is not None and not state.keys and record.name in stateless:
            found[record.name] = empty
    # What had no update yet, or is too small to tell its states from scalars, is taken to be like the others.
    largest = max(found.values(), key=lambda model: len(model.states), default=None)
    rest = largest or _named(optimizer)
    return {record.name: found.get(record.name, rest) for record in mine}


def _settle_small(states: Sequence[_Seen]) -> None:
    """A small tensor is a state where what has the same key and size per element is one for a larger parameter."""
    larger = {(key, size) for state in states for key, sizes in state.sizes.items() for size in sizes if size != 0}
    for state in states:
        for key, sizes in state.small.items():
            if all((key, size) in larger for size in sizes):
                state.sizes.setdefault(key, set()).update(sizes)


def _is_kept(form: OptimizerModel, state: _Seen) -> bool:
    """Whether the tensors seen are those of ``form``: each of its states is there, in its type."""
    if not state.keys & {part.name for part in form.states}:
        return False
    for part in form.states:
        # A size that is no whole number per element is no other type: it is left to the sums to tell.
        others = state.sizes.get(part.name, set()) - {None, 0}
        if part.elements and (part.name not in state.keys or (part.itemsize is None and others)):
            return False
    return True


def _as_seen(optimizer: OptimizerRecord, state: _Seen) -> OptimizerModel:
    """What ``optimizer`` was seen to keep of each element of a parameter."""
    states = tuple(
        StateTensor(name=key, elements=1.0, itemsize=next(iter(sizes)))
        for key, sizes in state.sizes.items()
        if len(sizes) == 1 and sizes <= {None, *ITEMSIZES}
    )
    title = f"{optimizer.class_name}, as seen"
    return OptimizerModel(key=_AS_SEEN, title=title, states=states, source="this recording")


def _usual(of: Mapping[str, OptimizerModel], mine: Sequence[ParameterRecord]) -> OptimizerModel | None:
    """The model that most elements of ``mine`` have."""
    elements: dict[str, int] = {}
    for record in mine:
        model = of[record.name]
        elements[model.title] = elements.get(model.title, 0) + own_elements(record)
    return max((of[record.name] for record in mine), key=lambda model: elements[model.title], default=None)


def _seen(history: MemoryHistory) -> dict[str, _Seen]:
    """The states of every parameter, by the facts of the whole recording."""
    recording, facts = history.recording, history.facts
    texts, masters = recording.texts, _masters(history)
    records = {record.name: record for record in history.parameters}
    rows = np.flatnonzero(facts.fact == Fact.OPTIMIZER_STATE)
    _, first = np.unique(facts.allocation[rows] * len(texts) + facts.name[rows], return_index=True)
    together = _elements_of_each(history, rows[first], records)
    seen: dict[str, _Seen] = {}
    for row in np.sort(rows[first]).tolist():
        name = StateName.read(texts[facts.name[row]])
        record, allocation = records.get(name.parameter), int(facts.allocation[row])
        if record is None:
            continue
        state = seen.setdefault(record.name, _Seen())
        state.keys.add(name.state)
        size = int(history.lifetimes.bytes[allocation])
        each, rest = divmod(size, together.get(allocation, 0) or 1)
        each = 0 if rest else each
        optimized = {itemsize(record), masters.get(record.name, 0)}
        sizes = state.sizes if size > SCALAR else state.small
        sizes.setdefault(name.state, set()).add(None if each and each in optimized else each)
    return seen


def _elements_of_each(history: MemoryHistory, rows: Column, records: Mapping[str, ParameterRecord]) -> dict[int, int]:
    """Elements of all that has a state in an allocation: several where one buffer holds the states of several."""
    facts, texts = history.facts, history.recording.texts
    elements: dict[int, int] = {}
    for row in rows.tolist():
        record = records.get(StateName.read(texts[facts.name[row]]).parameter)
        if record is not None:
            allocation = int(facts.allocation[row])
            elements[allocation] = elements.get(allocation, 0) + record.elements
    return elements


def _masters(history: MemoryHistory) -> dict[str, int]:
    """Bytes per element of the master copy of each parameter that has one."""
    facts, texts = history.recording.facts, history.recording.texts
    rows = np.flatnonzero(facts.fact == Fact.MASTER_COPY)
    return {texts[facts.name[row]]: dtype_bytes(texts[facts.dtype[row]]) or 4 for row in rows.tolist()}


def _updated_with_a_gradient(history: MemoryHistory) -> frozenset[str]:
    """The parameters of which a gradient was seen before an update that was done."""
    facts, texts = history.recording.facts, history.recording.texts
    done = [
        marks.after_optimizer
        for step, marks in zip(history.recording.steps, history.marks, strict=True)
        if marks.after_optimizer is not None and not step.skipped_update
    ]
    rows = (facts.fact == Fact.GRADIENT) & (facts.time_ns < max(done, default=0))
    return frozenset(texts[name] for name in np.unique(facts.name[rows]))
