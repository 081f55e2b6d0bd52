"""What watching a run costs: the CPU time of a step beside the same step unwatched, taken in turns in one process.

    python tests/benchmarks/watch.py [cpu|cuda] [--rounds N] [--steps N]
    python tests/emulated/run.py --python tests/benchmarks/watch.py cuda
    python tests/benchmarks/watch.py --long 20000

Each row is a small network whose step takes about so long on the host; a ratio is the median over the rounds of
(watched / plain, the same round). What is watched has settled: the steps that are recorded in full at the start are
over, and none is due. On the emulated CUDA runtime kernels cost nothing, so the host's time is all there is. ``--long``
runs so many steps, plain and from start to end watched, and says what that took, the memory and the size of the file.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tabulate import tabulate
from torch import nn

import ampmem

LAYERS = {"cpu": {"1 ms": (64, 32), "10 ms": (384, 128), "100 ms": (1024, 256)}, "cuda": {"2 ms": (64, 32)}}
"""Width and batch of each row, by device."""
DEEP = {"cuda": {"10 ms": (64, 32, 36), "100 ms": (64, 32, 400)}}
"""Where kernels cost nothing, a longer step has more layers."""


def training(device: str, width: int, batch: int, layers: int = 6) -> Callable[[], None]:
    """One step of a network of so many layers."""
    modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*modules, nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        loss(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """CPU seconds of all threads for a step."""
    before = process_time()
    for _ in range(steps):
        step()
    return (process_time() - before) / steps


def ratio(step: Callable[[], None], device: str, rounds: int, steps: int, folder: Path) -> tuple[float, float, float]:
    """Milliseconds of a plain step and of a watched one, and the ratio."""
    for _ in range(5):
        step()
    plain, watched = [], []
    for _ in range(rounds):
        plain.append(timed(step, steps))
        with ampmem.watch(output=folder / "run.ampmem", every=10**9, force=True, device=device):
            for _ in range(5):  # three of them in full
                step()
            watched.append(timed(step, steps))
    ratios = [after / before for before, after in zip(plain, watched, strict=True)]
    return statistics.median(plain) * 1e3, statistics.median(watched) * 1e3, statistics.median(ratios)


def table(device: str, rounds: int, seconds: float) -> str:
    shapes = {**LAYERS[device], **DEEP.get(device, {})}
    rows = []
    with TemporaryDirectory() as folder:
        for name, shape in shapes.items():
            step = training(device, *shape)
            for _ in range(5):
                step()
            steps = max(5, int(seconds / timed(step, 5)))
            plain, watched, times = ratio(step, device, rounds, steps, Path(folder))
            rows.append((name, f"{plain:.2f}", f"{watched:.2f}", f"{watched - plain:.2f}", f"{times:.3f}"))
    return tabulate(rows, headers=("row", "plain, ms", "watched, ms", "more, ms", "ratio"), disable_numparse=True)


def long_run(steps: int) -> str:
    """A whole run of so many steps, in a process of its own each: seconds, memory at the end, size of the file."""
    step = training("cpu", *LAYERS["cpu"]["1 ms"])
    for _ in range(20):
        step()
    plain = timed(step, steps)
    before = resident()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ampmem"
        start = process_time()
        with ampmem.watch(output=path, device="cpu"):
            for i in range(steps):
                if i == 20:
                    settled = resident()
                step()
        watched = (process_time() - start) / steps
        size = path.stat().st_size
    return (
        f"{steps} steps: plain {plain * 1e3:.2f} ms a step, watched {watched * 1e3:.2f} ms with start, end and full "
        f"recordings; resident memory {before / 2**20:.0f} MiB before, {settled / 2**20:.0f} after 20 steps, "
        f"{resident() / 2**20:.0f} at the end; file {size / 2**20:.2f} MiB"
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn, about")
    parser.add_argument("--long", type=int, metavar="STEPS")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(long_run(given.long) if given.long else table(given.device, given.rounds, given.seconds))


if __name__ == "__main__":
    main()
