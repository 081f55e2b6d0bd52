"""The other ranks of a training run, on paper: this process is one of them, and none of the others is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ampmem.simulator.communication import collectives, data_parallel, process_group
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private_communication import cuda_is_the_accelerator
from ampmem.simulator.world import World


def install(mode: SimulatedMode, world: World) -> Callable[[], None]:
    """Put all of it in place; returns what undoes it."""
    with ExitStack() as undo:
        undo.callback(cuda_is_the_accelerator())
        undo.callback(process_group.install(world))
        collectives.answer(mode)
        undo.callback(data_parallel.install(mode))
        return undo.pop_all().close
