"""``torch.distributed``'s process groups, with nobody behind them: every collective returns at once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampmem.patching import replace_all
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.communication import FAKE, FakeStore
from ampmem.simulator.where import stop
from ampmem.simulator.world import World

_NCCL = (2, 27, 5)
"""What scripts are told that compare it with the oldest that they can use."""
_DEFAULT = "cpu:gloo,cuda:nccl"
"""What torch takes where a script names no backend."""
_NO_GROUP = (
    "the script created no process group, so only one process was simulated. Start it with torchrun, or call "
    "init_process_group"
)


def install(world: World, device: SimulatedDevice) -> Callable[[], None]:
    """Let the script make process groups of ``world``; returns what undoes it, and ends those that are left."""
    distributed = torch.distributed
    owners = (distributed, distributed.distributed_c10d)
    named: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
    patches = {
        "init_process_group": _start(world, named, device),
        "new_group": _group(named),
        "get_backend": _backend(named),
    }
    with ExitStack() as undo:
        undo.callback(_end)
        if world.size > 1:
            device.warn(_NO_GROUP)  # until there is one
        undo.callback(replace_all(owners, patches))
        undo.callback(replace_all((distributed,), {"is_nccl_available": lambda: True}))
        undo.callback(replace_all((torch.cuda.nccl,), {"version": lambda: _NCCL}))
        # which has them by name, and starts the default group where the script has not
        meshes = {name: patches[name] for name in ("init_process_group", "new_group")}
        undo.callback(replace_all((distributed.device_mesh,), meshes))
        return undo.pop_all().close


def _start(world: World, named: weakref.WeakKeyDictionary[Any, str], device: SimulatedDevice) -> Callable[..., None]:
    distributed = torch.distributed
    original = distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *_: Any,
        **__: Any,
    ) -> None:
        if world_size not in (-1, world.size):
            raise stop(
                f"the script starts a process group of {world_size} ranks, and {world.size} are simulated; "
                f"say --world-size {world_size}, or have it read WORLD_SIZE"
            )
        if rank not in (-1, world.rank):
            raise stop(
                f"the script starts as rank {rank}, and rank {world.rank} is simulated; say --rank {rank}, or have it "
                "read RANK"
            )
        original(FAKE, store=FakeStore(), world_size=world.size, rank=world.rank)
        device.retract(_NO_GROUP)
        named[distributed.group.WORLD] = str(backend or _DEFAULT)

    return init_process_group


def _group(named: weakref.WeakKeyDictionary[Any, str]) -> Callable[..., Any]:
    original = torch.distributed.new_group

    @functools.wraps(original)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: Any = None,
        device_id: Any = None,
        **how: Any,
    ) -> Any:
        made = original(ranks, group_desc=group_desc, **how)
        if isinstance(made, torch.distributed.ProcessGroup):
            named[made] = str(backend or named.get(torch.distributed.group.WORLD, _DEFAULT))
        return made

    return new_group


def _backend(named: weakref.WeakKeyDictionary[Any, str]) -> Callable[..., str]:
    """What the script has asked for: it may go on by it."""
    original = torch.distributed.get_backend

    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        found = original(group)
        name = named.get(group or torch.distributed.group.WORLD, "nccl")
        return torch.distributed.Backend("nccl" if "nccl" in name else name) if found == FAKE else found

    return get_backend


def _end() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
