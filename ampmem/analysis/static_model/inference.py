"""Recipes of inference: parameters, and what autocast makes of them. Nothing is trained, so nothing else is told."""

from __future__ import annotations

from dataclasses import replace

from ampmem.analysis.static_model.optimizers import NONE, Optimizers
from ampmem.analysis.static_model.static_model import AUTOCAST, FP32, PURE_HALF

INFERENCE_FP32 = replace(FP32, key="inference-fp32", title="inference in float32, parameters only", gradients=0.0)
"""4 bytes per parameter."""

INFERENCE_AUTOCAST = replace(
    AUTOCAST,
    key="inference-autocast",
    title="inference under torch.autocast, parameters and their casts",
    gradients=0.0,
)
"""4 bytes per parameter, 2 more per cast parameter while autocast's cache holds the copy, until autocast is left."""

INFERENCE_HALF = replace(
    PURE_HALF, key="inference-half", title="inference in bfloat16 or float16, parameters only", gradients=0.0
)
"""2 bytes per parameter."""

NO_OPTIMIZERS = Optimizers(of={}, default=NONE, titles=())
"""Of inference: no update is told, and no state."""
