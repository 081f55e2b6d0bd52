"""What a recording holds: allocator events, storage facts and phases, as typed columns.

The recorder fills these, the analysis reads them; neither knows the other. All columns are
one-dimensional ``int64`` arrays of equal length. Times are nanoseconds since the Unix epoch.
``name``, ``module``, ``op`` and ``stack`` columns hold indices into :attr:`Recording.texts`;
index 0 is the empty text, "not known".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.int64]

NO_STEP = -1
"""Value of a ``step`` column before the first step."""

UNKNOWN = -1
"""Value of the ``allocated`` column where the allocator reported no running total."""


class Action(IntEnum):
    """What an allocator event does."""

    BASELINE = 1
    """The block was alive when the recording started."""
    ALLOC = 2
    FREE = 3


class Phase(IntEnum):
    """What the script was doing."""

    SETUP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    BETWEEN = 6


class Fact(IntEnum):
    """What a hook saw about a storage. ``name`` and ``module`` say more; see each member."""

    PARAMETER = 1
    """An ``nn.Parameter``; ``name`` is its full name, ``module`` its module's path."""
    BUFFER = 2
    """A module buffer; ``name`` is its full name."""
    GRADIENT = 3
    """``.grad`` of a parameter; ``name`` is the parameter's."""
    OPTIMIZER_STATE = 4
    """A tensor in ``optimizer.state``; ``name`` is ``exp_avg of blocks.0.weight``."""
    MASTER_COPY = 5
    """An optimizer's own copy of a parameter in another precision; ``name`` is the parameter's."""
    CAST_COPY = 6
    """A copy of a parameter in another floating dtype, made in forward; ``name`` is the parameter's."""
    SAVED = 7
    """Saved for backward by autograd."""
    INPUT = 8
    """An argument of a root module."""
    OUTPUT = 9
    """Returned by the op ``name`` inside ``module``."""
    RECOMPUTED = 10
    """Made again inside backward (activation checkpointing) and alive when the recomputation ended."""


class Source(StrEnum):
    """Where the allocator events come from."""

    CUDA = "cuda"
    CPU = "cpu"
    SIMULATED = "simulated"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Base of the column groups: equal-length ``int64`` arrays, one per field."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The columns, in the order in which the file stores them."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True, kw_only=True)
class EventColumns(Columns):
    """Allocator events in the order in which they happened.

    ``bytes`` is what was requested and ``block_bytes`` what the allocator set aside for it, both
    positive for frees too. ``allocated`` is the allocator's own running total of requested bytes
    after the event (plus the baseline), or :data:`UNKNOWN`. ``module``, ``op`` and ``stack`` say
    who allocated; they are 0 for frees.
    """

    time_ns: Column
    step: Column
    phase: Column
    action: Column
    address: Column
    bytes: Column
    block_bytes: Column
    stream: Column
    op: Column
    module: Column
    stack: Column
    allocated: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class FactColumns(Columns):
    """Facts about storages, in the order in which they were seen; ``fact`` is a :class:`Fact`."""

    time_ns: Column
    address: Column
    fact: Column
    name: Column
    module: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseColumns(Columns):
    """Each row: from ``time_ns`` on, until the next row, the script was in ``phase`` of ``step``."""

    time_ns: Column
    step: Column
    phase: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that ended.

    ``loss`` is what the step's last backward started from, unscaled; ``None`` unless that is one number.
    """

    index: int
    start_ns: int
    end_ns: int
    skipped_update: bool
    loss: float | None
    loss_scale: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """One parameter tensor; tied weights appear once, under their first name."""

    name: str
    elements: int
    bytes: int
    dtype: str
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """One optimizer that stepped; ``implementation`` is ``foreach``, ``fused`` or ``for-loop``."""

    class_name: str
    implementation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """The precision mode that was seen: ``fp32``, ``amp``, ``amp-nocache``, or ``as-is`` for another."""

    name: str
    dtype: str | None
    cache: bool | None
    scaler: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was run, on what, with which versions."""

    ampmem: str
    torch: str
    python: str
    source: Source
    device_type: str
    device_name: str
    rank: int
    world_size: int
    script: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole recording, in memory."""

    run: RunRecord
    arm: ArmRecord
    texts: tuple[str, ...]
    events: EventColumns
    facts: FactColumns
    phases: PhaseColumns
    steps: tuple[StepRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    notes: tuple[str, ...]
