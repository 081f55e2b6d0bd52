"""The GPUs that can be simulated, and what is taken to be outside of the allocator on them."""

from __future__ import annotations

import re

import pytest

from ampmem.allocator.contexts import READINGS, context_of
from ampmem.allocator.gpus import GPUS, find_gpu, gpu_to_simulate
from ampmem.allocator.settings import GIB, KIB, MIB
from ampmem.errors import UsageError

OLDER = {"h200", "h100", "a100-80", "a100-40", "l40s", "rtx4090", "rtx3090"}
NEWER = {"b200", "a10", "v100", "v100-32", "t4", "rtx5090", "rtx4060", "rtx3060"}


def test_named_gpus() -> None:
    assert set(GPUS) == OLDER | NEWER
    assert find_gpu(" H100 ").compute_capability == (9, 0)
    for spec in GPUS.values():
        assert spec.sm_count is not None
        assert 4 * GIB < spec.total_memory < 1024 * GIB
        assert spec.shared_memory_per_sm >= 64 * KIB
        assert spec.threads_per_sm in (1024, 1536, 2048)


@pytest.mark.parametrize(
    ("name", "capability", "per_sm", "per_block"),
    [("t4", (7, 5), 64, 64), ("v100", (7, 0), 96, 96), ("a100-80", (8, 0), 164, 163), ("rtx5090", (12, 0), 100, 99)],
)
def test_shared_memory_by_capability(name: str, capability: tuple[int, int], per_sm: int, per_block: int) -> None:
    spec = find_gpu(name)
    assert spec.compute_capability == capability
    assert (spec.shared_memory_per_sm, spec.shared_memory_per_block) == (per_sm * KIB, per_block * KIB)


@pytest.mark.parametrize(
    ("text", "total"),
    [("24GiB", 24 * GIB), ("1.5 gib", 3 * GIB // 2), ("80GB", 80 * 10**9), ("4096MiB", 4 * GIB), ("512", 512)],
)
def test_a_gpu_by_its_memory(text: str, total: int) -> None:
    spec = find_gpu(text)
    assert spec.total_memory == total
    assert spec.sm_count is None


@pytest.mark.parametrize("text", ["h300", "", "24 apples", "-4GiB", "0", "0.0GiB"])
def test_an_unknown_gpu_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(text)


@pytest.mark.parametrize("option", ["--gpu ", "gpu="])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_name_is_not_the_default_gpu(text: str, option: str) -> None:
    with pytest.raises(UsageError, match=rf"^{option.strip()} is empty; give one of .*h100, .* such as 24GiB$"):
        gpu_to_simulate(text, option)
    assert gpu_to_simulate(None, option) == GPUS["a100-80"]


@pytest.mark.parametrize("text", ["mi300x", "MI250", "Radeon RX 7900 XTX", "rx7900", "gfx942", "AMD Instinct MI300X"])
def test_a_gpu_of_another_kind_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text) + r" runs ROCm, .* simulate NVIDIA's GPUs only$") as refused:
        gpu_to_simulate(text, "--gpu ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chip", READINGS)
def test_every_reading_of_a_context_is_inside_of_what_is_assumed(chip: str) -> None:
    least, most = context_of(chip)
    assert all(least < reading.mib * MIB < most for reading in READINGS[chip])
    assert 64 * MIB < least < most < 1024 * MIB


def test_every_named_gpu_has_readings() -> None:
    assert {spec.chip for spec in GPUS.values()} == set(READINGS)


def test_where_the_gpu_is_not_known_any_context_may_be_there() -> None:
    unknown = find_gpu("24GiB").context
    assert unknown.least == min(spec.context.least for spec in GPUS.values())
    assert unknown.most == max(spec.context.most for spec in GPUS.values())
