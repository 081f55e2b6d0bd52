"""Where the CPU time of a short recording goes: the blocks of ``overhead.py``, part by part.

Each part is its functions' own time: what another part takes inside of them is that part's. The least of all rounds
counts, of each part for itself, so that what else runs on the machine matters little. Asking for the time takes some
of it too, which is in the rest.

    python tests/benchmarks/overhead_parts.py [--rounds 12] [gpt-block-amp]
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from time import process_time_ns
from typing import Any

import click
from overhead import CASES  # first: it sets up torch
from tabulate import tabulate

from ampmem.recorder import session
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.backward import GradientHooks
from ampmem.recorder.hooks.forward import ForwardMode
from ampmem.recorder.hooks.modules import ModuleHooks
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources.cpu import ProfilerSource
from ampmem.recorder.sources.ledger import Ledger
from ampmem.recorder.writing.join import Joiner
from ampmem.recording import RecordingWriter

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "looking for the tensors that are alive at the start": ((session, "live_at_start"),),
    "hooks in forward": (
        (ForwardMode, "_before"),
        (ForwardMode, "_after"),
        (Stacks, "capture"),
        (Log, "op"),
        (ModuleHooks, "_before"),
        (ModuleHooks, "_ended"),
    ),
    "reading the profiler's nodes": ((ProfilerSource, "_events"),),
    "opening and closing the profiler's windows": ((ProfilerSource, "drain"), (ProfilerSource, "stop")),
    "hooks around the update and in backward": (
        (OptimizerHooks, "note_gradients"),
        (OptimizerHooks, "note_state"),
        (GradientHooks, "_note"),
    ),
    "SQLite": ((RecordingWriter, "__init__"), (RecordingWriter, "append"), (RecordingWriter, "close")),
    "settling and joining events": ((Ledger, "settle"), (Joiner, "join")),
}


class Clock:
    """Adds up the time of each part while it runs and no other does inside of it."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self._inside: list[int] = []
        """Of each part that is running, the time of the parts inside of it, outermost first."""

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose time is that of ``part``."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0)
            start = process_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                whole = process_time_ns() - start
                self.taken[part] += whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        return run


@click.command()
@click.option("--rounds", default=12, show_default=True)
@click.argument("case", type=click.Choice(["gpt-block", "gpt-block-amp"]), default="gpt-block-amp")
def main(rounds: int, case: str) -> None:
    """Print one row per part."""
    block = CASES[case]()
    for variant in ("plain", "ampmem"):  # what happens only once in a process is nobody's overhead
        block.turn(variant, 1)
    plain, whole = (min(block.turn(variant, 1) for _ in range(rounds)) * 1e3 for variant in ("plain", "ampmem"))
    clock = Clock()
    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, clock.timed(part, getattr(owner, name)))
    least: dict[str, float] = dict.fromkeys(PARTS, float("inf"))
    for _ in range(rounds):
        clock.taken.clear()
        block.turn("ampmem", 1)
        least = {part: min(time, clock.taken[part] / 1e6) for part, time in least.items()}
    rows = [*least.items(), ("the rest", whole - plain - sum(least.values()))]
    print(f"{case}: {whole:.0f} ms, of which {plain:.0f} plain")
    print(tabulate([(part, f"{time:.0f}") for part, time in rows], ["part", "ms"], tablefmt="github"))


if __name__ == "__main__":
    main()
