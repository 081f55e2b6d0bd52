"""Copies of weights that compiled code keeps: backward makes them again, and the peak falls as the finding says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import ampmem
from support.compiled import needs_the_compiler

pytestmark = [pytest.mark.slow, needs_the_compiler]

SCRIPT = """
import torch
from torch import nn
{changed}
layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(256, 16)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model)
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(torch.randn({batch}, 256, device="cuda")).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COPIES = 5 * 2 * 256 * 256 + 2 * 256 * 16
"""Bytes of the copies that backward reads: not that of the first layer, whose input needs no gradient."""


def summary(folder: Path, batch: int, changed: str = "") -> Any:
    (folder / "train.py").write_text(SCRIPT.format(batch=batch, changed=changed), encoding="utf-8")
    done = ampmem(folder, "profile", "--gpu", "h100", "--quiet", "--force", "--seed", "0", "train.py")
    assert done.returncode == 0, done.stderr
    return json.loads(ampmem(folder, "show", "--json", "train.ampmem").stdout)


def told(run: Any) -> Any:
    return next((finding for finding in run["findings"] if finding["code"] == "compiled-casts"), None)


def test_what_compiled_code_keeps_is_said_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = summary(tmp_path, batch=512)
    found = told(before)
    assert (found["severity"], found["bytes"]) == ("advice", COPIES)
    assert "6 16-bit copies of weights" in found["message"]
    assert "_orig_mod.2.weight: 128.0 KiB" in found["evidence"]
    after = summary(tmp_path, batch=512, changed=found["change"].partition(",")[0])
    assert after["steps"][-1]["marks"]["after_forward"]["cast_copies"] == 0
    assert told(after) is None
    assert before["peak"]["bytes"] - after["peak"]["bytes"] >= found["off_peak"] > 0

    of_a_small_batch = told(summary(tmp_path, batch=8))  # the peak is where all gradients are there
    assert (of_a_small_batch["severity"], of_a_small_batch["off_peak"]) == ("info", None)
    assert of_a_small_batch["change"].startswith("nothing to fix")
