"""Private names of torch.distributed, kept as in ``torch_private.py``."""

from __future__ import annotations

from ampmem.recorder.torch_entries import Place, patched

_BUCKETS = "the buckets of DistributedDataParallel are not told from other memory"

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
    without="a few bytes of DistributedDataParallel are not told from other memory",
)
REBUILD_BUCKETS: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "_rebuild_buckets",
    "the buckets that it makes once it knows the order of the gradients",
    without=_BUCKETS,
)
BROADCASTS: tuple[Place, ...] = tuple(
    patched(
        "torch.distributed", name, why, without="what DistributedDataParallel broadcasts is not told from other memory"
    )
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
