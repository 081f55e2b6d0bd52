"""Probes that look at the allocator's trace itself, beside what the recorder and torch.profiler make of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import FAILED, PASSED, Fact, Row
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile as torch_profile

import ampmem
from ampmem.allocator.settings import Settings, round_size
from ampmem.events import Action, Phase
from ampmem.workloads import gpt
from ampmem.workloads.common import WorkloadOptions

_TIME = re.compile(r"\d{16,}")
"""A time in nanoseconds, as the recorder tags events."""
_ENGINE = "autograd::engine::evaluate_function: "


def clock(device: str, folder: Path) -> Row:
    """``time_us`` minus the tag of every tagged entry of a recorded run: the trace's clock beside the recorder's."""
    entries: list[tuple[str, int]] = []
    memory: Any = torch.cuda.memory
    before: Callable[..., Mapping[str, Any]] = memory._snapshot

    def listen(*arguments: Any, **options: Any) -> Mapping[str, Any]:
        snapshot = before(*arguments, **options)
        entries.extend(
            (str(entry.get("user_metadata", "")), int(entry.get("time_us", 0)))
            for trace in snapshot["device_traces"]
            for entry in trace
        )
        return snapshot

    memory._snapshot = listen
    try:
        with ampmem.profile(device=device, output=folder / "clock.ampmem"):
            gpt.train(WorkloadOptions(preset="small", steps=30, precision="amp", device=torch.device(device)))
    finally:
        memory._snapshot = before
    return clock_verdict(entries)


def clock_verdict(entries: Sequence[tuple[str, int]]) -> Row:
    """Pairs of a tag and ``time_us``: no entry may seem more than a microsecond earlier than its tag."""
    pairs = [(int(found[0]), time_us) for tag, time_us in entries if (found := _TIME.search(tag)) is not None]
    facts: dict[str, Fact] = {"entries": len(entries), "tagged": len(pairs)}
    if not pairs:
        return Row(name="clock", outcome=FAILED, detail="no entry of the trace has a tag", facts=facts)
    tags, times = np.array(pairs, dtype=np.int64).T
    late = (times * 1000 - tags) / 1000
    for name, percent in (("min", 0), ("1 %", 1), ("median", 50), ("99 %", 99), ("max", 100)):
        facts[f"us {name}"] = round(float(np.percentile(late, percent)), 3)
    tenth = max(len(late) // 10, 1)
    facts["us drift"] = round(float(np.percentile(late[-tenth:], 1) - np.percentile(late[:tenth], 1)), 3)
    below = facts["below -1 us"] = int((late < -1).sum())
    detail = (
        f"{len(pairs)} tagged entries are {facts['us min']} to {facts['us max']} us after their tags, "
        f"median {facts['us median']}; {below} seem earlier than -1 us"
    )
    return Row(name="clock", outcome=FAILED if below else PASSED, detail=detail, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An allocation: its address, its block's bytes, and the names around it, the innermost last."""

    address: int
    block: int
    names: tuple[str, ...]

    @property
    def in_backward(self) -> bool:
        """Whether a node of the engine asked for it."""
        return any(name.startswith(_ENGINE) for name in self.names)


def engine_thread(device: str, folder: Path) -> Row:
    """The same step under torch.profiler with the trace, and under ampmem: the same nodes, the same blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 700), nn.GELU(), nn.LayerNorm(700), nn.Linear(700, 512)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(900, 512, device=device)
    seed = torch.ones((), device=device)  # which backward would make, in no node

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward(seed)
        optimizer.step()

    for _ in range(3):  # what libraries keep for themselves is there from now on
        step()
    torch.cuda.empty_cache()  # so that blocks are placed alike in both
    taken, traced = _profiled(step, device)
    with ampmem.profile(model, optimizer, device=device, output=folder / "engine.ampmem") as profile:
        step()
        torch.cuda.empty_cache()
        step()
    recording = profile.recording()
    events = recording.events
    last = (events.step == events.step.max()) & (events.phase == Phase.BACKWARD) & (events.action == Action.ALLOC)
    recorded = [
        (recording.texts[op], block)
        for op, block in zip(events.op[last].tolist(), events.block_bytes[last].tolist(), strict=True)
    ]
    return engine_verdict(taken, traced, recorded)


def _profiled(step: Callable[[], None], device: str) -> tuple[list[Taken], list[tuple[int, int]]]:
    """The device's allocations of a step as torch.profiler has them, and as the trace: address and requested bytes."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history("all", context=None, clear_history=True)
    try:
        with torch_profile(profile_memory=True) as profiler:
            step()
            torch.cuda.synchronize()
        trace = memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        memory._record_memory_history(None)
    found: list[tuple[int, Taken]] = []
    pending = [(root, ()) for root in profiler.kineto_results.experimental_event_tree()]
    while pending:
        node, names = pending.pop()
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            if fields.alloc_size > 0 and fields.device.type == device:
                taken = Taken(address=int(fields.ptr or 0), block=int(fields.alloc_size), names=names)
                found.append((node.start_time_ns, taken))
        elif node.tag == _EventType.TorchOp:
            names = (*names, node.name)
        pending += [(child, names) for child in node.children]
    found.sort(key=lambda each: each[0])
    traced = [(int(entry["addr"]), int(entry["size"])) for entry in trace if entry["action"] == "alloc"]
    return [taken for _, taken in found], traced


def engine_verdict(
    taken: Sequence[Taken], traced: Sequence[tuple[int, int]], recorded: Sequence[tuple[str, int]]
) -> Row:
    """``taken`` is torch.profiler's, ``traced`` the trace's, ``recorded`` ampmem's ops and blocks of backward.

    The profiler's and the trace's addresses are the same in the same order. In backward ampmem has as many blocks as
    the engine's nodes took, each of the same size, and none with the name of something that did not run then.
    """
    backward = [each for each in taken if each.in_backward]
    sizes = [(round_size(size, Settings()), each.block) for (_, size), each in zip(traced, taken, strict=False)]
    foreign = [op for (op, _), each in zip(recorded, backward, strict=False) if op and not _names(op, each)]
    unnamed = sum(not op for op, _ in recorded)
    same_blocks = [block == each.block for (_, block), each in zip(recorded, backward, strict=False)]
    facts: dict[str, Fact] = {
        "profiler": len(taken),
        "trace": len(traced),
        "same_addresses": [each.address for each in taken] == [address for address, _ in traced],
        "blocks_as_rounded": sum(rounded == block for rounded, block in sizes),
        "largest_difference": max((block - rounded for rounded, block in sizes), default=0),
        "in_backward": len(backward),
        "recorded_in_backward": len(recorded),
        "recorded_without_a_name": unnamed,
        "recorded_with_a_foreign_name": len(foreign),
        "recorded_with_the_same_block": sum(same_blocks),
        "recorded": [[op, block] for op, block in recorded[:40]],
        "nodes": [[each.names[-1], each.block] for each in backward[:40]],
    }
    good = (
        bool(backward)
        and facts["same_addresses"] is True
        and len(recorded) == len(backward)
        and not foreign
        and all(same_blocks)
    )
    detail = (
        f"{len(backward)} blocks in backward, {len(recorded)} recorded, {unnamed} of them without a name, "
        f"{len(foreign)} with one that did not run, {sum(same_blocks)} with the same block"
    )
    return Row(name="engine-thread", outcome=PASSED if good else FAILED, detail=detail, facts=facts)


def _names(op: str, taken: Taken) -> bool:
    """Whether ``op`` was running, or is the node that was."""
    return any(op == name or name == f"{_ENGINE}{op}" for name in taken.names)
