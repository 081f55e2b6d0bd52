"""Which source records a run."""

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
from ampmem.vocabulary import Arm, Device


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
    """Whether it is a real CUDA device whose memory is to be recorded."""
    return options.device == Device.CUDA or (options.device == Device.AUTO and cuda_available())


def meant_device(device: Device, gpu: GpuSpec, *, option: str, remedy: str) -> Device:
    """The device that naming ``gpu`` asks for: a simulated one instead of ``auto``, where torch sees no real GPU.

    ``option`` is what named the GPU, ``remedy`` what asks for a simulated one in so many words. Raises ``UsageError``
    where torch sees a real GPU: the name does not say whether that one is to be recorded.
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
    """What a reader has to know of this torch. Raises :class:`UsageError` where it lacks what ``options`` take."""
    uses = {Use.ALWAYS: True, Use.CUDA: records_cuda(options), Use.ARM: options.arm != Arm.AS_IS}
    return probe(*(use for use, wanted in uses.items() if wanted))
