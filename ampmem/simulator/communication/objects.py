"""Collectives of Python objects: torch would send them as bytes through the device, which has no values here."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ampmem.patching import replace_all
from ampmem.simulator.communication.communicators import Communicators
from ampmem.simulator.communication.nccl import Use
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.where import stop

_SIZE = 8
"""Bytes of a number that says how long a pickled object is."""


class Objects:
    """Each peer has an object like this rank's."""

    def __init__(self, device: SimulatedDevice, communicators: Communicators) -> None:
        self._device = device
        self._communicators = communicators

    def install(self) -> Callable[[], None]:
        """Take the place of torch's; returns what undoes it."""
        names = (
            "all_gather_object",
            "gather_object",
            "broadcast_object_list",
            "scatter_object_list",
            "send_object_list",
            "recv_object_list",
            "monitored_barrier",
        )
        return replace_all((dist, dist.distributed_c10d), {name: getattr(self, name) for name in names})

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """As torch's."""
        if _outside(group):
            return
        count = dist.get_world_size(group)
        data = pickle.dumps(obj)
        self._through_the_device("all_gather_object", group, [len(data), _SIZE, _SIZE * count, len(data) * count])
        for i in range(count):
            object_list[i] = pickle.loads(data)

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, dst: Any = None, group: Any = None, **where: Any
    ) -> None:
        """As torch's."""
        if _outside(group):
            return
        here = dist.get_rank() == _peer(dst, where.get("group_dst"), group)
        count = dist.get_world_size(group)
        data = pickle.dumps(obj)
        sizes = [len(data), _SIZE, _SIZE * count]
        self._through_the_device("gather_object", group, [*sizes, len(data) * count] if here else sizes)
        if here and object_gather_list is not None:
            for i in range(count):
                object_gather_list[i] = pickle.loads(data)

    def broadcast_object_list(
        self, object_list: Sequence[Any], src: Any = None, group: Any = None, device: Any = None, **where: Any
    ) -> None:
        """As torch's; a rank that receives has the objects that it offers already."""
        if _outside(group):
            return
        source = _peer(src, where.get("group_src"), group)
        if dist.get_rank() != source:
            self._device.assume(
                f"assumed: what rank {source} broadcasts as Python objects is what rank {dist.get_rank()} had there"
            )
        sizes = [len(pickle.dumps(item)) for item in object_list]
        self._through_the_device("broadcast_object_list", group, [*sizes, _SIZE * len(sizes), sum(sizes)], device)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: Any = None,
        group: Any = None,
        **where: Any,
    ) -> None:
        """As torch's. A rank that only receives cannot know what."""
        if _outside(group):
            return
        source = _peer(src, where.get("group_src"), group)
        if dist.get_rank() != source or scatter_object_input_list is None:
            raise stop(
                f"what rank {source} scatters is not known to rank {dist.get_rank()}, which is simulated alone; say "
                f"--rank {source}"
            )
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]

    def send_object_list(self, object_list: Sequence[Any], *_: Any, **__: Any) -> None:
        """Nobody is there to receive it."""

    def recv_object_list(self, object_list: list[Any], src: Any = None, *_: Any, **__: Any) -> int:
        """What this rank offers is what it gets."""
        self._device.assume("assumed: Python objects that were received are what this rank had in their place")
        return 0 if src is None else int(src)

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Everybody is there."""

    def _through_the_device(self, name: str, group: Any, sizes: Sequence[int], device: Any = None) -> None:
        """NCCL sends bytes from the device and to it."""
        on_device = (
            dist.get_backend(group) == dist.Backend.NCCL if device is None else torch.device(device).type != "cpu"
        )
        if on_device:
            self._communicators.note(group or dist.group.WORLD, Use.RING)
            self._device.scratch(f"torch.distributed.{name}", [size for size in sizes if size])


def _outside(group: Any) -> bool:
    return bool(dist.get_rank(group) < 0)


def _peer(number: Any, in_group: Any, group: Any) -> int:
    """The global rank that the script names."""
    group = group or dist.group.WORLD
    if in_group is not None:
        return int(dist.get_global_rank(group, in_group))
    if number is not None:
        return int(number)
    return int(dist.get_global_rank(group, 0))
