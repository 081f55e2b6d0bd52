"""The prediction of a simulated run of a script, from the command line to the JSON."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from support.commands import ampmem

from ampmem.events import Fact
from ampmem.recording import read
from ampmem.vocabulary import Mark

pytestmark = pytest.mark.slow

MIB = 1 << 20

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.last = nn.Linear(16 * 64 * 64, 10)

    def forward(self, x):
        return self.last(self.first(x).relu().flatten(1))

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    images, labels = torch.randn(32, 3, 64, 64, device="cuda"), torch.zeros(32, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    net.last.weight.sum()  # of 655,360 numbers
"""

CONVOLUTION = (32 * 3 * 64 * 64 + 16 * 3 * 9 + 32 * 16 * 64 * 64) * 4 + 4 * MIB
"""A copy of the batch, of the weight and of what comes out, and what engines ask for beside."""


def profiled(folder: Path, gpu: str) -> CompletedProcess[str]:
    (folder / "net.py").write_text(SCRIPT)
    options = ("--device", "sim", "--gpu", gpu, "--run-to-end", "--quiet", "--no-stacks", "--force")
    return ampmem(folder, "profile", *options, "net.py")


def test_the_terms_of_a_run(tmp_path: Path) -> None:
    done = profiled(tmp_path, "rtx4090")
    assert done.returncode == 0, done.stderr
    assert "it fits, with" in done.stderr
    whole: Any = json.loads(ampmem(tmp_path, "show", "--json", "net.ampmem").stdout)
    told = whole["prediction"]
    for terms in (told["at_peak_allocated"], told["at_peak_reserved"]):
        asked = terms["tensors"] + sum(terms["workspaces"].values()) + sum(terms["scratch"].values())
        assert asked + terms["rounding"] == terms["allocated"]
        assert terms["allocated"] + terms["cached"] == terms["reserved"]
        assert terms["reserved"] + terms["outside"] == terms["total"]
        assert terms["workspaces"] == {"cuBLAS": 2 * 8_519_680}  # one for each thread
    layers = read(tmp_path / "net.ampmem").layers
    assert told["at_peak_allocated"]["allocated"] == max(each.allocated for each in layers if each.mark is Mark.PEAK)
    assert told["at_peak_allocated"]["allocated"] == whole["peak"]["allocated"] > whole["peak"]["bytes"]
    assert told["highest"]["bounds"] == {"cuDNN's workspaces in convolutions": CONVOLUTION}
    highest, allocated = told["highest"], told["at_peak_allocated"]["allocated"]
    assert allocated <= highest["least_reserved"] <= highest["likely_reserved"] <= highest["reserved"]
    assert allocated <= highest["allocated"] <= highest["reserved"]
    assert told["highest"]["reserved"] + told["highest"]["outside"] == told["highest"]["total"]
    assert told["highest"]["outside"] > told["at_peak_reserved"]["outside"] > 0
    shown = ampmem(tmp_path, "show", "net.ampmem").stdout
    assert "the prediction for NVIDIA GeForce RTX 4090" in shown
    assert "MiB is likely, " in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("gpu", ["rtx4090", "h100"])
def test_scratch_is_recorded_with_its_op(tmp_path: Path, gpu: str) -> None:
    assert profiled(tmp_path, gpu).returncode == 0
    recording = read(tmp_path / "net.ampmem")
    ops = {recording.texts[name] for name in recording.facts.name[recording.facts.fact == Fact.SCRATCH]}
    assert "aten.sum.default" in ops


def test_it_may_not_fit(tmp_path: Path) -> None:
    # The context takes 80 to 896 MiB; 59 to 76 MiB are reserved with the workspaces, fewer where there is no room.
    said = profiled(tmp_path, "400MiB").stderr
    assert "it may not fit: it lacks" in said
    assert "beside the most of the 80.0 MiB to 896.0 MiB that the CUDA context is assumed to use" in said
    assert "; it fits, with 0 B to " in profiled(tmp_path, "960MiB").stderr
    assert "it does not fit: out of memory" in profiled(tmp_path, "108MiB").stderr
