"""Simulates the other ranks of a training run: this process is one rank, and the others do not exist."""

from __future__ import annotations

from collections.abc import Iterator

from ampmem.patching import Undo, undone_together
from ampmem.simulator.communication import collectives, parallel
from ampmem.simulator.communication.collectives import Collectives, Objects
from ampmem.simulator.communication.nccl import Communicators
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import communication as private
from ampmem.simulator.world import World


@undone_together
def install(mode: SimulatedMode, world: World) -> Iterator[Undo]:
    """Install the simulated ranks; returns the undo."""
    communicators = Communicators(mode.device_model)
    yield private.install(world, cuda=mode.device_model.label == "cuda")
    private.done(())  # fails here, not in the first collective, if torch lacks a part
    yield collectives.install(world, mode.device_model)
    yield Objects(mode.device_model, communicators).install()
    yield Collectives(mode, communicators).install()
    yield parallel.install(mode, world)
