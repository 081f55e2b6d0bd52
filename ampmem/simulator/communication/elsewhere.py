"""What waits for other processes, or asks them: it is done here where that says the same, and stops where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import rpc
from torch.distributed.optim import ZeroRedundancyOptimizer

from ampmem.own_code import script_line
from ampmem.patching import replace_all
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.private.parallel import SYMMETRIC, HashStore, checkpoints, symmetric_memory, tracers
from ampmem.simulator.where import stop
from ampmem.simulator.world import World

_RPC = (
    "remote procedure calls need the other processes, and one rank is simulated alone; leave torch.distributed.rpc out"
)
_SYMMETRIC = (
    "symmetric memory is allocated by NVSHMEM or CUDA beside PyTorch's allocator and is not simulated; leave it out to "
    "see what the run needs with NCCL's collectives"
)
_CONSOLIDATE = (
    "the optimizer state of the other ranks is not there to be gathered; leave consolidate_state_dict out, which "
    "copies it to the host"
)
_LOADED = (
    "a distributed checkpoint cannot be loaded on a simulated device, which has no values; leave "
    "torch.distributed.checkpoint.load out"
)
_TRACED = (
    "a pipeline that is traced from the whole model cannot be simulated; give PipelineStage the module of each stage"
)


def install(world: World, device: SimulatedDevice) -> Callable[[], None]:
    """Put all of it in place; returns what undoes it."""
    with ExitStack() as undo:
        undo.callback(replace_all((torch.multiprocessing,), _processes(world)))
        undo.callback(replace_all((dist, dist.distributed_c10d), {"TCPStore": _Store}))
        undo.callback(replace_all((rpc,), {"init_rpc": _stops(_RPC)}))
        undo.callback(replace_all((symmetric_memory(),), dict.fromkeys(SYMMETRIC, _stops(_SYMMETRIC))))
        undo.callback(replace_all((ZeroRedundancyOptimizer,), {"consolidate_state_dict": _stops(_CONSOLIDATE)}))
        undo.callback(replace_all(tracers(), {"pipeline": _stops(_TRACED)}))
        undo.callback(replace_all(checkpoints(), _files(device)))
        return undo.pop_all().close


def _stops(why: str) -> Callable[..., Any]:
    def stopped(*_: Any, **__: Any) -> Any:
        raise stop(why)

    return stopped


def _files(device: SimulatedDevice) -> dict[str, Any]:
    """Saving asks for no memory of the device's, and there is nothing to save."""

    def save(*_: Any, **__: Any) -> None:
        where = script_line()
        device.not_written(f"torch.distributed.checkpoint wrote nothing, since tensors had no values, at {where}")

    def async_save(*_: Any, **__: Any) -> Any:
        saved: Future[None] = Future()
        save()
        saved.set_result(None)
        return saved

    return {"save": save, "async_save": async_save, "load": _stops(_LOADED)}


class _Joined:
    """The processes that a script has started, which are all over."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """They are."""
        return True


def _processes(world: World) -> dict[str, Any]:
    """``mp.spawn`` starts one process for each GPU of a machine: here is that of this rank."""

    def spawn(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _Joined | None:
        if nprocs != world.local_size:
            raise stop(
                f"the script starts {nprocs} processes, and the machine of rank {world.rank} has {world.local_size} of "
                f"the {world.size} ranks that are simulated; say --world-size {nprocs}"
            )
        fn(world.local_rank, *args)
        return None if join else _Joined()

    return {"spawn": spawn, "start_processes": spawn}


class _Store(HashStore):  # type: ignore[misc]
    """``TCPStore``, which waits for the other ranks to come."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def get(self, key: str) -> bytes:
        """What this rank has put there."""
        self._see(key)
        found: bytes = super().get(key)
        return found

    def wait(self, keys: list[str], *_: Any) -> None:
        """They are there, or never will be."""
        for key in keys:
            self._see(key)

    def _see(self, key: str) -> None:
        if not self.check([key]):
            raise stop(
                f"{key!r} is not in the store: another rank would have put it there, and one rank is simulated alone; "
                "leave it out, or --rank says which rank this is"
            )
