"""Everything here needs a CUDA device, and says so where there is none."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REASON = "needs a CUDA device, and torch sees none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder, and skip it without a GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    """Starts each test with an empty cache and no peaks; fails one that leaves memory history or a tag behind."""
    if not torch.cuda.is_available():
        yield
        return
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()  # each handle keeps one for ever, on each device
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.reset_peak_memory_stats(device)  # which device is recorded is decided by peaks
    yield
    if torch.cuda.is_initialized():  # before that there is no allocator to ask, and torch does not check
        assert not torch._C._cuda_isHistoryEnabled()
        if hasattr(torch._C, "_cuda_getMemoryMetadata"):
            assert torch._C._cuda_getMemoryMetadata() == ""
