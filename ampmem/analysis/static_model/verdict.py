"""The static model against a run: the recipe that fits a run, and every byte by which the run differs from it.

The model is a recipe of :mod:`ampmem.analysis.static_model.static_model` times the number of parameters. What is
measured are the categories at a mark. The terms between them are computed from what the hooks saw of each
parameter (its type, its optimizer, its gradient, its copies), never from the difference itself, so the
residual is a real check: it is 0 only when the terms account for every byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ampmem.analysis.casts import Ledger
from ampmem.analysis.jsonable import OneOf, Signed
from ampmem.analysis.static_model.evidence import ITEMSIZES, Evidence, credit, evidence_at, itemsize
from ampmem.analysis.static_model.static_model import (
    AUTOCAST,
    COMPONENTS,
    FP32,
    HALF_MASTER,
    HALF_MASTER_FP32_ACCUMULATION,
    HALF_MASTER_FP32_GRADIENTS,
    OPTIMIZERS,
    PURE_HALF,
    OptimizerModel,
    Precision,
    Recipe,
    StateTensor,
    optimizer_model,
)
from ampmem.analysis.static_model.terms import (
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
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.events import Fact, OptimizerRecord, ParameterRecord, Recording
from ampmem.names import StateName
from ampmem.vocabulary import AUTOCAST_ARMS, STEP_MARKS, Mark

TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticComponent:
    """One component at one mark: what the recipe tells, what was measured, and why they differ.

    ``residual_bytes`` is ``measured_bytes - model_bytes`` less the terms; ``holds`` says that it is 0. The
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
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRecipe:
    """The recipe that a run is measured against; ``peak_bytes_per_param`` counts transient casts too."""

    precision: str
    title: str
    optimizer: tuple[str, ...]
    bytes_per_param: float
    peak_bytes_per_param: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticVerdict:
    """The recipe, and the components in order of mark; those of the step with this index."""

    step: int
    recipe: StaticRecipe
    components: tuple[StaticComponent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the run is measured against: a precision, and the model of each optimizer."""

    precision: Precision
    optimizers: tuple[OptimizerModel, ...]
    count: int
    """Elements of all parameters."""

    def optimizer_of(self, parameter: ParameterRecord) -> OptimizerModel:
        """The model of the optimizer that has ``parameter``; of the first one for a parameter that none has."""
        return self.optimizers[parameter.optimizer or 0]

    def state_per_element(self, parameter: ParameterRecord) -> float:
        """Bytes of optimizer state per element."""
        return self.optimizer_of(parameter).bytes_per_element(self.precision.optimized_itemsize)


def judge(history: MemoryHistory, ledger: Ledger, index: int | None = None) -> StaticVerdict | None:
    """The verdict on the step at ``index`` (a position in the recording's steps).

    By default that is the last step with a backward, of those that ended if there is one; ``None`` when there is none.
    """
    recording = history.recording
    if index is None:
        judged = [place for place, marks in enumerate(history.marks) if marks.after_backward is not None]
        if not judged:
            return None
        index = ([place for place in judged if recording.steps[place].finished] or judged)[-1]
    marks = {name: getattr(history.marks[index], name) for name in STEP_MARKS}
    evidence = {
        name: evidence_at(history, ledger, instant, index) for name, instant in marks.items() if instant is not None
    }
    model = _model(history, evidence.values())
    components = tuple(component for mark, seen in evidence.items() for component in _components(model, mark, seen))
    return StaticVerdict(step=recording.steps[index].index, recipe=_recipe(model), components=components)


def _model(history: MemoryHistory, evidence: Collection[Evidence]) -> _Model:
    recording = history.recording
    own = [record for record in recording.parameters if record.shares is None]
    models = tuple(_optimizer_model(history, index, record) for index, record in enumerate(recording.optimizers))
    return _Model(
        precision=_precision(recording, evidence),
        optimizers=models or (OPTIMIZERS["sgd"],),
        count=sum(record.elements for record in own),
    )


def _precision(recording: Recording, evidence: Collection[Evidence]) -> Precision:
    """The recipe's precision, by the type that most elements have, the arm, and the gradients of master copies."""
    elements: dict[int, int] = {}
    for record in recording.parameters:
        elements[itemsize(record)] = elements.get(itemsize(record), 0) + record.elements
    if max(elements, key=lambda size: elements[size], default=4) != 2:
        return AUTOCAST if recording.arm.name in AUTOCAST_ARMS else FP32
    if not (recording.facts.fact == Fact.MASTER_COPY).any():
        return PURE_HALF
    sizes = {size for seen in evidence for size in _gradient_itemsizes(seen)}
    if {2, 4} <= sizes:
        return HALF_MASTER_FP32_ACCUMULATION
    return HALF_MASTER_FP32_GRADIENTS if 4 in sizes else HALF_MASTER


def _gradient_itemsizes(evidence: Evidence) -> Iterator[int]:
    """Bytes per element of the gradients that are alive."""
    elements = {record.name: record.elements for record in evidence.parameters}
    for name, sizes in credit(evidence.memories[Category.GRADIENTS], evidence.parameters).of.items():
        for size in sizes:
            yield size // (elements[name] or 1)


def _optimizer_model(history: MemoryHistory, index: int, record: OptimizerRecord) -> OptimizerModel:
    """What the optimizer is known to keep; for an unknown one, what it was seen to keep of each element."""
    known = optimizer_model((record.class_name, *record.bases), record.settings)
    if known is not None:
        return known
    seen = _seen_itemsizes(history, index)
    states = tuple(
        StateTensor(name=key, elements=1.0, itemsize=next(iter(sizes)))
        for key, sizes in seen.items()
        if len(sizes) == 1 and sizes <= {None, *ITEMSIZES}
    )
    return OptimizerModel(key="as-seen", title=f"{record.class_name}, as seen", states=states, source="this recording")


def _seen_itemsizes(history: MemoryHistory, index: int) -> dict[str, set[int | None]]:
    """Bytes per element of each state of the optimizer; ``None`` for those of the parameter, 0 for a part of one."""
    records = {record.name: record for record in history.recording.parameters if record.optimizer == index}
    facts, texts = history.facts, history.recording.texts
    rows = np.flatnonzero(facts.fact == Fact.OPTIMIZER_STATE)
    _, first = np.unique(facts.allocation[rows] * len(texts) + facts.name[rows], return_index=True)
    seen: dict[str, set[int | None]] = {}
    for row in np.sort(rows[first]).tolist():
        name = StateName.read(texts[facts.name[row]])
        size = int(history.lifetimes.bytes[facts.allocation[row]])
        if name.parameter in records and size > SCALAR:
            owner = records[name.parameter]
            per_element, rest = divmod(size, owner.elements or 1)
            per_element = 0 if rest else per_element
            seen.setdefault(name.state, set()).add(None if per_element == itemsize(owner) else per_element)
    return seen


def _recipe(model: _Model) -> StaticRecipe:
    recipe = Recipe(precision=model.precision, optimizer=model.optimizers[0])
    return StaticRecipe(
        precision=model.precision.key,
        title=model.precision.title,
        optimizer=tuple(dict.fromkeys(each.title for each in model.optimizers)),
        bytes_per_param=recipe.static,
        peak_bytes_per_param=recipe.peak,
    )


def _components(model: _Model, mark: Mark, evidence: Evidence) -> list[StaticComponent]:
    precision = model.precision
    casts = precision.cast_copies if mark == Mark.AFTER_FORWARD or not precision.transient_casts else 0.0
    sizes = {
        Category.PARAMETERS: precision.parameters * model.count,
        Category.CAST_COPIES: casts * model.count,
        Category.GRADIENTS: precision.gradients * model.count,
        Category.MASTER_COPIES: precision.master_copies * model.count,
        Category.OPTIMIZER_STATE: sum(
            model.state_per_element(record) * record.elements for record in evidence.parameters if record.shares is None
        ),
    }
    terms = {
        Category.PARAMETERS: parameter_terms(evidence, precision.parameters),
        Category.CAST_COPIES: cast_terms(evidence, casts),
        Category.GRADIENTS: gradient_terms(evidence, precision.gradients),
        Category.MASTER_COPIES: master_terms(evidence, precision.master_copies),
        Category.OPTIMIZER_STATE: state_terms(evidence, model.optimizer_of, model.state_per_element),
    }
    live = evidence.live
    parts = [_component(model, mark, name, round(sizes[name]), live[name], terms[name]) for name in COMPONENTS]
    together = TermSums.sum(terms.values())
    together.add(TermKind.ROUNDING, evidence.rounding)
    measured = sum(live[name] for name in COMPONENTS) + evidence.rounding
    return [*parts, _component(model, mark, TOTAL, sum(part.model_bytes for part in parts), measured, together)]


def _component(model: _Model, mark: Mark, name: str, size: int, measured: int, terms: TermSums) -> StaticComponent:
    listed = terms.listed()
    residual = measured - size - sum(term.bytes for term in listed)
    return StaticComponent(
        mark=mark,
        component=str(name),
        model_bytes_per_param=size / model.count if model.count else 0.0,
        model_bytes=size,
        measured_bytes=measured,
        measured_bytes_per_param=measured / model.count if model.count else 0.0,
        residual_bytes=residual,
        terms=listed,
        holds=residual == 0,
    )
