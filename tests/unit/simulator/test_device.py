"""The parts of the simulated device that need no simulation: its memory, its kernels, its verdict, its options."""

import gc
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import refused

torch = pytest.importorskip("torch")

from support.torch_version import older_than  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from ampmem.allocator.gpus import find_gpu  # noqa: E402
from ampmem.allocator.settings import MIB, Settings  # noqa: E402
from ampmem.analysis.estimate import Fit, prediction_of  # noqa: E402
from ampmem.cli.options import ScriptOptions, settled  # noqa: E402
from ampmem.errors import UsageError  # noqa: E402
from ampmem.events import Action, TermsRecord  # noqa: E402
from ampmem.recorder.options import Asked  # noqa: E402
from ampmem.recorder.sources import choose as choose_source  # noqa: E402
from ampmem.recorder.sources.choose import meant_device  # noqa: E402
from ampmem.simulator.device import DeviceEvent, SimulatedDevice  # noqa: E402
from ampmem.simulator.start import refusal  # noqa: E402
from ampmem.simulator.torch_cuda import attention  # noqa: E402
from ampmem.simulator.torch_cuda.attention import AttentionKernel, SdpaCall, choose  # noqa: E402
from ampmem.simulator.where import NotSimulated, take_stops  # noqa: E402
from ampmem.vocabulary import Device  # noqa: E402


def device(gpu: str = "a100-80") -> SimulatedDevice:
    return SimulatedDevice(find_gpu(gpu), Settings())


def test_a_storage_has_a_block_until_it_dies() -> None:
    simulated = device()
    events: list[DeviceEvent] = []
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


def test_the_settings_are_those_of_the_environment_at_the_first_request() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    simulated = SimulatedDevice(find_gpu("h100"), Settings(max_split_size=64 * MIB), environment=environment)
    simulated.allocator.set_memory_fraction(0.5)
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    simulated.malloc(1 << 20)
    assert simulated.allocator.settings == Settings(expandable_segments=True, memory_fraction=0.5)
    assert [segment.expandable for segment in simulated.segments()] == [True]
    assert simulated.in_force == ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environment["PYTORCH_CUDA_ALLOC_CONF"] = ""
    simulated.malloc(1 << 20)
    assert simulated.allocator.settings.expandable_segments
    simulated.configure("expandable_segments:False,max_split_size_mb:32", "a call")
    assert simulated.allocator.settings == Settings(max_split_size=32 * MIB, memory_fraction=0.5)
    assert simulated.in_force == ("a call", "expandable_segments:False,max_split_size_mb:32")
    assert [segment.expandable for segment in simulated.segments()] == [True]
    simulated.malloc(64 << 20)
    assert sorted(segment.expandable for segment in simulated.segments()) == [False, True]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync: the backend"),
        (
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "1",
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1 turns off PyTorch's caching allocator",
        ),
    ],
)
def test_settings_that_cannot_be_modelled_stop_at_the_first_request(variable: str, value: str, message: str) -> None:
    environment: dict[str, str] = {}
    simulated = SimulatedDevice(find_gpu("h100"), Settings(), environment=environment)
    environment[variable] = value
    with pytest.raises(NotSimulated, match=re.escape(f": {message}")):
        simulated.malloc(512)
    take_stops()


def test_storages_may_die_on_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = device()
    events: list[DeviceEvent] = []
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    simulated.recorder = events.append
    shelf: list[Any] = [None] * 64
    """Whoever puts a tensor here drops the one that lay there, which another thread may have made."""

    def work(number: int) -> None:
        random = Random(number)
        for _ in range(1000):
            tensor = torch.empty(random.choice((100, 5000, 1 << 18)), device="meta")
            simulated.born(tensor.untyped_storage())
            shelf[random.randrange(len(shelf))] = tensor

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # another thread's turn as often as can be
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    left = sorted(tensor.untyped_storage().nbytes() for tensor in shelf if tensor is not None)
    assert sorted(requested for requested, _, _ in simulated.live().values()) == left
    taken: dict[int, int] = {}
    for event in events:  # no address is given out twice, or taken back twice
        if event.action is Action.ALLOC:
            assert event.address not in taken
            taken[event.address] = event.bytes
        else:
            assert taken.pop(event.address) == event.bytes
    assert sorted(taken.values()) == left
    shelf.clear()
    assert not simulated.live() and simulated.allocator.counters.allocated == 0


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
        torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 1.0 GiB\. .* \(simulated 1GiB\)"
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


