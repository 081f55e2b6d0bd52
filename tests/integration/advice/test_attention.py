"""What is said about attention on a simulated GPU saves at least what is computed once it is written in the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import ampmem

from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings import findings
from ampmem.analysis.findings.base import Finding
from ampmem.recording import read

pytestmark = pytest.mark.slow

BATCH, HEADS, LENGTH, LAYERS = 2, 8, 256, 3
WEIGHTS = BATCH * HEADS * LENGTH * LENGTH * 4
"""Bytes of the attention weights of a layer in float32."""
KEPT_INSTEAD = 32 + 2
"""A fused kernel keeps 32 numbers of each head and query, and one in float32, where the math kernel keeps LENGTH."""
SCRIPT = """
import math
from contextlib import nullcontext
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn import functional as F

size, groups, kind = {size}, {groups}, "{kind}"

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8 * size, 8 * size), nn.Linear(8 * size, 8 * size // groups)

    def forward(self, x, mask):
        q, k = (each(x).unflatten(-1, (-1, size)).transpose(1, 2) for each in (self.query, self.key))
        if kind == "repeated":
            k = k.repeat_interleave(groups, 1)
        v, changed, how = k, kind.endswith("changed"), dict()
        if "causal" in kind:  # torch makes no CausalBias of a simulated tensor
            q, how = q[:, :, :128], dict(is_causal=not changed)
        if "narrow" in kind:
            v = F.pad(k[..., :16], (0, 16)) if changed else k[..., :16]
        if "strided" in kind:
            q, k, v = (each.mT.contiguous().mT for each in (q, k, v))
            q, k, v = (each.contiguous() for each in (q, k, v)) if changed else (q, k, v)
        if "flat" in kind:
            q, k, v = (each.flatten(0, 1).unsqueeze(1) if changed else each.flatten(0, 1) for each in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH) if kind == "disabled" else nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[1] < q.shape[1], **how)
        if y.shape != q.shape or "flat" in kind or "causal" in kind:
            return x + y.float().mean()
        return x + y.transpose(1, 2).flatten(2)

if "reduced" in kind:
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
layers = nn.ModuleList([Layer() for _ in range(3)]).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(2):
    x, mask = torch.randn(2, 256, 8 * size, device="cuda"), None
    if "mask" in kind:
        mask = torch.ones(2, 1, 256, 256, dtype=torch.bool, device="cuda").tril()
    if kind == "one mask":
        flags, mask = mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill(~mask, -math.inf)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled={autocast}):
        for layer in layers:
            x = layer(x, mask)
        loss = x.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def recorded(folder: Path, kind: str, *, size: int = 32, groups: int = 1, autocast: bool = True) -> tuple[int, Finding]:
    """The most requested bytes, and the finding about attention."""
    (folder / "train.py").write_text(SCRIPT.format(kind=kind, size=size, groups=groups, autocast=autocast))
    command = ("profile", "--gpu", "a100-40", "--steps", "2", "--quiet", "--force", "-o", "run.ampmem", "train.py")
    done = ampmem(folder, *command)
    assert done.returncode == 0, done.stderr
    analysis = analyse(read(folder / "run.ampmem"))
    found = {each.code: each for each in findings(analysis) if each.code.startswith("attention-")}
    return int(analysis.timeline.total.max()), found.get("attention-masks") or found["attention-kernel"]


def test_repeated_heads_let_a_fused_kernel_run_in_float32(tmp_path: Path) -> None:
    before, said = recorded(tmp_path, "grouped", groups=4, autocast=False)
    assert "enable_gqa in float32" in said.message
    assert (said.severity, said.bytes) == ("advice", LAYERS * WEIGHTS)
    after, fused = recorded(tmp_path, "repeated", groups=4, autocast=False)
    assert said.off_peak is not None
    assert before - after >= said.off_peak >= LAYERS * WEIGHTS * (LENGTH - KEPT_INSTEAD) // LENGTH
    assert "ran its memory-efficient kernel" in fused.message
    assert "float32" in fused.message


def test_a_script_that_disables_the_fused_kernels_allows_them_again(tmp_path: Path) -> None:
    before, said = recorded(tmp_path, "disabled")
    assert said.message.endswith("the script disabled the flash, memory-efficient and cuDNN kernels.")
    assert (said.severity, said.bytes) == ("advice", LAYERS * WEIGHTS)
    after, fused = recorded(tmp_path, "enabled")
    assert said.off_peak is not None
    assert before - after >= said.off_peak >= LAYERS * WEIGHTS * (LENGTH - KEPT_INSTEAD) // LENGTH
    assert fused.message.startswith("F.scaled_dot_product_attention in * ran its flash kernel, which keeps ")
    assert (fused.severity, fused.off_peak) == ("info", None)


def test_the_math_kernel_keeps_half_with_the_reduced_precision_switch(tmp_path: Path) -> None:
    before, said = recorded(tmp_path, "mask", size=36)
    assert "a multiple of 8, and it is 36" in said.message
    assert said.bytes == LAYERS * WEIGHTS
    after, reduced = recorded(tmp_path, "reduced mask", size=36)
    assert said.off_peak is not None
    assert before - after >= said.off_peak >= LAYERS * WEIGHTS // 2
    assert (reduced.bytes, reduced.off_peak) == (LAYERS * WEIGHTS // 2, None)
    assert "reduction_math_sdp" not in reduced.change


def test_a_boolean_mask_is_converted_in_each_layer(tmp_path: Path) -> None:
    before, said = recorded(tmp_path, "mask")
    assert (said.code, said.bytes) == ("attention-masks", (LAYERS - 1) * 2 * LENGTH * LENGTH * BATCH)
    after, kernel = recorded(tmp_path, "one mask")
    assert before - after == said.off_peak
    assert "an attn_mask, which the flash kernel does not take" in kernel.message


@pytest.mark.parametrize(
    ("kind", "why", "kernel"),
    [
        ("causal", "takes is_causal only where there are as many keys as queries", "memory-efficient"),
        ("narrow", "q and k have the head size 32, v has 16", "memory-efficient"),
        ("strided", "no fused kernel takes its arguments: their last dimension is not contiguous", "math"),
        ("flat", "q, k and v have three dimensions", "math"),
    ],
)
def test_why_the_flash_kernel_does_not_take_them(tmp_path: Path, kind: str, why: str, kernel: str) -> None:
    _, said = recorded(tmp_path, kind)
    assert f"ran its {kernel} kernel" in said.message and why in said.message
    _, said = recorded(tmp_path, f"{kind} changed")
    assert "ran its flash kernel" in said.message
