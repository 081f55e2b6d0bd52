"""Time of training on a GPU under ampmem and under its peers, as ratios to plain training.

The variants take turns in one process, on the same model from the same seed. A time is that of a whole turn,
building the model and leaving the variant included, with the device waited for at both ends.

    python tests/benchmarks/gpu_overhead.py [--rounds 5] [--steps 20] [--preset full]
"""

from __future__ import annotations

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler would write to stderr

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import click
import torch
from tabulate import tabulate
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.workloads import gpt
from ampmem.workloads.common import Options as Workload


@contextmanager
def ampmem_profile(**options: bool) -> Iterator[None]:
    """A recording as ``ampmem profile`` makes it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ampmem"
        session = Session(Options(path=path, script="benchmark", baseline=False, device="cuda", **options))
        session.start()
        try:
            yield
        finally:
            session.close()


@contextmanager
def memory_history() -> Iterator[None]:
    """PyTorch's own record, with Python stacks, and one snapshot at the end."""
    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        yield
        torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)


def torch_profiler() -> AbstractContextManager[object]:
    """torch.profiler as people use it to look for memory."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=True)


@contextmanager
def mem_tracker() -> Iterator[None]:
    """MemTracker, whose module statistics have to be reset after each step."""
    tracker = MemTracker()
    handle = register_optimizer_step_post_hook(lambda *_: tracker.reset_mod_stats())
    try:
        with tracker:
            yield
    finally:
        handle.remove()


BAR = 1.10
"""What recording may cost on the full preset."""

VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "ampmem": ampmem_profile,
    "ampmem --no-stacks": lambda: ampmem_profile(stacks=False),
    "ampmem --no-sync": lambda: ampmem_profile(synchronize=False),
    "memory history": memory_history,
    "torch.profiler": torch_profiler,
    "MemTracker": mem_tracker,
}


def seconds(variant: str, options: Workload) -> float:
    """Wall-clock time of one turn: building, training, and leaving the variant."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    start = perf_counter()
    with redirect_stdout(StringIO()), VARIANTS[variant]():
        gpt.train(options)
        torch.cuda.synchronize()
    return perf_counter() - start


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--preset", default="full", show_default=True)
def main(rounds: int, steps: int, preset: str) -> None:
    """Print one row per variant."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    options = Workload(preset=preset, steps=steps, precision="amp", device=torch.device("cuda"))
    for variant in VARIANTS:  # what happens only once in a process is nobody's overhead
        seconds(variant, Workload(preset="tiny", steps=1, precision="amp", device=torch.device("cuda")))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, taken in times.items():
            taken.append(seconds(variant, options))
    ratios = {
        variant: statistics.median(a / b for a, b in zip(taken, times["plain"], strict=True))
        for variant, taken in times.items()
    }
    rows = [
        [variant, f"{statistics.median(taken) / steps * 1e3:.1f} ms", f"{ratios[variant]:.2f}"]
        for variant, taken in times.items()
    ]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, gpt {preset}, {rounds} rounds of {steps} steps")
    print(tabulate(rows, ["", "a step", "ratio"], tablefmt="github", disable_numparse=True))
    print(f"ampmem takes {ratios['ampmem']:.3f} of the plain time; the bar is {BAR}")


if __name__ == "__main__":
    main()
