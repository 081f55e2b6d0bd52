"""Everything here runs on the emulated CUDA runtime, and says so where it is not there.

With AMPMEM_RECORDER_ON_GPU=1 the tests of the recorder run on a real GPU instead, but for what only the emulation can
do: fail on demand, have a small memory or a second device.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIBRARY = os.environ.get("EMULATED_CUDA", "")
"""The library, where ``run.py`` has started this."""
ON_GPU = bool(os.environ.get("AMPMEM_RECORDER_ON_GPU")) and not LIBRARY
REASON = "needs PyTorch's CUDA build on the emulated runtime: python tests/emulated/run.py"

Setting = Callable[[str, str], None]
"""Gives a setting of runtime.c a value until the test ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder without the emulation, but for the tests of its commands."""
    for item in items:
        test = item.name.partition("[")[0]
        anywhere = item.path.name in ("test_commands.py", "test_ops.py") and test != "test_what_differs_is_known"
        anywhere |= ON_GPU and item.path.name == "test_recorder.py"
        if HERE in item.path.parents and not LIBRARY and not anywhere:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def setting() -> Iterator[Setting]:
    """Changes settings of the running process; what was set is unset again."""
    library = ctypes.CDLL(LIBRARY)
    changed: list[str] = []

    def change(name: str, value: str) -> None:
        changed.append(name)
        library.emulated_cuda_set(name.encode(), value.encode())

    yield change
    for name in changed:
        library.emulated_cuda_set(name.encode(), b"")


@pytest.fixture
def emulated_only() -> None:
    """Skips the test on a real GPU."""
    if ON_GPU:
        pytest.skip("only the emulation can do this")


@pytest.fixture
def clean_device() -> Iterator[None]:
    """Nothing on the devices but what libraries keep, and no peaks."""
    gc.collect()
    torch.cuda.init()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
    yield
    torch.cuda.synchronize()
