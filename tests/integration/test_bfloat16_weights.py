"""``--precision bf16`` allocates what a script does that casts its model and its batches itself, event by event."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import ampmem

from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Recording
from ampmem.recording import read
from ampmem.units import format_bytes

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
    def forward(self, x, *, other):
        waves = torch.arange(64.0, device=x.device).expand_as(x){waves}
        return self.second(self.first(x + other)) + self.first.up(waves).mean()

model = Model(){cast}.{move}
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(128, 64).{move}, torch.randn(128, 64).{move}
    with torch.autocast(x.device.type, torch.bfloat16, enabled={autocast}):
        loss = functional.mse_loss(model(x{batch}, other=x{batch}), y{batch})
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sorted({{str(each.dtype) for each in model.state_dict().values()}}))
"""
AS_IT_IS = {"cast": "", "batch": "", "waves": "", "autocast": True}
WRITTEN = {"cast": ".to(torch.bfloat16)", "batch": ".to(torch.bfloat16)", "waves": ".to(x.dtype)", "autocast": False}
DEVICES = {"cpu": "cpu()", "sim": "cuda()"}
NO_MASTERS = "FP32 master copies would add {} (computed: 4 B for each of the {} parameters of {} on this device)"


def profiled(folder: Path, name: str, device: str, *options: str, **parts: object) -> tuple[Recording, str, str]:
    (folder / "train.py").write_text(SCRIPT.format(move=DEVICES[device], **parts))
    command = ("profile", "--device", device, "--steps", "2", "--seed", "0", "--run-to-end", "-o", f"{name}.ampmem")
    done = ampmem(folder, *command, *options, "train.py")
    assert done.returncode == 0, done.stderr
    return read(folder / f"{name}.ampmem"), done.stdout, done.stderr


def by_category(recording: Recording) -> dict[Category, int]:
    """The bytes of each category at the peak; the batch in float32 is an input where the model is given it."""
    live = dict(summarize(recording).steps[-1].peak.categories)
    live[Category.OTHER] += live.pop(Category.INPUTS)
    return live


@pytest.mark.parametrize(("device", "optimizer"), [("cpu", "AdamW"), ("sim", "AdamW"), ("sim", "Adagrad")])
def test_it_is_the_change_written_by_hand(tmp_path: Path, device: str, optimizer: str) -> None:
    forced, types, said = profiled(tmp_path, "forced", device, "--precision", "bf16", optimizer=optimizer, **AS_IT_IS)
    written = profiled(tmp_path, "written", device, optimizer=optimizer, **WRITTEN)[0]
    assert by_category(forced) == by_category(written)
    assert types == "['torch.bfloat16', 'torch.int64']\n"  # also in the step that was not recorded
    assert NO_MASTERS.format("259.5 KiB", "66,432", optimizer) in " ".join(said.split())
    static = summarize(forced).static_model
    assert static
    assert all(component.holds for component in static)


def test_a_model_that_the_script_casts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(move="cpu()", optimizer="SGD", **WRITTEN))
    done = ampmem(tmp_path, "profile", "--device", "cpu", "--precision", "bf16", "train.py")
    assert done.returncode == 1
    assert "--precision bf16: the script casts its model itself: weights are bfloat16" in done.stderr


LORA = """
import torch
from torch import nn
from torch.nn import functional

class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 8, bias=False)
        self.b = nn.Linear(8, base.out_features, bias=False)
    def forward(self, x):
        y = self.base(x)
        return y + self.b(self.a(x.to(self.a.weight.dtype))).to(y.dtype)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))

model = nn.Sequential(nn.Embedding(500, 64), *(Block() for _ in range(3)), nn.Linear(64, 500))
model.requires_grad_(False).to(torch.bfloat16)
for block in model[1:4]:
    block.up, block.down = Adapted(block.up), Adapted(block.down)
model.cuda()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
for _ in range(2):
    tokens = torch.randint(500, (4, 128), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_autocast_over_adapters_on_a_base_in_bfloat16(tmp_path: Path) -> None:
    """Autocast makes norms and the loss float32; without it adapters keep more, so no number says what that saves."""
    (tmp_path / "lora.py").write_text(LORA)
    activations = {}
    for precision in ("amp", "fp32"):
        command = ("--gpu", "a100-40", "--steps", "2", "--precision", precision, "-o", f"{precision}.ampmem")
        done = ampmem(tmp_path, "profile", *command, "lora.py")
        assert done.returncode == 0, done.stderr
        summary = summarize(read(tmp_path / f"{precision}.ampmem"))
        after = summary.steps[-1].marks.after_forward
        assert after is not None
        activations[precision] = after[Category.ACTIVATIONS]
        found = {each.code: each for each in summary.findings}
        assert "amp-saves" not in found  # no estimate from halves
        assert ("autocast-widens" in found) == (precision == "amp")
        if precision == "amp":
            widens = found["autocast-widens"]
    rows = 4 * 128
    # Nothing is trained before the first norm; a norm also keeps the mean and the deviation of each row.
    loss, norms = rows * 500 * 4, 2 * rows * (64 + 2) * 4
    parts = f"{format_bytes(loss)} for nll loss, {format_bytes(norms)} for layer norm in *.norm."
    assert f"what it runs in float32 keeps {format_bytes(loss + norms)}: {parts}" in widens.message
    assert (widens.severity, widens.off_peak) == ("info", None)
    # Without autocast norms and loss keep half, but the adapters' inputs are in float32: half would be too much.
    assert activations["amp"] - activations["fp32"] < (loss + norms) // 2
