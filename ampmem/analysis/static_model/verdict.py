"""The static model against a run: the recipe that fits, and every byte by which the run differs from it.

The model is a recipe times the number of parameters; the measured sizes are the categories at a mark. The terms between
them are computed from what the hooks saw of each parameter (its type, optimizer, gradient and copies), never from the
difference itself. So the residual is a real check: it is 0 only if the terms account for every byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Annotated

import numpy as np

from ampmem.analysis.casts import CastLedger
from ampmem.analysis.jsonable import OneOf, Signed
from ampmem.analysis.parameters import own_bytes, own_elements
from ampmem.analysis.static_model.evidence import (
    ITEMSIZES,
    Evidence,
    credit,
    evidence_at,
    itemsize,
    with_a_gradient_at_update,
)
from ampmem.analysis.static_model.explain import (
    SCALAR,
    Term,
    TermKind,
    TermSums,
    cast_terms,
    gradient_terms,
    master_terms,
    parameter_terms,
    state_terms,
)
from ampmem.analysis.static_model.recipes import (
    ADAFACTOR,
    ADAM_8BIT,
    AUTOCAST,
    COMPONENTS,
    FP32,
    HALF_MASTER,
    HALF_MASTER_FP32_ACCUMULATION,
    HALF_MASTER_FP32_GRADIENTS,
    PURE_HALF,
    OptimizerModel,
    PrecisionModel,
    StateTensor,
    adafactor_state,
    adam8bit_state,
    is_bitsandbytes,
    optimizer_forms,
    optimizer_model,
)
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import dtype_bytes
from ampmem.analysis.timeline.marks import trains
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import Column, Fact, OptimizerRecord, ParameterRecord, Recording
from ampmem.names import NOT_KNOWN, StateName, shape_of
from ampmem.units import format_count
from ampmem.vocabulary import AUTOCAST_PRECISIONS, STEP_MARKS, Mark, Precision, SourceKind

NONE = OptimizerModel(key="none", title="no torch.optim optimizer", states=(), source="this recording")
"""The model if no optimizer was seen: whatever updates the parameters has no known state."""

_AS_SEEN = "as-seen"
"""The key of a model made from an optimizer's state as it was seen, as its class is unknown."""

_Sizes = dict[str, set["int | None"]]
"""By state, bytes per element; ``None`` for the optimized tensor's own, 0 if not a whole number in a shared buffer."""

_OTHER_SHAPE = -1
"""The size of a state whose tensor has not as many elements as its parameter, such as a low-rank moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerModels:
    """The models of a run's optimizers: ``of`` by parameter, and ``default`` for parameters without an optimizer."""

    of: Mapping[str, OptimizerModel]
    default: OptimizerModel
    titles: tuple[str, ...]
    """The titles of the models in use, the first optimizer's first."""

    def model_of(self, parameter: ParameterRecord) -> OptimizerModel:
        """The model of the optimizer of ``parameter``."""
        return self.of.get(parameter.name, self.default)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The optimizer state seen of one parameter: its keys, and by key the sizes of large and of ``small`` tensors."""

    keys: set[str] = field(default_factory=set)
    sizes: _Sizes = field(default_factory=dict)
    small: _Sizes = field(default_factory=dict)


def optimizers_of(history: MemoryHistory) -> OptimizerModels:
    """The model of each parameter with an optimizer that made or skipped an update."""
    recording = history.recording
    seen = _states_by_parameter(history)
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
    default = default or (_model_by_class_names(recording.optimizers[0]) if recording.optimizers else NONE)
    titles = dict.fromkeys((default.title, *(model.title for model in of.values())))
    return OptimizerModels(of=of, default=default, titles=tuple(titles))


def state_to_come(history: MemoryHistory, position: int, parameters: Collection[str]) -> int | None:
    """Bytes of optimizer state that the trainable ``parameters`` (names) lack at ``position`` and will get.

    The answer follows from the optimizers' classes and the states seen; scalars such as ``step`` are left out. ``None``
    if no optimizer is known, or its state is unknown.
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
        if model == ADAM_8BIT:
            size += 0 if keys else adam8bit_state(own_elements(record))
        elif model == ADAFACTOR:
            size += adafactor_state(record.shape, itemsize(record)) if own_elements(record) and not keys else 0
        else:
            missing = tuple(state for state in model.states if state.name not in keys)
            per_element = replace(model, states=missing).bytes_per_element(masters.get(record.name, itemsize(record)))
            size += round(per_element * own_elements(record))
    return size