def held(simulated: SimulatedDevice, *sizes: int) -> list[torch.Tensor]:
    """A tensor of each size in MiB, on ``simulated``."""
    tensors = [torch.empty(size * MIB, dtype=torch.uint8, device="meta") for size in sizes]
    for tensor in tensors:
        simulated.born(tensor.untyped_storage())
    return tensors


def test_what_is_assumed_makes_a_range() -> None:
    simulated = device()
    kept = held(simulated, 30)
    for _ in range(2):  # the same request needs no segment of its own
        simulated.assume_scratch("workspaces", 3 * MIB, "forward")
    simulated.assume_scratch("workspaces", 0, "backward")
    found = simulated.prediction()
    assert summed(found.allocated) == simulated.allocator.counters.reserved == 30 * MIB
    assert found.bounds == {"workspaces": 3 * MIB}
    assert found.highest_allocated == 33 * MIB
    assert found.likely_reserved == found.least_reserved == 30 * MIB  # all of it is allocated
    assert found.highest_reserved == (30 + 20) * MIB  # the segment of 3 MiB
    kept.clear()
    held(simulated, 90)
    found = simulated.prediction()
    assert (found.likely_reserved, found.least_reserved) == (120 * MIB, (120 - 20) * MIB)
    assert found.highest_reserved == (120 + 20) * MIB
    simulated.assume_scratch("workspaces", 110 * MIB, "backward")
    found = simulated.prediction()
    assert found.least_reserved == 100 * MIB  # 17 % below, 99.6 MiB, in segments of 2 MiB
    assert found.highest_reserved == (120 + 20 + 110) * MIB
    simulated.assume_scratch("workspaces", 1000 * MIB, "another forward")
    assert simulated.prediction().highest_reserved == 1000 * MIB  # allocated at once
    held(simulated, 2000)
    found = simulated.prediction()
    assert (found.likely_reserved, found.highest_reserved) == (2120 * MIB, 2120 * MIB * 122 // 100)


def test_the_least_that_is_reserved_is_a_whole_number_of_segments() -> None:
    """A small tensor and a large one: 64 MiB and 512 B are allocated, and no allocator reserves so much."""
    simulated = device()
    kept = [torch.empty(64 * MIB, dtype=torch.uint8, device="meta"), torch.empty(1, dtype=torch.uint8, device="meta")]
    for tensor in kept:
        simulated.born(tensor.untyped_storage())
    simulated.assume_scratch("workspaces", 200 * MIB)
    found = simulated.prediction()
    assert summed(found.allocated) == 64 * MIB + 512
    assert (found.least_reserved, found.likely_reserved) == (66 * MIB, 66 * MIB)


def test_a_device_that_lags_has_no_say_in_the_least_and_the_likely() -> None:
    simulated = device("1200MiB")
    for _ in range(12):
        (used,) = held(simulated, 64)
        simulated.record_stream(used.untyped_storage(), 1)
        del used
    alone = simulated.prediction()
    simulated.assume_scratch("workspaces", MIB)
    found = simulated.prediction()
    assert alone.least_reserved is alone.likely_reserved is None
    assert (found.least_reserved, found.likely_reserved) == (64 * MIB, 64 * MIB)
    # the allocator waits for the other stream before it takes more than the device has
    assert alone.highest_reserved == found.highest_reserved == 1200 * MIB - simulated.gpu.context.most
    assert prediction_of(alone).fit is prediction_of(found).fit is Fit.FITS


def test_who_asks_for_what_is_assumed_does_without_it_where_there_is_no_memory() -> None:
    simulated = device("2GiB")
    room = 2048 * MIB - simulated.gpu.context.most
    tensor = torch.empty(1000 * MIB, dtype=torch.uint8, device="meta")
    simulated.born(tensor.untyped_storage())
    simulated.assume_scratch("workspaces", 200 * MIB)
    found = simulated.prediction()
    assert found.likely_reserved == 1000 * MIB
    assert 1000 * MIB < room < 1200 * MIB
    assert (found.highest_allocated, found.highest_reserved) == (room, room)


def test_what_is_cached_is_given_back_before_the_range_leaves_the_device() -> None:
    simulated = device("2GiB")
    for size in (600, 640, 680):
        simulated.born(torch.empty(size * MIB, dtype=torch.uint8, device="meta").untyped_storage())
        simulated.assume_scratch("workspaces", 10 * MIB)
    found = simulated.prediction()
    assert found.likely_reserved is not None
    assert found.likely_reserved <= found.highest_reserved <= 2048 * MIB - simulated.gpu.context.most


def test_what_is_free_may_be_taken_whole_and_still_fits() -> None:
    simulated = device("2GiB")
    simulated.hold_outside("channels", 10 * MIB, 30 * MIB - 1)
    tensor = torch.empty(600 * MIB, dtype=torch.uint8, device="meta")
    simulated.born(tensor.untyped_storage())
    free = 2048 * MIB - simulated.gpu.context.most - 630 * MIB + 1
    simulated.assume_all_that_is_free("trials", 50 * MIB)
    assert simulated.prediction().bounds == {"trials": 50 * MIB}
    simulated.assume_all_that_is_free("trials", None)
    found = simulated.prediction()
    assert (found.bounds, found.likely_reserved) == ({"trials": free}, 600 * MIB)
    assert found.highest_allocated == found.highest_reserved == 600 * MIB + free
    assert (found.unfilled_allocated, found.unfilled_reserved) == (600 * MIB, 600 * MIB)
    assert prediction_of(found).fit is Fit.FITS


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300), st.booleans()), max_size=20))
@settings(max_examples=40)
def test_the_range_is_in_order(steps: list[tuple[int, int, bool]]) -> None:
    simulated, kept = device("8GiB"), []
    for size, most, keep in steps:
        tensor = torch.empty(size * MIB, dtype=torch.uint8, device="meta")
        simulated.born(tensor.untyped_storage())
        simulated.assume_scratch("workspaces", (most + 1) * MIB)
        if keep:
            kept.append(tensor)
        del tensor
    found = simulated.prediction()
    if steps:
        assert found.least_reserved is not None and found.likely_reserved is not None
        assert summed(found.allocated) <= found.least_reserved <= found.likely_reserved <= found.highest_reserved
        assert found.highest_allocated <= found.highest_reserved


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
        ("h100", "bfloat16", 160, False, AttentionKernel.CUDNN),
        ("h200", "float16", 256, True, AttentionKernel.CUDNN),
        ("h100", "bfloat16", 264, False, AttentionKernel.EFFICIENT),
        ("h100", "bfloat16", 132, False, AttentionKernel.FLASH),
        ("h100", "float32", 64, False, AttentionKernel.EFFICIENT),
        ("rtx4090", "bfloat16", 128, False, AttentionKernel.FLASH),
        ("rtx5090", "bfloat16", 64, False, AttentionKernel.FLASH),
        ("b200", "bfloat16", 64, False, AttentionKernel.CUDNN),
        ("t4", "float16", 64, False, AttentionKernel.EFFICIENT),
        ("t4", "float16", 66, False, AttentionKernel.MATH),
        ("t4", "bfloat16", 64, False, AttentionKernel.MATH),
        ("v100", "bfloat16", 64, False, AttentionKernel.MATH),
        ("v100", "float32", 66, False, AttentionKernel.EFFICIENT),
    ],
)
def test_the_kernel_of_attention(gpu: str, dtype: str, width: int, mask: bool, kernel: AttentionKernel) -> None:
    query, key, value = shapes(width, getattr(torch, dtype))
    bias = torch.empty(128, 128, device="meta") if mask else None
    assert choose(device(gpu), SdpaCall(query, key, value, bias, causal=not mask, gqa=False, dropout=0.0)) is kernel


