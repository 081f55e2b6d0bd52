"""The terms that explain the difference between a component and the static model, each computed from evidence.

Every function takes the evidence and the model's bytes per element, and goes through the parameters. A parameter counts
with the elements that no earlier parameter has: with none if it is in another's memory (tied weights). Missing memory
is explained only if facts say what became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ampmem.analysis.jsonable import NOT_IN_JSON, Signed
from ampmem.analysis.parameters import own_bytes, own_elements
from ampmem.analysis.static_model.evidence import ITEMSIZES, Copy, Evidence, Fates, StateMemory, credit, fits, itemsize
from ampmem.analysis.static_model.recipes import ADAFACTOR, ADAM_8BIT, OptimizerModel, adafactor_state, adam8bit_state
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import dtype_bytes
from ampmem.events import ParameterRecord
from ampmem.names import INPUT, StateName

NAMED = 3
"""The number of a term's tensors that are named, the largest first."""


class TermKind(StrEnum):
    """The reason why a component has more or fewer bytes than the model; the values are sentences.

    ``{about}`` in a value stands for a type or a name.
    """

    FROZEN = "frozen parameters"
    TIED = "tied weights: a tensor for each name"
    OVERLAPPING = "parameters that share part of another's memory: a whole tensor for each"
    PADDING = "padding that makes the shards of all ranks equally long"
    ROUNDING = "rounding up to the allocator's blocks"

    PARAMETER_TYPE = "kept in {about}"
    PARAMETERS_GONE = "parameters freed before this mark"
    PARAMETERS_LATER = "parameters made after this mark"
    PARAMETERS_MOVED = "earlier memory of a parameter that is still alive"
    PARAMETERS_KEPT = "copies of parameters that an optimizer keeps to put them back: {about}"
    PARAMETER_COPIES = "parameters of modules that did not run, such as copies of the model"
    AROUND_PARAMETERS = "memory around parameters that are views of a larger buffer"

    GRADIENT_TYPE = "gradients in {about}"
    ONE_GRADIENT_OF_TWO = "only one of the two gradients is alive: the parameter's or its master copy's"
    SEVERAL_GRADIENTS = "more than one gradient of a parameter is alive"
    SPARSE_GRADIENTS = "sparse gradients: their indices and values instead of all elements"
    GRADIENTS_FREED = "gradients freed before this mark"
    GRADIENTS_LATER = "no gradient before this mark: the first came later"
    NO_GRADIENTS = "no gradient: it was not seen in the recording"
    FUNCTIONAL_GRADIENTS = "no gradient: torch.func's gradients are the script's own tensors"
    GRADIENTS_OF_INPUTS = "gradients of inputs"
    AROUND_GRADIENTS = "memory around gradients that are views of a larger buffer"

    MASTER_TYPE = "master copies in {about}"
    NO_MASTER = "parameters without a master copy in this process"
    MASTERS_GONE = "master copies freed before this mark"
    MASTERS_LATER = "master copies made after this mark"
    MORE_MASTERS = "more master copies than the rule expects"
    AROUND_MASTERS = "memory around master copies that are views of a larger buffer"

    COPIES_FREED_WITH_GRAPH = "copies freed before this mark, with the graph that had saved them"
    COPIES_NOT_SAVED = "copies freed before this mark: nothing kept them"
    COPIES_CHECKPOINTED = "copies freed before this mark: backward made them again, as checkpointing does"
    COMPILED = "no cast was seen: casts inside compiled code cannot be identified"
    FUNCTIONAL_CASTS = "no copy of the parameter: torch.func casts the script's own tensors"
    NORMS_NOT_CAST = "norms: their parameters were not cast"
    EMBEDDINGS_NOT_CAST = "embeddings: their parameters were not cast"
    DOUBLES_NOT_CAST = "float64 parameters, which autocast does not cast"
    NOT_CAST = "other parameters that were not cast"
    CASTS_OF_THE_SCRIPT = "casts that are not autocast's"
    COPIES_IN_CACHE = "copies that the cache still holds: the autocast region has not ended"
    COPIES_IN_GRAPH = "copies that autograd had saved and that are still alive"
    COPIES_ELSEWHERE = "copies that autograd had not saved and that are still alive"
    COPIES_OF_WHOLES = "copies of whole parameters, of which this rank keeps a shard"
    COPY_TYPE = "copies in another type than the rule expects"
    COPIES_OF_EARLIER_STEPS = "copies of an earlier step that are still alive"
    COPIES_MADE_AGAIN = "copies made again for another use, without the cache"
    COPIES_OF_UNTRAINED = "copies of parameters that nothing trains"
    COPIES_OF_VIEWS_TOO = "copies of views of a parameter, besides the whole"
    COPIES_OF_VIEWS_ONLY = "copies of views of a parameter instead of the whole"

    STATE_TYPE = "state of {about} parameters"
    FACTORED_STATE = "rows and columns instead of full second moments"
    SCALES_OF_BLOCKS = "scales of the blocks, and small tensors kept in float32"
    STATES_LATER = "states made after this mark: {about}"
    STATES_GONE = "states freed before this mark: {about}"
    SCALARS = "scalars of the optimizer: {about}"
    UNKNOWN_STATE = "state that the rule does not have: {about}"
    AROUND_STATES = "memory around states that are views of a larger buffer"
    STATE_FREED = "optimizer state freed before this mark"
    NOT_OPTIMIZED = "parameters that no optimizer of this process has updated"
    UPDATES_SKIPPED = "no optimizer state yet: the loss scaler skipped the updates"
    NO_UPDATE_YET = "no optimizer state before the first update"
    STATE_LATER = "no optimizer state yet: it came with an update after this mark"
    NEVER_A_GRADIENT = "no optimizer state: these parameters have had no gradient"
    NO_GRADIENT_AT_UPDATE = "no optimizer state: these parameters' gradients were dropped before each update"

    def words(self, about: str) -> str:
        """The sentence, with the type or name ``about`` filled in."""
        return self.value.format(about=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One reason for a difference between the model and the measured memory.

    ``tensors`` counts the tensors concerned, and ``names`` are the parameters of the largest, at most :data:`NAMED`;
    empty if they belong to no parameter.
    """

    kind: TermKind = field(metadata=NOT_IN_JSON)
    why: str
    bytes: Signed
    tensors: int
    names: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Sum:
    """The tensors and bytes of one reason so far; ``sizes`` by name of parameter."""

    bytes: int = 0
    tensors: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, size: int, tensors: int, sizes: Iterable[tuple[str, int]]) -> None:
        self.bytes += size
        self.tensors += tensors
        for name, part in sizes:
            self.sizes[name] = self.sizes.get(name, 0) + part

    def largest(self) -> tuple[str, ...]:
        """The names with the most bytes; of equal ones the first seen."""
        return tuple(sorted(self.sizes, key=lambda name: -abs(self.sizes[name]))[:NAMED])


class TermSums:
    """Bytes, tensors and names by reason, in order of first appearance."""

    def __init__(self) -> None:
        self._sums: dict[tuple[TermKind, str], _Sum] = {}
        self.complete = True
        """Whether every byte was added with a kind."""

    def add(self, kind: TermKind | None, size: float, name: str = "", *, tensors: int = 1, about: str = "") -> None:
        """Add ``size`` bytes, in ``tensors`` tensors, that are more than the model has; 0 adds nothing.

        ``name`` is their parameter. Without a ``kind`` there is no evidence for a reason: the bytes stay unexplained.
        """
        if size and kind is None:
            self.complete = False
        elif size and kind is not None:
            sizes = [(name, round(size))] if name else []
            self._sums.setdefault((kind, kind.words(about)), _Sum()).add(round(size), tensors, sizes)

    def listed(self) -> tuple[Term, ...]:
        """The terms, largest first, without those that add up to 0."""
        terms = [
            Term(kind=kind, why=why, bytes=found.bytes, tensors=found.tensors, names=found.largest())
            for (kind, why), found in self._sums.items()
            if found.bytes
        ]
        return tuple(sorted(terms, key=lambda term: -abs(term.bytes)))

    @classmethod
    def sum(cls, parts: Iterable[TermSums]) -> TermSums:
        """The sum of ``parts``."""
        together = cls()
        for part in parts:
            together.complete &= part.complete
            for key, found in part._sums.items():
                if found.bytes:
                    together._sums.setdefault(key, _Sum()).add(found.bytes, found.tensors, found.sizes.items())
        return together


_LARGEST_ITEMSIZE = 4
"""Bytes per element of one gradient; where the model has more, there are two gradients."""


def parameter_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Terms for types other than the model's, and for memory around parameters that are views of a larger buffer."""
    terms = TermSums()
    # Shared bytes count for the first parameter that has them.
    owners = [
        replace(record, elements=own_elements(record), bytes=own_bytes(record))
        for record in evidence.parameters
        if own_bytes(record) or record.padding
    ]
    credits = credit(evidence.memories[Category.PARAMETERS], owners)
    for record in owners:
        found = credits.of.get(record.name, ())
        kind = TermKind.PARAMETER_TYPE
        terms.add(kind, record.bytes - per_element * record.elements, record.name, about=record.dtype)
        if not found:
            fates = evidence.fates[Category.PARAMETERS]
            missing = _fate(fates, record.name, TermKind.PARAMETERS_GONE, TermKind.PARAMETERS_LATER)
            terms.add(missing, -record.bytes, record.name)
        elif len(found) > 1:
            about = evidence.kept.get(record.name, "")
            kind = TermKind.PARAMETERS_KEPT if about else TermKind.PARAMETERS_MOVED
            terms.add(kind, sum(found[:-1]), record.name, tensors=len(found) - 1, about=about)
    for memory in evidence.copied:
        terms.add(TermKind.PARAMETER_COPIES, memory.bytes, next(iter(memory.names)))
    padding = {record.name: record.padding for record in owners if credits.of.get(record.name)}
    _add_beyond(terms, credits.beyond, padding, TermKind.AROUND_PARAMETERS)
    return terms


def _add_beyond(terms: TermSums, beyond: int, padding: Mapping[str, int], kind: TermKind) -> None:
    """The terms for memory ``beyond`` the tensors: the ``padding`` of shards, by parameter, if it is that large."""
    if sum(padding.values()) <= beyond:
        for name, size in padding.items():
            terms.add(TermKind.PADDING, size, name)
        beyond -= sum(padding.values())
    terms.add(kind, beyond)


def gradient_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Terms for gradients that are missing, not there yet or freed; of another type; or views of a buffer."""
    terms = TermSums()
    memories = evidence.memories[Category.GRADIENTS]
    credits = credit(memories, evidence.parameters, evidence.sparse)
    types = {name: dtype for memory in memories for name, dtype in memory.names.items()}
    for memory in memories:
        if tuple(memory.names) == (INPUT,):
            terms.add(TermKind.GRADIENTS_OF_INPUTS, memory.bytes)
    for record in evidence.parameters:
        found, name = credits.of.get(record.name, ()), record.name
        if not found:
            terms.add(_no_gradient(evidence, record), -per_element * own_elements(record), name)
            continue
        whole = per_element * record.elements
        terms.add(shared(record), whole - per_element * own_elements(record), name)
        if name in evidence.sparse:
            terms.add(TermKind.SPARSE_GRADIENTS, sum(found) - whole, name)
        elif sum(found) < whole and per_element > _LARGEST_ITEMSIZE:
            terms.add(TermKind.ONE_GRADIENT_OF_TWO, sum(found) - whole, name)
        elif per_element > _LARGEST_ITEMSIZE:
            terms.add(TermKind.SEVERAL_GRADIENTS, sum(found) - whole, name)
        else:
            terms.add(TermKind.SEVERAL_GRADIENTS, sum(found[:-1]), name, tensors=len(found) - 1)
            about = types.get(name) or record.dtype
            terms.add(TermKind.GRADIENT_TYPE, found[-1] - whole, name, about=about)
    padding = {
        record.name: record.padding * (dtype_bytes(types.get(record.name, "")) or itemsize(record)) // itemsize(record)
        for record in evidence.parameters
        if credits.of.get(record.name)
    }
    _add_beyond(terms, credits.beyond, padding, TermKind.AROUND_GRADIENTS)
    return terms


def _no_gradient(evidence: Evidence, record: ParameterRecord) -> TermKind | None:
    name = record.name
    if not record.trainable:
        return TermKind.FROZEN
    if name in evidence.fates[Category.GRADIENTS].gone:
        return TermKind.GRADIENTS_FREED
    if name not in evidence.had_gradient and name in evidence.have_gradients:
        return TermKind.GRADIENTS_LATER
    if evidence.functional and name not in evidence.have_gradients:
        return TermKind.FUNCTIONAL_GRADIENTS
    # If no gradient was seen at all, a missing one means nothing.
    return TermKind.NO_GRADIENTS if evidence.have_gradients and name not in evidence.have_gradients else None


def master_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Terms for parameters without a copy in another precision, and for copies of another type."""
    terms = TermSums()
    memories = evidence.memories[Category.MASTER_COPIES]
    credits = credit(memories, evidence.parameters)
    types = {name: dtype for memory in memories for name, dtype in memory.names.items()}
    for record in evidence.parameters:
        found, name = credits.of.get(record.name, ()), record.name
        if not found:
            terms.add(_no_master(evidence, record), -per_element * own_elements(record), name)
            continue
        whole = per_element * record.elements
        terms.add(shared(record), whole - per_element * own_elements(record), name)
        more = found[1:] if per_element else found
        terms.add(TermKind.MORE_MASTERS, sum(more), name, tensors=len(more))
        if per_element:
            about = types.get(name) or f"another type than the {record.dtype} parameters"
            terms.add(TermKind.MASTER_TYPE, found[0] - whole, name, about=about)
    terms.add(TermKind.AROUND_MASTERS, credits.beyond)
    return terms


def _no_master(evidence: Evidence, record: ParameterRecord) -> TermKind | None:
    if not record.trainable:
        return TermKind.FROZEN
    fate = _fate(evidence.fates[Category.MASTER_COPIES], record.name, TermKind.MASTERS_GONE, TermKind.MASTERS_LATER)
    return fate or TermKind.NO_MASTER


def cast_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Terms for parameters that autocast does not cast, for copies that nothing kept, and for repeated copies."""
    terms = TermSums()
    for record in evidence.parameters:
        # A whole copy has the parameter's elements; a tensor with another number of elements is not a copy of it.
        found = evidence.copies.get(record.name, ())
        copies = [copy for copy in found if copy.view or fits(copy.bytes, record) or _of_whole(copy, record)]
        if not copies:
            terms.add(_no_copy(evidence, record), -per_element * own_elements(record), record.name)
        elif not per_element:
            for copy in copies:
                terms.add(_still_there(evidence, copy), copy.bytes, record.name)
        else:
            whole = per_element * record.elements
            terms.add(shared(record), whole - per_element * own_elements(record), record.name)
            _add_copies(terms, copies, whole, record, evidence.named)
    for name in evidence.copies.keys() & evidence.untrained:
        found = evidence.copies[name]
        terms.add(TermKind.COPIES_OF_UNTRAINED, sum(copy.bytes for copy in found), name, tensors=len(found))
    return terms


def _no_copy(evidence: Evidence, record: ParameterRecord) -> TermKind | None:
    cast = evidence.cast.get(record.name)
    if cast is not None:
        if cast.saved:
            return TermKind.COPIES_FREED_WITH_GRAPH
        return TermKind.COPIES_CHECKPOINTED if cast.again else TermKind.COPIES_NOT_SAVED
    if record.dtype == "float64" and evidence.autocast:
        return TermKind.DOUBLES_NOT_CAST
    if evidence.compiled:
        return TermKind.COMPILED
    if not (evidence.casts_seen or evidence.functional):  # the casts may have been made where no hook sees them
        return None
    if "Norm" in record.kind:
        return TermKind.NORMS_NOT_CAST
    if "Embedding" in record.kind:
        return TermKind.EMBEDDINGS_NOT_CAST
    return TermKind.FUNCTIONAL_CASTS if evidence.functional else TermKind.NOT_CAST


def _still_there(evidence: Evidence, copy: Copy) -> TermKind:
    if not evidence.autocast:
        return TermKind.CASTS_OF_THE_SCRIPT
    if copy.cached:
        return TermKind.COPIES_IN_CACHE
    return TermKind.COPIES_IN_GRAPH if copy.saved else TermKind.COPIES_ELSEWHERE


def _of_whole(copy: Copy, record: ParameterRecord) -> bool:
    """Whether ``copy`` may be of more than this process's shard of ``record``: at most of the whole parameter."""
    size = (record.global_elements or 0) * max(ITEMSIZES)
    return record.bytes < copy.bytes * itemsize(record) and copy.bytes <= size


def _add_copies(terms: TermSums, copies: Sequence[Copy], expected: float, record: ParameterRecord, named: bool) -> None:
    name = record.name
    earlier = [copy.bytes for copy in copies if copy.earlier]
    now = [copy for copy in copies if not copy.earlier]
    whole = [copy.bytes for copy in now if not copy.view]
    views = [copy.bytes for copy in now if copy.view]
    if earlier and not now:  # the earlier copy serves this step too
        whole, earlier = earlier[-1:], earlier[:-1]
    terms.add(TermKind.COPIES_OF_EARLIER_STEPS, sum(earlier), name, tensors=len(earlier))
    if whole:
        of_shard = record.global_elements is None or whole[0] <= expected
        terms.add(TermKind.COPY_TYPE if of_shard else TermKind.COPIES_OF_WHOLES, whole[0] - expected, name)
        again = TermKind.COPIES_MADE_AGAIN if named else None
        terms.add(again, sum(whole[1:]), name, tensors=len(whole) - 1)
        terms.add(TermKind.COPIES_OF_VIEWS_TOO, sum(views), name, tensors=len(views))
    else:
        terms.add(TermKind.COPIES_OF_VIEWS_ONLY, sum(views) - expected, name, tensors=len(views))


def shared(record: ParameterRecord) -> TermKind:
    """The kind of term for the elements of ``record`` that an earlier parameter has too: one tensor for each name."""
    return TermKind.OVERLAPPING if record.shares is None else TermKind.TIED


def _fate(fates: Fates, name: str, gone: TermKind, later: TermKind) -> TermKind | None:
    if name in fates.gone:
        return gone
    return later if name in fates.later else None


# Why optimizer state differs from the static model: terms computed from what the hooks saw.

SCALAR = 16
"""An optimizer's tensor of at most this many bytes is a counter, not a state."""

_SPECIAL = {ADAFACTOR.key: TermKind.FACTORED_STATE, ADAM_8BIT.key: TermKind.SCALES_OF_BLOCKS}

ModelOf = Callable[[ParameterRecord], OptimizerModel]


def state_terms(evidence: Evidence, model_of: ModelOf, per_element: Callable[[ParameterRecord], float]) -> TermSums:
    """Terms for state that is missing or not there yet, or has another type or shape; for scalars and unknown state."""
    terms = TermSums()
    states = _States(evidence, model_of, terms)
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
    return terms


class _States:
    """Which states of its model each parameter has; state beyond the models is added to ``terms``."""

    def __init__(self, evidence: Evidence, model_of: ModelOf, terms: TermSums) -> None:
        self.keys: dict[str, set[str]] = {}
        """The states that each parameter has, by parameter."""
        self._terms = terms
        self._model_of = model_of
        self._records = {record.name: record for record in evidence.parameters}
        self._masters = credit(evidence.memories[Category.MASTER_COPIES], evidence.parameters).of
        for memory in evidence.states:
            self._add_memory(memory)

    def kept(self, record: ParameterRecord, keys: set[str]) -> float:
        """Bytes that the model of ``record`` has for it in the states ``keys``."""
        model, size = self._model_of(record), itemsize(record)
        if record.elements and record.name in self._masters:
            size = self._masters[record.name][0] // record.elements
        if model == ADAFACTOR:
            return adafactor_state(record.shape, size)
        if model == ADAM_8BIT:
            return adam8bit_state(record.elements)
        states = (state for state in model.states if state.name in keys)
        return sum(state.elements * (state.itemsize or size) for state in states) * record.elements

    def _add_memory(self, memory: StateMemory) -> None:
        # State of no parameter has no parameter's name; with the name of an unknown parameter it is not attributed.
        known = [name for name in memory.names if name.parameter in self._records or not name.parameter]
        modelled = [name for name in known if name.parameter and name.state in self._modelled(name.parameter)]
        for name in modelled:
            self.keys.setdefault(name.parameter, set()).add(name.state)
        if not modelled and known:
            kind = TermKind.SCALARS if memory.bytes <= SCALAR else TermKind.UNKNOWN_STATE
            self._terms.add(kind, memory.bytes, known[0].parameter, about=known[0].state)
            return
        shares = sum(self.kept(self._records[name.parameter], {name.state}) for name in modelled)
        if len(modelled) == 1 and self._model_of(self._records[modelled[0].parameter]).key not in _SPECIAL:
            self._terms.add(None, memory.bytes - shares)
        elif len(modelled) > 1:
            self._terms.add(TermKind.AROUND_STATES, max(memory.bytes - shares, 0))

    def _modelled(self, name: str) -> set[str]:
        return {state.name for state in self._model_of(self._records[name]).states}


class _ParametersFate:
    """The reasons for missing optimizer state, as far as the hooks saw them."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._gone = {StateName.read(text).parameter for text in evidence.states_fate.gone}
        self._later = {StateName.read(text).parameter for text in evidence.states_fate.later}

    def no_state(self, record: ParameterRecord) -> TermKind | None:
        """Why ``record`` has none of its model's states; ``None`` without evidence."""
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
        if not evidence.have_gradients or name in evidence.at_update:
            return None
        return TermKind.NO_GRADIENT_AT_UPDATE if name in evidence.had_gradient else TermKind.NEVER_A_GRADIENT

    def no_key(self, record: ParameterRecord, key: str) -> TermKind | None:
        """Why ``record`` lacks one of its states while it has others; ``None`` without evidence."""
        text = str(StateName(state=key, parameter=record.name))
        if text in self._evidence.states_fate.gone:
            return TermKind.STATES_GONE
        return TermKind.STATES_LATER if text in self._evidence.states_fate.later else None
