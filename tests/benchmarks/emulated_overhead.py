"""CPU time of training on a GPU whose kernels cost nothing: plain, under ampmem, its peers, and ampmem's parts.

On the emulated runtime the host side of CUDA is the real one and kernels do nothing, so this is what recording adds
where the GPU waits for its host. The variants take turns in one process, on the same model from the same seed. A time
is that of ``time.process_time``, all threads together; a ratio is the median over the rounds of (turn's time / plain
turn's time of the same round). "training" leaves out how a variant starts and ends, "in all" has both. A part is its
functions' own time: what another part takes inside of them is that part's.

    python tests/emulated/run.py --python tests/benchmarks/emulated_overhead.py [--rounds 5] [--steps 20] [--amp]
    python tests/emulated/run.py --python tests/benchmarks/emulated_overhead.py --long 300000

The second records one step of about so many entries of the allocator's trace, an accumulation over many batches, and
prints what that costs in memory and CPU time.

It asserts nothing: it needs PyTorch's CUDA build (tests/emulated/emulation.py), and its figures are the machine's own.
"""

from __future__ import annotations

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler would write to stderr

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from time import process_time

import click
import torch
import torch.nn.functional as F
from gpu_overhead import memory_history, torch_profiler
from overhead_parts import Clock
from tabulate import tabulate

from ampmem.recorder import session as sessions
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.backward import BackwardHooks, GradientHooks
from ampmem.recorder.hooks.forward import ForwardMode
from ampmem.recorder.hooks.modules import ModuleHooks
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.models.variables import Variables
from ampmem.recorder.options import Options
from ampmem.recorder.sources.cuda.device import TorchCuda
from ampmem.recorder.sources.cuda.events import History
from ampmem.recorder.sources.cuda.nodes import NodeRecorder
from ampmem.recorder.sources.cuda.peaks import Peaks
from ampmem.recorder.sources.cuda.source import CudaSource
from ampmem.recorder.writing.describe import Describer
from ampmem.recorder.writing.join import Joiner
from ampmem.recording import RecordingWriter
from ampmem.workloads import gpt

CONFIG = gpt.Config(vocabulary=512, context=64, layers=2, heads=4, width=96, batch_size=4)

PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "dispatch mode: around each op": ((ForwardMode, "__torch_dispatch__"),),
    "dispatch mode: what ops save and return": ((ForwardMode, "_before"), (ForwardMode, "_after")),
    "dispatch mode: Python frames": ((Stacks, "capture"),),
    "dispatch mode: the log": ((Log, "op"),),
    "tags of events": ((CudaSource, "_stamp"),),
    "hooks of modules": ((ModuleHooks, "_before"), (ModuleHooks, "_ended")),
    "hooks of backward": ((BackwardHooks, "_started"), (BackwardHooks, "_ended"), (GradientHooks, "_note")),
    "hooks of the update": ((OptimizerHooks, "note_gradients"), (OptimizerHooks, "note_state")),
    "the script's variables": ((Variables, "_note"),),
    "names of the model": ((Models, "note"),),
    "marks: the allocator's statistics": ((CudaSource, "mark"),),
    "step's end: the wait": ((TorchCuda, "synchronize"),),
    "step's end: the allocator's snapshot": ((TorchCuda, "snapshot"), (TorchCuda, "history")),
    "step's end: the profiler": ((NodeRecorder, "take"),),
    "step's end: reading the trace": ((History, "read"),),
    "step's end: settling events": ((History, "settle"),),
    "step's end: peaks of the devices": ((Peaks, "note"),),
    "step's end: the rest of the source": ((CudaSource, "_take"),),
    "step's end: joining events": ((Joiner, "join"),),
    "step's end: what is known of the run": ((Describer, "description"), (Describer, "changed")),
    "SQLite": ((RecordingWriter, "append"),),
    "start of the recording": ((sessions.Session, "_install"), (RecordingWriter, "__init__")),
    "end of the recording": ((sessions.Session, "_end_recording"), (RecordingWriter, "close")),
}


