"""The properties of the simulated GPU."""

from __future__ import annotations

from types import SimpleNamespace

from ampmem.simulator.device import SimulatedDevice


def properties(device: SimulatedDevice) -> SimpleNamespace:
    """The result of ``torch.cuda.get_device_properties``; an A100's numbers where the GPU's are unknown.

    The L2 cache, on which no allocation depends, is always an A100's.
    """
    major, minor = device.gpu.compute_capability or (8, 0)
    return SimpleNamespace(
        name=device.gpu.name,
        major=major,
        minor=minor,
        total_memory=device.gpu.total_memory,
        multi_processor_count=device.gpu.sm_count or 108,
        is_integrated=False,
        is_multi_gpu_board=False,
        max_threads_per_multi_processor=device.gpu.threads_per_sm,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=device.gpu.shared_memory_per_block,
        shared_memory_per_multiprocessor=device.gpu.shared_memory_per_sm,
        L2_cache_size=41943040,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )
