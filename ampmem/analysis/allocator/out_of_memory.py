"""The device ran out of memory: who asked, what was alive, and why the cached memory did not serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ampmem.allocator.model.layout import SnapshotSegment
from ampmem.allocator.model.oom import Candidates, Reason, explanation, largest
from ampmem.allocator.shortage import candidates, unpack
from ampmem.analysis.json.jsonable import NOT_IN_JSON, AtLeast, Positive
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.analysis.timeline.history import MemoryHistory
from ampmem.analysis.timeline.marks import phase_at
from ampmem.analysis.timeline.timeline import ByPhase, PhaseName
from ampmem.errors import RecordingError
from ampmem.events import NO_STEP, OomRecord, Phase, Recording

_REASONS = {
    Reason.OVERSIZE: "raise max_split_size_mb in PYTORCH_ALLOC_CONF, or leave it out",
    Reason.WRONG_STREAM: "allocate on one stream, or call torch.cuda.empty_cache() before the other one needs memory",
    Reason.WRONG_POOL: "drop CUDA graphs and memory pools that are no longer used, then call torch.cuda.empty_cache()",
    Reason.LIMITED: "allow the process more with torch.cuda.set_per_process_memory_fraction",
}
_FREE = "cached, in free blocks"
_MOST = 1 << 62
_EXPANDABLE = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
_LARGEST = {
    Category.ACTIVATIONS: "make the batch smaller, or recompute activations with torch.utils.checkpoint",
    Category.CAST_COPIES: "run what needs no gradient under torch.no_grad(), and use a weight once per forward",
    Category.OPTIMIZER_STATE: "take an optimizer with a smaller state, or spread it over several GPUs",
    Category.GRADIENTS: "set gradients to None before the forward (zero_grad(set_to_none=True))",
}
_OTHERWISE = "make the batch or the model smaller, or spread the model over several GPUs"
_IN_SETUP = "make the model smaller, or use a larger GPU"
"""There is no batch yet."""
_MODEL = "make the model smaller, or spread it over several GPUs"
_FOREACH = "let the optimizer take one parameter at a time (foreach=False)"
_OR_FUSED = f"{_FOREACH}, or use fused=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFree:
    """Bytes of the largest free block that the request could use, of other streams, and of other pools; 0 for none."""

    usable: int
    other_streams: int
    other_pools: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something to change. ``bytes`` of ``about`` are what it is about; both are unknown where it has no size.

    ``finding`` is the code of the finding that says the same, and better, where there is one.
    """

    change: str
    bytes: int | None = None
    about: str = ""
    finding: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The last request that failed for want of memory, and the state of the allocator then; everything in bytes.

    ``step`` is ``None`` outside of every step. ``ended_the_run`` is false where the script went on. ``failures``
    counts the requests of the recording that failed. ``asked`` is the block that was needed, ``segment`` what the
    device was asked for it. ``op``, ``module`` and ``stack`` (outermost call first) say who asked, where that is
    known. ``alive`` are the tensors, ``reserved`` is what the allocator held, ``cached`` the part of it in free
    blocks. ``outside`` is what others hold of the device, at least: all of it, unless the process is limited to a
    part of the device. ``options`` are the ``changes`` with what each is about. ``residual_bytes`` is how far ``alive``
    is from the allocator's own blocks.
    """

    step: int | None
    phase: PhaseName
    ended_the_run: bool
    failures: Positive
    asked: int
    segment: int
    device_total: int
    device_free: int
    op: str | None
    module: str | None
    stack: tuple[str, ...]
    alive: Breakdown
    temporaries_by_phase: ByPhase
    reserved: int
    cached: int
    outside: int | None
    largest_free: LargestFree
    reason: Reason
    explanation: str
    changes: Annotated[tuple[str, ...], AtLeast(1)]
    options: tuple[Option, ...] = field(metadata=NOT_IN_JSON)
    residual_bytes: int

    @property
    def where(self) -> str:
        """Step and phase in words."""
        if self.step is None or self.phase == Phase.SETUP.name.lower():
            return self.phase
        if self.phase == Phase.BETWEEN.name.lower():
            return f"step {self.step}, outside of forward, backward and update"
        return f"{self.phase} of step {self.step}"


def failed_request(history: MemoryHistory) -> FailedRequest | None:
    """The last failure, the one that a script dies of; ``None`` when no request failed.

    Raises :class:`RecordingError` when the allocator's state cannot be read.
    """
    recording = history.recording
    if not recording.ooms:
        return None
    oom = recording.ooms[-1]
    segments, free = _state(oom)
    position = history.timeline.position(oom.time_ns)
    alive = history.timeline.breakdown(position)
    blocks = [block for segment in segments for block in segment.blocks]
    reserved = sum(segment.size for segment in segments)
    outside = oom.total - oom.free - reserved
    # A total below the device's is a limit of the process's; else this never is what stops a request.
    reason = free.reason(oom.asked, oom.segment, oom.free, max(oom.total - reserved, 0))
    phase = phase_at(recording.phases, oom.time_ns)
    cached = sum(block.size for block in blocks if not block.allocated and not block.awaiting)
    temporaries = history.timeline.temporaries_by_phase(position)
    largest_free = LargestFree(
        usable=largest(free.usable), other_streams=largest(free.other_stream), other_pools=largest(free.other_pool)
    )
    expandable = any(segment.expandable for segment in segments)
    options = (
        *_against(reason, oom.asked, cached, largest_free, expandable=expandable),
        *_against_the_largest(recording, alive, temporaries, phase),
    )
    return FailedRequest(
        step=_step(recording, oom),
        phase=phase.name.lower(),
        ended_the_run=_ended(recording),
        failures=len(recording.ooms),
        asked=oom.asked,
        segment=oom.segment,
        device_total=oom.total,
        device_free=oom.free,
        op=oom.op or None,
        module=oom.module or None,
        stack=tuple(line for line in oom.stack.split("\n") if line),
        alive=alive,
        temporaries_by_phase=temporaries,
        reserved=reserved,
        cached=cached,
        outside=outside if outside >= 0 else None,
        largest_free=largest_free,
        reason=reason,
        explanation=explanation(reason, oom.asked, cached),
        changes=tuple(option.change for option in options),
        options=options,
        residual_bytes=abs(sum(alive.values()) - sum(block.requested for block in blocks if block.allocated)),
    )


def _ended(recording: Recording) -> bool:
    return bool(recording.steps) and not recording.steps[-1].finished


def _step(recording: Recording, oom: OomRecord) -> int | None:
    if _ended(recording):
        return recording.steps[-1].index
    return None if oom.step == NO_STEP else oom.step


def _state(oom: OomRecord) -> tuple[tuple[SnapshotSegment, ...], Candidates]:
    """The allocator's segments, and their free blocks."""
    try:
        segments = unpack(oom.segments)
        first, second = map(int, oom.pool.split(","))
        _check_sizes(segments)
    except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise RecordingError(f"the recording is damaged: its out-of-memory state cannot be read ({error})") from error
    return segments, candidates(segments, oom.asked, oom.stream, (first, second))


