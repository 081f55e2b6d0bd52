"""The emulated runtime does what the head of runtime.c says, seen through PyTorch's CUDA build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import python
from torch import nn
from torch.torch_version import TorchVersion

pytestmark = pytest.mark.usefixtures("clean_device")
MIB = 1 << 20
Setting = Callable[[str, str], None]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_fills_and_copies_are_real(dtype: torch.dtype) -> None:
    assert torch.full((5,), 1, dtype=dtype, device="cuda").tolist() == [1] * 5
    values = torch.arange(2, 12).to(dtype)
    there = values.cuda()
    assert there[3:].clone().cpu().tolist() == values[3:].tolist()
    assert there.to("cuda:1").cpu().tolist() == values.tolist()
    assert there.zero_().tolist() == [0] * 10


def test_fresh_memory_is_zero_also_where_something_was() -> None:
    first = torch.full((MIB,), 7.0, device="cuda")
    address = first.data_ptr()
    del first
    torch.cuda.empty_cache()
    second = torch.empty(MIB, device="cuda")
    assert second.data_ptr() == address or second.numel()  # the system may hand out the same addresses
    assert second[::4096].cpu().sum() == 0


def test_memory_counts_against_the_devices_size(setting: Setting) -> None:
    setting("MEMORY", "1G")
    free, total = torch.cuda.mem_get_info()
    assert total == 1 << 30
    held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == free - 100 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 600.00 MiB"):
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info(1)[1] == 1 << 30
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_an_allocation_fails_on_demand(setting: Setting) -> None:
    setting("FAIL", "cudaMalloc@2+=memory")
    first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(65 * MIB, dtype=torch.uint8, device="cuda")
    setting("FAIL", "")
    assert torch.empty(65 * MIB, dtype=torch.uint8, device="cuda").nbytes > first.nbytes


def test_any_call_fails_on_demand_once(setting: Setting) -> None:
    setting("FAIL", "cudaStreamSynchronize@1=launch")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        torch.cuda.current_stream().synchronize()
    torch.cuda.current_stream().synchronize()


def test_work_is_done_when_somebody_waits(setting: Setting) -> None:
    setting("LATE", "sync")
    event = torch.cuda.Event()
    torch.ones(4, device="cuda")
    event.record()
    assert not event.query()
    assert not torch.cuda.current_stream().query()
    event.synchronize()
    assert event.query()


def test_work_is_done_after_some_more_of_it(setting: Setting) -> None:
    setting("LATE", "10")
    event = torch.cuda.Event()
    torch.ones(4, device="cuda")
    event.record()
    answers = [event.query() for _ in range(12)]
    assert answers == sorted(answers)
    assert not answers[0]
    assert answers[-1]


def test_a_stream_that_waited_is_done_after_what_it_waited_for(setting: Setting) -> None:
    setting("LATE", "sync")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.ones(4, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    assert not side.query()
    torch.cuda.current_stream().synchronize()
    assert side.query()


def test_a_copy_to_pinned_memory_arrives_when_it_is_done(setting: Setting) -> None:
    setting("LATE", "sync")
    number = torch.full((), 3.0, device="cuda")
    copy = torch.zeros((), pin_memory=True)
    copy.copy_(number, non_blocking=True)
    number.fill_(4.0)
    assert copy == 0
    torch.cuda.synchronize()
    assert copy == 3


def test_memory_of_another_stream_is_not_handed_out_before_that_is_done(setting: Setting) -> None:
    setting("LATE", "sync")
    block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    address, side = block.data_ptr(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        block.fill_(1)
    block.record_stream(side)
    del block
    waiting = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert waiting.data_ptr() != address
    side.synchronize()
    assert torch.empty(30 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address


def test_a_graph_is_captured_and_replayed() -> None:
    source, target = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
    assert target.tolist() == [0] * 4
    source.fill_(5)
    graph.replay()
    assert target.tolist() == [5] * 4


SPOILED = """
import torch
torch.ones(1, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        {spoils}
except RuntimeError as error:
    print("captur" in str(error), torch.cuda.is_current_stream_capturing())
"""


@pytest.mark.parametrize("spoils", ["torch.cuda.synchronize()", "torch.ones(1, device='cuda').item()"])
def test_waiting_spoils_a_capture(spoils: str, tmp_path: Path) -> None:
    """In a process of its own: torch 2.11 draws no random numbers any more after that."""
    done = python(tmp_path, "-c", SPOILED.format(spoils=spoils))
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize(("dtype", "sum_"), [(torch.float32, 10), (torch.float64, 10), (torch.int64, 10)])
def test_a_number_is_added(dtype: torch.dtype, sum_: int) -> None:
    """As Adam counts its steps where a default device is set."""
    x = torch.full((5,), 3, dtype=dtype, device="cuda")
    x += 1
    assert x.add_(2, alpha=3).tolist() == [sum_] * 5


@pytest.mark.skipif(TorchVersion(torch.__version__) >= "2.14", reason="Adam's counts are on the host since torch 2.14")
def test_a_number_is_added_to_each_of_many() -> None:
    counts = [torch.zeros((), device="cuda") for _ in range(900)]
    torch._foreach_add_(counts, 1)
    torch._foreach_add_(counts, 1)
    assert {count.item() for count in counts} == {2}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_train(kind: type[nn.RNNBase], bias: bool) -> None:
    model = kind(24, 40, 2, bias=bias, bidirectional=True, dropout=0.1).cuda()
    flat = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    # One buffer, as cuDNN has it; PyTorch asks for the places of the biases in any case.
    assert list(flat.values()) == [sum(p.nbytes for p in kind(24, 40, 2, bidirectional=True).parameters())]
    model(torch.randn(7, 3, 24, device="cuda"))[0].sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_workspaces_of_any_size(setting: Setting) -> None:
    setting("CUDNN_WORKSPACE", "48M")
    layer, x = nn.Conv2d(3, 5, 3).cuda(), torch.randn(2, 3, 9, 9, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x)
    assert torch.cuda.max_memory_allocated() - before >= 48 * MIB


STICKY = """
import torch
x = torch.ones(8, device="cuda")
for i in range(100):
    x = x * 2
print(i)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).splitlines()[0])
try:
    torch.ones(1, device="cuda")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def test_a_sticky_error_shows_when_the_work_is_done_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_CUDA_LATE", "sync")
    monkeypatch.setenv("EMULATED_CUDA_FAIL", "cudaLaunchKernel@9=illegal!")
    done = python(tmp_path, "-c", STICKY)
    assert done.stdout.splitlines()[0] == "99"
    assert [("illegal memory access" in line) for line in done.stdout.splitlines()[1:]] == [True, True]


def test_what_is_not_emulated_ends_the_process_with_its_name() -> None:
    code = "import torch; torch.linalg.svd(torch.ones(40, 40, device='cuda'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert "emulated CUDA: cusolver" in done.stderr
    assert "is not emulated" in done.stderr


def test_collectives_return_at_once(tmp_path: Path) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.full((3,), 2.0, device="cuda")
dist.all_reduce(x)
whole = torch.zeros(3, device="cuda")
dist.all_gather_into_tensor(whole, x)
print(x.tolist(), whole.tolist())
dist.destroy_process_group()
"""
    done = python(tmp_path, "-c", code)
    assert done.stdout.splitlines() == ["[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]"], done.stderr


def test_the_device_is_called_as_it_is_said() -> None:
    assert torch.cuda.get_device_name(0) == "Emulated GPU"
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"],
        env={**os.environ, "EMULATED_CUDA_NAME": "NVIDIA H100 80GB HBM3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "NVIDIA H100 80GB HBM3\n"
