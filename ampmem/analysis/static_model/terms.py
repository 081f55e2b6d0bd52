"""Why a component differs from what the static model tells: terms of a kind, each computed from evidence.

Every function takes the evidence and the bytes per element that the model has, and goes through the
parameters. A parameter that lies in another's memory (tied weights) counts for nothing in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ampmem.analysis.jsonable import NOT_IN_JSON, Signed
from ampmem.analysis.static_model.evidence import Copy, Evidence, StateMemory, credit, fits, itemsize
from ampmem.analysis.static_model.static_model import (
    ADAFACTOR,
    ADAM_8BIT,
    OptimizerModel,
    adafactor_state,
    adam8bit_state,
)
from ampmem.analysis.timeline.categories import Category
from ampmem.events import ParameterRecord

SCALAR = 16
"""A tensor of at most so many bytes that an optimizer keeps is a counter, not a state."""

_LARGEST_ITEMSIZE = 4
"""Bytes per element of one gradient; where a model has more, it has two."""


class TermKind(StrEnum):
    """Why there are more bytes than the model has, or fewer; the values are the words, of a type or a name where
    there is one in question.
    """

    FROZEN = "frozen parameters"
    TIED = "tied weights: a tensor for each of the names"
    ROUNDING = "rounding up to the allocator's blocks"

    PARAMETER_TYPE = "kept in {about}"
    PARAMETERS_NOT_THERE = "not in memory at this mark"
    PARAMETERS_MOVED = "earlier memory of a parameter that is still alive"
    AROUND_PARAMETERS = "memory around parameters that are views of a larger buffer"

    GRADIENT_TYPE = "gradients of {about} parameters"
    ONE_GRADIENT_OF_TWO = "only one of the two gradients is alive: the parameter's or its master copy's"
    SEVERAL_GRADIENTS = "more than one gradient of a parameter is alive"
    SPARSE_GRADIENTS = "sparse gradients: their indices and values instead of all elements"
    GRADIENTS_FREED = "gradients freed before this mark (zero_grad sets them to None)"
    NO_GRADIENTS_YET = "no gradient so far: no backward has reached them"
    AROUND_GRADIENTS = "buckets, and gradients that are views of a larger buffer"

    MASTER_TYPE = "master copies of {about} parameters"
    NO_MASTER = "parameters without a master copy"
    MORE_MASTERS = "more master copies than the model tells"
    AROUND_MASTERS = "memory around master copies that are views of a larger buffer"

    COPIES_FREED_WITH_GRAPH = "copies freed before this mark, with the graph that had saved them"
    COPIES_NOT_SAVED = "copies freed before this mark: autograd did not save them (biases, mostly)"
    NORMS_NOT_CAST = "norms: autocast does not cast their parameters"
    EMBEDDINGS_NOT_CAST = "embeddings: autocast does not cast them"
    NOT_CAST = "parameters that no op needed in low precision"
    CASTS_OF_THE_SCRIPT = "casts that the script makes itself"
    COPIES_IN_CACHE = "copies that the cache still holds: autocast has not been left"
    COPIES_IN_GRAPH = "copies that autograd still holds"
    COPIES_ELSEWHERE = "copies that something else still holds"
    COPY_TYPE = "copies in another type than the model tells"
    COPIES_MADE_AGAIN = "copies made again for another use: no cache served it"
    COPIES_OF_VIEWS_TOO = "copies of views of a parameter, besides the whole"
    COPIES_OF_VIEWS_ONLY = "copies of views of a parameter instead of the whole"

    STATE_TYPE = "state of {about} parameters"
    FACTORED_STATE = "rows and columns instead of full second moments"
    SCALES_OF_BLOCKS = "scales of the blocks, and small tensors kept in float32"
    STATES_NOT_YET = "states of an optimizer that are not there yet"
    STEP_COUNTERS = "scalar step counters"
    UNKNOWN_STATE = "state that the model does not have: {about}"
    AROUND_STATES = "memory around states that are views of a larger buffer"
    STATE_FREED = "optimizer state freed before this mark"
    NOT_OPTIMIZED = "parameters that no optimizer updates"
    UPDATES_SKIPPED = "no optimizer state yet: the loss scaler skipped the updates"
    NO_UPDATE_YET = "no optimizer state before the first update"
    NO_UPDATE_OF_THEIRS = "no optimizer state: no update of theirs so far"

    def words(self, about: str) -> str:
        """The words for one type, or one name, in question."""
        return self.value.format(about=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One reason for a difference between what the model has and what was measured, and how many tensors have it."""

    kind: TermKind = field(metadata=NOT_IN_JSON)
    why: str
    bytes: Signed
    tensors: int


