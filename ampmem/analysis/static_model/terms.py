"""Why a component differs from what the static model tells: named terms, each computed from evidence.

Every function takes the evidence and the bytes per element that the model tells, and goes through the
parameters. A parameter that lies in another's memory (tied weights) counts for nothing in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ampmem.analysis.static_model.evidence import Copy, Evidence, Memory, credit, fits, itemsize, split_state
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
"""Bytes per element of one gradient; where a model tells more, it tells two."""

FROZEN = "frozen parameters"
TIED = "tied weights: a tensor for each of the names"


class Terms:
    """Bytes and tensors by reason, in order of first mention."""

    def __init__(self) -> None:
        self._terms: dict[str, tuple[int, int]] = {}

    def add(self, why: str, size: float, tensors: int = 1) -> None:
        """``size`` bytes, of so many ``tensors``, more than told because of ``why``; nothing when that is 0."""
        if size:
            before, count = self._terms.get(why, (0, 0))
            self._terms[why] = (before + round(size), count + tensors)

    def listed(self) -> list[tuple[str, int, int]]:
        """(why, bytes, tensors), largest first; what came to 0 is left out."""
        terms = [(why, size, count) for why, (size, count) in self._terms.items() if size]
        return sorted(terms, key=lambda term: -abs(term[1]))

    @classmethod
    def sum(cls, parts: Iterable[Terms]) -> Terms:
        """All of ``parts`` together."""
        together = cls()
        for part in parts:
            for why, (size, count) in part._terms.items():
                together.add(why, size, count)
        return together


def parameter_terms(evidence: Evidence, told: float) -> Terms:
    """Types other than the model's; memory around parameters that are views of a larger buffer."""
    terms = Terms()
    credits = credit(evidence.memories[Category.PARAMETERS], [p for p in evidence.parameters if p.shares is None])
    for record in evidence.parameters:
        if record.shares is not None:
            continue
        found = credits.of.get(record.name, ())
        terms.add(f"kept in {record.dtype}", record.bytes - told * record.elements)
        if not found:
            terms.add("not in memory at this mark", -record.bytes)
        terms.add("earlier memory of a parameter that is still alive", sum(found) - record.bytes if found else 0)
    terms.add("memory around parameters that are views of a larger buffer", credits.beyond)
    return terms


def gradient_terms(evidence: Evidence, told: float) -> Terms:
    """Gradients that are not there, not there yet or no more; of another type; buckets."""
    terms = Terms()
    credits = credit(evidence.memories[Category.GRADIENTS], evidence.parameters)
    for record in evidence.parameters:
        found = credits.of.get(record.name, ())
        if record.shares is not None:
            terms.add(TIED, sum(found))
            continue
        why = _gradient(record, found, told) if found else _no_gradient(evidence, record)
        terms.add(why, sum(found) - told * record.elements)
    terms.add("buckets, and gradients that are views of a larger buffer", credits.beyond)
    return terms


def _gradient(record: ParameterRecord, found: Sequence[int], told: float) -> str:
    """Why the gradients ``found`` are not as told."""
    if sum(found) < told * record.elements and told > _LARGEST_ITEMSIZE:
        return "only one of the two gradients is alive: the parameter's or its master copy's"
    if len(found) > 1:
        return "more than one gradient of a parameter is alive"
    return f"gradients of {record.dtype} parameters"


def _no_gradient(evidence: Evidence, record: ParameterRecord) -> str:
    if not record.trainable:
        return FROZEN
    if record.name in evidence.sparse:
        return "sparse gradients, which are not counted as gradients"
    if record.name in evidence.had_gradient:
        return "gradients freed before this mark (zero_grad sets them to None)"
    return "no gradient so far: no backward has reached them"


def master_terms(evidence: Evidence, told: float) -> Terms:
    """Parameters without a copy in another precision, and copies of another type."""
    terms = Terms()
    credits = credit(evidence.memories[Category.MASTER_COPIES], evidence.parameters)
    for record in evidence.parameters:
        found = credits.of.get(record.name, ())
        expected = 0.0 if record.shares is not None else told * record.elements
        terms.add(_master(record, found, told), sum(found) - expected)
    terms.add("memory around master copies that are views of a larger buffer", credits.beyond)
    return terms


def _master(record: ParameterRecord, found: Sequence[int], told: float) -> str:
    if not found:
        return "parameters without a master copy" if record.trainable else FROZEN
    if told and len(found) == 1 and record.shares is None:
        return f"master copies of {record.dtype} parameters"
    return "more master copies than the model tells"


def cast_terms(evidence: Evidence, told: float) -> Terms:
    """What autocast does not cast, what nobody kept, and what is there more than once."""
    terms = Terms()
    for record in evidence.parameters:
        # A whole copy has the parameter's elements; what has others is no copy of it.
        copies = [copy for copy in evidence.copies.get(record.name, ()) if copy.view or fits(copy.bytes, record)]
        expected = 0.0 if record.shares is not None else told * record.elements
        if not copies:
            terms.add(_no_copy(evidence, record), -expected)
        elif record.shares is not None:
            terms.add(TIED, sum(copy.bytes for copy in copies))
        elif not told:
            for copy in copies:
                terms.add(_still_there(evidence, copy), copy.bytes)
        else:
            _add_copies(terms, copies, expected)
    return terms


