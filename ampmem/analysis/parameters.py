"""The parameters of a run, and how much memory is each one's own: shared memory must count once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ampmem.analysis.jsonable import NOT_IN_JSON
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import dtype_bytes
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import Fact, ParameterRecord, Recording
from ampmem.names import buffers_counted, parameters_left_over, shape_of
from ampmem.vocabulary import Precision, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The number and bytes of the parameters; ``cast_eligible`` is known under autocast only.

    ``count``, ``trainable`` and ``cast_eligible`` count elements in this process. If it has shards, ``global_count``
    and ``global_bytes`` are those of the whole parameters on all ranks, each once; ``None`` if nothing is sharded.

    ``exact`` says that these are all parameters, in their types. A snapshot has the parameters that were recognised,
    counted as float32: ``bound`` says that their bytes are a lower or an upper bound, empty if they are neither.

    ``untrained_count`` and ``untrained_bytes`` are those of models that nothing trains, such as an EMA of the weights
    or a teacher; beside a trained model the other numbers leave them out.
    """

    count: int
    trainable: int
    bytes: int
    cast_eligible: int | None
    global_count: int | None = None
    global_bytes: int | None = None
    untrained_count: int = 0
    untrained_bytes: int = 0
    exact: bool = field(default=True, metadata=NOT_IN_JSON)
    bound: Literal["at least", "at most", ""] = field(default="", metadata=NOT_IN_JSON)

    @property
    def known_count(self) -> int:
        """``count`` if bytes may be divided by it, else 0."""
        return self.count if self.exact else 0


def parameters_of(history: MemoryHistory, cast_eligible: int | None) -> Parameters:
    """All parameters of ``history``, each byte once."""
    recording, records = history.recording, history.parameters
    bound, others = _bound(recording), _untrained(history)
    untyped = recording.run.source == SourceKind.SNAPSHOT and recording.precision.name == Precision.AS_IS
    return Parameters(
        count=sum(own_elements(record) for record in records),
        trainable=sum(own_elements(record) for record in records if record.trainable),
        bytes=sum(own_bytes(record) for record in records),
        cast_eligible=cast_eligible,
        global_count=_global(records, own_elements),
        global_bytes=_global(records, own_bytes),
        untrained_count=sum(elements for elements, _ in others),
        untrained_bytes=sum(size for _, size in others),
        exact=not bound and not untyped,
        bound=bound,
    )


def _untrained(history: MemoryHistory) -> list[tuple[int, int]]:
    """The elements and the bytes of each untrained parameter, including parameters of modules that never ran.

    Models that were freed before the last step's end do not count: they may never have been alive together.
    """
    facts, texts, steps = history.facts, history.recording.texts, history.recording.steps
    end = history.timeline.position(steps[-1].end_ns) if steps else len(history.recording.events)
    named, alive = facts.fact == Fact.PARAMETER, history.lifetimes.alive_at(end)[facts.allocation]
    gone = {texts[name] for name in np.unique(facts.name[named])}
    gone -= {texts[name] for name in np.unique(facts.name[named & alive])}
    records = (record for record in history.recording.parameters if record.name in history.untrained - gone)
    found = [(own_elements(record), own_bytes(record)) for record in records]
    idle = (facts.fact == Fact.PARAMETER_COPY) & history.classes.of(Category.UNTRAINED)[facts.allocation]
    places = {(int(facts.allocation[row]), int(facts.name[row])): row for row in np.flatnonzero(idle).tolist()}
    for (allocation, _), row in places.items():
        size, shape = dtype_bytes(texts[facts.dtype[row]]), shape_of(texts[facts.shape[row]])
        if size is None or shape is None:
            found.append((0, int(history.lifetimes.bytes[allocation])))
        else:
            found.append((math.prod(shape), size * math.prod(shape)))
    return found


def _global(records: Sequence[ParameterRecord], own: Callable[[ParameterRecord], int]) -> int | None:
    """The sum of ``own`` over whole parameters; ``None`` if no parameter is sharded."""
    if all(record.global_elements is None for record in records):
        return None
    return sum(own(whole(record)) for record in records)


def whole(record: ParameterRecord) -> ParameterRecord:
    """``record`` as it would be on a single rank."""
    if record.global_elements is None:
        return record
    elements = record.global_elements
    size = (
        record.bytes * elements // record.elements if record.elements else elements * (dtype_bytes(record.dtype) or 0)
    )
    return replace(record, elements=elements, bytes=size, overlap=0, global_elements=None, padding=0)


def _bound(recording: Recording) -> Literal["at least", "at most", ""]:
    if parameters_left_over(recording.notes):
        return "at least"
    return "at most" if buffers_counted(recording.notes) else ""


def own_bytes(record: ParameterRecord) -> int:
    """Bytes of ``record`` that no earlier parameter has: 0 if it is in another parameter's memory."""
    return 0 if record.shares is not None else record.bytes - record.overlap


def own_elements(record: ParameterRecord) -> int:
    """The elements in :func:`own_bytes`."""
    return own_bytes(record) * record.elements // record.bytes if record.bytes else 0
