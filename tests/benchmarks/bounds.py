"""What recording would cost at least: the loop under ampmem without its source of events, its dispatch mode, or both.

Without its source a recording has no events: no profiler, no memory history, nothing read, settled or written of
them. So the figures bound what a cheaper source, or a cheaper look at ops, can gain.

    python tests/emulated/run.py --python tests/benchmarks/bounds.py gpt gpt2 [--rounds N]

The variants take turns in one process; a ratio is the median of CPU times of the loop, in that of plain training.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import process_time
from typing import Any
from unittest.mock import patch

from overhead_turns import PROGRAMS, Training, turn
from tabulate import tabulate

from ampmem.recorder.hooks.forward import ForwardObserver
from ampmem.recorder.hooks.ops import OpRecorder
from ampmem.recorder.sources import extension
from ampmem.recorder.sources.base import NO_EVENTS
from ampmem.recorder.sources.cuda.source import CudaSource

STEPS = 20


def nothing(*_: Any, **__: Any) -> None:
    """What takes the place of a method that is left out."""


@contextmanager
def without_source() -> Iterator[None]:
    """A block in which a CUDA source records nothing."""
    empty = {"drain": lambda _: NO_EVENTS, "stop": lambda _: NO_EVENTS}
    with patch.multiple(CudaSource, start=nothing, mark=nothing, pause=nothing, _stamp=nothing, **empty):
        yield


@contextmanager
def without_mode() -> Iterator[None]:
    """A block in which forward is not observed."""
    with patch.multiple(ForwardObserver, enter=nothing, leave=nothing):
        yield


@contextmanager
def with_mode() -> Iterator[None]:
    """A block in which the extension does not observe forward: the dispatch mode does."""
    with patch.object(OpRecorder, "find", lambda *_: None):
        yield


@contextmanager
def without_both() -> Iterator[None]:
    """A block without either."""
    with without_source(), without_mode():
        yield


VARIANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "plain": ("plain", nullcontext),
    "ampmem": ("ampmem", nullcontext),
    "ampmem, extension": ("ampmem, extension", nullcontext),
    "extension, mode": ("ampmem, extension", with_mode),
    "no events": ("ampmem", without_source),
    "no dispatch mode": ("ampmem", without_mode),
    "neither": ("ampmem", without_both),
}


def ratios(program: str, rounds: int) -> list[str]:
    """One row: the program, and each variant's ratio."""
    training = Training(program, "emulated")
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):  # the first has what happens only once in a process
        for name, (precision, without) in VARIANTS.items():
            with without():
                loop, _ = turn(precision, training, STEPS, process_time)
            if number:
                taken[name].append(loop)
    plain = statistics.median(taken.pop("plain"))
    return [program, *(f"{statistics.median(times) / plain:.2f}" for times in taken.values())]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    options = parser.parse_args()
    extension.build()
    warnings.simplefilter("ignore", RuntimeWarning)  # recordings without events say so
    rows = [ratios(program, options.rounds) for program in options.programs]
    print(tabulate(rows, ["program", *list(VARIANTS)[1:]], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
