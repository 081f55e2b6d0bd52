"""A simulated device for a block of code in a process that continues afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

from ampmem.allocator.gpus import GpuSpec
from ampmem.output import Terminal
from ampmem.recorder.options import Asked
from ampmem.recorder.process import check_none
from ampmem.recorder.sources.choose import meant_device
from ampmem.recorder.sources.simulated import SimulatedSource
from ampmem.simulator.assumed import assumed_of
from ampmem.simulator.start import Simulation


class SimulatedBlock:
    """A simulated GPU until :meth:`end`; :attr:`source` records it.

    Raises ``UsageError`` if a session is active, and for what cannot be simulated.
    """

    def __init__(self, gpu: GpuSpec, assume: Sequence[str]) -> None:
        check_none()  # an active session would record the self-test
        self._thread = threading.get_ident()
        self._simulation = Simulation(gpu, assumed=assumed_of(assume))
        self.device = self._simulation.device
        self.source = SimulatedSource(self.device)

    def tell_doubts(self, *, failed: bool) -> None:
        """Print on standard error what makes the numbers doubtful, as the command line does."""
        for doubt in self._simulation.device.doubts(failed=failed):
            Terminal(sys.stderr).say(doubt)

    def end(self) -> None:
        """Remove the device. On another thread it stays, because the mode that runs its ops is the first thread's."""
        if threading.get_ident() == self._thread:
            self._simulation.end()


def simulated_block(asked: Asked) -> SimulatedBlock | None:
    """The simulated GPU that is asked for; ``None`` for a real device. Raises what :func:`meant_device` raises."""
    if asked.gpu is not None:
        check_none()  # inside a simulated block torch sees that block's GPU
        device = meant_device(asked.device, asked.gpu, option="gpu=", remedy="device='sim'")
        asked = replace(asked, device=device)
    gpu = asked.simulated_gpu
    return None if gpu is None else SimulatedBlock(gpu, asked.assume)
