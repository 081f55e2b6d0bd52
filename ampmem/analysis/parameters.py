"""The parameters of a run, and how much of each is its own: what lies in the same memory must count once."""

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
from ampmem.vocabulary import Arm, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``count``, ``trainable`` and ``cast_eligible`` are elements; the last is known under autocast only.

    They are those in this process. Where it has shards only, ``global_count`` and ``global_bytes`` are those of the
    whole parameters on all ranks together, each once; ``None`` where nothing is sharded.

    ``exact`` says that these are all parameters, in their types. Of a snapshot they are what was recognised, counted as
    float32: there are ``bound`` so many bytes, empty where nothing speaks against just as many.

    ``untrained_count`` and ``untrained_bytes`` are those of models that nothing trains, such as an average of the
    weights or a teacher: beside a model that is trained they are in none of the others.
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
        """``count`` where bytes may be divided by it, else 0."""
        return self.count if self.exact else 0


def parameters_of(history: MemoryHistory, cast_eligible: int | None) -> Parameters:
    """All parameters of ``history``, each byte once."""
    recording, records = history.recording, history.parameters
    bound, others = _bound(recording), _untrained(history)
    untyped = recording.run.source == SourceKind.SNAPSHOT and recording.arm.name == Arm.AS_IS
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
    """Elements and bytes of each parameter that nothing trains, those of modules that never ran among them."""
    records = (record for record in history.recording.parameters if record.name in history.untrained)
    found = [(own_elements(record), own_bytes(record)) for record in records]
    facts, texts = history.facts, history.recording.texts
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
    """What ``own`` counts, of whole parameters; ``None`` where no parameter is sharded."""
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
    """Bytes of ``record`` that no parameter before it has: none where it lies in another's memory."""
    return 0 if record.shares is not None else record.bytes - record.overlap


def own_elements(record: ParameterRecord) -> int:
    """The elements in :func:`own_bytes`."""
    return own_bytes(record) * record.elements // record.bytes if record.bytes else 0
