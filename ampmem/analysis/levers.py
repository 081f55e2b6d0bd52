"""Changes that make the tensors smaller that were alive when memory ran out, and by how much at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ampmem.analysis.blocks import kept_inside, names_of_blocks
from ampmem.analysis.jsonable import Positive
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask, Tensors
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.names import of_all_layers
from ampmem.vocabulary import AUTOCAST_PRECISIONS

LOSS_CHUNKS = 8
"""The number of chunks in which the loss is tried."""

_SHARE = 0.05
"""The least share of the live bytes that is worth a line."""
_LEAST_BYTES = 1 << 20
_OF_THE_LOSS = ("aten::_log_softmax", "_log_softmax", "NllLossBackward0")
_HALVED = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.ACTIVATIONS,
    Category.TEMPORARIES,
)
"""The categories whose float32 tensors are half as large if the weights are in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change, and the option of ``ampmem profile`` that tries it.

    ``bytes`` is the most that it saves at the failure, computed from the tensors that were alive: no run had the
    change.
    """

    change: str
    option: str
    bytes: Positive


def levers_of(history: MemoryHistory, tensors: Tensors, position: int) -> tuple[Lever, ...]:
    """The changes that would make a notable part of what is alive at ``position`` smaller, the largest first."""
    alive = history.lifetimes.alive_at(position)
    least = max(_LEAST_BYTES, int(_SHARE * history.lifetimes.bytes[alive].sum()))
    found = [lever for lever in _levers(history, tensors, position, alive) if lever.bytes >= least]
    return tuple(sorted(found, key=lambda lever: -lever.bytes))


def _levers(history: MemoryHistory, tensors: Tensors, position: int, alive: Mask) -> Iterator[Lever]:
    recording, lifetimes, classes = history.recording, history.lifetimes, history.classes
    activations = alive & classes.of(Category.ACTIVATIONS)
    blocks = names_of_blocks(history.parameters)
    inside = sum(kept_inside(history, blocks, activations, int(recording.ooms[-1].time_ns)))
    patterns = ",".join(dict.fromkeys(map(of_all_layers, blocks)))
    yield Lever(change=f"recompute {len(blocks)} blocks", option=f"--force-checkpoint '{patterns}'", bytes=inside)
    yield Lever(change="offload saved tensors to the CPU", option="--force-offload", bytes=_bytes(history, activations))
    autocast = recording.precision.name in AUTOCAST_PRECISIONS
    if not autocast:  # where it is on, the finding fp32-activations has the loss
        loss = _bytes(history, alive & recording.naming(*_OF_THE_LOSS)[lifetimes.op])
        chunked = loss - loss // LOSS_CHUNKS
        option = f"--force-chunked-loss {LOSS_CHUNKS}"
        yield Lever(change=f"compute the loss in {LOSS_CHUNKS} chunks", option=option, bytes=chunked)
    if not any(record.dtype == "float32" for record in recording.parameters):
        return
    float32 = alive & recording.naming("", "float32")[tensors.dtype]
    halved = sum(_bytes(history, float32 & classes.of(category)) for category in _HALVED) // 2
    copies = _bytes(history, alive & classes.of(Category.CAST_COPIES))
    yield Lever(change="put weights in bfloat16, no autocast", option="--precision bf16", bytes=halved + copies)
    if not autocast:
        yield Lever(change="use autocast", option="--precision amp", bytes=_bytes(history, float32 & activations) // 2)


def _bytes(history: MemoryHistory, mine: Mask) -> int:
    return int(history.lifetimes.bytes[mine].sum())
