"""The contents of a recording: allocator events, facts about storages and phases as typed columns, and records.

The recorder writes them, the analysis reads them; neither knows the other. All columns are one-dimensional ``int64``
arrays of equal length. Times are nanoseconds since the Unix epoch. ``name``, ``module``, ``dtype``, ``shape``, ``op``
and ``stack`` columns hold indices into :attr:`Recording.texts`; index 0 is the empty text, "not known".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.failure import FailureRecord
from ampmem.output import Shown, in_short
from ampmem.vocabulary import Mark, Precision, SourceKind

Column: TypeAlias = NDArray[np.int64]

Setting: TypeAlias = "bool | int | float | str | None"
"""The value of an optimizer's option."""

NO_STEP = -1
"""The value of a ``step`` column before the first step."""

UNKNOWN = -1
"""The value of the ``allocated`` column if the allocator reported no running total."""

OTHER_THREADS = 1
"""The address of the block that stands for the memory of threads that are not recorded; nothing is at it."""


class Action(IntEnum):
    """The kind of an allocator event."""

    BASELINE = 1
    """The block was alive when the recording started."""
    ALLOC = 2
    FREE = 3


class SegmentAction(IntEnum):
    """The kind of a segment's row: what happens to memory taken from the device, in segments or pages."""

    BASELINE = 1
    """The memory was reserved when the recording started."""
    RESERVE = 2
    RELEASE = 3


class Phase(IntEnum):
    """The phase of a script."""

    SETUP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    BETWEEN = 6
    EVALUATION = 7
    """A model runs forward with gradients off, in a script that trains."""


class Fact(IntEnum):
    """The kind of a fact that a hook saw about a storage. ``name`` and ``module`` say more; see each member."""

    PARAMETER = 1
    """An ``nn.Parameter``; ``name`` is its full name, ``module`` its module's path."""
    BUFFER = 2
    """A module buffer; ``name`` is its full name."""
    GRADIENT = 3
    """``.grad`` of a parameter; ``name`` is the parameter's."""
    OPTIMIZER_STATE = 4
    """A tensor in ``optimizer.state``; ``name`` is a :class:`~ampmem.names.StateName`."""
    MASTER_COPY = 5
    """An optimizer's own copy of a parameter in another precision; ``name`` is the parameter's."""
    CAST_COPY = 6
    """A copy of a parameter, or of a part of it, in another floating dtype; ``name`` is the parameter's."""
    SAVED = 7
    """Saved for backward by autograd, by the op ``name``."""
    INPUT = 8
    """An argument of a root module."""
    OUTPUT = 9
    """Returned by the op ``name`` inside ``module``."""
    RECOMPUTED = 10
    """Made again inside backward (activation checkpointing) and alive when the recomputation ended."""
    VIEW_CAST = 11
    """A :attr:`CAST_COPY` whose source was a view of the parameter; autocast's cache does not take those."""
    OTHER_CAST = 12
    """A copy in another floating dtype of a tensor that is not a parameter; ``name`` is the buffer's if it is one."""
    CAST_USE = 13
    """The op ``name`` reads this :attr:`CAST_COPY`."""
    CACHED = 14
    """A :attr:`CAST_COPY` that autocast's cache holds, until it is cleared right after."""
    WORKSPACE = 15
    """Scratch that a library keeps for itself; ``name`` is the library, such as cuBLAS, where it is known."""
    INFERRED = 16
    """Other facts about this storage were inferred from frames, sizes and lifetimes, not seen by a hook."""
    SCRATCH = 17
    """Memory that the op ``name`` allocates for itself and frees before it returns."""
    PARAMETER_COPY = 18
    """A parameter of a module that did not run during the recording, such as an EMA's; ``name`` is the parameter's."""
    HELD = 19
    """Alive in ``name`` when a step of inference, or the recording, ended: ``DynamicCache.layers[0].keys``. If the name
    begins with a variable of the script, ``module`` is where that was assigned, as for :attr:`VARIABLE`."""
    COMMUNICATION = 20
    """Memory of distributed training; ``name`` is a :class:`~ampmem.vocabulary.Communication`."""
    COLLECTIVE = 21
    """Given to or filled by a collective, whatever else it is for; ``name`` is a
    :class:`~ampmem.vocabulary.Communication`."""
    CAST_SOURCE = 22
    """The source of the :attr:`OTHER_CAST` of the same instant."""
    VARIABLE = 23
    """Held by the script's variable ``name``; ``module`` is where that was assigned, ``FILE:LINE FUNCTION``."""
    ATTRIBUTE = 24
    """Held by a module's attribute ``name`` (a path) when the recording ends; neither a parameter nor a buffer."""
    COMPILED = 25
    """Code that torch.compile generated made this :attr:`CAST_COPY`."""
    DISABLED = 26
    """Returned by an op of attention while the script had disabled the kernels ``name``, such as ``flash, cuDNN``."""


