"""What ``ampmem advise`` says that a change takes is what PyTorch takes with that change, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.commands import ampmem
from torch.torch_version import TorchVersion

from ampmem.analysis.changes import CHANGES
from ampmem.analysis.summary import summarize
from ampmem.recording import read

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), *(Block() for _ in range(4)), nn.Linear(512, 2000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    target = torch.randint(2000, (8192,), device="cuda")
    nn.functional.cross_entropy(model(torch.randn(8192, 64, device="cuda")), target).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.14", reason="workspaces differ, as docs/simulation.md says")
def test_what_is_advised_is_what_pytorch_takes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    uncompiled = ",".join(each.allow for each in CHANGES if each.allow not in ("compile", "memory-budget"))
    asked = ("--gpu", "h100", "--budget", "900MiB", "--jobs", "1", "--allow", uncompiled)
    done = ampmem(tmp_path, "advise", "--json", *asked, "train.py")
    assert done.stdout, done.stderr
    runs = {run["change"]: run for run in json.loads(done.stdout)["runs"] if run["failure"] is None}
    compared = []
    alone = {change: run for change, run in runs.items() if ", " not in change}  # the others are several of these
    for number, (change, run) in enumerate(alone.items()):
        file = f"run{number}.ampmem"
        real = ampmem(
            tmp_path, "profile", "--quiet", "--steps", "2", "--device", "cuda", "-o", file, *run["options"], "train.py"
        )
        assert real.returncode == 0, (change, real.stderr)
        summary = summarize(read(tmp_path / file))
        assert summary.caching_allocator is not None
        compared.append((change, run["allocated_bytes"], summary.whole.bytes))
    assert {"loss in 8 chunks", "checkpoint 4 of 4 blocks"} < set(runs) and len(compared) >= 4
    whole = ampmem(tmp_path, "advise", "--json", "--device", "cuda", "--allow", "fused", "train.py")
    assert whole.returncode == 0, whole.stderr
    measured = {run["change"]: run for run in json.loads(whole.stdout)["runs"]}
    for change in ("the script as it is", "fused=True"):
        assert measured[change]["allocated_bytes"] == runs[change]["allocated_bytes"], change
        assert measured[change]["reserved_bytes"] >= measured[change]["allocated_bytes"]
        assert measured[change]["step_ns"] > 0
    assert [(change, said) for change, said, _ in compared] == [(change, took) for change, _, took in compared]
