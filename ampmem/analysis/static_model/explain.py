"""Why a component differs from what the static model tells: terms of a kind, each computed from evidence.

Every function takes the evidence and the bytes per element that the model has, and goes through the parameters. A
parameter counts in the model with the elements that no parameter before it has: with none where it lies in another's
memory (tied weights). What is not there is explained only where facts say what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ampmem.analysis.parameters import own_bytes, own_elements
from ampmem.analysis.static_model.evidence import ITEMSIZES, Copy, Evidence, Fates, credit, fits, itemsize
from ampmem.analysis.static_model.terms import TermKind, TermSums
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.tensors import dtype_bytes
from ampmem.events import ParameterRecord
from ampmem.names import INPUT

_LARGEST_ITEMSIZE = 4
"""Bytes per element of one gradient; where a model has more, it has two."""


def parameter_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Types other than the model's; memory around parameters that are views of a larger buffer."""
    terms = TermSums()
    # Of what several have, the first one has the bytes.
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
            terms.add(_missing_parameter(evidence.fates[Category.PARAMETERS], record), -record.bytes, record.name)
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
    """What memory holds ``beyond`` its tensors: the ``padding`` of shards, by parameter, where there is as much."""
    if sum(padding.values()) <= beyond:
        for name, size in padding.items():
            terms.add(TermKind.PADDING, size, name)
        beyond -= sum(padding.values())
    terms.add(kind, beyond)


def _missing_parameter(fates: Fates, record: ParameterRecord) -> TermKind | None:
    return _fate(fates, record.name, TermKind.PARAMETERS_GONE, TermKind.PARAMETERS_LATER)


def gradient_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Gradients that are not there, not there yet or no more; of another type; views of a buffer."""
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
    # Where no gradient of anything was seen, that theirs was not says nothing.
    return TermKind.NO_GRADIENTS if evidence.have_gradients and name not in evidence.have_gradients else None


def master_terms(evidence: Evidence, per_element: float) -> TermSums:
    """Parameters without a copy in another precision, and copies of another type."""
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
            about = types.get(name) or f"another type than that of {record.dtype} parameters"
            terms.add(TermKind.MASTER_TYPE, found[0] - whole, name, about=about)
    terms.add(TermKind.AROUND_MASTERS, credits.beyond)
    return terms


def _no_master(evidence: Evidence, record: ParameterRecord) -> TermKind | None:
    if not record.trainable:
        return TermKind.FROZEN
    fate = _fate(evidence.fates[Category.MASTER_COPIES], record.name, TermKind.MASTERS_GONE, TermKind.MASTERS_LATER)
    return fate or TermKind.NO_MASTER


def cast_terms(evidence: Evidence, per_element: float) -> TermSums:
    """What autocast does not cast, what nobody kept, and what is there more than once."""
    terms = TermSums()
    for record in evidence.parameters:
        # A whole copy has the parameter's elements; what has others is no copy of it.
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
    if not evidence.casts_seen:  # they may have been made where no hook sees any
        return None
    if "Norm" in record.kind:
        return TermKind.NORMS_NOT_CAST
    return TermKind.EMBEDDINGS_NOT_CAST if "Embedding" in record.kind else TermKind.NOT_CAST


def _still_there(evidence: Evidence, copy: Copy) -> TermKind:
    if not evidence.autocast:
        return TermKind.CASTS_OF_THE_SCRIPT
    if copy.cached:
        return TermKind.COPIES_IN_CACHE
    return TermKind.COPIES_IN_GRAPH if copy.saved else TermKind.COPIES_ELSEWHERE


def _of_whole(copy: Copy, record: ParameterRecord) -> bool:
    """Whether ``copy`` may be of more than this process's shard of ``record``: as much as all ranks have, at most."""
    size = (record.global_elements or 0) * max(ITEMSIZES)
    return record.global_elements is not None and record.bytes < copy.bytes * itemsize(record) and copy.bytes <= size


def _add_copies(terms: TermSums, copies: Sequence[Copy], expected: float, record: ParameterRecord, named: bool) -> None:
    name = record.name
    earlier = [copy.bytes for copy in copies if copy.earlier]
    now = [copy for copy in copies if not copy.earlier]
    whole = [copy.bytes for copy in now if not copy.view]
    views = [copy.bytes for copy in now if copy.view]
    if earlier and not now:  # what serves this step
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
    """Why there is a tensor for those elements of ``record`` that a parameter before it has."""
    return TermKind.OVERLAPPING if record.shares is None else TermKind.TIED


def _fate(fates: Fates, name: str, gone: TermKind, later: TermKind) -> TermKind | None:
    if name in fates.gone:
        return gone
    return later if name in fates.later else None
