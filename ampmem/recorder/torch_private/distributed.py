"""What recording takes of torch.distributed that torch does not promise, or patches; as in ``general.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from ampmem.recorder.torch_private.entries import Place, optional, patched

# -- ranks and their places -------------------------------------------------------------------------

default_store: Callable[[], Any] | None = optional(
    "torch.distributed.distributed_c10d",
    "_get_default_store",
    "by which ranks agree to stop together",
    without="a script of several ranks is not stopped after the last step that is recorded, and runs to its end",
    otherwise=None,
)
NEW_MESH = patched(
    "torch.distributed.device_mesh.DeviceMesh",
    "__init__",
    "the axes of the script's device mesh",
    without="where a rank lies in the device mesh is not recorded",
)
JOINED = patched(
    "torch.multiprocessing.ProcessContext",
    "join",
    "a script that waits for ranks that were stopped is stopped, too",
    without="a script that spawns its ranks is not stopped, and runs to its end",
)
GROUP_MADE = patched(
    "torch.distributed.distributed_c10d",
    "_update_default_pg",
    "a process that multiprocessing started becomes a rank",
    without="processes that the script starts by multiprocessing are not recorded",
)


def world_size() -> int:
    """How many ranks there are; 1 where torch.distributed is not in use."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


# -- DistributedDataParallel ------------------------------------------------------------------------

_BUCKETS = "DDP's buckets cannot be identified: they count as other memory"

REDUCER_INIT: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "__init__",
    "the buckets that DistributedDataParallel makes first",
    without=_BUCKETS,
)
STATIC_GRAPH: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "_set_static_graph",
    "where it notes which parameters a step has used",
    without="a few bytes of DDP count as other memory",
)
REBUILD_BUCKETS: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "_rebuild_buckets",
    "the buckets that it makes once it knows the order of the gradients",
    without=_BUCKETS,
)
BROADCASTS: tuple[Place, ...] = tuple(
    patched("torch.distributed", name, why, without="what DDP broadcasts counts as other memory")
    for name, why in (
        ("_broadcast_coalesced", "what it lays side by side to broadcast parameters and buffers"),
        ("_verify_params_across_processes", "the shapes of parameters, which it compares with another rank's"),
    )
)

# -- process groups ---------------------------------------------------------------------------------


def _collective(name: str) -> Place:
    return patched(
        "torch._C._distributed_c10d.ProcessGroup",
        name,
        "what a process group is handed: its threads may be the ones that free that",
        without="what the threads of a process group free is told by sizes",
    )


RECEIVES: tuple[Place, ...] = (_collective("recv"), _collective("recv_anysource"))
COLLECTIVES: tuple[Place, ...] = (*RECEIVES, *map(_collective, ("send", "allreduce", "broadcast")))
