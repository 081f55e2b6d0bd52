"""NCCL's communicators, and the memory that each keeps on the GPU, outside of the caching allocator.

The amount depends on how the GPUs are connected, which is unknown. So it is an interval for each communicator: at least
one piece of memory, with all buffers on the host; at most what the connections that its collectives may use need on the
assumed number of channels. Names in parentheses are of NCCL 2.30.7. No GPU run has confirmed the sums. What others have
measured: an all-to-all among the 8 GPUs of an H100 machine made buffers of 10 MiB and of 2 MiB, on 32 channels to each
GPU, 3.28 GB together (https://github.com/NVIDIA/nccl/issues/1685); the formula gives 3.22 GB.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.distributed as dist

from ampmem.allocator.settings import KIB, MIB, round_up
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.communication import group_named
from ampmem.simulator.private.general import op_schema
from ampmem.simulator.world import GPUS_PER_NODE, here
from ampmem.units import format_bytes

WITHIN, ACROSS, ALONE = 32, 16, 8
"""Maximum number of channels assumed: within a machine, across machines, and with one rank on each.

NCCL uses as many as links and network cards can feed, times two or four (``ncclTopoPostset``).
"""
_LIMIT = 64
"""``MAXCHANNELS``."""
_STEPS = 8
"""``NCCL_STEPS``: number of slices of a buffer."""
_LL = 8 * 512 * _STEPS * 16
"""``DEFAULT_LL_BUFFSIZE`` (``init.cc``): lines per thread, threads, steps, bytes per line."""
_LL128 = 120 * 640 * _STEPS * 8
"""``DEFAULT_LL128_BUFFSIZE``: elements per thread, threads, steps, bytes per element."""
_SIMPLE = 4 * MIB
"""``DEFAULT_BUFFSIZE``."""
_HEADER = 4 * KIB
"""``ncclSendMem`` and ``ncclRecvMem``, one page each (``comm.h``)."""
_PIECE = 2 * MIB
"""Every allocation is a multiple of this (``CUDA_IPC_MIN``, ``ncclCuMemAlloc``)."""
_TABLES = 3
"""Allocations per channel besides its buffers (``initChannel``)."""
_OF_COMMUNICATOR = 4
"""Allocations per communicator (``devCommSetup``), and the credits of NVLS."""
_SHARED_STEPS, _NETWORK_CHUNK = 16, 128 * KIB
"""``NCCL_SHARED_STEPS`` and ``NCCL_P2P_NET_CHUNKSIZE``: buffers shared by all sends over the network."""
_NVLS_SINCE = (9, 0)
_NVLS_CHUNK = 128 * KIB


class Connections(Enum):
    """The kinds of connections that collectives need; NCCL makes them at first use (``NCCL_RUNTIME_CONNECT``)."""

    RING = "all_gather, reduce_scatter, broadcast, reduce"
    TREE = "all_reduce, which may take a ring too"
    ALL_TO_ALL = "all_to_all, gather, scatter: from each to each"
    SEND = "send, recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A process group's communicator: number of ranks on this rank's machine, and number of machines."""

    ranks: int
    local: int
    nodes: int
    uses: frozenset[Connections]


def least() -> int:
    """Minimum bytes of a communicator: its tables, with every buffer in host memory."""
    return _PIECE


def most(communicator: Communicator, capability: tuple[int, int] | None, environment: Mapping[str, str]) -> int:
    """Maximum bytes assumed for a communicator, with the ``NCCL_*`` variables of ``environment``."""
    channels = _channels(communicator, environment)
    found = (_TABLES * channels + _OF_COMMUNICATOR) * _PIECE
    if communicator.uses & {Connections.RING, Connections.TREE}:
        # GPUs of the machine from which a channel receives and to which it sends (``generic.cc``): a ring receives from
        # one and sends to one; a tree, which is a chain within a machine, has one neighbour on each side and does both.
        pairs = 3 if Connections.TREE in communicator.uses else 1
        found += channels * min(pairs, communicator.local - 1) * _local_buffers(environment)
        found += _network_pairs(communicator, channels) * _network_buffers(environment)
        if communicator.local > 1:
            found += _multicast(communicator, capability, environment)
    if communicator.uses & {Connections.ALL_TO_ALL, Connections.SEND}:
        found += _sends(communicator, channels, environment)
    return found


