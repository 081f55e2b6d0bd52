"""What recording takes of torch.distributed that torch does not promise, or patches; as in ``torch_private.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

from ampmem.recorder.torch_entries import optional, patched

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
