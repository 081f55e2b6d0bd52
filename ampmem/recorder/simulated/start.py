"""Puts the simulated device in place for this process, and takes away what can be taken away."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ampmem.allocator.device import GpuSpec
from ampmem.allocator.settings import settings_of_environment
from ampmem.recorder.log import simulated_addresses
from ampmem.recorder.simulated import attention, cuda, private, selftest
from ampmem.recorder.simulated.device import CONTEXT, SimulatedDevice
from ampmem.recorder.simulated.mode import SimulatedMode
from ampmem.units import format_bytes

_running: SimulatedDevice | None = None


def running() -> SimulatedDevice | None:
    """The device that is simulated in this process."""
    return _running


def start(gpu: GpuSpec, *, label: str = "cuda") -> tuple[SimulatedDevice, Callable[[], None]]:
    """Simulate ``gpu``; returns it, and what ends that. Raises ``UsageError`` where torch has not what it takes.

    To be called before the first backward of the process. The registration of the device with torch stays.
    """
    settings = settings_of_environment(os.environ)
    try:
        private.install_cuda_guard()
    except Exception as error:
        raise selftest.refusal(error) from error
    with ExitStack() as trial:  # on a device of its own: what it allocates is not the script's
        tried = _install(SimulatedDevice(gpu, settings), trial)
        selftest.check(tried)
    undo = ExitStack()
    device = SimulatedDevice(gpu, settings, label=label)
    mode = _install(device, undo)
    mode.accumulation.alone = tried.accumulation.alone
    return device, undo.close


class Simulation:
    """One simulated GPU, from now until :meth:`end`."""

    def __init__(self, gpu: GpuSpec) -> None:
        self.device, self._undo = start(gpu)

    def end(self, *, failed: bool) -> str:
        """Take the device away; returns what came of it, in one line. ``failed`` says that the script did."""
        self._undo()
        return verdict(self.device, failed=failed)


def verdict(device: SimulatedDevice, *, failed: bool = False) -> str:
    """Whether the run fits on the GPU, and with what margin; a run that failed for other reasons says neither."""
    counters, total = device.allocator.counters, device.gpu.total_memory
    peaks = (
        f"{device.gpu.name} (simulated): peak {format_bytes(counters.allocated_peak)} allocated, "
        f"{format_bytes(counters.reserved_peak)} reserved"
    )
    if device.out_of_memory is not None:
        return f"{peaks}; it does not fit: {device.out_of_memory}"
    if failed:
        return f"{peaks} of {format_bytes(total)}, up to where the script failed"
    margin = total - CONTEXT - counters.reserved_peak
    return (
        f"{peaks} of {format_bytes(total)}; it fits, with {format_bytes(margin)} to spare beside the "
        f"{format_bytes(CONTEXT)} that the CUDA context is assumed to use"
    )


def _install(device: SimulatedDevice, undo: ExitStack) -> SimulatedMode:
    """Patch, register and push all that belongs to ``device``."""
    global _running
    mode = SimulatedMode(device)
    undo.callback(simulated_addresses.clear)
    simulated_addresses[0] = 0
    undo.callback(private.accept_foreach())
    undo.callback(attention.install(device))
    if device.label == "cuda":
        undo.callback(cuda.install(device))
    # As on a GPU, where the engine's thread for the device does all of it, backward runs in one thread: this one.
    undo.callback(torch.autograd.set_multithreading_enabled, torch._C._is_multithreading_enabled())
    torch.autograd.set_multithreading_enabled(False)
    # Parameters keep their identity when a module moves, as they do between real devices.
    undo.callback(
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.get_swap_module_params_on_conversion(),
    )
    torch.__future__.set_swap_module_params_on_conversion(True)
    mode.__enter__()
    undo.callback(mode.__exit__, None, None, None)
    _running = device
    undo.callback(_stop)
    return mode


def _stop() -> None:
    global _running
    _running = None
