"""Which source records a run."""

from __future__ import annotations

from ampmem.errors import UsageError
from ampmem.recorder.options import DEVICES, Options
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.baseline import Baseline
from ampmem.recorder.sources.cpu import ProfilerSource
from ampmem.recorder.sources.cuda.device import TorchCuda, cuda_available
from ampmem.recorder.sources.cuda.source import CudaSource


def choose_source(options: Options, baseline: Baseline) -> Source:
    """The source for ``options.device``. Raises :class:`UsageError` for a device that cannot be recorded."""
    device = options.device
    if device not in DEVICES:
        raise UsageError(f"there is no device {device!r} to record; there are {', '.join(DEVICES)}")
    if device == "sim":
        raise UsageError("a device can only be simulated for a script: ampmem profile --device sim SCRIPT")
    if device == "auto":
        device = "cuda" if cuda_available() else "cpu"
    if device == "cuda":
        problem = TorchCuda().problem()
        if problem is not None:
            raise UsageError(problem)
        return CudaSource(stacks=options.stacks, synchronize=options.synchronize)
    return ProfilerSource(baseline)