@pytest.mark.parametrize(
    ("gpu", "widths", "before", "since"),
    [
        ("h100", (160, 160), AttentionKernel.CUDNN, AttentionKernel.FLASH),
        ("h100", (256, 256), AttentionKernel.CUDNN, AttentionKernel.CUDNN),
        ("h100", (192, 128), AttentionKernel.CUDNN, AttentionKernel.CUDNN),
        ("b200", (192, 128), AttentionKernel.CUDNN, AttentionKernel.CUDNN),
        ("b200", (256, 256), AttentionKernel.FLASH, AttentionKernel.CUDNN),
        ("b200", (128, 64), AttentionKernel.CUDNN, AttentionKernel.CUDNN),
        ("a100-80", (192, 128), AttentionKernel.EFFICIENT, AttentionKernel.EFFICIENT),
    ],
)
def test_wide_heads_are_trained_with_cudnn_where_its_version_can(
    monkeypatch: pytest.MonkeyPatch,
    gpu: str,
    widths: tuple[int, int],
    before: AttentionKernel,
    since: AttentionKernel,
) -> None:
    """``widths`` of keys and of values; ``before`` and ``since`` torch 2.14."""
    query, key, _ = shapes(widths[0])
    value = shapes(widths[1])[2]
    query.requires_grad_()
    for newer, kernel in ((False, before), (True, since)):
        monkeypatch.setattr(attention, "_CUDNN_TAKES_256", newer)
        assert choose(device(gpu), SdpaCall(query, key, value, None, causal=True, gqa=False, dropout=0.0)) is kernel


