"""Activations that stay in float32 under autocast."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import NOTABLE_BYTES, Finding, Section, TrainingRun
from ampmem.units import format_bytes

_SHARE = 0.2
_OTHERWISE = "look at where the input of {op} becomes float32, and cast it there: x = x.to(torch.bfloat16)"

# autocast's own lists: https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference. On CUDA and XPU rms_norm
# is in the float32 list since torch 2.12 (pytorch/pytorch#174824), layer_norm has always been.
_CHANGES = (
    (
        ("log_softmax", "cross_entropy", "nll_loss"),
        "the loss is computed in float32: compute it in chunks of the logits, or drop logits that have no target",
    ),
    ("loss", "the loss is computed in float32: compute it in chunks of the batch"),
    # This one is what F.scaled_dot_product_attention runs where no kernel does all of it.
    ("_safe_softmax", _OTHERWISE),
    ("softmax", "F.scaled_dot_product_attention(q, k, v) instead of softmax(q @ k.transpose(-2, -1)) @ v"),
    (
        ("layer_norm", "rms_norm"),
        "norms keep their float32 input: make the residual stream low precision, x = x.to(torch.bfloat16) after the "
        "embedding. On a GPU autocast itself runs layer_norm, and since torch 2.12 rms_norm, in float32; "
        "with torch.autocast(x.device.type, enabled=False): norm(x) in the type of x if the norm's weight has it too",
    ),
)


def check(run: TrainingRun) -> Finding | None:
    """More than a fifth of the activations' bytes at the end of forward are float32; those of the last step."""
    position = run.last_after_forward
    if not run.autocast or run.recording.arm.dtype is None or position is None:  # no type: autocast was never seen on
        return None
    by_op = _float32_by_op(run, position)
    size, activations = sum(by_op.values()), run.bytes_of(run.kept_by_autograd(position))
    if size <= _SHARE * activations or size < NOTABLE_BYTES:
        return None
    ordered = sorted(by_op.items(), key=lambda item: (-item[1], item[0]))
    return Finding(
        code="fp32-activations",
        severity="advice",
        section=Section.ACTIVATIONS,
        message=f"{format_bytes(size)} of {format_bytes(activations)} that autograd keeps are float32 at the end of "
        f"forward in spite of autocast: {', '.join(f'{format_bytes(share)} for {op}' for op, share in ordered[:3])}"
        f"{' and others' if len(ordered) > 3 else ''}.",
        bytes=size,
        change=_change(ordered[0][0]),
        evidence=tuple(f"kept for {op}: {format_bytes(share)}" for op, share in ordered[:4]),
    )


def _float32_by_op(run: TrainingRun, position: int) -> dict[str, int]:
    """Bytes of the float32 activations by the op that saved them, or else by the one that made them."""
    saved = run.analysis.saved_as
    lifetimes = run.analysis.lifetimes
    mine = np.flatnonzero(run.kept_by_autograd(position))
    found: dict[str, int] = {}
    for allocation in mine.tolist():
        if run.text(saved.dtype[allocation]) == "float32":
            name = run.text(saved.op[allocation]) or run.text(lifetimes.op[allocation]) or "an unknown op"
            found[name] = found.get(name, 0) + int(lifetimes.bytes[allocation])
    return found


def _change(op: str) -> str:
    """What to do about the activations of ``op``; the first entry with a word of it decides."""
    for words, change in _CHANGES:
        if any(word in op for word in ((words,) if isinstance(words, str) else words)):
            return change.format(op=op)
    return _OTHERWISE.format(op=op)
