"""The GPUs that can be simulated, and what is taken to be outside of the allocator on them."""

import re

import pytest

from ampmem.allocator.gpus import GPUS, READINGS, GpuSpec, context_of, find_gpu, gpu_to_simulate
from ampmem.allocator.settings import GIB, KIB, MIB
from ampmem.errors import UsageError


@pytest.mark.parametrize("spec", GPUS.values(), ids=list(GPUS))
def test_what_is_known_of_a_named_gpu_can_be(spec: GpuSpec) -> None:
    assert spec.sm_count is not None
    assert 4 * GIB < spec.total_memory < 1024 * GIB
    assert spec.shared_memory_per_sm >= 64 * KIB
    assert spec.threads_per_sm in (1024, 1536, 2048)
    assert 64 * MIB < spec.context.least < spec.context.most < 1024 * MIB
    assert find_gpu(spec.name) is spec


def test_a_gpu_takes_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without readings of its context, and with a compute capability of which no table has heard."""
    new = GpuSpec(name="NVIDIA X1", total_memory=48 * GIB, sm_count=10, compute_capability=(14, 2))
    monkeypatch.setitem(GPUS, "x1", new)
    assert find_gpu("x1") is new
    assert new.context == find_gpu("24GiB").context
    assert (new.threads_per_sm, new.shared_memory_per_sm) == (2048, 164 * KIB)
    assert context_of("a chip of which there are no readings") == new.context


@pytest.mark.parametrize(
    ("name", "capability", "per_sm", "per_block"),
    [
        ("p100", (6, 0), 64, 48),
        ("v100", (7, 0), 96, 96),
        ("t4", (7, 5), 64, 64),
        ("a100-80", (8, 0), 164, 163),
        ("rtx5090", (12, 0), 100, 99),
    ],
)
def test_shared_memory_by_capability(name: str, capability: tuple[int, int], per_sm: int, per_block: int) -> None:
    spec = find_gpu(name)
    assert spec.compute_capability == capability
    assert (spec.shared_memory_per_sm, spec.shared_memory_per_block) == (per_sm * KIB, per_block * KIB)


@pytest.mark.parametrize(
    ("threads", "capabilities"),
    [
        (1024, [(7, 5)]),
        (1536, [(8, 6), (8, 7), (8, 9), (11, 0), (12, 0), (12, 1)]),
        (2048, [(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)]),
    ],
)
def test_threads_by_capability(threads: int, capabilities: list[tuple[int, int]]) -> None:
    """As the CUDA programming guide has them."""
    for capability in capabilities:
        spec = GpuSpec(name="a chip", total_memory=GIB, sm_count=1, compute_capability=capability)
        assert spec.threads_per_sm == threads, capability


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("24GiB", 24 * GIB),
        ("1.5 gib", 3 * GIB // 2),
        ("80GB", 80 * 10**9),
        ("4096MiB", 4 * GIB),
        ("4294967296", 4 * GIB),
    ],
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


@pytest.mark.parametrize("text", ["mi300x", "MI250", "Radeon RX 7900 XTX", "rx7900", "gfx942", "AMD Instinct MI300X"])
def test_a_gpu_of_another_kind_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text) + r" runs ROCm, .* simulate NVIDIA GPUs only$") as refused:
        gpu_to_simulate(text, "--gpu ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chip", READINGS)
def test_every_reading_of_a_context_is_inside_of_what_is_assumed(chip: str) -> None:
    least, most = context_of(chip)
    assert all(least < reading.mib * MIB < most for reading in READINGS[chip])
    assert 64 * MIB < least < most < 1024 * MIB


def test_where_the_gpu_is_not_known_any_context_may_be_there() -> None:
    unknown = find_gpu("24GiB").context
    assert unknown.least == min(context_of(chip).least for chip in READINGS)
    assert unknown.most == max(context_of(chip).most for chip in READINGS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" H100 ", "h100"),
        ("4090", "rtx4090"),
        ("rtx 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("3090", "rtx3090"),
        ("A10G", "a10g"),
        ("a100 80GB", "a100-80"),
        ("V100-32GB", "v100-32"),
        ("RTX 6000 Ada", "rtx6000ada"),
        ("A6000", "rtxa6000"),
        ("RTX PRO 6000", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("Tesla T4", "t4"),
        ("RTX 3080 Ti", "rtx3080ti"),
        ("3080", "rtx3080"),
        ("4070ti", "rtx4070ti"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("GH200", "gh200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("rtx4080", "rtx4080"),
        ("A30", "a30"),
        ("a40", "a40"),
    ],
)
def test_a_gpu_by_another_spelling_of_its_name(text: str, name: str) -> None:
    assert find_gpu(text) is GPUS[name]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a100", "a100-80 or a100-40"),
        ("6000", "rtxpro6000, rtx6000ada or rtxa6000"),
        ("24G", "24GiB"),
        ("24", "24GiB"),
        ("rtx 3090 ti", "rtx3080ti, rtx3090 or rtx4070ti"),
        ("h100 pcie", "h100"),
    ],
)
def test_what_may_be_meant_by_an_unknown_gpu_is_named(text: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_gpu(text)
    assert str(refused.value) == f"unknown GPU {text!r}; did you mean {meant}? Or give a size, such as 24GiB"


def test_where_nothing_resembles_an_unknown_gpu_all_are_named() -> None:
    with pytest.raises(UsageError) as refused:
        find_gpu("voodoo")
    assert str(refused.value) == f"unknown GPU 'voodoo'; give one of {', '.join(GPUS)}, or its memory, such as 24GiB"