class TermSums:
    """Bytes and tensors by reason, in order of first mention."""

    def __init__(self) -> None:
        self._sums: dict[tuple[TermKind, str], tuple[int, int]] = {}

    def add(self, kind: TermKind, size: float, tensors: int = 1, *, about: str = "") -> None:
        """``size`` bytes, of so many ``tensors``, more than the model has; nothing when that is 0."""
        if size:
            self._add(kind, kind.words(about), round(size), tensors)

    def _add(self, kind: TermKind, why: str, size: int, tensors: int) -> None:
        before, count = self._sums.get((kind, why), (0, 0))
        self._sums[kind, why] = (before + size, count + tensors)

    def listed(self) -> tuple[Term, ...]:
        """The terms, largest first; what came to 0 is left out."""
        terms = [
            Term(kind=kind, why=why, bytes=size, tensors=count)
            for (kind, why), (size, count) in self._sums.items()
            if size
        ]
        return tuple(sorted(terms, key=lambda term: -abs(term.bytes)))

    @classmethod
    def sum(cls, parts: Iterable[TermSums]) -> TermSums:
        """All of ``parts`` together."""
        together = cls()
        for part in parts:
            for (kind, why), (size, count) in part._sums.items():
                if size:
                    together._add(kind, why, size, count)
        return together


def parameter_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Types other than the model's; memory around parameters that are views of a larger buffer."""
    terms = TermSums()
    credits = credit(evidence.memories[Category.PARAMETERS], [p for p in evidence.parameters if p.shares is None])
    for record in evidence.parameters:
        if record.shares is not None:
            continue
        found = credits.of.get(record.name, ())
        terms.add(TermKind.PARAMETER_TYPE, record.bytes - per_element * record.elements, about=record.dtype)
        if not found:
            terms.add(TermKind.PARAMETERS_NOT_THERE, -record.bytes)
        terms.add(TermKind.PARAMETERS_MOVED, sum(found) - record.bytes if found else 0)
    terms.add(TermKind.AROUND_PARAMETERS, credits.beyond)
    return terms


def gradient_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Gradients that are not there, not there yet or no more; of another type; buckets."""
    terms = TermSums()
    credits = credit(evidence.memories[Category.GRADIENTS], evidence.parameters, evidence.sparse)
    for record in evidence.parameters:
        found = credits.of.get(record.name, ())
        if record.shares is not None:
            terms.add(TermKind.TIED, sum(found))
            continue
        kind = _gradient(evidence, record, found, per_element) if found else _no_gradient(evidence, record)
        terms.add(kind, sum(found) - per_element * record.elements, about=record.dtype)
    terms.add(TermKind.AROUND_GRADIENTS, credits.beyond)
    return terms


def _gradient(evidence: Evidence, record: ParameterRecord, found: Sequence[int], per_element: float) -> TermKind:
    """Why the gradients ``found`` are not as the model has them."""
    if record.name in evidence.sparse:
        return TermKind.SPARSE_GRADIENTS
    if sum(found) < per_element * record.elements and per_element > _LARGEST_ITEMSIZE:
        return TermKind.ONE_GRADIENT_OF_TWO
    return TermKind.SEVERAL_GRADIENTS if len(found) > 1 else TermKind.GRADIENT_TYPE


def _no_gradient(evidence: Evidence, record: ParameterRecord) -> TermKind:
    if not record.trainable:
        return TermKind.FROZEN
    return TermKind.GRADIENTS_FREED if record.name in evidence.had_gradient else TermKind.NO_GRADIENTS_YET


def master_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Parameters without a copy in another precision, and copies of another type."""
    terms = TermSums()
    credits = credit(evidence.memories[Category.MASTER_COPIES], evidence.parameters)
    for record in evidence.parameters:
        found = credits.of.get(record.name, ())
        expected = 0.0 if record.shares is not None else per_element * record.elements
        terms.add(_master(record, found, per_element), sum(found) - expected, about=record.dtype)
    terms.add(TermKind.AROUND_MASTERS, credits.beyond)
    return terms


