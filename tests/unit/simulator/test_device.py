"""The parts of the simulated device that need no simulation: its memory, its kernels, its verdict, its options."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from command_line import refused

torch = pytest.importorskip("torch")

from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.allocator.settings import MIB, Settings  # noqa: E402
from ampmem.cli.options import simulated_gpu  # noqa: E402
from ampmem.errors import UsageError  # noqa: E402
from ampmem.events import Action, TermsRecord  # noqa: E402
from ampmem.simulator.device import Event, SimulatedDevice  # noqa: E402
from ampmem.simulator.selftest import refusal  # noqa: E402
from ampmem.simulator.torch_cuda.attention import AttentionKernel, choose  # noqa: E402
from ampmem.simulator.values import KnownNumbers  # noqa: E402


def device(gpu: str = "a100-80") -> SimulatedDevice:
    return SimulatedDevice(find_gpu(gpu), Settings())


def test_a_storage_has_a_block_until_it_dies() -> None:
    simulated = device()
    events: list[Event] = []
    simulated.recorder = events.append
    tensor = torch.empty(1000, device="meta")
    simulated.born(tensor.untyped_storage())
    view = tensor[10:]
    simulated.born(view.untyped_storage())
    assert simulated.storage_address(tensor) == simulated.data_address(tensor) == events[0].address
    assert simulated.data_address(view) == events[0].address + 40
    del tensor
    assert [event.action for event in events] == [Action.ALLOC]
    del view
    gc.collect()
    assert [event.action for event in events] == [Action.ALLOC, Action.FREE]
    assert [(event.bytes, event.block_bytes, event.allocated) for event in events] == [
        (4000, 4096, 4000),
        (4000, 4096, 0),
    ]
    assert not simulated.live()
    assert simulated.storage_address(torch.empty(1000, device="meta")) == 0
    real = torch.empty(3)
    assert simulated.storage_address(real) == real.untyped_storage().data_ptr()


def test_scratch_is_gone_and_a_workspace_stays() -> None:
    simulated = device()
    told: list[tuple[int, str]] = []
    simulated.on_workspace = simulated.on_scratch = lambda address, name: told.append((address, name))
    simulated.workspace("cuBLAS", 3 * MIB)
    simulated.scratch("aten.sum.default", (MIB, 2 * MIB))
    assert simulated.allocator.counters.allocated == 3 * MIB
    assert simulated.allocator.counters.allocated_peak == 6 * MIB
    assert [name for _, name in told] == ["cuBLAS", "aten.sum.default", "aten.sum.default"]
    assert dict(told[:1]) == simulated.workspaces == dict.fromkeys(simulated.live(), "cuBLAS")


def test_it_runs_out_of_memory_as_a_gpu_does() -> None:
    simulated = device("1GiB")
    tensor = torch.empty(1 << 28, device="meta")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory: 1.0 GiB were asked for .* \(simulated 1GiB\)"
    ):
        simulated.born(tensor.untyped_storage())
    assert simulated.storage_address(tensor) == 0
    assert simulated.prediction().ran_out


def summed(terms: TermsRecord) -> int:
    return terms.tensors + sum(terms.workspaces.values()) + sum(terms.scratch.values()) + terms.rounding


def test_the_terms_of_the_peaks_add_up_to_the_allocators_numbers() -> None:
    simulated = device()
    simulated.workspace("cuBLAS", 8_519_680)
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in (700, 30 * MIB + 1, 5 * MIB)]
    for tensor in tensors:
        simulated.born(tensor.untyped_storage())
    simulated.scratch("aten.sum.default", (40 * MIB, 16))
    del tensors[1], tensor
    gc.collect()
    simulated.scratch("aten.max.dim", (60 * MIB,))
    found, counters = simulated.prediction(), simulated.allocator.counters
    assert found.allocated == TermsRecord(
        tensors=700 + 30 * MIB + 1 + 5 * MIB,
        workspaces={"cuBLAS": 8_519_680},
        scratch={"aten.sum.default": 40 * MIB + 16},
        rounding=(1024 - 700) + 511 + (512 - 16),
        cached=counters.reserved_peak - 60 * MIB - counters.allocated_peak,
    )
    assert summed(found.allocated) == counters.allocated_peak
    assert found.reserved.scratch == {"aten.max.dim": 60 * MIB}
    assert summed(found.reserved) + found.reserved.cached == counters.reserved_peak
    assert (found.highest_allocated, found.highest_reserved) == (counters.allocated_peak, counters.reserved_peak)


def test_its_peaks_are_those_of_the_whole_run() -> None:
    simulated = device()
    simulated.scratch("aten.sum.default", (40 * MIB,))
    before = simulated.prediction()
    simulated.allocator.counters.reset_peaks()
    simulated.scratch("aten.sum.default", (10 * MIB,))
    assert simulated.prediction() == before


def test_what_is_assumed_at_most_is_in_the_highest_peaks_only() -> None:
    simulated = device()
    tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="meta")
    simulated.born(tensor.untyped_storage())
    simulated.assume_at_most("workspaces", 100 * MIB)
    simulated.assume_at_most("workspaces", 50 * MIB)
    found = simulated.prediction()
    assert summed(found.allocated) == simulated.allocator.counters.reserved == 30 * MIB
    assert (found.highest_allocated, found.highest_reserved) == (130 * MIB, 130 * MIB)
    assert found.bounds == {"workspaces": 100 * MIB}
    simulated.empty_cache()
    later = torch.empty(90 * MIB, dtype=torch.uint8, device="meta")
    simulated.born(later.untyped_storage())
    assert simulated.prediction().highest_reserved == 130 * MIB


def test_a_number_is_known_until_somebody_writes() -> None:
    values = KnownNumbers()
    tensor = torch.zeros((), device="meta")
    values.note(tensor, 5.0)
    assert values.get(tensor) == values.get(tensor.detach()) == 5.0
    tensor.add_(1)
    assert values.get(tensor) is None
    values.note(tensor, 6.0, written=True)
    tensor.mul_(1)
    assert values.get(tensor) == 6.0
    tensor.mul_(1)
    assert values.get(tensor) is None


def shapes(width: int = 64, dtype: Any = torch.bfloat16, length: int = 128) -> tuple[Any, Any, Any]:
    query, key, value = (torch.empty(2, 4, length, width, dtype=dtype, device="meta") for _ in range(3))
    return query, key, value


@pytest.mark.parametrize(
    ("gpu", "dtype", "width", "mask", "kernel"),
    [
        ("a100-80", "bfloat16", 64, False, AttentionKernel.FLASH),
        ("a100-80", "bfloat16", 64, True, AttentionKernel.EFFICIENT),
        ("a100-80", "float32", 64, False, AttentionKernel.EFFICIENT),
        ("a100-80", "float32", 66, False, AttentionKernel.MATH),
        ("a100-80", "float16", 512, False, AttentionKernel.EFFICIENT),
        ("h100", "bfloat16", 64, False, AttentionKernel.CUDNN),
        ("h100", "bfloat16", 160, False, AttentionKernel.FLASH),
        ("h100", "float32", 64, False, AttentionKernel.EFFICIENT),
        ("rtx4090", "bfloat16", 128, False, AttentionKernel.FLASH),
    ],
)
def test_the_kernel_of_attention(gpu: str, dtype: str, width: int, mask: bool, kernel: AttentionKernel) -> None:
    query, key, value = shapes(width, getattr(torch, dtype))
    bias = torch.empty(128, 128, device="meta") if mask else None
    assert choose(device(gpu), query, key, value, bias, causal=not mask, gqa=False, dropout=0.0) is kernel


def test_the_gpu_to_simulate() -> None:
    assert simulated_gpu("auto", None) is None
    assert simulated_gpu("sim", None) is find_gpu("a100-80")
    assert simulated_gpu("sim", "H100") is find_gpu("h100")
    with pytest.raises(UsageError, match="needs --device sim"):
        simulated_gpu("cuda", "h100")


@pytest.mark.parametrize("gpu", ["50MB", "512MiB"])
@pytest.mark.parametrize(
    "command", [["profile", "--device", "sim"], ["compare", "--device", "sim"], ["fit", "--vary", "-b=1:8"]]
)
def test_a_gpu_that_is_full_before_the_script_starts_is_refused(tmp_path: Path, command: list[str], gpu: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (line,) = refused(tmp_path, *command, "--gpu", gpu, "train.py").splitlines()
    assert line.startswith(f"ampmem: --gpu {gpu} leaves nothing for the script: 512.0 MiB are assumed in use outside")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_torch_that_cannot_is_told_what_can() -> None:
    message = str(refusal("no such symbol"))
    assert "cannot simulate a CUDA device: no such symbol" in message
    assert "torch 2.13 can, and CUDA builds from 2.11 on" in message and "--device cpu" in message
