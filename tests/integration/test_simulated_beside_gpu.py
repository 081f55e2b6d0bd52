"""Whole training steps on a simulated GPU beside what an NVIDIA H200 allocated with torch 2.11 (cuDNN 9.19)."""

import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "emulated"))

import steps  # noqa: E402

pytestmark = pytest.mark.slow

MEASURED = TESTS / "gpu/measured/h200/steps.json.gz"
LT_WORKSPACE = 1 << 20
"""Bytes that torch 2.11 keeps for cuBLASLt in each thread that uses it, and later versions do not."""
STATES = 4096
"""Bytes of the blocks with the state of random numbers of eight calls of memory-efficient attention, which are on the
host up to torch 2.13."""
THREADS = {
    **dict.fromkeys(("gpt", "bert", "vit"), 1),
    **dict.fromkeys(("checkpointed", "checkpointed gpt"), 2),  # backward's thread computes forward again
    **dict.fromkeys(("llama", "lora", "t5", "unet"), 0),
}
"""In how many threads each program calls cuBLASLt."""
CASES = [
    *((program, "amp") for program in ("gpt", "bert", "checkpointed", "llama", "t5", "unet")),
    *((program, "fp32") for program in ("vit", "checkpointed gpt", "llama", "lora")),
    ("gpt", "bf16"),
]
"""Each program in a precision, and each precision in several; ``steps.py --beside`` lays all beside each other."""


def test_every_byte_at_the_peak_is_what_a_gpu_had() -> None:
    only = [f"{program}/{precision}" for program, precision in CASES]
    found = steps.rows_beside(MEASURED, sys.executable, "h100", only)  # whose chip is the H200's
    assert {(row.program, row.precision) for row in found} == set(CASES)
    assert [row.failed for row in found if row.failed] == []
    differences = {(row.program, row.precision): row.categories for row in found}
    expected: dict[tuple[str, str], dict[str, int]] = {
        (program, precision): {"workspace": -threads * LT_WORKSPACE} if (threads := THREADS[program]) else {}
        for program, precision in CASES
    }
    if TorchVersion(torch.__version__) >= "2.14":
        expected["llama", "fp32"] = expected["lora", "fp32"] = {"activations": STATES}
    assert differences == expected
    assert [row.allocated for row in found] == [sum(row.categories.values()) for row in found]