def _models_by_number(history: MemoryHistory) -> Mapping[int | None, OptimizerModel | None]:
    """The model of each optimizer by number, optimizers that have not stepped yet last; ``None`` if unknown.

    During an optimizer's first update some of its parameters have no state yet, so the largest model counts.
    """
    recording, of = history.recording, optimizers_of(history).of
    found: dict[int | None, OptimizerModel | None] = {}
    for number, optimizer in enumerate((*recording.optimizers, *recording.waiting)):
        named = _model_by_class_names(optimizer)
        mine = [of[record.name] for record in recording.parameters if record.optimizer == number and record.name in of]
        most = max((named, *mine), key=lambda model: len(model.states))
        updated = any(marks.after_optimizer is not None for marks in history.marks)
        found[number] = None if most.key == _AS_SEEN and not (most.states and updated) else most
    return found


def _states_at(history: MemoryHistory, position: int) -> Mapping[str, set[str]]:
    """By parameter the keys of its states that are alive at ``position``."""
    facts, texts = history.facts, history.recording.texts
    alive = history.lifetimes.alive_at(position)
    found: dict[str, set[str]] = {}
    for text in np.unique(facts.name[(facts.fact == Fact.OPTIMIZER_STATE) & alive[facts.allocation]]).tolist():
        name = StateName.read(texts[text])
        found.setdefault(name.parameter, set()).add(name.state)
    return found


def _model_by_class_names(optimizer: OptimizerRecord) -> OptimizerModel:
    """The model by an optimizer's class names, before any of its state has been seen."""
    classes = (optimizer.class_name, *optimizer.bases)
    named = optimizer_model(classes, optimizer.settings)
    if named is None or (named == ADAM_8BIT and not is_bitsandbytes(classes)):
        return _as_seen(optimizer, _Seen())
    return named


def _models(
    optimizer: OptimizerRecord, mine: Sequence[ParameterRecord], seen: Mapping[str, _Seen], stateless: frozenset[str]
) -> dict[str, OptimizerModel]:
    """The model of each parameter in ``mine``, which ``optimizer`` updates."""
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
    if not forms or any(model.key == _AS_SEEN for model in found.values()):
        # Another parameter may have the state of these, as where one has a stack of all.
        bare = [record.name for record in mine if record.name in stateless and record.name not in seen]
        found |= dict.fromkeys([name for name in bare if name not in found], _as_seen(optimizer, _Seen()))
    # Parameters without an update yet, or too small to tell states from scalars, are taken to be like the others.
    largest = max(found.values(), key=lambda model: len(model.states), default=None)
    rest = largest or _model_by_class_names(optimizer)
    return {record.name: found.get(record.name, rest) for record in mine}


def _settle_small(states: Sequence[_Seen]) -> None:
    """Count small tensors as states, not scalars, if a larger parameter has a state with their key and element size."""
    larger = {
        (key, size) for state in states for key, sizes in state.sizes.items() for size in sizes - {0, _OTHER_SHAPE}
    }
    for state in states:
        for key, sizes in state.small.items():
            if all((key, size) in larger for size in sizes):
                state.sizes.setdefault(key, set()).update(sizes)


def _is_kept(form: OptimizerModel, state: _Seen) -> bool:
    """Whether the tensors in ``state`` are those of the model ``form``: each of its states, in its type."""
    if not state.keys & {part.name for part in form.states}:
        return False
    for part in form.states:
        # A buffer's size that is not a whole number per element is not another type: the sums deal with it.
        others = state.sizes.get(part.name, set()) - {None, 0}
        unlike = _OTHER_SHAPE in others or (part.itemsize is None and others)
        if part.elements and (part.name not in state.keys or unlike):
            return False
    return True


def _as_seen(optimizer: OptimizerRecord, state: _Seen) -> OptimizerModel:
    """A model for an ``optimizer`` of unknown class, from the tensors in ``state`` that it keeps for a parameter."""
    states = tuple(
        StateTensor(name=key, elements=1.0, itemsize=next(iter(sizes)))
        for key, sizes in state.sizes.items()
        if len(sizes) == 1 and sizes <= {None, *ITEMSIZES}
    )
    title = f"{optimizer.class_name}, as seen"
    return OptimizerModel(key=_AS_SEEN, title=title, states=states, source="this recording")


