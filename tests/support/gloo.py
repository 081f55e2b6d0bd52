"""Runs a function on several ranks of a gloo process group, each a process of its own; what tensors add up to there."""

import gc
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ampmem
from support import commands, measure

_START = """
import sys
sys.path.append({tests!r})
from support import gloo
gloo.start({module!r}, {function!r}, {folder!r}, {ranks})
"""


def on_ranks(work: Callable[[Path], None], folder: Path, *, ranks: int = 2) -> None:
    """Call ``work(folder)``, a function of a module, on every rank; what fails there fails here."""
    folder.mkdir(exist_ok=True)
    paths = {"tests": str(Path(__file__).parents[1]), "folder": str(folder)}
    code = _START.format(module=work.__module__, function=work.__name__, ranks=ranks, **paths)
    done = commands.python(folder, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr


def start(module: str, function: str, folder: str, ranks: int) -> None:
    """Fork the ranks of a process that has torch imported already, and wait for them."""
    work = getattr(import_module(module), function)
    processes.start_processes(_run, (work, Path(folder), ranks), nprocs=ranks, start_method="fork")


class _OneThread(distributed_c10d.ProcessGroupGloo):
    """A process group whose collectives are done by one thread, each after the one before was let go of.

    With gloo's two, a thread may hold what a collective was given, and its own copies, for as long as the other works.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = self._Options()
        options._devices = [self.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def settle() -> None:
    """Return when gloo's threads hold no memory of the collectives so far; every rank has to call it.

    A barrier would not do: it keeps what comes before it.
    """
    for group in list(distributed_c10d._world.pg_map):
        dist.broadcast(torch.empty(0), group_src=0, group=group)


def _run(rank: int, work: Callable[[Path], None], folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = _OneThread
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        work(folder)
    finally:
        dist.destroy_process_group()


def recording_of(folder: Path, name: str, rank: int) -> Path:
    """Where the recording of that run of a rank is."""
    return folder / f"{name}.rank{rank}.ampmem"


def recorded(folder: Path, name: str, **how: Any) -> ampmem.Profile:
    """What records the run called ``name`` of this rank."""
    gc.collect()  # or what an earlier run left in circles would be in this one
    return ampmem.profile(output=recording_of(folder, name, dist.get_rank()), **how)


def keep(folder: Path, name: str, values: Any) -> None:
    """Write down what this rank knows of that run."""
    (folder / f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(values))


def kept(folder: Path, name: str, rank: int) -> Any:
    """What the rank has written down."""
    return json.loads((folder / f"{name}.rank{rank}.json").read_text())


def sums(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of this process's tensors by category; of buckets as DistributedDataParallel itself reports them."""
    return {
        "parameters": measure.parameters(model),
        "gradients": measure.gradients(model),
        "buffers": measure.buffers(model),
        "optimizer_state": measure.state(optimizer),
        "communication": bucket_bytes(model) if isinstance(model, DistributedDataParallel) else 0,
    }


def bucket_bytes(model: DistributedDataParallel) -> int:
    """Bytes of the buckets of ``model`` that gradients do not view, and of the two maps of the parameters in use."""
    data: Mapping[str, Any] = model._get_ddp_logging_data()
    maps = 2 * 4 * len(list(model.parameters())) if model.find_unused_parameters or model.static_graph else 0
    if model.gradient_as_bucket_view:
        return maps
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return maps + sum(int(size) for size in str(sizes).split(","))
