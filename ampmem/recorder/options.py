"""What to record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

AS_IS = "as-is"
ARMS = (AS_IS, "fp32", "amp", "amp-nocache")
DEVICES = ("auto", "cpu", "cuda", "sim")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to record, and where to.

    ``steps`` is how many steps to record, ``None`` for as many as come; ``skip`` how many to let
    pass before. ``timed`` only times ``steps`` steps and writes nothing. ``baseline`` says that the
    script is running already, so storages may be alive. ``arm`` is the precision to force on the
    script, ``dtype`` what autocast is to cast to; ``None`` for what the script says. ``device`` is whose
    memory to record, one of :data:`DEVICES`. ``synchronize`` waits for a CUDA device at each step's end.
    """

    path: Path
    script: str
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    skip: int = 0
    timed: bool = False
    stacks: bool = True
    force: bool = False
    baseline: bool = True
    arm: str = AS_IS
    dtype: torch.dtype | None = None
    device: str = "auto"
    synchronize: bool = True
