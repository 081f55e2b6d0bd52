"""What data and pipeline parallelism take of torch beside ``private_communication.py``: why, and since when.

All of it is there since 2.11 or before, unless it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ampmem.patching import patch


def nobody_to_verify(verify: Callable[[Any, Sequence[Tensor]], None]) -> Callable[[], None]:
    """Let DDP ask ``verify`` whether all ranks have the same parameters; returns what undoes it.

    Torch reads in C++ what the others have answered.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def verify_params(group: Any, parameters: Sequence[Tensor], logger: Any = None) -> None:
            if isinstance(parameters[0], torch._subclasses.FakeTensor):
                verify(group, parameters)
            else:
                original(group, parameters, logger)

        return verify_params

    return patch(torch.distributed, "_verify_params_across_processes", wrap)


def nothing_is_timed() -> Callable[[], None]:
    """Keep DDP's reducer from timing its first iterations with CUDA events; returns what undoes it.

    It does so from C++, where there is no device to ask. What it is told before each forward starts the count of
    iterations, and nothing else; the logger then dereferences the times.
    """
    with ExitStack() as undo:
        undo.callback(patch(torch.distributed.Reducer, "prepare_for_forward", _nothing))
        undo.callback(patch(torch.distributed.Logger, "set_runtime_stats_and_log", _nothing))
        return undo.pop_all().close


def _nothing(original: Callable[..., None]) -> Callable[..., None]:
    return lambda reducer: None


def around_bookkeeping(region: Callable[[], Any]) -> Callable[[], None]:
    """Enter ``region`` where DDP's reducer makes the numbers that it keeps for itself; returns what undoes it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def inside(reducer: Any, *args: Any) -> Any:
            with region():
                return original(reducer, *args)

        return inside

    reducer, parallel = torch.distributed.Reducer, torch.nn.parallel.DistributedDataParallel
    with ExitStack() as undo:
        undo.callback(patch(reducer, "_rebuild_buckets", wrap))
        undo.callback(patch(reducer, "_set_static_graph", wrap))
        undo.callback(patch(parallel, "_ddp_init_helper", wrap))
        return undo.pop_all().close
