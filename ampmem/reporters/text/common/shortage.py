"""A failed request in sentences, for the answer, the tables and the page: who asked, and what there was."""

from __future__ import annotations

from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.units import format_bytes, format_count


def asked(oom: FailedRequest) -> str:
    """How much was asked for."""
    wanted, where = f"a block of {format_bytes(oom.asked)}", "" if oom.recorded else f" on cuda:{oom.device}"
    segment = "" if oom.asked == oom.segment else f" in a new segment of {format_bytes(oom.segment)}"
    return f"{wanted}{segment}{where}"


def asked_by(oom: FailedRequest) -> str:
    """The op and the module; empty where neither is known."""
    if not oom.op and not oom.module:
        return ""
    return " in ".join(part for part in (oom.op or "an op that is not known", oom.module) if part)


def lacking(oom: FailedRequest) -> str:
    """How much more the device would have had to give, and what it had; empty where it refused what it had."""
    return f"{format_bytes(oom.lacking)}: {left(oom)}" if oom.lacking else ""


def left(oom: FailedRequest) -> str:
    """What the device could give, or what this process could take."""
    if oom.allowed is not None and oom.left < oom.device_free:
        return f"{format_bytes(oom.left)} were left of the {format_bytes(oom.allowed)} that this process may take"
    return f"the device had {format_bytes(oom.device_free)} free"


def device(oom: FailedRequest) -> str:
    """Who had the device's memory."""
    limit = "" if oom.allowed is None else f" (which may take {format_bytes(oom.allowed)})"
    free, mine = f"{format_bytes(oom.device_free)} were free", f"{format_bytes(oom.reserved)} reserved by this process"
    index = "" if oom.recorded else f"cuda:{oom.device}, which is not the device that was recorded: "
    if oom.outside is None or oom.device_total is None:
        return f"{index}{free}, {mine}{limit}"
    others = f"{format_bytes(oom.outside)} used outside of its allocator"
    return f"{index}{format_bytes(oom.device_total)}, of which {free}, {mine}{limit} and {others}"


def to_come(oom: FailedRequest) -> str:
    """What the step would still have made; empty where that is nothing, or not known."""
    found = oom.to_come
    if found is None:
        return ""
    parts = []
    if found.gradients:
        parts.append(f"{format_bytes(found.gradients)} of gradients ({format_count(found.parameters)} parameters)")
    if found.optimizer_state:
        parts.append(f"{format_bytes(found.optimizer_state)} of optimizer state ({', '.join(found.optimizers)})")
    elif found.optimizer_state is None:
        parts.append("optimizer state, of which it is not known how much")
    return " and ".join(parts) if found.gradients or found.optimizer_state else ""


def free_blocks(oom: FailedRequest) -> str:
    """The largest free blocks in what was cached."""
    free = oom.largest_free
    return (
        f"{format_bytes(free.usable)} that it could use, {format_bytes(free.other_streams)} of other streams, "
        f"{format_bytes(free.other_pools)} of other pools"
    )


def shortage(oom: FailedRequest) -> tuple[str, ...]:
    """Sentences on what was asked for, how much was lacking, and what is still to come."""
    less = f": {format_bytes(oom.lacking)} were lacking" if oom.lacking else ""
    coming = to_come(oom)
    return (f"In {oom.where}, {asked(oom)} was asked for{less}.", *([f"Still to come: {coming}."] if coming else []))


def why_it_does_not_fit(oom: FailedRequest) -> str:
    """How much was lacking, and where."""
    if not oom.lacking:
        return f"out of memory in {oom.where}"
    if oom.by_the_limit and oom.allowed is not None:
        limit = f"the {format_bytes(oom.allowed)} that this process may take"
        return f"{format_bytes(oom.lacking)} more than {limit} were needed in {oom.where}"
    return f"{format_bytes(oom.lacking)} were lacking in {oom.where}"
