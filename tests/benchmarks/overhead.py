"""CPU time of training under ampmem and under its peers, as ratios to plain training.

The variants take turns in one process. A turn of a whole run builds the same model from the same seed and trains it for
the same steps. A turn of a block trains a model that is there already, for three steps on one thread inside
``with ampmem.profile(model, optimizer)`` or a peer's ``with``, whose start and end are in the time. CPU time is
``time.process_time``, all threads of the process together; a ratio is the median over the rounds of
(turn's time / plain turn's time of the same round).

    python tests/benchmarks/overhead.py [--rounds 3] [--steps 10] [gpt-tiny gpt-small-amp gpt-block-amp ...]

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
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import click
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampmem
from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.workloads import gpt, resnet
from ampmem.workloads.common import Options as Workload

Measured = Callable[[], AbstractContextManager[object]]
"""What a variant does around the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """From before the model is built: ``train`` with ``options``."""

    train: Callable[[Workload], None]
    options: Workload

    def turn(self, variant: str, steps: int) -> float:
        """CPU seconds of entering the variant, building, training and leaving."""
        return seconds(VARIANTS[variant], partial(self.train, replace(self.options, steps=steps)))


class Block:
    """A GPT that has trained before, small enough for the recording to outweigh it."""

    STEPS = 3
    CONFIG = gpt.Config(vocabulary=512, context=64, layers=6, heads=4, width=96, batch_size=4)

    def __init__(self, *, amp: bool) -> None:
        torch.manual_seed(0)
        self._autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=amp)
        self._model = gpt.GPT(self.CONFIG)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._text = torch.randint(self.CONFIG.vocabulary, (self.CONFIG.batch_size, self.CONFIG.context + 1))
        self._train(1)

    def turn(self, variant: str, steps: int) -> float:
        """CPU seconds of entering the variant, three steps and leaving."""
        block = partial(ampmem.profile, self._model, self._optimizer, device="cpu")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return seconds(block if variant == "ampmem" else VARIANTS[variant], partial(self._train, self.STEPS))
        finally:
            torch.set_num_threads(threads)

    def _train(self, steps: int) -> None:
        inputs, targets = self._text[:, :-1], self._text[:, 1:]
        for _ in range(steps):
            self._optimizer.zero_grad()
            with self._autocast():
                loss = F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


def seconds(variant: Measured, train: Callable[[], None]) -> float:
    """CPU time of ``train`` inside of ``variant``, with its start and its end."""
    gc.collect()
    start = process_time()
    with redirect_stdout(StringIO()), variant():
        train()
    return process_time() - start


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


VARIANTS: dict[str, Measured] = {
    "plain": nullcontext,
    "ampmem": ampmem_profile,
    "torch.profiler": torch_profiler,
    "MemTracker": mem_tracker,
}
CASES: dict[str, Callable[[], WholeRun | Block]] = {
    "gpt-tiny": partial(WholeRun, train=gpt.train, options=Workload(preset="tiny")),
    "gpt-small": partial(WholeRun, train=gpt.train, options=Workload(preset="small")),
    "resnet-tiny": partial(WholeRun, train=resnet.train, options=Workload(preset="tiny")),
    "resnet-small": partial(WholeRun, train=resnet.train, options=Workload(preset="small")),
    "gpt-tiny-amp": partial(WholeRun, train=gpt.train, options=Workload(preset="tiny", precision="amp")),
    "gpt-small-amp": partial(WholeRun, train=gpt.train, options=Workload(preset="small", precision="amp")),
    "gpt-block": partial(Block, amp=False),
    "gpt-block-amp": partial(Block, amp=True),
}
BAR = {"gpt-small": 1.6}


def measure(case: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of every round, by variant."""
    made = CASES[case]()
    for variant in VARIANTS:  # what happens only once in a process is nobody's overhead
        made.turn(variant, 1)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, taken in times.items():
            taken.append(made.turn(variant, steps))
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
        plain = statistics.median(times["plain"]) / (Block.STEPS if "block" in case else steps)
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
