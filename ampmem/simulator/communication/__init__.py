"""Simulates the other ranks of a training run: this process is one rank, and the others do not exist."""

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
    """Install the simulated ranks; returns the undo."""
    communicators = Communicators(mode.device_model)
    with ExitStack() as undo:
        undo.callback(private.install(world, cuda=mode.device_model.label == "cuda"))
        private.done(())  # fails here, not in the first collective, if torch lacks a part
        undo.callback(collectives.install(world, mode.device_model))
        undo.callback(Objects(mode.device_model, communicators).install())
        undo.callback(Collectives(mode, communicators).install())
        undo.callback(parallel.install(mode, world))
        return undo.pop_all().close
