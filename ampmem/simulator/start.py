"""Puts the simulated device in place for this process, and takes it away again."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import GIB, settings_of_environment
from ampmem.errors import AmpmemError, UsageError
from ampmem.events import PredictionRecord
from ampmem.patching import InPlace, added, in_place
from ampmem.signals import SIGNALS
from ampmem.simulator import selftest
from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import compiled, general
from ampmem.simulator.private.ops import kernels_of_cuda
from ampmem.simulator.refusal import our_fault, refusal
from ampmem.simulator.scratch import convolutions
from ampmem.simulator.torch_cuda import attention, cuda, recurrent
from ampmem.simulator.where import stop, take_stops
from ampmem.simulator.world import World, enter

_HELD = (
    "a parameter cannot be moved to a simulated device while a view of it or a scripted module holds it; move the "
    "module to the device first, and then make the view or call torch.jit.script"
)
_MODE = InPlace("dispatch modes", "SimulatedMode")


class Simulation:
    """One simulated GPU, from now until :meth:`end`, on this thread; there is one at a time.

    ``label`` is the type of torch device that it stands for. ``assumed`` is what
    is said of the data that it has not. ``world`` says as which rank of how many the script runs; without it there is
    no communication. Raises ``UsageError`` where torch has not what it takes, where it uses a real GPU already, and
    where a device is simulated.
    """

    def __init__(
        self, gpu: GpuSpec, *, label: str = "cuda", assumed: Assumed = NOTHING, world: World | None = None
    ) -> None:
        _check_process()
        settings = settings_of_environment(os.environ)
        roomy = replace(gpu, total_memory=gpu.total_memory + GIB)  # the trial is not to fail for want of memory
        ungate = SIGNALS.hold()  # before what takes each error for a refusal
        try:
            with ExitStack() as undo:
                undo.callback(ungate)
                compiled.load()
                undo.callback(_answer_for_cuda())
                with ExitStack() as trial:  # on a device of its own: what it allocates is not the script's
                    trial.callback(torch.set_rng_state, torch.get_rng_state())  # a layer of its draws its weights
                    tried = _install(SimulatedMode(SimulatedDevice(roomy, settings)), trial)
                    selftest.check(tried)
                self.device = SimulatedDevice(gpu, settings, label=label, environment=os.environ)
                if world is not None:
                    undo.callback(enter(world))
                take_stops()  # those that ended an earlier block
                mode = _install(SimulatedMode(self.device, assumed), undo, world)
                mode.accumulation.alone = tried.accumulation.alone
                self.work = mode.work
                self._undo = undo.pop_all()
        except AmpmemError:
            raise
        except (ImportError, AttributeError, KeyError) as error:  # a part of torch is not where it was
            raise refusal(error) from error
        except Exception as error:
            raise our_fault(error) from error

    def end(self) -> tuple[PredictionRecord, str]:
        """Take the device away; returns what came of it, and the last request that failed, in half a sentence.

        Tensors that are left on it can be used no longer: they have no values, and an op on one says so.
        """
        self._undo.close()
        failure = self.device.out_of_memory
        return self.device.prediction(), "" if failure is None else failure.report.in_short


def _check_process() -> None:
    if _MODE in in_place():
        raise UsageError("a device is simulated already: leave that block first")
    if torch.cuda.is_initialized():
        raise UsageError(
            "this process uses a real GPU already, and none can be simulated beside it: simulate in a process of its "
            "own (ampmem profile --device sim SCRIPT), or hide the GPU with CUDA_VISIBLE_DEVICES="
        )


def _answer_for_cuda() -> Callable[[], None]:
    """Let torch's engine find a CUDA device; where it cannot be let, this build of torch is at fault."""
    try:
        return general.install_cuda_device()
    except Exception as error:
        raise refusal(error) from error


def _install(mode: SimulatedMode, undo: ExitStack, world: World | None = None) -> SimulatedMode:
    """Patch, register and push all that belongs to ``mode`` and its device."""
    device = mode.device_model
    undo.callback(general.accept_foreach())
    undo.callback(attention.install(mode))
    if device.label == "cuda":
        undo.callback(kernels_of_cuda())
        undo.callback(cuda.install(mode, alone=world is None))
        undo.callback(recurrent.install(mode))
        undo.callback(general.convolutions_in_format(convolutions.memory_format))
    if world is not None:
        from ampmem.simulator.communication import install

        undo.callback(install(mode, world))
    undo.callback(general.without_device_context())
    undo.callback(general.nothing_runs_on_the_device())
    undo.callback(general.run_backward_here())
    undo.callback(general.swap_on_conversion(functools.partial(stop, _HELD)))
    undo.callback(general.keep_names_in_torchscript())
    mode.__enter__()
    undo.callback(added(*_MODE, functools.partial(_leave, mode)))
    return mode


def _leave(mode: SimulatedMode) -> None:
    mode.__exit__(None, None, None)
    mode.ended = True
