"""Puts the simulated device in place for this process, and takes away what can be taken away."""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from dataclasses import replace

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import GIB, settings_of_environment
from ampmem.errors import UsageError
from ampmem.events import PredictionRecord
from ampmem.patching import added
from ampmem.simulator import private, selftest
from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.refusal import refusal
from ampmem.simulator.torch_cuda import attention, cuda
from ampmem.simulator.world import World, enter


class Simulation:
    """One simulated GPU, from now until :meth:`end`.

    To be made before the first backward of the process. The registration of the device with torch stays.
    ``label`` is the type of torch device that it stands for. ``assumed`` is what
    is said of the data that it has not. ``world`` says as which rank of how many the script runs; without it there is
    no communication. Raises ``UsageError`` where torch has not what it takes.
    """

    def __init__(
        self, gpu: GpuSpec, *, label: str = "cuda", assumed: Assumed = NOTHING, world: World | None = None
    ) -> None:
        settings = settings_of_environment(os.environ)
        roomy = replace(gpu, total_memory=gpu.total_memory + GIB)  # the trial is not to fail for want of memory
        try:
            with ExitStack() as doubt:
                doubt.callback(private.install_cuda_device())
                with ExitStack() as trial:  # on a device of its own: what it allocates is not the script's
                    tried = _install(SimulatedMode(SimulatedDevice(roomy, settings)), trial)
                    selftest.check(tried)
                self.device = SimulatedDevice(gpu, settings, label=label)
                with ExitStack() as undo:
                    if world is not None:
                        undo.callback(enter(world))
                    mode = _install(SimulatedMode(self.device, assumed), undo, world)
                    mode.accumulation.alone = tried.accumulation.alone
                    self._undo = undo.pop_all()
                doubt.pop_all()
        except UsageError:
            raise
        except Exception as error:
            raise refusal(error) from error

    def end(self) -> tuple[PredictionRecord, str]:
        """Take the device away; returns what came of it, and the message of the last request that failed."""
        self._undo.close()
        failure = self.device.out_of_memory
        return self.device.prediction(), "" if failure is None else str(failure)


def _install(mode: SimulatedMode, undo: ExitStack, world: World | None = None) -> SimulatedMode:
    """Patch, register and push all that belongs to ``mode`` and its device."""
    device = mode.device_model
    undo.callback(private.accept_foreach())
    undo.callback(attention.install(device))
    if device.label == "cuda":
        undo.callback(cuda.install(mode, alone=world is None))
        undo.callback(private.recurrent_without_cudnn())
    if world is not None:
        from ampmem.simulator.communication import install

        undo.callback(install(mode, world))
    undo.callback(private.without_device_context())
    undo.callback(private.nothing_runs_on_the_device())
    undo.callback(private.run_backward_here())
    undo.callback(private.swap_on_conversion())
    mode.__enter__()
    undo.callback(added("dispatch modes", "SimulatedMode", functools.partial(mode.__exit__, None, None, None)))
    return mode