def _master(record: ParameterRecord, found: Sequence[int], per_element: float) -> TermKind:
    if not found:
        return TermKind.NO_MASTER if record.trainable else TermKind.FROZEN
    if per_element and len(found) == 1 and record.shares is None:
        return TermKind.MASTER_TYPE
    return TermKind.MORE_MASTERS


def cast_terms(evidence: Evidence, per_element: float) -> TermSums:
    """What autocast does not cast, what nobody kept, and what is there more than once."""
    terms = TermSums()
    for record in evidence.parameters:
        # A whole copy has the parameter's elements; what has others is no copy of it.
        copies = [copy for copy in evidence.copies.get(record.name, ()) if copy.view or fits(copy.bytes, record)]
        expected = 0.0 if record.shares is not None else per_element * record.elements
        if not copies:
            terms.add(_no_copy(evidence, record), -expected)
        elif record.shares is not None:
            terms.add(TermKind.TIED, sum(copy.bytes for copy in copies))
        elif not per_element:
            for copy in copies:
                terms.add(_still_there(evidence, copy), copy.bytes)
        else:
            _add_copies(terms, copies, expected)
    return terms


def _no_copy(evidence: Evidence, record: ParameterRecord) -> TermKind:
    if record.name in evidence.cast:
        if evidence.cast[record.name]:
            return TermKind.COPIES_FREED_WITH_GRAPH
        return TermKind.COPIES_NOT_SAVED
    if "Norm" in record.kind:
        return TermKind.NORMS_NOT_CAST
    return TermKind.EMBEDDINGS_NOT_CAST if "Embedding" in record.kind else TermKind.NOT_CAST


def _still_there(evidence: Evidence, copy: Copy) -> TermKind:
    if not evidence.autocast:
        return TermKind.CASTS_OF_THE_SCRIPT
    if copy.cached:
        return TermKind.COPIES_IN_CACHE
    return TermKind.COPIES_IN_GRAPH if copy.saved else TermKind.COPIES_ELSEWHERE


def _add_copies(terms: TermSums, copies: Sequence[Copy], expected: float) -> None:
    whole = [copy.bytes for copy in copies if not copy.view]
    views = [copy.bytes for copy in copies if copy.view]
    if whole:
        terms.add(TermKind.COPY_TYPE, whole[0] - expected)
        terms.add(TermKind.COPIES_MADE_AGAIN, sum(whole[1:]), len(whole) - 1)
        terms.add(TermKind.COPIES_OF_VIEWS_TOO, sum(views), len(views))
    else:
        terms.add(TermKind.COPIES_OF_VIEWS_ONLY, sum(views) - expected)