class Training:
    """A small GPT that has trained before."""

    def __init__(self, *, amp: bool) -> None:
        torch.manual_seed(0)
        self._autocast = lambda: torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp)
        self._model = gpt.GPT(CONFIG).to("cuda")
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._text = torch.randint(CONFIG.vocabulary, (CONFIG.batch_size, CONFIG.context + 1), device="cuda")
        self.run(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.update()

    def backward(self) -> None:
        inputs, targets = self._text[:, :-1], self._text[:, 1:]
        with self._autocast():
            loss = F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


@contextmanager
def ampmem_profile() -> Iterator[None]:
    """A recording as ``ampmem profile`` makes it, on disk, with stacks."""
    with TemporaryDirectory() as folder:
        options = Options(path=Path(folder) / "run.ampmem", script="benchmark", baseline=True, device="cuda")
        session = sessions.Session(options)
        session.start()
        try:
            yield
        finally:
            session.close()


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "memory history": memory_history,
    "torch.profiler": torch_profiler,
    "ampmem": ampmem_profile,
}


def milliseconds(variant: str, training: Training, steps: int) -> tuple[float, float]:
    """CPU time of ``steps`` steps under a variant, and of all with its start and end."""
    gc.collect()
    torch.cuda.synchronize()
    start = process_time()
    with VARIANTS[variant]():
        began = process_time()
        training.run(steps)
        torch.cuda.synchronize()
        ended = process_time()
    return (ended - began) * 1e3, (process_time() - start) * 1e3


def print_variants(training: Training, rounds: int, steps: int) -> None:
    """Print one row per variant."""
    for variant in VARIANTS:  # what happens only once in a process is nobody's overhead
        milliseconds(variant, training, 1)
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, times in taken.items():
            times.append(milliseconds(variant, training, steps))
    rows = []
    for variant, times in taken.items():
        row = [variant]
        for which in (0, 1):
            ratios = (own[which] / plain[which] for own, plain in zip(times, taken["plain"], strict=True))
            row += [f"{statistics.median(time[which] for time in times):.0f}", f"{statistics.median(ratios):.2f}"]
        rows.append(row)
    headers = ["", "training, CPU ms", "ratio", "in all, CPU ms", "ratio"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


def print_parts(training: Training, rounds: int, steps: int) -> None:
    """Print one row per part of ampmem: the least of all rounds, of each part for itself."""
    clock = Clock()
    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, clock.timed(part, getattr(owner, name)))
    least: dict[str, float] = dict.fromkeys(PARTS, float("inf"))
    for _ in range(rounds):
        clock.taken.clear()
        milliseconds("ampmem", training, steps)
        least = {part: min(time, clock.taken[part] / 1e6) for part, time in least.items()}
    print(tabulate([(part, f"{time:.1f}") for part, time in least.items()], ["part", "CPU ms"], tablefmt="github"))


def print_long(training: Training, events: int) -> None:
    """Print what recording one step of about ``events`` entries of the trace costs."""
    training.run(1)
    with ampmem_profile():
        training.run(1)
    torch.cuda.memory._record_memory_history("all", context=None)
    training.backward()
    (trace, *_) = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(None)
    batches = max(1, events // len(trace))
    times = []
    for variant in ("plain", "ampmem"):
        before, start = getrusage(RUSAGE_SELF).ru_maxrss, process_time()
        with VARIANTS[variant]():
            for _ in range(batches):
                training.backward()
            training.update()
        times.append((process_time() - start, (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024))
    (plain_s, _), (own_s, own_mib) = times
    print(f"one step of {batches} batches, about {batches * len(trace):,} entries of the trace:")
    print(f"plain {plain_s:.1f} CPU s; ampmem {own_s:.1f} CPU s, and {own_mib:.0f} MiB more at the most")


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--amp", is_flag=True, help="Train under autocast.")
@click.option("--long", type=int, help="Record one step of about so many entries of the trace instead.")
def main(rounds: int, steps: int, amp: bool, long: int | None) -> None:
    """Print one row per variant, then one row per part of ampmem."""
    if not torch.cuda.is_available():
        sys.exit("needs PyTorch's CUDA build on the emulated runtime: python tests/emulated/run.py --python ...")
    training = Training(amp=amp)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {rounds} rounds of {steps} steps\n")
    if long is not None:
        print_long(training, long)
        return
    print_variants(training, rounds, steps)
    print()
    print_parts(training, rounds, steps)


if __name__ == "__main__":
    main()
