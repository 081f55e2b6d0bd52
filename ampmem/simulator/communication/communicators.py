"""Which of NCCL's communicators there would be, and what they keep for themselves."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ampmem.simulator.communication import nccl
from ampmem.simulator.communication.nccl import Communicator, Use
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.communication import group_named
from ampmem.simulator.private.ops import schema_of
from ampmem.simulator.world import GPUS_PER_NODE, here
from ampmem.units import format_bytes

NCCL = "NCCL's buffers"
"""What is kept outside of the allocator."""
_ASSUMED = (
    f"assumed: {NCCL}, outside of the allocator, take from {format_bytes(nccl.least())} for each communicator, up to: "
    f"what its collectives need on {nccl.WITHIN} channels within a machine and {nccl.ACROSS} across machines, with the "
    "sizes that the NCCL_* variables say; no GPU run has shown it"
)

_USES = {
    "all_reduce": Use.TREE,
    "all_reduce_": Use.TREE,
    "all_reduce_coalesced": Use.TREE,
    "all_reduce_coalesced_": Use.TREE,
    "all_to_all_single": Use.ALL_TO_ALL,
    "allreduce_": Use.TREE,
    "allreduce_coalesced_": Use.TREE,
    "barrier": Use.TREE,
    "alltoall_": Use.ALL_TO_ALL,
    "alltoall_base_": Use.ALL_TO_ALL,
    "gather_": Use.ALL_TO_ALL,
    "scatter_": Use.ALL_TO_ALL,
    "send": Use.SEND,
    "recv_": Use.SEND,
    "recv_any_source_": Use.SEND,
}
"""By the op's name; all others need a ring."""


class Communicators:
    """Follows the process groups of backend ``nccl``: each has a communicator from its first collective on.

    A send has one of its own for the two ranks, as where ``torch.distributed`` is not asked for several at once.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._uses: dict[tuple[str, tuple[int, ...]], frozenset[Use]] = {}

    def used(self, func: Any, args: Sequence[Any]) -> None:
        """The op ``func`` of ``c10d`` ran on the device."""
        use, at = _use_of(func)
        peer = args[at + 1] if use is Use.SEND else None
        self.note(dist.ProcessGroup.unbox(args[at]), use, peer if isinstance(peer, int) else None)

    def used_by_name(self, func: Any, args: Sequence[Any]) -> None:
        """The op ``func`` of ``_c10d_functional`` ran on the device, which names its process group."""
        use, at = _use_of(func)
        group = args[at]
        self.note(group_named(group) if isinstance(group, str) else group, use)

    def note(self, group: Any, use: Use, peer: int | None = None) -> None:
        """``group`` needs connections for ``use``; with the rank ``peer`` of it alone, where one is given."""
        if self._device.label != "cuda" or dist.get_backend(group) != dist.Backend.NCCL:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        if peer is not None and peer < len(ranks):
            ranks = tuple(sorted({here().rank, ranks[peer]}))
        known = self._uses.get((group.group_name, ranks), frozenset())
        if use not in known:
            self._uses[group.group_name, ranks] = known | {use}
            self._tell()

    def _tell(self) -> None:
        found = [_communicator(ranks, uses) for (_, ranks), uses in self._uses.items()]
        capability = self._device.gpu.compute_capability
        most = sum(nccl.most(each, capability, os.environ) for each in found)
        self._device.hold_outside(NCCL, nccl.least() * len(found), most)
        self._device.assume(_ASSUMED)


@functools.cache
def _use_of(func: Any) -> tuple[Use, int]:
    """What ``func`` needs connections for, and which of its arguments is the process group."""
    schema = schema_of(func)
    at = [argument.name in ("process_group", "group_name") for argument in schema.arguments].index(True)
    return _USES.get(schema.name.rpartition("::")[2], Use.RING), at


def _communicator(ranks: tuple[int, ...], uses: frozenset[Use]) -> Communicator:
    nodes = [rank // GPUS_PER_NODE for rank in ranks]
    return Communicator(ranks=len(ranks), local=nodes.count(here().node), nodes=len(set(nodes)), uses=uses)