def _usual(of: Mapping[str, OptimizerModel], mine: Sequence[ParameterRecord]) -> OptimizerModel | None:
    """The model of most elements of ``mine``."""
    elements: Counter[str] = Counter()
    for record in mine:
        elements[of[record.name].title] += own_elements(record)
    return max((of[record.name] for record in mine), key=lambda model: elements[model.title], default=None)


def _states_by_parameter(history: MemoryHistory) -> dict[str, _Seen]:
    """The states of every parameter, from the facts of the whole recording."""
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
        shape = shape_of(texts[facts.shape[row]])
        if shape is not None and math.prod(shape) != record.elements == together[allocation]:
            each = _OTHER_SHAPE
        optimized = {itemsize(record), masters.get(record.name, 0)}
        sizes = state.sizes if size > SCALAR else state.small
        sizes.setdefault(name.state, set()).add(None if each and each in optimized else each)
    return seen


def _elements_of_each(history: MemoryHistory, rows: Column, records: Mapping[str, ParameterRecord]) -> dict[int, int]:
    """By allocation, the elements of all parameters with state in it: one buffer may hold the states of several."""
    facts, texts = history.facts, history.recording.texts
    elements: Counter[int] = Counter()
    for row in rows.tolist():
        record = records.get(StateName.read(texts[facts.name[row]]).parameter)
        elements[int(facts.allocation[row])] += 0 if record is None else record.elements
    return elements


def _masters(history: MemoryHistory) -> dict[str, int]:
    """Bytes per element of the master copy of each parameter that has one."""
    facts, texts = history.recording.facts, history.recording.texts
    rows = np.flatnonzero(facts.fact == Fact.MASTER_COPY)
    return {texts[facts.name[row]]: dtype_bytes(texts[facts.dtype[row]]) or 4 for row in rows.tolist()}


def _updated_with_a_gradient(history: MemoryHistory) -> frozenset[str]:
    """The parameters with a gradient during an update that was done."""
    steps = zip(history.recording.steps, history.marks, strict=True)
    done = (marks.after_optimizer or 0 for step, marks in steps if not step.skipped_update)
    return with_a_gradient_at_update(history, max(done, default=0))


# Recipes of inference: parameters and autocast's copies. Nothing is trained, so there is nothing else.

INFERENCE_FP32 = replace(FP32, key="inference-fp32", title="inference in float32, parameters only", gradients=0.0)
"""4 bytes per parameter."""

INFERENCE_AUTOCAST = replace(
    AUTOCAST,
    key="inference-autocast",
    title="inference under torch.autocast, parameters and their casts",
    gradients=0.0,
)
"""4 bytes per parameter, 2 more per cast parameter while autocast's cache holds the copy, until autocast is left."""

INFERENCE_HALF = replace(
    PURE_HALF, key="inference-half", title="inference in bfloat16 or float16, parameters only", gradients=0.0
)
"""2 bytes per parameter."""

NO_OPTIMIZERS = OptimizerModels(of={}, default=NONE, titles=())
"""The models for inference: no update, no state."""


# The facts that a recording must have before a rule of thumb can be compared with it.


def unknown_of(recording: Recording) -> tuple[str, ...]:
    """The facts missing in ``recording`` that choose a recipe; empty if none is missing.

    A recorded run has them all. A snapshot has no types, no names, and often no update: only casts show that parameters
    are float32 and autocast is on, and only the profiler's names show the optimizer.
    """
    if recording.run.source != SourceKind.SNAPSHOT:
        return ()
    names = [optimizer.class_name for optimizer in recording.optimizers]
    unknown = {
        "precision": recording.precision.name == Precision.AS_IS,
        "parameters": not recording.parameters,
        "optimizer": not names or NOT_KNOWN in names,
    }
    return tuple(compress(unknown, unknown.values()))


