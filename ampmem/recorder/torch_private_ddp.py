"""Private names of torch's that tell the memory of DistributedDataParallel; kept as ``torch_private.py`` says."""

from __future__ import annotations

from ampmem.recorder.torch_entries import Place, patched

_BUCKETS = "the buckets of DistributedDataParallel are not told from other memory"

REDUCER_INIT: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "__init__",
    "the buckets that DistributedDataParallel makes first",
    without=_BUCKETS,
)
REBUILD_BUCKETS: Place = patched(
    "torch._C._distributed_c10d.Reducer",
    "_rebuild_buckets",
    "the buckets that it makes once it knows the order of the gradients",
    without=_BUCKETS,
)
BROADCAST: Place = patched(
    "torch.distributed",
    "_broadcast_coalesced",
    "what it lays side by side to broadcast parameters and buffers",
    without="what DistributedDataParallel broadcasts is not told from other memory",
)
