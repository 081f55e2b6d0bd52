"""What to record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ampmem.errors import UsageError
from ampmem.events import PlaceRecord
from ampmem.recorder.marker import Marker
from ampmem.vocabulary import NOTHING_FORCED, Arm, AutocastDtype, Device, Forced, StepOn

DTYPES = {AutocastDtype.BF16: torch.bfloat16, AutocastDtype.FP16: torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to record, and where to.

    ``steps`` is how many steps to record, ``None`` for as many as come; ``skip`` how many to let
    pass before, ``first_step`` the number of the first of all. ``timed`` only times ``steps`` steps and writes nothing.
    ``baseline`` says that the
    script is running already, so storages may be alive. ``arm`` is the precision to force on the
    script, ``dtype`` what autocast is to cast to; ``None`` for what the script says. ``device`` is whose
    memory to record. ``synchronize`` waits for a CUDA device at each step's end. ``step_on`` is what ends a step.
    ``place`` is which process of a job this is, where a launcher says so. ``assume`` is what a simulated device takes
    for granted, as it was said. ``forced`` are changes to force on the script beside the precision.
    ``script_sha256`` is the digest of the script's own file, where a command line has started it.
    """

    path: Path
    script: str
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    skip: int = 0
    first_step: int = 0
    timed: bool = False
    stacks: bool = True
    force: bool = False
    baseline: bool = True
    arm: Arm = Arm.AS_IS
    dtype: torch.dtype | None = None
    device: Device = Device.AUTO
    synchronize: bool = True
    step_on: StepOn | Marker = StepOn.FOUND
    place: PlaceRecord | None = None
    assume: tuple[str, ...] = ()
    forced: Forced = NOTHING_FORCED
    script_sha256: str = ""


def device_named(name: str) -> Device:
    """The device of that name. Raises :class:`UsageError` when there is none."""
    if name not in tuple(Device):
        raise UsageError(f"unknown device {name!r}; there are {', '.join(Device)}")
    return Device(name)
