"""CPU time of training under ampmem and under its peers, as ratios to plain training.

The variants take turns in one process: each turn builds the same model from the same seed and trains
it for the same steps. CPU time is ``time.process_time``, all threads of the process together; a ratio
is the median over the rounds of (turn's time / plain turn's time of the same round).

    python tests/benchmarks/overhead.py [--rounds 3] [--steps 10] [gpt-tiny gpt-small resnet-tiny resnet-small]

Exits with 1 when a bar is broken: ampmem at most 1.6 times plain on gpt-small, and below both peers.
"""

from __future__ import annotations

import os

# Before torch is imported: its profiler would write to stderr, and waiting threads would burn CPU time.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import click
import torch
from tabulate import tabulate
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.workloads import gpt, resnet
from ampmem.workloads.common import Options as Workload

CASES: dict[str, tuple[Callable[[Workload], None], str]] = {
    "gpt-tiny": (gpt.train, "tiny"),
    "gpt-small": (gpt.train, "small"),
    "resnet-tiny": (resnet.train, "tiny"),
    "resnet-small": (resnet.train, "small"),
}
BAR = {"gpt-small": 1.6}


def torch_profiler() -> AbstractContextManager[object]:
    """torch.profiler as people use it to look for memory."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=True)


@contextmanager
def ampmem_profile() -> Iterator[None]:
    """A recording as ``ampmem profile`` makes it: from before the model is built, on disk, with stacks."""
    with TemporaryDirectory() as folder:
        session = Session(Options(path=Path(folder) / "run.ampmem", script="benchmark", baseline=False))
        session.start()
        try:
            yield
        finally:
            session.close()


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


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "ampmem": ampmem_profile,
    "torch.profiler": torch_profiler,
    "MemTracker": mem_tracker,
}


def cpu_seconds(variant: str, train: Callable[[Workload], None], options: Workload) -> float:
    """CPU time of one turn: entering the variant, building, training and leaving."""
    gc.collect()
    start = process_time()
    with redirect_stdout(StringIO()), VARIANTS[variant]():
        train(options)
    return process_time() - start


def measure(case: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of every round, by variant."""
    train, preset = CASES[case]
    options = Workload(preset=preset, steps=steps)
    for variant in VARIANTS:  # what happens only once in a process is nobody's overhead
        cpu_seconds(variant, train, Workload(preset="tiny", steps=1))
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, seconds in times.items():
            seconds.append(cpu_seconds(variant, train, options))
    return times


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=10, show_default=True)
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
def main(rounds: int, steps: int, cases: tuple[str, ...]) -> None:
    """Print one row per case."""
    rows = []
    broken = []
    for case in cases or CASES:
        times = measure(case, rounds, steps)
        ratio = {
            variant: statistics.median(a / b for a, b in zip(seconds, times["plain"], strict=True))
            for variant, seconds in times.items()
        }
        plain = statistics.median(times["plain"]) / steps
        rows.append([case, f"{plain * 1e3:.0f} ms", *(f"{ratio[name]:.2f}" for name in VARIANTS if name != "plain")])
        if ratio["ampmem"] > min(BAR.get(case, 1e9), ratio["torch.profiler"], ratio["MemTracker"]):
            broken.append(case)
    peers = [name for name in VARIANTS if name != "plain"]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {rounds} rounds of {steps} steps")
    print(tabulate(rows, ["", "plain, a step", *peers], tablefmt="github", disable_numparse=True))
    if broken:
        sys.exit(f"bar broken: {', '.join(broken)}")


if __name__ == "__main__":
    main()
