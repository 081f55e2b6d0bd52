"""The private parts of torch that other ranks on paper need, beside those in ``private.py``: why, and since when."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

from ampmem.patching import patch

FAKE = "fake"
"""The backend without peers, whose collectives return at once: torch's own, for its tests. Since 2.1; importing
``fake_pg`` registers it."""


def cuda_is_the_accelerator() -> Callable[[], None]:
    """Let ``fully_shard`` and others take CUDA for the device of a mesh; returns what undoes it.

    ``torch._C._get_accelerator`` is there since 2.5, and CPU builds answer "cpu".
    """
    return patch(torch._C, "_get_accelerator", lambda original: lambda check=None: torch.device("cuda"))
