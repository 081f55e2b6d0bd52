"""The static model against a run: the recipe that fits a run, and every byte by which the run differs from it.

The model is a recipe of :mod:`ampmem.analysis.static_model.static_model` times the number of parameters. What is
measured are the categories at a mark. The terms between them are computed from what the hooks saw of each
parameter (its type, its optimizer, its gradient, its copies), never from the difference itself, so the
residual is a real check: it is 0 only when the terms account for every byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from ampmem.analysis.casts import Ledger
from ampmem.analysis.json.jsonable import OneOf, Signed
from ampmem.analysis.parameters import own_bytes, own_elements
from ampmem.analysis.static_model.evidence import Evidence, credit, evidence_at, itemsize
from ampmem.analysis.static_model.explain import cast_terms, gradient_terms, master_terms, parameter_terms
from ampmem.analysis.static_model.inference import (
    INFERENCE_AUTOCAST,
    INFERENCE_FP32,
    INFERENCE_HALF,
    NO_OPTIMIZERS,
)
from ampmem.analysis.static_model.optimizers import Optimizers, optimizers_of
from ampmem.analysis.static_model.states import state_terms
from ampmem.analysis.static_model.static_model import (
    AUTOCAST,
    COMPONENTS,
    FP32,
    HALF_MASTER,
    HALF_MASTER_FP32_ACCUMULATION,
    HALF_MASTER_FP32_GRADIENTS,
    PURE_HALF,
    Precision,
)
from ampmem.analysis.static_model.terms import Term, TermKind, TermSums
from ampmem.analysis.static_model.unknown import unknown_of
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.marks import trains
from ampmem.events import Fact, ParameterRecord
from ampmem.units import format_count
from ampmem.vocabulary import AUTOCAST_ARMS, STEP_MARKS, Mark

TOTAL = "total"
_SOME = 0.1
"""Gradients of a smaller share of the elements than this do not decide on a recipe: one may be held by a variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticComponent:
    """One component at one mark: what the recipe tells, what was measured, and why they differ.

    ``residual_bytes`` is ``measured_bytes - model_bytes`` less the terms. ``explained`` says that it is 0, and not only
    because differences without evidence cancel out; ``holds`` that the recording's sums are right besides. The
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
    """The recipe that a run is measured against; ``peak_bytes_per_param`` counts transient casts too."""

    precision: str
    title: str
    optimizer: tuple[str, ...]
    bytes_per_param: float
    peak_bytes_per_param: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticVerdict:
    """The recipe, and the components in order of mark; those of the step with this index.

    ``problem`` says why nothing holds, whatever the components' residuals are: the recording's sums are wrong, or the
    parameters were not found in it. In the latter case there are no components.
    """

    step: int
    recipe: StaticRecipe
    components: tuple[StaticComponent, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the run is measured against: a precision, and the model of each optimizer."""

    precision: Precision
    optimizers: Optimizers
    count: int
    """Elements of all parameters, each counted once."""
    state: float
    """Bytes of optimizer state of all of them."""

    def state_per_element(self, parameter: ParameterRecord) -> float:
        """Bytes of optimizer state per element."""
        return self.optimizers.model_of(parameter).bytes_per_element(self.precision.optimized_itemsize)


def judge(
    history: MemoryHistory, ledger: Ledger, index: int | None = None, *, breach: str | None = None
) -> StaticVerdict | None:
    """The verdict on the step at ``index`` (a position in the recording's steps).

    By default that is the last step with a backward, in a recording of inference with a forward, of those that ended
    if there is one; ``None`` when there is none, and where nothing is known that a recipe could be chosen by.
    ``breach`` says how the recording's sums are off, where they are.
    """
    recording = history.recording
    if unknown_of(recording):
        return None
    if index is None:
        judged = _worth_judging(history)
        if not judged:
            return None
        index = ([place for place in judged if recording.steps[place].finished] or judged)[-1]
    marks = {name: getattr(history.marks[index], name) for name in STEP_MARKS}
    evidence = {
        name: evidence_at(history, ledger, instant, index) for name, instant in marks.items() if instant is not None
    }
    model = _model(history, evidence.values())
    step, recipe = recording.steps[index].index, _recipe(model)
    lost = _lost_parameters(evidence)
    if lost is not None:
        return StaticVerdict(step=step, recipe=recipe, components=(), problem=lost)
    components = [component for mark, seen in evidence.items() for component in _components(model, mark, seen)]
    if breach is not None:
        components = [replace(component, holds=False) for component in components]
    return StaticVerdict(step=step, recipe=recipe, components=tuple(components), problem=breach)


