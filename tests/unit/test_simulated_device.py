"""The parts of the simulated device that need no simulation: its memory, its kernels, its verdict, its options."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ampmem.allocator.device import find_gpu  # noqa: E402
from ampmem.allocator.settings import MIB, Settings  # noqa: E402
from ampmem.cli.options import simulated_gpu  # noqa: E402
from ampmem.errors import UsageError  # noqa: E402
from ampmem.events import Action  # noqa: E402
from ampmem.recorder.log import simulated_addresses  # noqa: E402
from ampmem.recorder.simulated.attention import Kernel, choose  # noqa: E402
from ampmem.recorder.simulated.device import CONTEXT, Event, SimulatedDevice  # noqa: E402
from ampmem.recorder.simulated.selftest import refusal  # noqa: E402
from ampmem.recorder.simulated.start import verdict  # noqa: E402
from ampmem.recorder.simulated.values import KnownNumbers  # noqa: E402


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
    assert simulated_addresses[tensor.untyped_storage()._cdata] == events[0].address
    del tensor
    assert [event.action for event in events] == [Action.ALLOC]
    del view
    gc.collect()
    assert [event.action for event in events] == [Action.ALLOC, Action.FREE]
    assert [(event.bytes, event.block_bytes, event.allocated) for event in events] == [
        (4000, 4096, 4000),
        (4000, 4096, 0),
    ]
    assert events[0].address not in simulated_addresses.values()


def test_scratch_is_gone_and_a_workspace_stays() -> None:
    simulated = device()
    told: list[int] = []
    simulated.on_workspace = told.append
    simulated.workspace(3 * MIB)
    simulated.scratch(MIB, 2 * MIB)
    assert simulated.allocator.counters.allocated == 3 * MIB
    assert simulated.allocator.counters.allocated_peak == 6 * MIB
    assert told == simulated.workspaces == list(simulated.live())


def test_it_runs_out_of_memory_as_a_gpu_does() -> None:
    simulated = device("1GiB")
    tensor = torch.empty(1 << 28, device="meta")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory: 1.0 GiB were asked for .* \(simulated 1GiB\)"
    ):
        simulated.born(tensor.untyped_storage())
    assert not simulated.knows(tensor.untyped_storage())
    assert "it does not fit: out of memory" in verdict(simulated)


def test_the_verdict_leaves_the_context_out() -> None:
    simulated = device("1GiB")
    simulated.scratch(100 * MIB)
    assert "peak 100.0 MiB allocated, 100.0 MiB reserved of 1.0 GiB; it fits, with 412.0 MiB to spare" in verdict(
        simulated
    )
    assert CONTEXT == 512 * MIB
    assert verdict(simulated, failed=True).endswith("reserved of 1.0 GiB, up to where the script failed")


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
        ("a100-80", "bfloat16", 64, False, Kernel.FLASH),
        ("a100-80", "bfloat16", 64, True, Kernel.EFFICIENT),
        ("a100-80", "float32", 64, False, Kernel.EFFICIENT),
        ("a100-80", "float32", 66, False, Kernel.MATH),
        ("a100-80", "float16", 512, False, Kernel.EFFICIENT),
        ("h100", "bfloat16", 64, False, Kernel.CUDNN),
        ("h100", "bfloat16", 160, False, Kernel.FLASH),
        ("h100", "float32", 64, False, Kernel.EFFICIENT),
        ("rtx4090", "bfloat16", 128, False, Kernel.FLASH),
    ],
)
def test_the_kernel_of_attention(gpu: str, dtype: str, width: int, mask: bool, kernel: Kernel) -> None:
    query, key, value = shapes(width, getattr(torch, dtype))
    bias = torch.empty(128, 128, device="meta") if mask else None
    assert choose(device(gpu), query, key, value, bias, causal=not mask, gqa=False, dropout=0.0) is kernel


def test_the_gpu_to_simulate() -> None:
    assert simulated_gpu("auto", None) is None
    assert simulated_gpu("sim", None) is find_gpu("a100-80")
    assert simulated_gpu("sim", "H100") is find_gpu("h100")
    with pytest.raises(UsageError, match="needs --device sim"):
        simulated_gpu("cuda", "h100")


def test_a_torch_that_cannot_is_told_what_can() -> None:
    message = str(refusal("no such symbol"))
    assert "cannot simulate a CUDA device: no such symbol" in message
    assert "CUDA wheel" in message and "--device cpu" in message