PLACED = (Fact.HELD, Fact.VARIABLE)
"""The facts whose ``module`` is a line of the script."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Columns(Shown):
    """Base of the column groups: equal-length ``int64`` arrays, one per field."""

    def __len__(self) -> int:
        return len(getattr(self, self.names()[0]))

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """The columns, in the order in which the file stores them."""
        return tuple(column.name for column in fields(cls))

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]]) -> Self:
        """The columns of ``rows``, each of which has one number per column."""
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(cls.names()))
        return cls(**dict(zip(cls.names(), np.ascontiguousarray(table.T), strict=True)))

    def part(self, start: int, end: int) -> Self:
        """The rows from ``start`` to before ``end``."""
        return type(self)(**{name: getattr(self, name)[start:end] for name in self.names()})

    def _in_short(self) -> str:
        return f"{len(self):,} rows"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EventColumns(Columns):
    """Allocator events in order.

    ``bytes`` is the requested size and ``block_bytes`` the size of the block, both positive for frees too.
    ``allocated`` is the allocator's own running total of requested bytes after the event (plus the baseline), or
    :data:`UNKNOWN`. ``module``, ``op`` and ``stack`` say who allocated; they are 0 for frees.
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FactColumns(Columns):
    """Facts about storages, in the order in which they were seen.

    ``fact`` is a :class:`Fact`, ``dtype`` and ``shape`` (see :func:`~ampmem.names.shape_text`) are those of its tensor,
    if the hook knew them; the tensor may be a view of a part of the storage.
    """

    time_ns: Column
    address: Column
    fact: Column
    name: Column
    module: Column
    dtype: Column
    shape: Column


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PhaseColumns(Columns):
    """Each row: from ``time_ns`` on, until the next row, the script was in ``phase`` of ``step``."""

    time_ns: Column
    step: Column
    phase: Column


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SegmentColumns(Columns):
    """The memory that the allocator takes from the device and gives back, in order; the baseline comes first.

    ``position`` is how many events of the recording came before: a segment is reserved right before the alloc that it
    is for, and often in the same microsecond. ``action`` is a :class:`SegmentAction`. ``small`` (in the pool for small
    blocks) and ``expandable`` (pages of an expandable segment, of which any part can be released) are 0 or 1.
    """

    time_ns: Column
    position: Column
    action: Column
    address: Column
    bytes: Column
    stream: Column
    small: Column
    expandable: Column


