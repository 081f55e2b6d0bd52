"""Tries what the simulated device needs of torch, in a few milliseconds, before the script starts."""

from __future__ import annotations

import torch
from torch import nn

from ampmem.errors import UsageError
from ampmem.simulator.device import Event, SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import holders, running_node
from ampmem.simulator.refusal import refusal


def check(mode: SimulatedMode) -> None:
    """One step of training on fake tensors. Raises :class:`UsageError` when anything is not as on a GPU.

    Also finds out how many holders a gradient has that only the engine holds.
    """
    try:
        _calibrate(mode)
        _name_node()
        _follow_stream(mode.device_model)
        _train()
    except UsageError:
        raise
    except Exception as error:
        raise refusal(error) from error


def _calibrate(mode: SimulatedMode) -> None:
    """Two gradients that nobody else holds are summed, and two of which a hook keeps the first."""
    counts = mode.accumulation.seen = []
    try:
        x = torch.ones(8, device="cuda", requires_grad=True)
        holders(x)  # where that is missing, it has to be known before backward: the engine could not pass it on
        (x * 2 + x * 3).backward(torch.ones(8, device="cuda"))
        kept: list[torch.Tensor] = []
        y = torch.ones(8, device="cuda", requires_grad=True)
        product = y * 2
        last = y * 3  # whose gradient comes first
        last.grad_fn.register_hook(lambda grads, _: kept.append(grads[0]))  # type: ignore[union-attr]
        (product + last).backward(torch.ones(8, device="cuda"))
    finally:
        mode.accumulation.seen = None
    if len(counts) != 2 or counts[1] == counts[0] or any(b < a for a, b in zip(*counts, strict=True)):
        raise refusal(f"the engine's sums of gradients cannot be told apart ({counts})")
    mode.accumulation.alone = counts[0]


def _name_node() -> None:
    """A backward that knows which of its nodes runs."""
    seen: list[str] = []
    x = torch.ones(8, device="cuda", requires_grad=True)
    x.register_hook(lambda _: seen.append(running_node()[0]))
    (x * 2).sum().backward()
    if not seen or not seen[0]:
        raise refusal("the engine does not say which node runs")


def _follow_stream(device: SimulatedDevice) -> None:
    """Backward on the stream of its forward."""
    events: list[Event] = []
    x = torch.ones(8, device="cuda", requires_grad=True)
    _ = x + 1  # a node before the change, so that the numbers of nodes are told apart
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        product = x * 2
    total = product.sum()
    device.recorder = events.append
    total.backward()
    device.recorder = None
    streams = {event.stream for event in events if event.node.startswith("Mul")}
    if streams != {side.stream_id}:
        raise refusal("the engine does not say on which stream a node's forward ran")


def _train() -> None:
    model = nn.Linear(4, 4).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(torch.ones(2, 4, device="cuda"))
        loss = out.float().sum()
    if out.dtype != torch.float16 or out.device.type != "cuda":
        raise refusal("autocast does not see the fake device")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not optimizer.state:
        raise refusal("a GradScaler does not let its optimizer step")
