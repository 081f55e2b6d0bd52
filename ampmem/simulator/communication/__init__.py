"""The other ranks of a training run, on paper: this process is one of them, and none of the others is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ampmem.simulator.communication import collectives, parallel
from ampmem.simulator.communication.collectives import Collectives, Objects
from ampmem.simulator.communication.nccl import Communicators
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import communication as private
from ampmem.simulator.world import World


def install(mode: SimulatedMode, world: World) -> Callable[[], None]:
    """Put all of it in place; returns what undoes it."""
    communicators = Communicators(mode.device_model)
    with ExitStack() as undo:
        undo.callback(private.install(world, cuda=mode.device_model.label == "cuda"))
        private.done(())  # or the first collective would find that it cannot be made
        undo.callback(collectives.install(world, mode.device_model))
        undo.callback(Objects(mode.device_model, communicators).install())
        undo.callback(Collectives(mode, communicators).install())
        undo.callback(parallel.install(mode, world))
        return undo.pop_all().close