NO_SEGMENTS = SegmentColumns.of_rows([])
"""The segments of a source whose allocator has none, such as the CPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that ended; or the step in which memory ran out and the recording ended, which is not ``finished``.

    ``loss`` is the value that the last of the step's ``backwards`` started from, unscaled; ``None`` unless it is one
    number. ``batch_size`` is the first dimension of the last outermost module's first tensor argument, ``batch_loaded``
    says that a DataLoader made the batch, ``autocast_in_backward`` that a backward ran under autocast.
    """

    index: int
    start_ns: int
    end_ns: int
    skipped_update: bool
    loss: float | None
    loss_scale: float | None
    batch_size: int | None = None
    autocast_in_backward: bool = False
    finished: bool = True
    batch_loaded: bool = False
    backwards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """One parameter tensor; a tensor registered twice appears once, under its first name.

    ``kind`` is its module's class, ``optimizer`` the index of the optimizer that updates it (or its master copy),
    ``shares`` the parameter that has the same memory, ``overlap`` the bytes shared with earlier parameters, if not all.
    ``elements`` and ``bytes`` are those in this process; for a shard, ``global_elements`` are those of the whole
    parameter, and ``padding`` the bytes of the shard's memory that belong to no element.

    ``model`` is the path of its outermost module. ``held`` says that an optimizer has it, with or without an update so
    far. ``in_graph`` says whether its module ever ran forward with gradients on; ``None`` if it never ran.
    """

    name: str
    elements: int
    bytes: int
    dtype: str
    trainable: bool
    shape: tuple[int, ...] = ()
    kind: str = ""
    optimizer: int | None = None
    shares: str | None = None
    overlap: int = 0
    global_elements: int | None = None
    padding: int = 0
    model: str = ""
    held: bool = False
    in_graph: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """One optimizer; ``implementation`` is ``foreach``, ``fused`` or ``for-loop``.

    ``bases`` are its base classes, nearest first; ``settings`` the options of its first parameter group. ``stepped`` is
    false for an optimizer that had made no update when memory ran out.
    """

    class_name: str
    implementation: str
    bases: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    stepped: bool = True

    @property
    def takes_fused(self) -> bool:
        """Whether the optimizer has a fused implementation."""
        return "fused" in self.settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecord:
    """The precision mode; :attr:`Precision.AS_IS` if no other precision describes it.

    ``forced`` says that ampmem imposed it on the script, ``wrapped`` that ampmem had to open the autocast regions
    itself, as the script has none.
    """

    name: Precision
    dtype: str | None
    cache: bool | None
    scaler: bool
    forced: bool = False
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The script, device and versions of a run; why the script failed, if so; the value of ``--step-on``, if given."""

    ampmem: str
    torch: str
    python: str
    source: SourceKind
    device_type: str
    device_name: str
    rank: int
    world_size: int
    script: str
    arguments: tuple[str, ...]
    failure: FailureRecord | None = None
    step_on: str = ""
    local_rank: int | None = None
    """The rank of this process on its machine, if known."""
    job: str = ""
    """The identity of the job, shared by its ranks, if there are several."""
    assume: tuple[str, ...] = ()
    """The assumptions given to a simulated device (``--assume``)."""
    script_sha256: str = ""
    """The digest of the script's own file, if a command line started it; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of the script's device mesh with ``size`` ranks; this rank is at ``coordinate``."""

    name: str
    size: int
    coordinate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRecord:
    """The place of this process in a job; ``stages`` are its own ones of the pipeline's ``stage_count``."""

    rank: int
    world_size: int
    local_rank: int | None = None
    job: str = ""
    mesh: tuple[MeshAxis, ...] = ()
    stages: tuple[int, ...] = ()
    stage_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersRecord:
    """The allocator's own statistics at a mark of a step, in bytes.

    ``requested`` and ``allocated`` leave out freed blocks that wait for other streams, ``active`` includes them.
    ``device_used`` is the device's memory in use by all processes and ``process_used`` by this one, as the driver
    counts; ``None`` if it was not asked.
    """

    step: int
    mark: Mark
    requested: int
    allocated: int
    active: int
    reserved: int
    device_used: int | None
    process_used: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecord:
    """One request that failed for lack of memory.

    ``asked`` is the needed block, the request rounded up; ``segment`` the request to the device. ``total`` is the
    device's memory, ``None`` in a snapshot, ``free`` the rest of it that the driver had, and ``limit`` the process's
    limit (``set_per_process_memory_fraction``), ``None`` without one.
    ``op``, ``module`` and ``stack`` say who asked; empty where not known. ``segments`` has the allocator's segments at
    that moment, as :func:`ampmem.allocator.oom.pack_segments` writes them. ``later`` is ``None`` unless the request
    came after the recorded steps: then it has the addresses of what was alive when the recording ended, and still was.
    """

    time_ns: int
    step: int
    device: int
    stream: int
    pool: str
    asked: int
    segment: int
    total: int | None
    free: int
    op: str
    module: str
    stack: str
    segments: str
    limit: int | None = None
    later: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TermsRecord:
    """The memory of a simulated allocator at one instant, in bytes.

    ``tensors``, ``workspaces`` (by library) and ``scratch`` (by op) were requested; with ``rounding`` they are the
    allocated bytes, and with ``cached`` the reserved bytes.
    """

    tensors: int
    workspaces: Mapping[str, int]
    scratch: Mapping[str, int]
    rounding: int
    cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRecord:
    """The peaks of a simulated run on its GPU: the first instants of the most allocated and the most reserved bytes.

    ``total`` is the device's memory, ``outside`` the lower and ``outside_at_most`` the upper bound of the CUDA
    context's; if a recording has no upper bound, both are equal. ``highest_allocated`` and ``highest_reserved`` are the
    upper bounds of the peaks, with the largest single unknown request by name in ``bounds``. If unknown buffers come
    and go between the tensors, a run without them gives no lower bound: ``least_reserved`` is that bound, and
    ``likely_reserved`` is between. ``unmodelled`` names what was left out. ``ran_out`` says that a request failed.
    ``libraries`` has the lower bounds of libraries' memory besides ``outside``, by purpose; ``libraries_at_most`` the
    upper bounds. ``unfilled_allocated`` and ``unfilled_reserved`` are the highest peaks without the trials of
    ``torch.backends.cudnn.benchmark``, which may fill the free memory; ``None`` without trials. ``allowed`` is the
    process's limit (``set_per_process_memory_fraction``) when the most was reserved; ``None`` without one.
    """

    total: int
    outside: int
    allocated: TermsRecord
    reserved: TermsRecord
    highest_allocated: int
    highest_reserved: int
    bounds: Mapping[str, int]
    unmodelled: tuple[str, ...]
    ran_out: bool
    libraries: Mapping[str, int] = field(default_factory=dict)
    libraries_at_most: Mapping[str, int] = field(default_factory=dict)
    least_reserved: int | None = None
    likely_reserved: int | None = None
    outside_at_most: int = 0
    unfilled_allocated: int | None = None
    unfilled_reserved: int | None = None
    allowed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRecord:
    """The caching allocator's ``settings`` (in ``variable``), its use, and its ``peaks`` in bytes by device."""

    variable: str
    settings: str
    expandable_segments: bool
    streams: int
    private_pools: int
    device: int
    peaks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Recording(Shown):
    """A whole recording, in memory.

    ``plain_step_ns`` has the durations in ns of the same steps in a separate run without instrumentation; empty without
    such a run. ``layers``, ``ooms`` and ``segments`` are empty if the source has no allocator with layers, such as the
    CPU; ``prediction`` is there for a simulated GPU only. ``mesh`` has the axes of the script's device mesh, outermost
    first, ``stages`` the pipeline stages of this process, out of ``stage_count``. ``optimizers`` are those that
    stepped, ``waiting`` those that had not when memory ran out: a parameter's ``optimizer`` is an index into both, one
    after the other.
    """

    run: RunRecord
    precision: PrecisionRecord
    texts: tuple[str, ...]
    events: EventColumns
    facts: FactColumns
    phases: PhaseColumns
    steps: tuple[StepRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    notes: tuple[str, ...]
    plain_step_ns: tuple[int, ...] = ()
    layers: tuple[LayersRecord, ...] = ()
    ooms: tuple[OomRecord, ...] = ()
    segments: SegmentColumns = NO_SEGMENTS
    prediction: PredictionRecord | None = None
    allocator: AllocatorRecord | None = None
    mesh: tuple[MeshAxis, ...] = ()
    ended: bool | None = None
    """Whether the recorder ended the recording; ``None`` if that is not known (yet)."""
    stages: tuple[int, ...] = ()
    stage_count: int = 0
    waiting: tuple[OptimizerRecord, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, without the one about the script's failure, which is also in ``run``."""
        failure = self.run.failure
        return tuple(note for note in self.notes if failure is None or note != failure.note)

    def naming(self, *names: str) -> NDArray[np.bool_]:
        """For each of the texts, whether it is one of ``names``."""
        return np.array([text in names for text in self.texts], dtype=np.bool_)

    def _in_short(self) -> str:
        run, precision = self.run, (self.precision.name, self.precision.dtype)
        said = in_short(run.source, run.device_name, precision, len(self.steps), (run.rank, run.world_size))
        return f"{run.script}, {said}, {len(self.events):,} events"
