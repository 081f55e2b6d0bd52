"""Why optimizer state differs from what the static model tells, each term computed from what the hooks saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampmem.analysis.parameters import own_elements
from ampmem.analysis.static_model.evidence import Evidence, StateMemory, credit, itemsize
from ampmem.analysis.static_model.explain import shared
from ampmem.analysis.static_model.static_model import (
    ADAFACTOR,
    ADAM_8BIT,
    OptimizerModel,
    adafactor_state,
    adam8bit_state,
)
from ampmem.analysis.static_model.terms import TermKind, TermSums
from ampmem.analysis.timeline.categories import Category
from ampmem.events import ParameterRecord
from ampmem.names import StateName

SCALAR = 16
"""A tensor of at most so many bytes that an optimizer keeps is a counter, not a state."""

_SPECIAL = {
    ADAFACTOR.key: TermKind.FACTORED_STATE,
    ADAM_8BIT.key: TermKind.SCALES_OF_BLOCKS,
}

ModelOf = Callable[[ParameterRecord], OptimizerModel]


def state_terms(evidence: Evidence, model_of: ModelOf, per_element: Callable[[ParameterRecord], float]) -> TermSums:
    """State that is not there or not there yet, of another type or shape; scalars, and what no model has."""
    terms = TermSums()
    states = _States(evidence, model_of)
    parameters_fate = _ParametersFate(evidence)
    for record in evidence.parameters:
        keys = states.keys.get(record.name)
        expected, model, name = per_element(record), model_of(record), record.name
        if keys is None:
            terms.add(parameters_fate.no_state(record), -expected * own_elements(record), name)
            continue
        whole = expected * record.elements
        terms.add(shared(record), whole - expected * own_elements(record), name)
        if model.key in _SPECIAL:
            terms.add(_SPECIAL[model.key], states.kept(record, keys) - whole, name)
            continue
        every = {state.name for state in model.states}
        terms.add(TermKind.STATE_TYPE, states.kept(record, every) - whole, name, about=record.dtype)
        for key in sorted(every - keys):
            size = states.kept(record, {key})
            terms.add(parameters_fate.no_key(record, key), -size, name, about=key)
    for other in states.others:
        terms.add(other.kind, other.bytes, other.parameter, about=other.about)
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """What an optimizer keeps beyond its model, which calls it ``about``; of no ``kind`` where nothing says why."""

    kind: TermKind | None
    bytes: float
    parameter: str = ""
    about: str = ""


class _States:
    """Which states of its model each parameter has, and what else the optimizers keep."""

    def __init__(self, evidence: Evidence, model_of: ModelOf) -> None:
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
            kind = TermKind.SCALARS if memory.bytes <= SCALAR else TermKind.UNKNOWN_STATE
            first = known[0]
            self.others.append(_Other(kind=kind, bytes=memory.bytes, parameter=first.parameter, about=first.state))
        elif len(modelled) == 1 and self._model_of(self._records[modelled[0].parameter]).key not in _SPECIAL:
            name = modelled[0]
            more = memory.bytes - self.kept(self._records[name.parameter], {name.state})
            self.others.append(_Other(kind=None, bytes=more))
        elif len(modelled) > 1:
            shares = sum(self.kept(self._records[name.parameter], {name.state}) for name in modelled)
            self.others.append(_Other(kind=TermKind.AROUND_STATES, bytes=max(memory.bytes - shares, 0)))

    def _modelled(self, name: str) -> set[str]:
        return {state.name for state in self._model_of(self._records[name]).states}


class _ParametersFate:
    """What became of state that is not there, as far as it was seen."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._gone = {StateName.read(text).parameter for text in evidence.states_fate.gone}
        self._later = {StateName.read(text).parameter for text in evidence.states_fate.later}

    def no_state(self, record: ParameterRecord) -> TermKind | None:
        """Why ``record`` has none of its model's states; ``None`` where nothing that was seen says why."""
        evidence, name = self._evidence, record.name
        if not record.trainable:
            return TermKind.FROZEN
        if name in self._gone:
            return TermKind.STATE_FREED
        if record.optimizer is None:
            return TermKind.NOT_OPTIMIZED
        if not evidence.updated:
            return TermKind.UPDATES_SKIPPED if evidence.skipped else TermKind.NO_UPDATE_YET
        if name in self._later:
            return TermKind.STATE_LATER
        return TermKind.NEVER_A_GRADIENT if evidence.have_gradients and name not in evidence.had_gradient else None

    def no_key(self, record: ParameterRecord, key: str) -> TermKind | None:
        """Why ``record`` lacks one of its states while it has others."""
        text = str(StateName(state=key, parameter=record.name))
        if text in self._evidence.states_fate.gone:
            return TermKind.STATES_GONE
        return TermKind.STATES_LATER if text in self._evidence.states_fate.later else None
