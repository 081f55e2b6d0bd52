"""Which source records a run."""

from __future__ import annotations

from ampmem.errors import UsageError
from ampmem.recorder.options import Options
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.baseline import Baseline
from ampmem.recorder.sources.cpu import ProfilerSource
from ampmem.recorder.sources.cuda.device import TorchCuda, cuda_available
from ampmem.recorder.sources.cuda.source import CudaSource
from ampmem.vocabulary import Device


def choose_source(options: Options, baseline: Baseline) -> Source:
    """The source for ``options.device``. Raises :class:`UsageError` for a device that cannot be recorded."""
    device = options.device
    if device == Device.SIMULATED:
        # The rest of torch that a simulation needs takes a second to import.
        from ampmem.recorder.sources.simulated import SimulatedSource
        from ampmem.simulator.start import running

        simulated = running()
        if simulated is None:
            raise UsageError("a device can only be simulated for a script: ampmem profile --device sim SCRIPT")
        return SimulatedSource(simulated)
    if device == Device.AUTO:
        device = Device.CUDA if cuda_available() else Device.CPU
    if device == Device.CUDA:
        problem = TorchCuda().problem()
        if problem is not None:
            raise UsageError(problem)
        return CudaSource(stacks=options.stacks, synchronize=options.synchronize)
    return ProfilerSource(baseline)
