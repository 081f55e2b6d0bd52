"""Scripts with ``torch.compile`` on a simulated GPU, against what PyTorch's CUDA build allocates without one."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.commands import ampmem
from support.compiled import needs_the_compiler
from support.simulated_runs import torch_now

import ampmem as package
from ampmem.allocator.gpus import find_gpu
from ampmem.recording import read
from ampmem.simulator.start import Simulation
from ampmem.simulator.where import NotSimulated

pytestmark = [pytest.mark.slow, needs_the_compiler]

SCRIPT = """
import json, torch, torch.nn.functional as F
from torch import nn
def parted(x):
    y = x.sin() + 1
    torch._dynamo.graph_break()
    assert not isinstance(y, getattr(torch, "_subclasses").FakeTensor)  # as transformers asks, in each forward
    return (y * x).cos()
step = torch.compile(parted)
step(torch.ones(8, 8, device="cuda"))
step(torch.ones(8, 8, device="cuda", dtype=torch.float16))
whole = torch.compile(lambda x: x * torch.tensor(2.0, device="cuda"))
whole(torch.ones(8, device="cuda"))
torch.cuda.reset_peak_memory_stats()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1)
        self.net = nn.Sequential(*layers, nn.Linear(1024, 256))
    def forward(self, x, y):
        return F.mse_loss(self.net(x).float(), y)
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
compiled, found = torch.compile(model), []
for _ in range(3):
    x, y = torch.randn(2, 64, 256).cuda()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(x, y)
    forward = torch.cuda.memory_allocated()
    loss.backward()
    backward = torch.cuda.memory_allocated()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    found.append([forward, backward, torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()])