def test_an_op_that_has_to_be_deterministic_is_not_cudnns() -> None:
    query, key, value = shapes(64)
    torch.use_deterministic_algorithms(True)
    try:
        found = choose(device("h100"), SdpaCall(query, key, value, None, causal=True, gqa=False, dropout=0.0))

    finally:
        torch.use_deterministic_algorithms(False)
    assert found is AttentionKernel.FLASH


def test_attention_that_no_kernel_can_do_is_the_error_that_torch_raises() -> None:
    """Heads of 264 are too wide for cuDNN, which alone may be chosen."""
    query, key, value = shapes(264)
    how = {"causal": True, "gqa": False, "dropout": 0.0}
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        with pytest.raises(RuntimeError, match=r"^No available kernel\. Aborting execution\.$"):
            choose(device("h100"), SdpaCall(query, key, value, None, **how))

        with pytest.raises(RuntimeError, match="No available kernel"):
            choose(device("h100"), SdpaCall(query[0], key[0], value[0], None, **how))

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert choose(device("h100"), SdpaCall(query, key, value, None, **how)) is AttentionKernel.MATH


def test_a_mask_that_is_trained_is_not_for_cudnn() -> None:
    query, key, value = shapes(64)
    how = {"causal": False, "gqa": False, "dropout": 0.0}
    bias = torch.empty(128, 128, device="meta")
    assert choose(device("h100"), SdpaCall(query, key, value, bias, **how)) is AttentionKernel.CUDNN
    assert (
        choose(device("h100"), SdpaCall(query, key, value, bias.requires_grad_(), **how)) is AttentionKernel.EFFICIENT
    )


@pytest.mark.parametrize(
    ("gpu", "dtype", "gqa", "kernel"),
    [
        ("h100", torch.bfloat16, True, AttentionKernel.CUDNN),
        ("a100-80", torch.bfloat16, True, AttentionKernel.FLASH),
        ("a100-80", torch.bfloat16, False, AttentionKernel.MATH),
        (
            "h100",
            torch.float32,
            True,
            AttentionKernel.MATH if older_than("2.14") else AttentionKernel.EFFICIENT,
        ),
    ],
)
def test_groups_of_heads_are_for_kernels_that_take_them(
    gpu: str, dtype: torch.dtype, gqa: bool, kernel: AttentionKernel
) -> None:
    query, key, value = shapes(64, dtype)
    key, value = key[:, :2], value[:, :2]
    assert choose(device(gpu), SdpaCall(query, key, value, None, causal=True, gqa=gqa, dropout=0.0)) is kernel


@pytest.mark.parametrize(
    ("width", "dropout", "kernel"),
    [
        (192, 0.5, AttentionKernel.FLASH),
        (208, 0.0, AttentionKernel.EFFICIENT),
        (256, 0.0, AttentionKernel.FLASH),
        (256, 0.5, AttentionKernel.EFFICIENT),
    ],
)
def test_wide_heads_train_without_flash_where_shared_memory_is_small(
    width: int, dropout: float, kernel: AttentionKernel
) -> None:
    query, key, value = shapes(width)
    query.requires_grad_()
    assert (
        choose(device("rtx3060"), SdpaCall(query, key, value, None, causal=True, gqa=False, dropout=dropout)) is kernel
    )
    assert choose(device("a100-80"), SdpaCall(query, key, value, None, causal=True, gqa=False, dropout=dropout)) is (
        AttentionKernel.FLASH
    )


