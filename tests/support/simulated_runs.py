"""Runs workloads on a simulated device; for a process of its own, since torch keeps the device's registration.

    python simulated_runs.py FOLDER GPU CASE...

A case is WORKLOAD:PRECISION:DTYPE, or WORKLOAD:PRECISION:DTYPE:cpu for a device that stands for the CPU. Each leaves
FOLDER/CASE.ampmem. Prints as JSON what is left of the simulation in torch after each.
"""

import contextlib
import io
import json
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampmem.allocator.gpus import find_gpu
from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.recorder.sources.simulated import SimulatedSource
from ampmem.simulator.start import Simulation
from ampmem.workloads.common import DTYPES
from ampmem.workloads.common import WorkloadOptions as Workload

EXTRA: dict[str, dict[str, int]] = {"reuse": {"width": 128}}
STEPS = 2


def values(owner: ModuleType) -> dict[str, Any]:
    """What is in a module, without the modules that something else may import and what torch finds out once."""
    found = {name: value for name, value in vars(owner).items() if not isinstance(value, ModuleType)}
    found.pop("_spmd_types_available", None)  # torch 2.15: whether a package is there
    return found


def torch_now() -> list[Any]:
    """Everything that the simulation replaces, to be compared with ``==``."""
    tensor = {name: vars(torch.Tensor).get(name) for name in ("pin_memory", "is_pinned", "record_stream")}
    return [
        values(torch.cuda),
        dict(vars(torch.cuda.memory)),
        dict(vars(torch.cuda.random)),
        dict(vars(torch.cuda.nvtx)),
        dict(vars(torch.accelerator)),
        tensor,
        (torch.save, torch.load, torch.compile, torch.Generator),
        [vars(torch._dynamo.eval_frame)[name] for name in ("_stance", "_callback_from_stance")],
        (torch._dynamo.set_stance, torch._dynamo.decorators.set_stance),
        [dict(vars(owner)) for owner in (torch.cuda.graphs, torch.nn.parallel.comm, torch.serialization)],
        [values(owner) for owner in (torch.distributed, torch.distributed.distributed_c10d)],
        torch.nn.parallel.DistributedDataParallel.__init__,
        {name: vars(FakeTensor).get(name) for name in ("__format__", "data_ptr", "numpy")},
        list(torch_optimizer._foreach_supported_types),
        list(_foreach_utils._foreach_supported_types),
        torch._C._is_multithreading_enabled(),
        [type(torch._subclasses), type(torch._subclasses.fake_tensor), threading.Thread._bootstrap_inner],
        hasattr(torch._C, "_cuda_getCurrentRawStream"),
        torch.__future__.get_swap_module_params_on_conversion(),
        (torch.utils.swap_tensors, torch.utils.weakref, torch.tensor, torch.as_tensor),
        list(_get_current_dispatch_mode_stack()),
    ]


def run(case: str, folder: Path, gpu: str) -> list[int]:
    """Record one case; the places of :func:`torch_now` that are not as they were."""
    name, precision, dtype, *label = case.split(":")
    module = import_module(f"ampmem.workloads.{name}")
    before = torch_now()
    simulation = Simulation(find_gpu(gpu), label=label[0] if label else "cuda")
    try:
        # The workload that went before left its optimizers to the garbage collector.
        options = Options(path=folder / f"{case}.ampmem", script=case, device="sim", baseline=False)
        session = Session(options, source=SimulatedSource(simulation.device))
        session.start()
        try:
            workload = Workload(
                preset="tiny",
                device=torch.device("cpu" if label else "cuda"),
                precision=precision,
                dtype=DTYPES[dtype],
                steps=STEPS,
            )
            with contextlib.redirect_stdout(io.StringIO()):
                module.train(workload, **EXTRA.get(name, {}))
        finally:
            session.close()
        session.check()
    finally:
        simulation.end()
    after = torch_now()
    return [place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]


def main() -> None:
    """The command line."""
    folder, gpu, *cases = sys.argv[1:]
    import_module("torch.distributed.tensor")  # which adds to the lists of foreach, whoever imports it
    json.dump({case: run(case, Path(folder), gpu) for case in cases}, sys.stdout)


if __name__ == "__main__":
    main()