print(json.dumps(found))
"""
EMULATED = [
    [43_207_168, 79_858_176, 98_784_768, 121_634_816],
    [89_379_328, 92_475_904, 98_784_768, 121_634_816],
    [89_379_328, 92_475_904, 98_784_768, 121_634_816],
]
"""What torch 2.14.1 says of the last part on the emulated runtime, as an H100, with a warm cache."""


def test_compiled_code_allocates_what_it_does_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, users = tmp_path / "cache", tmp_path / "users"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(users))
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    graphs = []
    for _ in range(2):  # the second time with a warm cache
        done = ampmem(tmp_path, "profile", "--gpu", "h100", "--force", "--quiet", "--steps", "9", "train.py")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == EMULATED
        notes = read(tmp_path / "train.ampmem").notes
        line = SCRIPT.splitlines().index("    torch._dynamo.graph_break()") + 1
        assert (
            f"torch.compile made 6 graphs, 2 breaks at {tmp_path / 'train.py'}:{line}, "
            "2 graphs of them for other inputs of the same code" in notes
        )
        assert any("so it pads no matrix products" in note for note in notes)
        assert any("the trials of compiled kernels at their first call take at most" in note for note in notes)
        graphs.append(sorted(path.name for path in cache.rglob("fxgraph/*/*/*")))
    assert graphs[0] == graphs[1] != []
    assert stat.S_IMODE((cache / "ampmem/compiled").stat().st_mode) == 0o700
    assert not any(
        path.is_file() for path in users.rglob("*")
    )  # torch makes the folder itself, wherever it is imported


AGAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
compiled, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the tests that compile AGAIN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.usefixtures("shared_cache")
def test_memory_that_is_used_again_is_one_copy_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AGAIN, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--gpu", "h100", "--quiet", "train.py")
    assert done.returncode == 0, done.stderr
    assert ampmem(tmp_path, "show", "--check", "train.ampmem").returncode == 0
    shown = ampmem(tmp_path, "show", "--json", "train.ampmem")
    summary = json.loads(shown.stdout)
    kept = 2 * 64 * 256  # backward reads the second weight's; the first one is gone
    assert summary["steps"][-1]["marks"]["after_forward"]["cast_copies"] == kept
    assert summary["casts"]["steps"][-1]["after_forward"]["autograd"] == {"copies": 1, "bytes": kept}
    held = {each["name"]: each["held_by_autograd"] for each in summary["casts"]["by_parameter"]}
    assert (held["_orig_mod.0.weight"], held["_orig_mod.2.weight"]) == (0, 3)
    assert "empty_strided" not in shown.stdout  # what a buffer is for has a name, as on a GPU


OWN_CLASS = """
class Net(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x
model = Net("""


@pytest.mark.usefixtures("shared_cache")
def test_a_model_compiled_in_place_is_seen(tmp_path: Path) -> None:
    in_place = AGAIN.replace(
        "compiled, optimizer = torch.compile(model)", "model.compile()\ncompiled, optimizer = model"
    )
    # Dynamo compiles nothing of torch's own classes, without ampmem either.
    for script, graphs in ((in_place, 0), (in_place.replace("\nmodel = nn.Sequential(", OWN_CLASS), 1)):
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        done = ampmem(tmp_path, "profile", "--gpu", "h100", "--force", "train.py")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("torch.compile made 1 graph") == graphs
        assert "WARNING" not in done.stderr


@pytest.mark.usefixtures("shared_cache")
def test_a_change_that_compiled_code_does_not_take_is_said(tmp_path: Path) -> None:
    inside = AGAIN.replace("torch.compile(model)", "torch.compile(lambda x: model(x))")
    (tmp_path / "train.py").write_text(inside, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--gpu", "h100", "--quiet", "--force-checkpoint", "0", "train.py")
    assert "the model runs only inside of compiled functions" in done.stderr.splitlines()[-1]
    notes = read(tmp_path / "train.ampmem").notes
    assert any(note.startswith("torch.compile made 1 graph") for note in notes)
    assert not any(note.startswith("forced: ") for note in notes)


def test_inputs_that_are_not_aligned_are_copied(tmp_path: Path) -> None:
    """To 16 bytes, as the kernels expect them: torch 2.14.1 has these peaks on the emulated runtime."""
    peaks = []
    simulation = Simulation(find_gpu("h100"), cache=tmp_path / "cache")
    try:
        large = torch.ones(4112, device="cuda", dtype=torch.bfloat16)
        added = torch.compile(lambda value: value.sin() + value.sum(), dynamic=False)
        for offset in (0, 1, 8, 3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            added(large[offset : offset + 4096])
            peaks.append(torch.cuda.max_memory_allocated() - before)
    finally:
        simulation.end()
    assert peaks == [8192, 16_384, 8192, 16_384]


def test_a_long_scan_has_its_workspace(tmp_path: Path) -> None:
    """As torch 2.14.1 has it on the emulated runtime."""
    peaks = []
    simulation = Simulation(find_gpu("h100"), cache=tmp_path / "cache")
    try:
        added = torch.compile(lambda value: value.cumsum(0) + 1, dynamic=False)
        for dtype in (torch.int64, torch.int32, torch.float32):
            values = torch.ones(65_536, dtype=dtype, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            added(values)
            peaks.append(torch.cuda.max_memory_allocated() - before)
    finally:
        simulation.end()
    assert peaks == [530_432, 530_432, 264_192]


def test_dynamo_leaves_recurrent_layers_uncompiled_as_on_a_gpu(tmp_path: Path) -> None:
    simulation = Simulation(find_gpu("h100"), cache=tmp_path / "cache")
    try:
        layer = torch.nn.LSTM(8, 8).cuda()
        doubled = torch.compile(lambda value: layer(value)[0] * 2)
        assert doubled(torch.ones(2, 8, device="cuda")).shape == (2, 8)
        assert any(f"0 graphs, 1 break at {__file__}:" in note for note in simulation.device.assumptions)
    finally:
        simulation.end()


def test_code_that_runs_uncompiled_without_an_error_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU might compile what fails here."""
    simulation = Simulation(find_gpu("h100"), cache=tmp_path / "cache")
    try:
        doubled = torch.compile(lambda value: value * 2)
        value = torch.ones(2, 8, device="cuda")
        doubled(value)
        monkeypatch.setattr("torch._inductor.compile_fx.GraphLowering", None)
        with (
            torch._dynamo.config.patch(suppress_errors=True),
            pytest.raises(NotSimulated, match=r"uncompiled, which changes the run's numbers: an error was suppressed"),
        ):
            torch.compile(lambda value: value + 3)(value)
    finally:
        simulation.end()


def test_nothing_of_compiled_code_is_left_after_a_block(tmp_path: Path) -> None:
    torch.compiler.reset()
    doubled = torch.compile(lambda value: value * 2, dynamic=False)
    environment = dict(os.environ)
    before = torch_now()
    simulation = Simulation(find_gpu("h100"), cache=tmp_path / "cache")
    try:
        on_device = doubled(torch.ones(3, 5, device="cuda"))
        assert (on_device.shape, on_device.device.type) == ((3, 5), "cuda")
        assert simulation.device.allocator.counters.allocated == 512
        with pytest.raises(NotSimulated, match=r"reduce-overhead.*--assume compile=eager runs it uncompiled"):
            torch.compile(lambda value: value + 1, mode="reduce-overhead")(on_device)
    finally:
        simulation.end()
    assert [place for place, pair in enumerate(zip(before, torch_now(), strict=True)) if pair[0] != pair[1]] == []
    assert dict(os.environ) == environment
    assert not any(name.startswith("triton") for name in vars(package))
    from torch._inductor.async_compile import AsyncCompile

    assert AsyncCompile.triton.__module__ == "torch._inductor.async_compile"


def test_code_that_dynamo_silently_leaves_alone_stops(tmp_path: Path) -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    simulation = Simulation(find_gpu("h100"), cache=tmp_path / "cache")
    try:
        compiled = torch.compile(lambda value: value + 1)
        with Mode(), pytest.raises(NotSimulated, match=r"torch.compile ran .*lambda.* uncompiled.*dispatch mode"):
            compiled(torch.ones(1, device="cuda"))
    finally:
        simulation.end()
