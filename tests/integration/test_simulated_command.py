"""``ampmem profile --device sim``: what a script sees of the GPU, what is said at the end, and what is refused."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from command_line import refused
from commands import ampmem

from ampmem.recording import read

TRAINING = """
import torch, copy, sys
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model = model.to(device)
assert all(p.is_cuda and isinstance(p, nn.Parameter) for p in model.parameters())
data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
scaler = torch.amp.GradScaler("cuda")
for x, y in DataLoader(data, 16, shuffle=True, pin_memory=True):
    assert x.abs().sum().item() > 1  # what is on the CPU is real
    x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
    assert out.dtype == torch.float16
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss:.2f} {norm:.2f}", (out.argmax(-1) == y).sum().item(), out.detach().cpu().numpy().shape)
    print(torch.cuda.max_memory_allocated() > 0, torch.cuda.memory_stats()["reserved_bytes.all.peak"] > 0)
assert scaler.get_scale() == 65536.0
copy.deepcopy(model)
torch.save(model.state_dict(), "model.pt")
torch.cuda.synchronize()
model.load_state_dict(model.state_dict())
"""
MODEL = """
import torch
from torch import nn
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def profile(folder: Path, script: str, *options: str) -> CompletedProcess[str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    return ampmem(folder, "profile", *options, "--quiet", "train.py")


def test_an_unmodified_cuda_script_runs(tmp_path: Path) -> None:
    done = profile(tmp_path, TRAINING, "--device", "sim", "--gpu", "rtx4090", "--steps", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NVIDIA GeForce RTX 4090 (8, 9)\n")
    assert "Warning" not in done.stderr
    assert "NVIDIA GeForce RTX 4090 (simulated): peak" in done.stderr
    assert "it fits, with" in done.stderr
    found = read(tmp_path / "train.ampmem")
    assert len(found.steps) == 4
    assert [optimizer.implementation for optimizer in found.optimizers] == ["fused"]
    assert found.run.device_name == "NVIDIA GeForce RTX 4090"
    assert any(note.startswith("torch.save wrote nothing") and "train.py:" in note for note in found.notes)
    assert any(note.startswith("an integer that the script read") and "train.py:" in note for note in found.notes)


def test_out_of_memory_is_the_devices_own_error(tmp_path: Path) -> None:
    script = (
        MODEL + "try:\n    torch.empty(1 << 28, device='cuda')\nexcept torch.cuda.OutOfMemoryError as e: print(e)\n"
    )
    script += "torch.cuda.empty_cache()\nmodel(torch.zeros(1 << 25, 8).cuda()).sum().backward()\n"
    done = profile(tmp_path, script, "--device", "sim", "--gpu", "592MiB")
    assert done.returncode == 1
    assert done.stdout.startswith("CUDA out of memory: 1.0 GiB were asked for")
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "it does not fit" in done.stderr


def test_a_gpu_with_next_to_nothing_left_runs_out_in_the_script(tmp_path: Path) -> None:
    done = profile(tmp_path, MODEL, "--device", "sim", "--gpu", "81MiB")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "cannot simulate" not in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x = torch.ones(8, device='cuda'); x[x > 0]", ("aten.nonzero", "depends on the data", "masked_fill")),
        ("torch.compile(model)", ("torch.compile", "leave torch.compile out")),
    ],
)
def test_what_cannot_be_simulated_is_named_with_its_line(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    done = profile(tmp_path, MODEL + line + "\n", "--device", "sim")
    assert done.returncode == 1
    message = done.stderr.partition("NotSimulated: ")[2]
    assert message.startswith(f"{tmp_path / 'train.py'}:6: ")
    assert all(word in message for word in words)
    assert "it fits" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "sim", "--gpu", "voodoo"), "unknown GPU 'voodoo'"),
        (("--device", "cpu", "--gpu", "h100"), "--device cpu records a real device: leave one of them out"),
    ],
)
def test_a_gpu_that_cannot_be_meant_is_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "train.py").write_text(MODEL)
    assert message in refused(tmp_path, "profile", *options, "--quiet", "train.py")
    assert not (tmp_path / "train.ampmem").exists()


def test_a_gpu_s_name_alone_simulates_it_where_torch_sees_none(tmp_path: Path) -> None:
    done = profile(
        tmp_path,
        MODEL + "model(torch.ones(2, 8).cuda()).sum().backward()\noptimizer.step()\n",
        "--gpu",
        "4090",
        "--steps",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "ampmem: simulating a GPU (NVIDIA GeForce RTX 4090), as --gpu asks for: torch sees no GPU here\n"
        "ampmem: recording to train.ampmem\n"
        "ampmem: NVIDIA GeForce RTX 4090 (simulated): peak "
    )
    assert read(tmp_path / "train.ampmem").run.source == "simulated"


@pytest.mark.slow
def test_compare_runs_all_arms_on_the_simulated_device(tmp_path: Path) -> None:
    options = ("--device", "sim", "--gpu", "a100-40", "--steps", "1")
    done = ampmem(tmp_path, "compare", *options, "-m", "ampmem.workloads.reuse", "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert "NVIDIA A100-SXM4-40GB" in done.stdout
    copies = {}
    for arm in ("fp32", "amp", "amp-nocache"):
        found = read(tmp_path / f"reuse.{arm}.ampmem")
        assert found.arm.name == arm and found.plain_step_ns == ()
        copies[arm] = sum("_to_copy" in found.texts[op] for op in found.events.op.tolist())
    assert copies["fp32"] < copies["amp"] < copies["amp-nocache"]