TOTAL = "total"
_SOME = 0.1
"""Gradients of a smaller share of the elements do not decide on a recipe: a variable may hold one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticComponent:
    """One component at one mark: the recipe's bytes, the measured bytes, and why they differ.

    ``residual_bytes`` is ``measured_bytes - model_bytes`` less the terms. ``explained`` says that it is 0, and not
    only because differences without evidence cancel out; ``holds`` says that the recording's sums are right too. The
    component ``total`` is measured in the allocator's blocks, so rounding is a term there.
    """

    mark: Annotated[Mark, OneOf(STEP_MARKS)]
    component: str
    model_bytes_per_param: float
    model_bytes: int
    measured_bytes: int
    measured_bytes_per_param: float
    residual_bytes: Signed
    terms: tuple[Term, ...]
    explained: bool
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRecipe:
    """The recipe that a run is compared with; ``peak_bytes_per_param`` includes transient casts."""

    precision: str
    title: str
    optimizer: tuple[str, ...]
    bytes_per_param: float
    peak_bytes_per_param: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticVerdict:
    """The verdict on one step: its recipe, and the components in order of mark.

    ``problem`` says why the verdict does not hold, whatever the residuals: the recording's sums are wrong, or the
    parameters were not found in it. In the latter case there are no components.
    """

    step: int
    recipe: StaticRecipe
    components: tuple[StaticComponent, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The model for a run: a precision, and the model of each optimizer."""

    precision: PrecisionModel
    optimizers: OptimizerModels
    count: int
    """Elements of all parameters, each counted once."""
    state: float
    """Bytes of optimizer state of all parameters."""

    def state_per_element(self, parameter: ParameterRecord) -> float:
        """Bytes of optimizer state per element of ``parameter``."""
        return self.optimizers.model_of(parameter).bytes_per_element(self.precision.optimized_itemsize)


def judge(
    history: MemoryHistory, ledger: CastLedger, index: int | None = None, *, breach: str | None = None
) -> StaticVerdict | None:
    """The static model's verdict on the step at ``index`` (a position in the recording's steps).

    The default is the last step with a backward (in inference, with a forward), if possible one that ended. ``None`` if
    there is no such step, or nothing to choose a recipe by. ``breach`` says how the recording's sums are wrong, if they
    are.
    """
    recording = history.recording
    if unknown_of(recording):
        return None
    if index is None:
        enough = Mark.AFTER_FORWARD if _is_inference(history) else Mark.AFTER_BACKWARD
        judged = [place for place, marks in enumerate(history.marks) if getattr(marks, enough) is not None]
        if not judged:
            return None
        index = ([place for place in judged if recording.steps[place].finished] or judged)[-1]
    reached = ((name, getattr(history.marks[index], name)) for name in STEP_MARKS)
    evidence = {name: evidence_at(history, ledger, at, index) for name, at in reached if at is not None}
    model = _model(history, evidence.values())
    step, recipe = recording.steps[index].index, _recipe(model)
    lost = _lost_parameters(evidence)
    if lost is not None:
        return StaticVerdict(step=step, recipe=recipe, components=(), problem=lost)
    components = [component for mark, seen in evidence.items() for component in _components(model, mark, seen)]
    if breach is not None:
        components = [replace(component, holds=False) for component in components]
    return StaticVerdict(step=step, recipe=recipe, components=tuple(components), problem=breach)


def _is_inference(history: MemoryHistory) -> bool:
    """Whether no step has, or needs, a backward."""
    return not trains(history.recording) and all(marks.after_backward is None for marks in history.marks)


def _lost_parameters(evidence: Mapping[Mark, Evidence]) -> str | None:
    """The problem that no memory at some mark was recognised as the model's parameters; ``None`` without it."""
    for mark, seen in evidence.items():
        size = sum(own_bytes(record) for record in seen.parameters)
        swapped = seen.live[Category.MASTER_COPIES] and seen.fates[Category.PARAMETERS].gone
        if size and not seen.live[Category.PARAMETERS] and not swapped:
            when = str(mark).replace("_", " ")
            return (
                f"none of the model's parameters ({format_count(size)} bytes) was found in the recorded memory {when}: "
                "ampmem did not look where they are, so the sums do not have them as parameters"
            )
    return None


def _model(history: MemoryHistory, evidence: Collection[Evidence]) -> _Model:
    precision = _precision(history, evidence)
    optimizers = NO_OPTIMIZERS if _is_inference(history) else optimizers_of(history)
    each = [(own_elements(record), optimizers.model_of(record)) for record in history.parameters]
    state = sum(model.bytes_per_element(precision.optimized_itemsize) * count for count, model in each)
    return _Model(precision=precision, optimizers=optimizers, count=sum(count for count, _ in each), state=state)


