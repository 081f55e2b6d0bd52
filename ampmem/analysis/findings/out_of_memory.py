"""The device ran out of memory: who asked, what was alive, and why the cached memory did not serve."""

from __future__ import annotations

from ampmem.allocator.oom import EXPLANATIONS, Candidates, Reason, largest
from ampmem.allocator.shortage import candidates, unpack
from ampmem.analysis.categories import Category
from ampmem.analysis.findings.base import Case, Finding, own_frame
from ampmem.errors import RecordingError
from ampmem.events import OomRecord
from ampmem.units import format_bytes

_CHANGES = {
    Reason.OVERSIZE: "raise max_split_size_mb in PYTORCH_ALLOC_CONF, or leave it out",
    Reason.WRONG_STREAM: "allocate on one stream, or call torch.cuda.empty_cache() before the other one needs memory",
    Reason.WRONG_POOL: "drop CUDA graphs and memory pools that are no longer used, then call torch.cuda.empty_cache()",
    Reason.LIMITED: "allow the process more with torch.cuda.set_per_process_memory_fraction",
    Reason.FRAGMENTED: "set PYTORCH_ALLOC_CONF=expandable_segments:True",
}
_LARGEST = {
    Category.ACTIVATIONS: "make the batch smaller, or recompute activations with torch.utils.checkpoint",
    Category.CAST_COPIES: "run what needs no gradient under torch.no_grad(), and use a weight once per forward",
    Category.OPTIMIZER_STATE: "take an optimizer with a smaller state, or spread it over several GPUs",
    Category.GRADIENTS: "set gradients to None before the forward (zero_grad(set_to_none=True))",
}
_OTHERWISE = "make the batch or the model smaller, or spread the model over several GPUs"


def check(case: Case) -> Finding | None:
    """A request failed; of several the last one is told, since it is the one that a script dies of."""
    ooms = case.recording.ooms
    if not ooms:
        return None
    oom = ooms[-1]
    cached, free, reason = _shortage(oom)
    live = case.analysis.timeline.breakdown(case.analysis.timeline.position(oom.time_ns))
    ranked = sorted(((size, category) for category, size in live.items() if size), key=lambda pair: -pair[0])
    times = f" ({len(ooms)} requests failed; this is the last)" if len(ooms) > 1 else ""
    return Finding(
        code="out-of-memory",
        severity="warning",
        message=f"the device ran out of memory: {format_bytes(oom.asked)} were needed, {format_bytes(oom.segment)} "
        f"were asked of the device, which had {format_bytes(oom.free)} of {format_bytes(oom.total)} left; "
        f"{format_bytes(sum(live.values()))} were in tensors and {format_bytes(cached)} cached: "
        f"{EXPLANATIONS[reason]}{times}.",
        bytes=oom.asked,
        change=_CHANGES.get(reason) or _for_category(ranked[0][1] if ranked else None),
        evidence=(
            f"asked by {_asked_by(oom)}",
            "alive: " + (", ".join(f"{category} {format_bytes(size)}" for size, category in ranked) or "nothing"),
            f"largest free blocks: {format_bytes(largest(free.usable))} that it could use, "
            f"{format_bytes(largest(free.other_stream))} of other streams, "
            f"{format_bytes(largest(free.other_pool))} of other pools",
        ),
    )


def _shortage(oom: OomRecord) -> tuple[int, Candidates, Reason]:
    """Bytes in cached blocks, those blocks, and why none served. Raises :class:`RecordingError`."""
    try:
        segments = unpack(oom.segments)
        first, second = map(int, oom.pool.split(","))
    except (TypeError, ValueError) as error:
        raise RecordingError(f"the recording is damaged: its out-of-memory state cannot be read ({error})") from error
    free = candidates(segments, oom.asked, oom.stream, (first, second))
    cached = sum(block.size for group in (free.usable, free.other_stream, free.other_pool) for block in group)
    # A total below the device's is a limit of the process's; else this never is what stops a request.
    allowed = max(oom.total - sum(segment.size for segment in segments), 0)
    return cached, free, free.reason(oom.asked, oom.segment, oom.free, allowed)


def _asked_by(oom: OomRecord) -> str:
    words = [oom.op or "an op that is not known"]
    if oom.module:
        words.append(f"in {oom.module}")
    if oom.stack:
        words.append(f"at {own_frame(oom.stack)}")
    return " ".join(words)


def _for_category(category: Category | None) -> str:
    return _OTHERWISE if category is None else _LARGEST.get(category, _OTHERWISE)
