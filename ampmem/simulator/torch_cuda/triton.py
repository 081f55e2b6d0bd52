"""Kernels in Triton, a library's or the script's own: there is no GPU to compile them for, and nothing to compute.

A launch allocates nothing: a kernel writes to tensors that exist. So a launch does nothing here, and the values of the
tensors that it was given are unknown afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ampmem.patching import Undo, added, patch, undone_together
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import driver_of_triton, launches_of_triton, tree_leaves
from ampmem.simulator.torch_cuda.properties import properties

_NOTHING = "Triton kernels did nothing, because a simulated device computes nothing; their FLOPs are not counted"


@undone_together
def install(mode: SimulatedMode) -> Iterator[Undo]:
    """Make launches of kernels do nothing; returns the undo. Without Triton there is nothing to do."""
    driver, former = driver_of_triton()
    for place in launches_of_triton():
        yield patch(*place, functools.partial(_doing_nothing, mode))
    if driver is not None:
        driver.set_active(_driver(mode))
        yield added("triton.runtime", "driver", lambda: driver.set_active(former))


def _doing_nothing(mode: SimulatedMode, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        mode.device_model.assume(_NOTHING)
        for leaf in tree_leaves((args, kwargs)):
            # A launch does not say which of its tensors the kernel writes to.
            if isinstance(leaf, torch.Tensor):
                mode.forget(leaf.untyped_storage())

    return run


def _driver(mode: SimulatedMode) -> Any:
    """A replacement of Triton's driver, which libraries ask for the device, its stream and its properties."""
    found = properties(mode.device_model)
    asked = {
        "multiprocessor_count": found.multi_processor_count,
        "max_shared_mem": found.shared_memory_per_block_optin,
        "max_num_regs": found.regs_per_multiprocessor,
        "warpSize": found.warp_size,
    }
    target = SimpleNamespace(backend="cuda", arch=10 * found.major + found.minor, warp_size=found.warp_size)
    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_device_capability=lambda device=0: (found.major, found.minor),
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device=0: asked),
    )