def _precision(history: MemoryHistory, evidence: Collection[Evidence]) -> PrecisionModel:
    """The recipe's precision, from the type of most elements, the precision, and the gradients of master copies."""
    recording, inference = history.recording, _is_inference(history)
    elements: Counter[int] = Counter()
    for record in history.parameters:
        elements[itemsize(record)] += record.elements
    if max(elements, key=lambda size: elements[size], default=4) != 2:
        under_autocast = recording.precision.name in AUTOCAST_PRECISIONS
        if inference:
            return INFERENCE_AUTOCAST if under_autocast else INFERENCE_FP32
        return AUTOCAST if under_autocast else FP32
    if inference:
        return INFERENCE_HALF
    if not (recording.facts.fact == Fact.MASTER_COPY).any():
        return PURE_HALF
    shares = [_gradient_shares(seen) for seen in evidence]
    if any(min(share.get(2, 0), share.get(4, 0)) >= _SOME for share in shares):
        return HALF_MASTER_FP32_ACCUMULATION
    return HALF_MASTER_FP32_GRADIENTS if any(share.get(4, 0) >= _SOME for share in shares) else HALF_MASTER


def _gradient_shares(evidence: Evidence) -> dict[int, float]:
    """By bytes per element, the share of all elements with a live gradient."""
    elements = {record.name: record.elements for record in evidence.parameters}
    shares: dict[int, float] = {}
    for name, sizes in credit(evidence.memories[Category.GRADIENTS], evidence.parameters).of.items():
        for size in sizes:
            width = size // (elements[name] or 1)
            shares[width] = shares.get(width, 0) + elements[name] / sum(elements.values())
    return shares


def _recipe(model: _Model) -> StaticRecipe:
    precision = model.precision
    usual = model.optimizers.default.bytes_per_element(precision.optimized_itemsize)
    state = model.state / model.count if model.count else usual
    lasting = precision.parameters + precision.gradients + precision.master_copies + state
    static = lasting + (0.0 if precision.transient_casts else precision.cast_copies)
    return StaticRecipe(
        precision=precision.key,
        title=precision.title,
        optimizer=model.optimizers.titles,
        bytes_per_param=static,
        peak_bytes_per_param=lasting + precision.cast_copies,
    )


def _components(model: _Model, mark: Mark, evidence: Evidence) -> list[StaticComponent]:
    precision = model.precision
    casts = precision.cast_copies if mark == Mark.AFTER_FORWARD or not precision.transient_casts else 0.0
    per_element = {
        Category.PARAMETERS: (precision.parameters, parameter_terms),
        Category.CAST_COPIES: (casts, cast_terms),
        Category.GRADIENTS: (precision.gradients, gradient_terms),
        Category.MASTER_COPIES: (precision.master_copies, master_terms),
    }
    found = {name: (size * model.count, terms(evidence, size)) for name, (size, terms) in per_element.items()}
    of_state = state_terms(evidence, model.optimizers.model_of, model.state_per_element)
    found[Category.OPTIMIZER_STATE] = model.state, of_state
    live = evidence.live
    parts = [_component(model, mark, name, round(size), live[name], terms) for name, (size, terms) in found.items()]
    together = TermSums.sum(terms for _, terms in found.values())
    together.add(TermKind.ROUNDING, evidence.rounding)
    measured = sum(live[name] for name in COMPONENTS) + evidence.rounding
    return [*parts, _component(model, mark, TOTAL, sum(part.model_bytes for part in parts), measured, together)]


def _component(model: _Model, mark: Mark, name: str, size: int, measured: int, terms: TermSums) -> StaticComponent:
    listed, count = terms.listed(), model.count or math.inf
    residual = measured - size - sum(term.bytes for term in listed)
    explained = residual == 0 and terms.complete
    return StaticComponent(
        mark=mark,
        component=str(name),
        model_bytes_per_param=size / count,
        model_bytes=size,
        measured_bytes=measured,
        measured_bytes_per_param=measured / count,
        residual_bytes=residual,
        terms=listed,
        explained=explained,
        holds=explained,
    )
