"""What libraries bring with them on a simulated GPU: classes of parameters, and kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from support.commands import ampmem
from torch import Tensor, nn

from ampmem.allocator.gpus import find_gpu
from ampmem.simulator.start import Simulation


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulated = Simulation(find_gpu("h100"))
    yield simulated
    simulated.end()


class Packed(nn.Parameter):
    """Packs itself on its way to the GPU, as the weights of bitsandbytes do, and keeps how."""

    scale: Tensor

    def cuda(self, *_: object, **__: object) -> Packed:
        values = self.data.to("cuda")
        self.scale = values.abs().amax()
        self.data = values.to(torch.int8)
        return self


def test_a_class_of_parameters_keeps_its_methods_and_attributes(simulation: Simulation) -> None:
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = Packed(torch.ones(4, 8), requires_grad=False)
    layer.cuda()
    weight = layer.weight
    assert isinstance(weight, Packed)
    assert isinstance(weight.detach(), Packed)
    assert (weight.is_cuda, weight.dtype, weight.scale.shape) == (True, torch.int8, ())
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 4 * 8 + 4
    assert (weight.data.float() * weight.scale).shape == (4, 8)


class MadeInC(Packed):
    """Makes itself as the weights of bitsandbytes do, by a function that C++ refuses for a fake tensor."""

    def __new__(cls, data: Tensor) -> MadeInC:
        made: MadeInC = torch.Tensor._make_subclass(cls, data, False)
        return made


@pytest.mark.parametrize("rows", [4, 1 << 20], ids=["real on the CPU", "without values there, too"])
def test_a_class_of_parameters_of_any_size(simulation: Simulation, rows: int) -> None:
    layer = nn.Linear(8, 1, bias=False)
    layer.weight = MadeInC(torch.zeros(rows, 8))
    assert (type(layer.weight).__name__, layer.weight.is_cuda, layer.weight.requires_grad) == ("MadeInC", False, False)
    layer.cuda()
    assert isinstance(layer.weight, MadeInC) and (layer.weight.is_cuda, layer.weight.dtype) == (True, torch.int8)
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == rows * 8 + 4
    simulation.end()
    assert torch.Tensor._make_subclass is torch._C.TensorBase._make_subclass


def test_what_kernels_of_a_library_allocate_is_not_modelled(simulation: Simulation) -> None:
    with torch.library._scoped_library("ampmem_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        torch.library.register_fake("ampmem_test::twice", lambda x: x.new_empty(2 * x.numel()), lib=library)
        made = torch.ops.ampmem_test.twice(torch.ones(4, device="cuda"))
    assert made.shape == (8,)
    assert "what ampmem_test's own kernels allocate for themselves" in simulation.device.unmodelled


def test_dynamo_knows_torchs_functions_after_a_library_has_added_one(simulation: Simulation) -> None:
    """As DTensor and einops do on import: dynamo then makes its table of torch's functions anew."""
    torch._dynamo.trace_rules.clear_lru_cache()
    layer = nn.Linear(8, 8).cuda()
    torch._dynamo.trace_rules.check(layer.forward)  # as torch.compile does for a module
    seed = torch.cuda.manual_seed
    assert seed not in torch._dynamo.trace_rules.get_torch_obj_rule_map()
    simulation.end()
    torch._dynamo.trace_rules.clear_lru_cache()
    assert torch.cuda.manual_seed is not seed
    assert torch.cuda.manual_seed in torch._dynamo.trace_rules.get_torch_obj_rule_map()


def test_a_thread_that_starts_while_the_mode_is_entered_leaves_the_others_as_they_are(simulation: Simulation) -> None:
    """As a library's threads do that load weights: each restored what another one had found."""
    mode = torch.ones(1, device="cuda").fake_mode  # type: ignore[attr-defined]
    go = threading.Event()
    with mode:
        threads = [threading.Thread(target=go.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
    try:
        made = torch.tensor([1.0, 2.0], device="cuda")
        assert (made + torch.ones(2, device="cuda")).is_cuda
    finally:
        go.set()
        for thread in threads:
            thread.join()
    assert torch.tensor([1.0, 2.0], device="cuda").is_cuda


def test_the_tensor_types_of_old_programs(simulation: Simulation) -> None:
    kind = torch.cuda.FloatTensor
    made = kind(2, 3)
    assert (made.shape, made.dtype, made.is_cuda, made.type()) == (
        (2, 3),
        torch.float32,
        True,
        "torch.cuda.FloatTensor",
    )
    assert kind(np.ones((2, 2))).shape == (2, 2) and torch.cuda.LongTensor([4, 5]).tolist() == [4, 5]
    assert isinstance(made, kind) and not isinstance(made.half(), kind) and not isinstance(torch.ones(1), kind)
    assert torch.ones(1).type() == "torch.FloatTensor"
    for half in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
        assert torch.ones(1).type(half).type() == "torch.cuda.HalfTensor"
    assert torch.ones(1).type(torch.int64).dtype == torch.int64


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("given", ["torch.cuda.HalfTensor", torch.cuda.HalfTensor], ids=["name", "class"])
def test_the_device_can_be_that_of_the_default_tensor_type(simulation: Simulation, given: object) -> None:
    given = given if isinstance(given, str) else torch.cuda.HalfTensor
    try:
        torch.set_default_tensor_type(given)  # type: ignore[arg-type]
        layer = nn.Linear(8, 8)
        assert (layer.weight.is_cuda, layer.weight.dtype, torch.zeros(1).is_cuda) == (True, torch.float16, True)
        layer(torch.randn(2, 8)).sum().backward()
        torch.set_default_tensor_type("torch.FloatTensor")
        assert (torch.zeros(1).device.type, torch.zeros(1).dtype) == ("cpu", torch.float32)
        torch.set_default_tensor_type(given)  # type: ignore[arg-type]
    finally:
        simulation.end()
        torch.set_default_dtype(torch.float32)
    assert torch.zeros(1).device.type == "cpu"


class Kernel:
    """Like a kernel of Triton's, which cannot be compiled without a GPU."""

    def run(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("libcuda.so cannot found!")


class Driver:
    """Like Triton's driver, which looks for a GPU when it is asked for."""

    active: Any = None

    def set_active(self, driver: object) -> None:
        self.active = driver


def test_kernels_in_triton_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(driver=Driver())
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", SimpleNamespace(JITFunction=Kernel))
    tuners = [type(name, (Kernel,), {"run": Kernel.run}) for name in ("Autotuner", "Heuristics")]
    both = SimpleNamespace(**{tuner.__name__: tuner for tuner in tuners})
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", both)
    simulation = Simulation(find_gpu("h100"))
    try:
        out = torch.tensor([3, 7]).cuda()
        before = torch.cuda.memory_allocated()
        for kernel in (Kernel(), *(tuner() for tuner in tuners)):
            kernel.run(out, 2, grid=(1,), warmup=False)
        assert torch.cuda.memory_allocated() == before
        assert out.max().item() == 1  # the kernels may have written to it
        assert runtime.driver.active.get_current_target().arch == 90
        assert runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"] == 132
        assert any("Triton kernels did nothing" in note for note in simulation.device.assumptions)
    finally:
        simulation.end()
    assert runtime.driver.active is None
    with pytest.raises(RuntimeError, match="libcuda"):
        Kernel().run()


def test_a_script_that_needs_triton_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import triton.language_of_mine\n")
    done = ampmem(tmp_path, "profile", "--device", "sim", "--quiet", "train.py")
    assert done.returncode == 1
    assert sum("the script needs Triton, which is not installed" in line for line in done.stderr.splitlines()) == 1
