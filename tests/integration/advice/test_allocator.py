"""Advice about the allocator is followed here: the script runs with the setting, and reserves what was said."""

from __future__ import annotations

from pathlib import Path

from support.commands import ampmem

from ampmem.analysis.summary import Summary, summarize
from ampmem.recording import read

SETTING = "expandable_segments:True"
SCRIPT = """
import os
os.environ["PYTORCH_ALLOC_CONF"] = "{settings}"
import torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for length in (8000, 12000, 18000):  # each step needs larger blocks than those that the one before has freed
    model(torch.randn(length, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def recorded(folder: Path, settings: str) -> Summary:
    (folder / "train.py").write_text(SCRIPT.format(settings=settings))
    done = ampmem(folder, "profile", "--device", "sim", "--quiet", "--force", "train.py")
    assert done.returncode == 0, done.stderr
    return summarize(read(folder / "train.ampmem"))


def most_reserved(summary: Summary) -> int:
    return max(step.peak_reserved or 0 for step in summary.steps)


def test_reserved_memory_falls_by_what_the_advice_says(tmp_path: Path) -> None:
    before, after = (
        recorded(tmp_path, "max_split_size_mb:2000"),
        recorded(tmp_path, f"max_split_size_mb:2000,{SETTING}"),
    )
    (told,) = [finding for finding in before.findings if finding.code == "fragmentation"]
    assert (told.severity, told.off_peak) == ("advice", None)
    assert told.off_reserved == most_reserved(before) - most_reserved(after)
    assert told.change.startswith(f"PYTORCH_ALLOC_CONF=max_split_size_mb:2000,{SETTING} ")
    assert told.proof == "ampmem advise --gpu a100-80 --allow allocator train.py"
    assert after.peak.bytes == before.peak.bytes
    assert "fragmentation" not in [finding.code for finding in after.findings]
