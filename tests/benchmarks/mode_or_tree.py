"""CPU time of an op of forward: under ampmem's dispatch mode, in its C++ extension, and read from the profiler's tree.

A recording needs to know of each op of forward when it ran, on which storages. The dispatch mode sees ops as they run.
The C++ extension writes integers while they run, which are read when forward ends. The tree of torch.profiler, recorded
with every op and the shapes of its inputs, has them too, and has to be made, read and freed at the end of each step.
The ops are those of ``nn.Linear`` on a batch of matrices, so small that nothing else counts.

    python tests/benchmarks/mode_or_tree.py
    python tests/emulated/run.py --python tests/benchmarks/mode_or_tree.py

It asserts nothing. Each figure is the median of 15 turns, in microseconds an op that the mode sees.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler would write to stderr

import statistics
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import torch
from tabulate import tabulate
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from ampmem.recorder.facts.addresses import RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.forward import ForwardMode
from ampmem.recorder.hooks.ops import OpRecorder
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources import extension, window
from ampmem.recorder.torch_private import general

LAYERS, TURNS = 50, 15


class Nothing(TorchDispatchMode):
    """A mode that only runs each op, and counts."""

    ops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def forward() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, value = torch.nn.Linear(16, 16, device=device), torch.randn(4, 8, 16, device=device)
    for _ in range(LAYERS):
        value = layer(value)


def recorded() -> Callable[[], None]:
    """Forward under ampmem's mode, with stacks."""
    log = Log(RealAddresses())
    mode = ForwardMode(log, CastHooks(log, Models(log)), Stacks(enabled=True))
    mode.saved._readable = lambda: True

    def run() -> None:
        with mode:
            forward()
        log.take_ops(), log.take_facts()

    return run


def in_cpp(*, stacks: bool) -> Callable[[], tuple[float, float]]:
    """Forward observed by the C++ extension: seconds of forward itself, and of reading what it saw."""
    log = Log(RealAddresses())
    ops = OpRecorder.find(log, CastHooks(log, Models(log)), Stacks(enabled=stacks), lambda: None)
    assert ops is not None

    def run() -> tuple[float, float]:
        start = process_time()
        ops.start()
        forward()
        ran = process_time()
        ops.stop()
        log.take_ops(), log.take_facts()
        return ran - start, process_time() - ran

    return run


def under(mode: TorchDispatchMode) -> None:
    with mode:
        forward()


def in_tree(*, every_op: bool) -> tuple[float, float, float]:
    """Seconds of forward itself, of making the tree, and of going through it, attributes unread."""
    config = profile(profile_memory=True, record_shapes=every_op).config()
    general.prepare_profiler(config, set(window._PARTS), window._PARTS)
    general.enable_profiler(
        config, window._ACTIVITIES, window._SCOPES | ({RecordScope.FUNCTION} if every_op else set())
    )
    start = process_time()
    forward()
    ran = process_time()
    result = window._disabled()
    made = process_time()
    sum(1 for _ in nodes(result.experimental_event_tree()))
    del result
    return ran - start, made - ran, process_time() - made


def nodes(pending: list[Any]) -> Iterator[Any]:
    while pending:
        node = pending.pop()
        yield node
        pending += node.children


def median(run: Callable[[], object]) -> float:
    """CPU time of a turn, in seconds."""
    run()
    times = []
    for _ in range(TURNS):
        start = process_time()
        run()
        times.append(process_time() - start)
    return statistics.median(times)


def main() -> None:
    counting = Nothing()
    under(counting)
    ops, plain = counting.ops, median(forward)
    rows: list[tuple[str, float, float]] = [("plain", plain, 0)]
    rows.append(("a dispatch mode that does nothing", median(lambda: under(counting)), 0))
    rows.append(("ampmem's dispatch mode", median(recorded()), 0))
    extension.build()
    for name, stacks in (("ampmem's C++ extension", True), ("the same without stacks", False)):
        observe = in_cpp(stacks=stacks)
        ran, read = (statistics.median(times) for times in zip(*[observe() for _ in range(TURNS + 1)][1:], strict=True))
        rows.append((name, ran, read))
    for name, every_op in (
        ("the profiler as ampmem has it: no ops", False),
        ("the profiler with ops and shapes", True),
    ):
        turns = [in_tree(every_op=every_op) for _ in range(TURNS + 1)][1:]
        ran, made, read = (statistics.median(times) for times in zip(*turns, strict=True))
        rows.append((name, ran, made + read))
    table = [(name, *(f"{time / ops * 1e6:.1f}" for time in times)) for name, *times in rows]
    print(f"torch {torch.__version__}, {ops / LAYERS:g} ops a layer\n")
    print(tabulate(table, ["", "forward, us an op", "afterwards, us an op"], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
