"""float16 gradients that nothing keeps from vanishing."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun


def check(run: TrainingRun) -> Finding | None:
    """Autocast to float16, and no GradScaler made an update."""
    arm = run.recording.arm
    if not run.autocast or arm.dtype != "float16" or arm.scaler:
        return None
    return Finding(
        code="fp16-without-scaler",
        severity="warning",
        section=Section.STEPS,
        message="autocast casts to float16 and no GradScaler was seen: small gradients may become zero.",
        bytes=None,
        change="scaler = torch.amp.GradScaler(device); scaler.scale(loss).backward(); scaler.step(optimizer); "
        "scaler.update() - or autocast to torch.bfloat16, which needs none",
        evidence=("autocast dtype float16", f"steps without a scaler: {len(run.steps)}"),
    )
