"""Chooses the source for a run."""

from __future__ import annotations

from ampmem.allocator.gpus import GpuSpec
from ampmem.errors import UsageError
from ampmem.recorder.options import Options
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.cpu import ProfilerSource
from ampmem.recorder.sources.cuda.device import TorchCuda, cuda_available
from ampmem.recorder.sources.cuda.source import CudaSource
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.torch_private.general import Use, probe
from ampmem.vocabulary import Device, Precision


def choose_source(options: Options, storages: Storages) -> Source:
    """The source for ``options.device``. Raises :class:`UsageError` for a device that cannot be recorded."""
    if options.device == Device.SIMULATED:
        raise UsageError("a device can only be simulated for a script: ampmem profile --device sim SCRIPT")
    if records_cuda(options):
        problem = TorchCuda().problem()
        if problem is not None:
            raise UsageError(problem)
        return CudaSource(stacks=options.stacks, synchronize=options.synchronize)
    return ProfilerSource(storages)


def records_cuda(options: Options) -> bool:
    """Whether ``options`` ask to record a real CUDA device."""
    return options.device == Device.CUDA or (options.device == Device.AUTO and cuda_available())


def meant_device(device: Device, gpu: GpuSpec, *, option: str, remedy: str) -> Device:
    """The device that a GPU's name asks for: a simulated one instead of ``auto``, if torch sees no real GPU.

    ``option`` is where ``gpu`` was named, ``remedy`` the explicit way to ask for a simulated one. Raises ``UsageError``
    if torch sees a real GPU: the name does not say whether to record that one.
    """
    if device is not Device.AUTO:
        return device
    if cuda_available():
        raise UsageError(
            f"{option} simulates a GPU, but torch sees a real one here: add {remedy} to simulate {gpu.name}, or "
            f"leave {option} out to record the real GPU"
        )
    return Device.SIMULATED


def check_torch(options: Options) -> list[str]:
    """Notes on this version of torch. Raises :class:`UsageError` if it lacks what ``options`` need."""
    uses = {Use.ALWAYS: True, Use.CUDA: records_cuda(options), Use.PRECISION: options.precision != Precision.AS_IS}
    return probe(*(use for use, wanted in uses.items() if wanted))
