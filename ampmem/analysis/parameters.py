"""The parameters of a run, and how much of each is its own: what lies in the same memory must count once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ampmem.analysis.jsonable import NOT_IN_JSON
from ampmem.events import ParameterRecord, Recording
from ampmem.names import buffers_counted, parameters_left_over
from ampmem.vocabulary import Arm, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``count``, ``trainable`` and ``cast_eligible`` are elements; the last is known under autocast only.

    ``exact`` says that these are all parameters, in their types. Of a snapshot they are what was recognised, counted as
    float32: there are ``bound`` so many bytes, empty where nothing speaks against just as many.
    """

    count: int
    trainable: int
    bytes: int
    cast_eligible: int | None
    exact: bool = field(default=True, metadata=NOT_IN_JSON)
    bound: Literal["at least", "at most", ""] = field(default="", metadata=NOT_IN_JSON)

    @property
    def known_count(self) -> int:
        """``count`` where bytes may be divided by it, else 0."""
        return self.count if self.exact else 0


def parameters_of(recording: Recording, cast_eligible: int | None) -> Parameters:
    """All parameters of ``recording``, each byte once."""
    records, bound = recording.parameters, _bound(recording)
    untyped = recording.run.source == SourceKind.SNAPSHOT and recording.arm.name == Arm.AS_IS
    return Parameters(
        count=sum(own_elements(record) for record in records),
        trainable=sum(own_elements(record) for record in records if record.trainable),
        bytes=sum(own_bytes(record) for record in records),
        cast_eligible=cast_eligible,
        exact=not bound and not untyped,
        bound=bound,
    )


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