def state_terms(
    evidence: Evidence,
    model_of: Callable[[ParameterRecord], OptimizerModel],
    per_element: Callable[[ParameterRecord], float],
) -> TermSums:
    """StateTensor that is not there or not there yet, of another type or shape; step counters."""
    terms = TermSums()
    states = _States(evidence, model_of)
    for record in evidence.parameters:
        expected = 0.0 if record.shares is not None else per_element(record) * record.elements
        keys = states.keys.get(record.name)
        if keys is None:
            terms.add(_no_state(evidence, record), -expected)
        elif record.shares is not None:
            terms.add(TermKind.TIED, states.kept(record, keys))
        elif model_of(record) in (ADAFACTOR, ADAM_8BIT):
            terms.add(_SPECIAL[model_of(record).key], states.kept(record, keys) - expected)
        else:
            whole = states.kept(record, {state.name for state in model_of(record).states})
            terms.add(TermKind.STATE_TYPE, whole - expected, about=record.dtype)
            terms.add(TermKind.STATES_NOT_YET, states.kept(record, keys) - whole)
    for other in states.others:
        terms.add(other.kind, other.bytes, about=other.about)
    return terms


_SPECIAL = {
    ADAFACTOR.key: TermKind.FACTORED_STATE,
    ADAM_8BIT.key: TermKind.SCALES_OF_BLOCKS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """A tensor that an optimizer keeps and that is no state of its model; ``about`` is what the optimizer calls it."""

    kind: TermKind
    bytes: float
    about: str = ""


class _States:
    """Which states of its model each parameter has, and what else the optimizers keep."""

    def __init__(self, evidence: Evidence, model_of: Callable[[ParameterRecord], OptimizerModel]) -> None:
        self.keys: dict[str, set[str]] = {}
        """By parameter."""
        self.others: list[_Other] = []
        self._model_of = model_of
        self._records = {record.name: record for record in evidence.parameters}
        self._masters = credit(evidence.memories[Category.MASTER_COPIES], evidence.parameters).of
        for memory in evidence.states:
            self._take(memory)

    def kept(self, record: ParameterRecord, keys: set[str]) -> float:
        """Bytes that the model of ``record`` keeps for it in the states ``keys``."""
        model, size = self._model_of(record), itemsize(record)
        if record.elements and record.name in self._masters:
            size = self._masters[record.name][0] // record.elements
        if model == ADAFACTOR:
            return adafactor_state(record.shape, size)
        if model == ADAM_8BIT:
            return adam8bit_state(record.elements)
        states = (state for state in model.states if state.name in keys)
        return sum(state.elements * (state.itemsize or size) for state in states) * record.elements

    def _take(self, memory: StateMemory) -> None:
        # What is kept for no parameter has no name of one; what has the name of an unknown one is nobody's.
        known = [name for name in memory.names if name.parameter in self._records or not name.parameter]
        modelled = [name for name in known if name.parameter and name.state in self._modelled(name.parameter)]
        for name in modelled:
            self.keys.setdefault(name.parameter, set()).add(name.state)
        if not modelled and known:
            kind = TermKind.STEP_COUNTERS if memory.bytes <= SCALAR else TermKind.UNKNOWN_STATE
            self.others.append(_Other(kind=kind, bytes=memory.bytes, about=known[0].state))
        elif len(modelled) > 1:
            shares = sum(self.kept(self._records[name.parameter], {name.state}) for name in modelled)
            self.others.append(_Other(kind=TermKind.AROUND_STATES, bytes=max(memory.bytes - shares, 0)))

    def _modelled(self, name: str) -> set[str]:
        return {state.name for state in self._model_of(self._records[name]).states}


def _no_state(evidence: Evidence, record: ParameterRecord) -> TermKind:
    if not record.trainable:
        return TermKind.FROZEN
    if record.name in evidence.had_state:
        return TermKind.STATE_FREED
    if record.optimizer is None:
        return TermKind.NOT_OPTIMIZED
    if not evidence.updated:
        return TermKind.UPDATES_SKIPPED if evidence.skipped else TermKind.NO_UPDATE_YET
    return TermKind.NO_UPDATE_OF_THEIRS
