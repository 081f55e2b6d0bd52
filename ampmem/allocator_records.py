"""What a recording holds of the allocator above the tensors: its statistics, failures, settings and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampmem.vocabulary import Mark


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