def _no_copy(evidence: Evidence, record: ParameterRecord) -> str:
    if record.name in evidence.cast:
        if evidence.cast[record.name]:
            return "copies freed before this mark, with the graph that had saved them"
        return "copies freed before this mark: autograd did not save them (biases, mostly)"
    if "Norm" in record.kind:
        return "norms: autocast does not cast their parameters"
    if "Embedding" in record.kind:
        return "embeddings: autocast does not cast them"
    return "parameters that no op needed in low precision"


def _still_there(evidence: Evidence, copy: Copy) -> str:
    if not evidence.autocast:
        return "casts that the script makes itself"
    if copy.cached:
        return "copies that the cache still holds: autocast has not been left"
    return "copies that autograd still holds" if copy.saved else "copies that something else still holds"


def _add_copies(terms: Terms, copies: Sequence[Copy], expected: float) -> None:
    whole = [copy.bytes for copy in copies if not copy.view]
    views = [copy.bytes for copy in copies if copy.view]
    if whole:
        terms.add("copies in another type than the model tells", whole[0] - expected)
        terms.add("copies made again for another use: no cache served it", sum(whole[1:]), len(whole) - 1)
        terms.add("copies of views of a parameter, besides the whole", sum(views), len(views))
    else:
        terms.add("copies of views of a parameter instead of the whole", sum(views) - expected)


def state_terms(
    evidence: Evidence,
    model_of: Callable[[ParameterRecord], OptimizerModel],
    told: Callable[[ParameterRecord], float],
) -> Terms:
    """State that is not there or not there yet, of another type or shape; step counters."""
    terms = Terms()
    states = _States(evidence, model_of)
    for record in evidence.parameters:
        expected = 0.0 if record.shares is not None else told(record) * record.elements
        keys = states.keys.get(record.name)
        if keys is None:
            terms.add(_no_state(evidence, record), -expected)
        elif record.shares is not None:
            terms.add(TIED, states.kept(record, keys))
        elif model_of(record) in (ADAFACTOR, ADAM_8BIT):
            terms.add(_SPECIAL[model_of(record).key], states.kept(record, keys) - expected)
        else:
            whole = states.kept(record, {state.name for state in model_of(record).states})
            terms.add(f"state of {record.dtype} parameters", whole - expected)
            terms.add("states of an optimizer that are not there yet", states.kept(record, keys) - whole)
    for why, size in states.others:
        terms.add(why, size)
    return terms


_SPECIAL = {
    ADAFACTOR.key: "rows and columns instead of full second moments",
    ADAM_8BIT.key: "scales of the blocks, and small tensors kept in float32",
}


class _States:
    """Which states of its model each parameter has, and what else the optimizers keep."""

    def __init__(self, evidence: Evidence, model_of: Callable[[ParameterRecord], OptimizerModel]) -> None:
        self.keys: dict[str, set[str]] = {}
        """By parameter."""
        self.others: list[tuple[str, float]] = []
        """Why each tensor is there that is no state of a model, and its bytes."""
        self._model_of = model_of
        self._records = {record.name: record for record in evidence.parameters}
        self._masters = credit(evidence.memories[Category.MASTER_COPIES], evidence.parameters).of
        for memory in evidence.memories[Category.OPTIMIZER_STATE]:
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

    def _take(self, memory: Memory) -> None:
        named = [split_state(text) for text in memory.names]
        # What is kept for no parameter has no name of one; what has the name of an unknown one is nobody's.
        known = [(key, name) for key, name in named if name in self._records or not key]
        modelled = [(key, name) for key, name in known if key and key in self._modelled(name)]
        for key, name in modelled:
            self.keys.setdefault(name, set()).add(key)
        if not modelled and known:
            key = known[0][0] or known[0][1]
            counter = memory.bytes <= SCALAR
            self.others.append(
                ("scalar step counters" if counter else f"state that the model does not have: {key}", memory.bytes)
            )
        elif len(modelled) > 1:
            shares = sum(self.kept(self._records[name], {key}) for key, name in modelled)
            around = "memory around states that are views of a larger buffer"
            self.others.append((around, max(memory.bytes - shares, 0)))

    def _modelled(self, name: str) -> set[str]:
        return {state.name for state in self._model_of(self._records[name]).states}


def _no_state(evidence: Evidence, record: ParameterRecord) -> str:
    if not record.trainable:
        return FROZEN
    if record.name in evidence.had_state:
        return "optimizer state freed before this mark"
    if record.optimizer is None:
        return "parameters that no optimizer updates"
    if not evidence.updated:
        skipped = "no optimizer state yet: the loss scaler skipped the updates"
        return skipped if evidence.skipped else "no optimizer state before the first update"
    return "no optimizer state: no update of theirs so far"
