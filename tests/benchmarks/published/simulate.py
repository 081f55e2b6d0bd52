"""Runs scripts on simulated GPUs, each in a child of this process, which has imported the libraries once.

    python simulate.py

Each line of standard input is a run: a JSON object with the ``gpu``, the ``script`` and its ``arguments``, how many
``ranks`` it is the first of (0 without a launcher), the allocator's ``settings``, and the ``file`` for the JSON of a
``Simulated``. A line of standard output says that it is
done: empty, or the script's last words where it failed. Peaks are those since the script last called
``torch.cuda.reset_peak_memory_stats``.
"""

import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from ampmem.allocator.gpus import find_gpu
from ampmem.events import Action
from ampmem.simulator.device import DeviceEvent, SimulatedDevice
from ampmem.simulator.memory.peaks import Peaks
from ampmem.simulator.start import Simulation
from ampmem.simulator.world import World
from published.runs import Peak, Simulated


class Watched:
    """A simulated device whose prediction, and whose list of allocations, begin anew when the script's peaks do."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.sizes: list[int] = []
        device.recorder = self._note
        reset = torch.cuda.reset_peak_memory_stats

        def reset_all(*args: object) -> None:
            reset(*args)
            self._begin()

        torch.cuda.reset_peak_memory_stats = reset_all

    def _begin(self) -> None:
        device = self.device
        peaks = Peaks(device.allocator.counters)
        peaks.workspaces = device._peaks.workspaces
        peaks.note()
        device._peaks = peaks
        device._highest.counters.reset_peaks()
        device._highest.most_allocated = 0
        self.sizes.clear()

    def _note(self, event: DeviceEvent) -> None:
        if event.action == Action.ALLOC:
            self.sizes.append(event.bytes)

    def result(self, seconds: float) -> Simulated:
        """By now."""
        found = self.device.prediction()
        counters = self.device.allocator.counters
        allocated, reserved = counters.allocated_peak, counters.reserved_peak
        least_context, most_context = found.outside, found.outside_at_most
        return Simulated(
            allocated=Peak(
                least=allocated,
                likely=max(allocated, self.device._highest.counters.allocated_peak) if found.bounds else allocated,
                most=max(allocated, found.highest_allocated),
            ),
            reserved=Peak(
                least=reserved if found.least_reserved is None else found.least_reserved,
                likely=reserved if found.likely_reserved is None else found.likely_reserved,
                most=reserved if not found.bounds else found.highest_reserved,
            ),
            outside=Peak(
                least=least_context + sum(found.libraries.values()),
                likely=(least_context + most_context) // 2 + sum(found.libraries.values()),
                most=most_context + sum(found.libraries_at_most.values()),
            ),
            total=found.total,
            ran_out=found.ran_out,
            seconds=seconds,
            sizes=tuple(self.sizes),
        )


def run(gpu: str, file: str, script: str, arguments: list[str], ranks: int = 0) -> None:
    """One script, in this process."""
    began = perf_counter()
    world = World(size=ranks) if ranks else None
    simulation = Simulation(find_gpu(gpu), world=world)  # what it put into torch goes with it, so it has a name
    watched = Watched(simulation.device)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except torch.OutOfMemoryError:
        traceback.print_exc()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    Path(file).write_text(json.dumps(asdict(watched.result(perf_counter() - began))), encoding="utf-8")


def in_child(asked: dict[str, Any]) -> str:
    """The same in a child; its last words where it failed."""
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(words.fileno(), 1)
                os.dup2(words.fileno(), 2)
                if asked["settings"]:
                    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = asked["settings"]
                run(asked["gpu"], asked["file"], asked["script"], asked["arguments"], asked["ranks"])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return ""
        words.seek(0)
        return (words.read().strip().splitlines() or ["without a word"])[-1]


def main() -> None:
    """Until standard input ends."""
    for library in ("transformers", "peft", "timm", "torchvision"):
        with suppress(ImportError, RuntimeError):  # such as of kernels for another build of torch
            import_module(library)
    for line in sys.stdin:
        print(in_child(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