def _network_pairs(communicator: Communicator, channels: int) -> int:
    """Number of network connections of all channels; a machine's connections are divided among its GPUs.

    A ring has one; a tree two children and a parent. With one rank per machine all_gather and reduce_scatter may use
    binomial trees, both ways (``ncclTransportPatConnect``).
    """
    if communicator.nodes < 2:
        return 0
    pairs = 4 if Connections.TREE in communicator.uses else 1
    if communicator.local == 1 and Connections.RING in communicator.uses:
        pairs += 2 * (communicator.ranks - 1).bit_length()
    return -(-channels // communicator.local) * min(pairs, communicator.ranks - 1)


def _sends(communicator: Communicator, channels: int, environment: Mapping[str, str]) -> int:
    """Number of connections to each GPU of the machine on all channels; those to other machines share its buffers.

    An all-to-all also sends to the GPU itself.
    """
    channels = min(channels, _number(environment, "NCCL_MAX_P2P_NCHANNELS", _LIMIT))
    channels = 1 << (channels - 1).bit_length()  # (ncclTopoComputeP2pChannels)
    peers = communicator.local if Connections.ALL_TO_ALL in communicator.uses else communicator.local - 1
    found = channels * peers * _local_buffers(environment)
    if communicator.nodes > 1:
        chunk = _number(environment, "NCCL_P2P_NET_CHUNKSIZE", _NETWORK_CHUNK)
        found += 2 * channels * _SHARED_STEPS * chunk
    return found


def _multicast(communicator: Communicator, capability: tuple[int, int] | None, environment: Mapping[str, str]) -> int:
    """Bytes of the buffers through which NVSwitch reduces (``ncclNvlsBufferSetup``), if the GPU can."""
    if (capability is not None and capability < _NVLS_SINCE) or environment.get("NCCL_NVLS_ENABLE") == "0":
        return 0
    usual = 32 if capability is not None and capability[0] >= 10 else 16  # (NVLS_NCHANNELS_SM90, NVLS_NCHANNELS_SM100)
    channels = _number(environment, "NCCL_NVLS_NCHANNELS", usual)
    chunk = _number(environment, "NCCL_NVLS_CHUNKSIZE", _NVLS_CHUNK)
    return round_up(channels * 2 * chunk * _STEPS * communicator.local, _PIECE)


def _local_buffers(environment: Mapping[str, str]) -> int:
    """Bytes to receive from one GPU of the machine and to send to one (``p2pSendSetup``, ``p2pRecvSetup``)."""
    if environment.get("NCCL_P2P_DISABLE") == "1":
        return 0
    low_latency, low_latency_128, simple = _buffers(environment)
    return round_up(_HEADER + low_latency + low_latency_128 + simple, _PIECE) + round_up(_HEADER, _PIECE)


def _network_buffers(environment: Mapping[str, str]) -> int:
    """Bytes to receive and send over the network if it reads from the GPU (``sendProxyConnect``).

    LL's buffers stay on the host.
    """
    _, low_latency_128, simple = _buffers(environment)
    return 2 * round_up(low_latency_128 + simple, _PIECE)


def _buffers(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Bytes of one connection's buffers, by protocol (``computeBuffSizes``)."""
    return (
        _number(environment, "NCCL_LL_BUFFSIZE", _LL),
        _number(environment, "NCCL_LL128_BUFFSIZE", _LL128),
        _number(environment, "NCCL_BUFFSIZE", _SIMPLE),
    )


def _channels(communicator: Communicator, environment: Mapping[str, str]) -> int:
    """Maximum number of channels, bounded as in ``ncclTopoPostset``: first from above, then from below."""
    usual = WITHIN if communicator.nodes == 1 else ALONE if communicator.local == 1 else ACROSS
    highest = [_number(environment, name, _LIMIT) for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")]
    lowest = [_number(environment, name, 1) for name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS")]
    return min(max(min(usual, *highest), *lowest), _LIMIT)


def _number(environment: Mapping[str, str], name: str, usual: int) -> int:
    """The variable ``name`` if it is a positive number, else NCCL's default."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else usual


NCCL = "NCCL's buffers"
"""The name for NCCL's memory outside of the allocator."""
_ASSUMED = (
    f"assumed: {NCCL}, outside of the allocator, take from {format_bytes(least())} for each communicator, up to: what "
    f"its collectives need on {WITHIN} channels within a machine and {ACROSS} across machines, with the sizes set by "
    "the NCCL_* variables; no GPU run has confirmed this"
)

_USES = {
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"), Connections.TREE),
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "barrier"), Connections.TREE),
    **dict.fromkeys(("all_to_all_single", "alltoall_", "alltoall_base_"), Connections.ALL_TO_ALL),
    **dict.fromkeys(("gather_", "scatter_"), Connections.ALL_TO_ALL),
    **dict.fromkeys(("send", "recv_", "recv_any_source_"), Connections.SEND),
}
"""Connections by the op's name; all other ops need a ring."""


class Communicators:
    """Follows the process groups of backend ``nccl``: each has a communicator from its first collective on.

    A send has a separate communicator for the two ranks, as in ``torch.distributed`` without batching.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._uses: dict[tuple[str, tuple[int, ...]], frozenset[Connections]] = {}

    def used(self, func: Any, args: Sequence[Any]) -> None:
        """Note that the op ``func`` of ``c10d`` ran on the device."""
        use, at = _use_of(func)
        peer = args[at + 1] if use is Connections.SEND else None
        self.note(dist.ProcessGroup.unbox(args[at]), use, peer if isinstance(peer, int) else None)

    def used_by_name(self, func: Any, args: Sequence[Any]) -> None:
        """Note that the op ``func`` of ``_c10d_functional``, which names its process group, ran on the device."""
        use, at = _use_of(func)
        group = args[at]
        self.note(group_named(group) if isinstance(group, str) else group, use)

    def note(self, group: Any, use: Connections, peer: int | None = None) -> None:
        """Note that ``group`` needs the connections ``use``, or only with rank ``peer`` if that is given."""
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
        at_most = sum(most(each, capability, os.environ) for each in found)
        self._device.hold_outside(NCCL, least() * len(found), at_most)
        self._device.assume(_ASSUMED)


@functools.cache
def _use_of(func: Any) -> tuple[Connections, int]:
    """The connections that ``func`` needs, and the position of its argument for the process group."""
    schema = op_schema(func)
    at = [argument.name in ("process_group", "group_name") for argument in schema.arguments].index(True)
    return _USES.get(schema.name.rpartition("::")[2], Connections.RING), at


def _communicator(ranks: tuple[int, ...], uses: frozenset[Connections]) -> Communicator:
    nodes = [rank // GPUS_PER_NODE for rank in ranks]
    return Communicator(ranks=len(ranks), local=nodes.count(here().node), nodes=len(set(nodes)), uses=uses)