def _worth_judging(history: MemoryHistory) -> list[int]:
    """The steps that came far enough."""
    if _is_inference(history):
        return [place for place, marks in enumerate(history.marks) if marks.after_forward is not None]
    return [place for place, marks in enumerate(history.marks) if marks.after_backward is not None]


def _is_inference(history: MemoryHistory) -> bool:
    """Whether no step has a backward, nor has to have one."""
    return not trains(history.recording) and all(marks.after_backward is None for marks in history.marks)


def _lost_parameters(evidence: Mapping[Mark, Evidence]) -> str | None:
    """What to say where a mark has nothing of the model's parameters: then they are somewhere else in the sums."""
    for mark, seen in evidence.items():
        size = sum(own_bytes(record) for record in seen.parameters)
        swapped = seen.live[Category.MASTER_COPIES] and seen.fates[Category.PARAMETERS].gone
        if size and not seen.live[Category.PARAMETERS] and not swapped:
            when = str(mark).replace("_", " ")
            return (
                f"none of the model's parameters ({format_count(size)} bytes) was found in the recorded memory {when}: "
                "they lie where ampmem did not look, and are not in the sums under their name"
            )
    return None


def _model(history: MemoryHistory, evidence: Collection[Evidence]) -> _Model:
    if _is_inference(history):
        precision, optimizers = _precision_of_inference(history), NO_OPTIMIZERS
    else:
        precision, optimizers = _precision(history, evidence), optimizers_of(history)
    state = sum(
        optimizers.model_of(record).bytes_per_element(precision.optimized_itemsize) * own_elements(record)
        for record in history.parameters
    )
    count = sum(own_elements(record) for record in history.parameters)
    return _Model(precision=precision, optimizers=optimizers, count=count, state=state)


def _precision(history: MemoryHistory, evidence: Collection[Evidence]) -> Precision:
    """The recipe's precision, by the type that most elements have, the arm, and the gradients of master copies."""
    recording = history.recording
    if not _mostly_half(history):
        return AUTOCAST if recording.arm.name in AUTOCAST_ARMS else FP32
    if not (recording.facts.fact == Fact.MASTER_COPY).any():
        return PURE_HALF
    shares = [_gradient_shares(seen) for seen in evidence]
    if any(min(share.get(2, 0), share.get(4, 0)) >= _SOME for share in shares):
        return HALF_MASTER_FP32_ACCUMULATION
    return HALF_MASTER_FP32_GRADIENTS if any(share.get(4, 0) >= _SOME for share in shares) else HALF_MASTER


def _precision_of_inference(history: MemoryHistory) -> Precision:
    if _mostly_half(history):
        return INFERENCE_HALF
    return INFERENCE_AUTOCAST if history.recording.arm.name in AUTOCAST_ARMS else INFERENCE_FP32


def _mostly_half(history: MemoryHistory) -> bool:
    """Whether most elements of parameters have two bytes."""
    elements: dict[int, int] = {}
    for record in history.parameters:
        elements[itemsize(record)] = elements.get(itemsize(record), 0) + record.elements
    return max(elements, key=lambda size: elements[size], default=4) == 2


def _gradient_shares(evidence: Evidence) -> dict[int, float]:
    """Of how large a share of all elements a gradient is alive, by its bytes per element."""
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
    sizes = {
        Category.PARAMETERS: precision.parameters * model.count,
        Category.CAST_COPIES: casts * model.count,
        Category.GRADIENTS: precision.gradients * model.count,
        Category.MASTER_COPIES: precision.master_copies * model.count,
        Category.OPTIMIZER_STATE: model.state,
    }
    terms = {
        Category.PARAMETERS: parameter_terms(evidence, precision.parameters),
        Category.CAST_COPIES: cast_terms(evidence, casts),
        Category.GRADIENTS: gradient_terms(evidence, precision.gradients),
        Category.MASTER_COPIES: master_terms(evidence, precision.master_copies),
        Category.OPTIMIZER_STATE: state_terms(evidence, model.optimizers.model_of, model.state_per_element),
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
    explained = residual == 0 and terms.complete
    return StaticComponent(
        mark=mark,
        component=str(name),
        model_bytes_per_param=size / model.count if model.count else 0.0,
        model_bytes=size,
        measured_bytes=measured,
        measured_bytes_per_param=measured / model.count if model.count else 0.0,
        residual_bytes=residual,
        terms=listed,
        explained=explained,
        holds=explained,
    )