def _check_sizes(segments: Sequence[SnapshotSegment]) -> None:
    sizes = [segment.size for segment in segments]
    sizes += [size for segment in segments for block in segment.blocks for size in (block.size, block.requested)]
    if min(sizes, default=0) < 0 or sum(sizes) > _MOST:
        raise ValueError("a size that no block has")


def _against(reason: Reason, asked: int, cached: int, free: LargestFree, *, expandable: bool) -> Iterator[Option]:
    """What may help against the reason: the free blocks that the request could not use."""
    if reason in _REASONS:
        sizes = {Reason.WRONG_STREAM: free.other_streams, Reason.WRONG_POOL: free.other_pools, Reason.OVERSIZE: cached}
        size = sizes.get(reason)
        yield Option(change=_REASONS[reason], bytes=size, about="" if size is None else _FREE)
    elif reason is Reason.FRAGMENTED and not expandable:
        # The free blocks are what it is about where they are enough; else the device's free memory is, too.
        yield Option(change=_EXPANDABLE, bytes=cached, about=_FREE) if cached >= asked else Option(change=_EXPANDABLE)


def _against_the_largest(
    recording: Recording, alive: Breakdown, temporaries: ByPhase, phase: Phase
) -> Iterator[Option]:
    """What may help against what takes the most."""
    foreach = [record for record in recording.optimizers if record.implementation == "foreach"]
    if phase == Phase.OPTIMIZER and foreach:
        size = temporaries["optimizer"]
        change = _OR_FUSED if any(record.takes_fused for record in foreach) else _FOREACH
        yield Option(change=change, bytes=size, about="temporaries of the update", finding="foreach-temporaries")
    most = max(alive, key=lambda category: alive[category])
    otherwise = _OTHERWISE
    if phase in (Phase.FORWARD, Phase.BACKWARD) and most is not Category.ACTIVATIONS and alive[Category.ACTIVATIONS]:
        yield _option(_LARGEST[Category.ACTIVATIONS], Category.ACTIVATIONS, alive)
        otherwise = _MODEL
    if most in _LARGEST:
        yield _option(_LARGEST[most], most, alive)
    elif most is Category.PARAMETERS:
        yield _option(_IN_SETUP if phase == Phase.SETUP else otherwise, most, alive)
    else:
        yield Option(change=otherwise)


def _option(change: str, category: Category, alive: Breakdown) -> Option:
    words = category.value.replace("_", " ")
    finding = "gradients-through-forward" if category is Category.GRADIENTS else None
    return Option(change=change, bytes=alive[category], about=f"{words} alive then", finding=finding)
