"""What a recording holds: allocator events, storage facts and phases, as typed columns; and records of the allocator.

The recorder fills these, the analysis reads them; neither knows the other. All columns are one-dimensional ``int64``
arrays of equal length. Times are nanoseconds since the Unix epoch. ``name``, ``module``, ``dtype``, ``shape``, ``op``
and ``stack`` columns hold indices into :attr:`Recording.texts`; index 0 is the empty text, "not known".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ampmem.failure import FailureRecord
from ampmem.output import Shown, in_short
from ampmem.vocabulary import Arm, Mark, SourceKind

Column: TypeAlias = NDArray[np.int64]

Setting: TypeAlias = "bool | int | float | str | None"
"""One option of an optimizer."""

NO_STEP = -1
"""Value of a ``step`` column before the first step."""

UNKNOWN = -1
"""Value of the ``allocated`` column where the allocator reported no running total."""

OTHER_THREADS = 1
"""Address of the block that stands for all that threads hold which are not recorded; nothing lies there."""


class Action(IntEnum):
    """What an allocator event does."""

    BASELINE = 1
    """The block was alive when the recording started."""
    ALLOC = 2
    FREE = 3


class SegmentAction(IntEnum):
    """What becomes of memory that the allocator takes from the device, in segments or in pages."""

    BASELINE = 1
    """It was reserved when the recording started."""
    RESERVE = 2
    RELEASE = 3


class Phase(IntEnum):
    """What the script was doing."""

    SETUP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    BETWEEN = 6
    EVALUATION = 7
    """A model runs forward with gradients off, in a script that trains."""


class Fact(IntEnum):
    """What a hook saw about a storage. ``name`` and ``module`` say more; see each member."""

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
    """A copy in another floating dtype of what is no parameter; ``name`` is the buffer's where it is one."""
    CAST_USE = 13
    """The op ``name`` reads this :attr:`CAST_COPY`."""
    CACHED = 14
    """A :attr:`CAST_COPY` that autocast's cache holds, until it is cleared right after."""
    WORKSPACE = 15
    """Scratch that a library keeps for itself; ``name`` is the library, such as cuBLAS, where it is known."""
    INFERRED = 16
    """What other facts say of this storage was concluded from frames, sizes and lifetimes, not seen by a hook."""
    SCRATCH = 17
    """What the op ``name`` allocates for itself and gives back before it returns."""
    PARAMETER_COPY = 18
    """A parameter of a module that did not run while it was recorded, such as an EMA's; ``name`` says whose."""
    HELD = 19
    """Alive in ``name`` when a step of inference, or the recording, ended: ``DynamicCache.layers[0].keys``."""
    COMMUNICATION = 20
    """Memory of distributed training; ``name`` is a :class:`~ampmem.vocabulary.Communication`."""
    COLLECTIVE = 21
    """Given to a collective, or filled by one, whatever else it may be for; ``name`` is a word of those, too."""
    CAST_SOURCE = 22
    """What the :attr:`OTHER_CAST` of the same instant is a copy of."""
    VARIABLE = 23
    """The variable ``name`` of the script holds it; ``module`` is where it got its value, ``FILE:LINE FUNCTION``."""
    ATTRIBUTE = 24
    """What an attribute of a module holds when the recording ends, no parameter and no buffer; ``name`` is its path."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Columns(Shown):
    """Base of the column groups: equal-length ``int64`` arrays, one per field."""

    LATER: ClassVar[frozenset[str]] = frozenset()
    """Those that the first files of this format lack; there they are 0."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The columns, in the order in which the file stores them."""
        return tuple(column.name for column in fields(cls))

    def _in_short(self) -> str:
        return f"{len(self):,} rows"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FactColumns(Columns):
    """Facts about storages, in the order in which they were seen.

    ``fact`` is a :class:`Fact`, ``dtype`` and ``shape`` (see :func:`~ampmem.names.shape_text`) are those of the
    tensor it is about, where the hook knew them; that may be a view of a part of the storage.
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"shape"})

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
    """What the allocator takes from the device and gives back, in order; the baseline comes first.

    ``position`` is how many events of the recording came before: a segment is reserved right before the alloc
    that it is for, and often in the same microsecond. ``action`` is a :class:`SegmentAction`. ``small`` (is it of
    the pool for small blocks) and ``expandable`` (are these pages of an expandable segment, of which any part can
    be released) are 0 or 1.
    """

    time_ns: Column
    position: Column
    action: Column
    address: Column
    bytes: Column
    stream: Column
    small: Column
    expandable: Column


NO_SEGMENTS = SegmentColumns(**{name: np.zeros(0, dtype=np.int64) for name in SegmentColumns.names()})
"""Of a source whose allocator has none, as the CPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that ended; or one in which memory ran out and the recording with it, which is not ``finished``.

    ``loss`` is what the last of the step's ``backwards`` started from, unscaled; ``None`` unless that is one number.
    ``batch_size`` is the first dimension of the first tensor that the last outermost module was called
    with, ``batch_loaded`` that a DataLoader batched those, ``autocast_in_backward`` that a backward ran under autocast.
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
    """One parameter tensor; one that is registered twice appears once, under its first name.

    ``kind`` is its module's class, ``optimizer`` the index of what updates it (or its master copy), ``shares`` the
    parameter whose memory is its own too, ``overlap`` how many bytes lie in those of others before it, if not all.
    ``elements`` and ``bytes`` are those in this process; where it has a shard only, ``global_elements`` are those of
    the whole parameter, and ``padding`` so many bytes of the shard's memory that are no element's.

    ``model`` is the path of the outermost module that it hangs below. ``held`` says that an optimizer has it, whether
    that has made an update or not. ``in_graph`` says whether its module ever ran forward with gradients on; ``None``
    where it never ran. Recordings before these came have none of the three.
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

    ``bases`` are its base classes, nearest first; ``settings`` the options of its first parameter group. ``stepped``
    is false for an optimizer that existed when memory ran out and had made no update.
    """

    class_name: str
    implementation: str
    bases: tuple[str, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    stepped: bool = True

    @property
    def takes_fused(self) -> bool:
        """Whether it has a fused update to choose."""
        return "fused" in self.settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """The precision mode; :attr:`Arm.AS_IS` where no other arm describes it.

    ``forced`` says that ampmem imposed it on the script, ``wrapped`` that to do so ampmem itself had to
    open the autocast regions, because the script has none.
    """

    name: Arm
    dtype: str | None
    cache: bool | None
    scaler: bool
    forced: bool = False
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was run, on what, with which versions; why the script failed, if so; what ``--step-on`` said, if given."""

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
    """Which of its machine's ranks this is, where it is known."""
    job: str = ""
    """What tells the ranks of one job from those of another, where there are several."""
    assume: tuple[str, ...] = ()
    """What a simulated device was told to take for granted (``--assume``)."""
    script_sha256: str = ""
    """The digest of the script's own file, where a command line has started it; empty elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of the script's device mesh, as long as ``size`` ranks; this one is at ``coordinate``."""

    name: str
    size: int
    coordinate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRecord:
    """Which process of a job this is; ``stages`` are those of the ``stage_count`` of a pipeline that it has."""

    rank: int
    world_size: int
    local_rank: int | None = None
    job: str = ""
    mesh: tuple[MeshAxis, ...] = ()
    stages: tuple[int, ...] = ()
    stage_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersRecord:
    """The allocator's own statistics at a mark of a step; bytes.

    ``requested`` leaves out the blocks that were freed and await other streams, as ``allocated`` does and ``active``
    does not. ``device_used`` is what anybody holds of the device's memory and ``process_used`` what this process
    does, as the driver counts; ``None`` where it was not asked.
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
    """One request that there was no memory for.

    ``asked`` is the block that was needed, the request rounded up; ``segment`` what the device was asked for.
    ``total`` is the device's memory, ``None`` of a snapshot, ``free`` what the driver had left of it, and ``limit``
    what the process may take (``set_per_process_memory_fraction``), ``None`` without a limit: older recordings have
    the limit as ``total``.
    ``op``, ``module`` and ``stack`` say who asked; empty where not known. ``segments`` has the allocator's
    segments at that moment, as :func:`ampmem.allocator.oom.pack_segments` writes them. ``later`` is ``None`` unless the
    request came after the recorded steps: then it has the addresses of what was alive when the recording ended, and
    still was.
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
    """What a simulated allocator held at one instant; bytes.

    ``tensors``, ``workspaces`` and ``scratch`` are what was asked for, the last two by the library and by the op that
    asked; with ``rounding`` they are what was allocated, and with ``cached`` what was reserved.
    """

    tensors: int
    workspaces: Mapping[str, int]
    scratch: Mapping[str, int]
    rounding: int
    cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRecord:
    """What a simulated run comes to on its GPU: the first instants of the most allocated and the most reserved.

    ``total`` is the device's memory, ``outside`` the least and ``outside_at_most`` the most that the CUDA context is
    taken to use of it; where a recording does not say, the most is the least. ``highest_allocated`` and
    ``highest_reserved`` are the same peaks with the most that is assumed for what is not known, which ``bounds`` has by
    name: the largest single request. Where that comes and goes between the tensors, the run without it reserves no
    least amount: ``least_reserved`` is that, and ``likely_reserved`` lies in between. ``unmodelled`` names what was
    left out. ``ran_out`` says that a request failed.
    ``libraries`` has what libraries are taken to hold beside ``outside`` at least, by what it is; ``libraries_at_most``
    the same with the most that is assumed. ``unfilled_allocated`` and ``unfilled_reserved`` are the highest peaks
    without the trials of ``torch.backends.cudnn.benchmark``, which may take all that is free; ``None`` without trials.
    ``allowed`` is what the process was allowed to take (``set_per_process_memory_fraction``) when the most was
    reserved; ``None`` without such a limit.
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
    """How the caching allocator was set (``settings``, in ``variable``) and used; ``peaks`` are bytes, by device."""

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

    ``plain_step_ns`` has the durations of the same steps in a run of their own without instrumentation;
    empty unless such a run was made. ``layers``, ``ooms`` and ``segments`` are empty where the source has no
    allocator with layers, as the CPU has none; ``prediction`` is there for a simulated GPU only. ``mesh`` has the axes
    of the script's device mesh, outermost first, where it made one, ``stages`` the stages of a pipeline that this
    process has, of ``stage_count``. ``optimizers`` are those that stepped, ``waiting`` those that had not when memory
    ran out: a parameter's ``optimizer`` counts through both.
    """

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
    plain_step_ns: tuple[int, ...] = ()
    layers: tuple[LayersRecord, ...] = ()
    ooms: tuple[OomRecord, ...] = ()
    segments: SegmentColumns = NO_SEGMENTS
    prediction: PredictionRecord | None = None
    allocator: AllocatorRecord | None = None
    mesh: tuple[MeshAxis, ...] = ()
    ended: bool | None = None
    """Whether its recorder got to end it; ``None`` where that is not known (yet)."""
    stages: tuple[int, ...] = ()
    stage_count: int = 0
    waiting: tuple[OptimizerRecord, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes but for the one on the script's failure, which is in ``run`` too."""
        failure = self.run.failure
        return tuple(note for note in self.notes if failure is None or note != failure.note)

    def _in_short(self) -> str:
        run, arm = self.run, (self.arm.name, self.arm.dtype)
        said = in_short(run.source, run.device_name, arm, len(self.steps), (run.rank, run.world_size))
        return f"{run.script}, {said}, {len(self.events):,} events"