def test_a_gpu_s_name_settles_the_device_of_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ScriptOptions(
        script_or_module="train.py",
        as_module=False,
        arguments=(),
    )
    assert settled(given) == given
    monkeypatch.setattr(choose_source, "cuda_available", lambda: False)
    named = replace(given, gpu=find_gpu("3090"), world_size=2)
    assert settled(named) == replace(named, device=Device.SIMULATED)
    said = "ampmem: simulating the GPU that --gpu names (NVIDIA GeForce RTX 3090), because torch sees no GPU\n"
    assert capsys.readouterr().err == said
    assert settled(replace(named, device=Device.SIMULATED)).device is Device.SIMULATED
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(choose_source, "cuda_available", lambda: True)
    with pytest.raises(UsageError, match=r"^--gpu simulates a GPU, but torch sees a real one here: add --device sim "):
        settled(named)


def test_the_gpu_to_simulate() -> None:
    assert Asked().simulated_gpu is None
    assert Asked(device=Device.SIMULATED).simulated_gpu is find_gpu("a100-80")
    assert Asked(device=Device.SIMULATED, gpu=find_gpu("H100")).simulated_gpu is find_gpu("h100")
    given = ScriptOptions(script_or_module="train.py", as_module=False, arguments=(), gpu=find_gpu("h100"))
    with pytest.raises(UsageError, match=r"^--gpu simulates a GPU, and --device cuda records a real device"):
        settled(replace(given, device=Device.CUDA))


@pytest.mark.parametrize(("option", "remedy"), [("--gpu", "--device sim"), ("gpu=", "device='sim'")])
def test_naming_a_gpu_asks_for_a_simulated_one_where_torch_sees_none(
    monkeypatch: pytest.MonkeyPatch, option: str, remedy: str
) -> None:
    h100 = find_gpu("h100")
    monkeypatch.setattr(choose_source, "cuda_available", lambda: False)
    assert meant_device(Device.AUTO, h100, option=option, remedy=remedy) is Device.SIMULATED
    assert meant_device(Device.CPU, h100, option=option, remedy=remedy) is Device.CPU
    monkeypatch.setattr(choose_source, "cuda_available", lambda: True)
    assert meant_device(Device.SIMULATED, h100, option=option, remedy=remedy) is Device.SIMULATED
    with pytest.raises(UsageError) as refused:
        meant_device(Device.AUTO, h100, option=option, remedy=remedy)
    assert str(refused.value) == (
        f"{option} simulates a GPU, but torch sees a real one here: add {remedy} to simulate NVIDIA H100 80GB HBM3, "
        f"or leave {option} out to record the real GPU"
    )


@pytest.mark.parametrize("gpu", ["50MB", "80MiB"])
@pytest.mark.parametrize(
    "command", [["profile", "--device", "sim"], ["compare", "--device", "sim"], ["fit", "--vary", "-b=1:8"]]
)
def test_a_gpu_that_is_full_before_the_script_starts_is_refused(tmp_path: Path, command: list[str], gpu: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (line,) = refused(tmp_path, *command, "--gpu", gpu, "train.py").splitlines()
    assert line.startswith(f"ampmem: --gpu {gpu} leaves nothing for the script: at least 80.0 MiB are assumed")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    "command", [["profile", "--device", "sim"], ["compare", "--device", "sim"], ["fit", "--vary", "-b=1:8"]]
)
def test_an_empty_gpu_is_refused(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (line,) = refused(tmp_path, *command, "--gpu", "", "train.py").splitlines()
    assert line.startswith("ampmem: --gpu is empty; give one of ")


@pytest.mark.parametrize(
    ("version", "others"),
    [
        ("2.12.1+cpu", "CPU builds of torch 2.13 can, and CUDA builds from 2.11 on, which need no GPU for it; "),
        ("2.13.0+cpu", ""),  # of which that would contradict what it says of this build
    ],
)
def test_a_torch_that_cannot_is_told_what_can(monkeypatch: pytest.MonkeyPatch, version: str, others: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert str(refusal("no such symbol")) == (
        f"this build of torch ({version}) cannot simulate a CUDA device: no such symbol. {others}"
        "--device cpu measures on the CPU instead"
    )
