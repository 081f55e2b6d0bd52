"""The options of a recording."""

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

    ``steps`` is the number of steps to record, ``None`` for all; ``skip`` the number to skip before, ``first_step`` the
    number of the first of all. ``timed`` only times ``steps`` steps and writes nothing. ``baseline``: the script is
    running already, so storages may be alive. ``arm`` is the precision to force on the script, ``dtype`` what autocast
    casts to; ``None`` keeps the script's. ``device`` is the device whose memory to record. ``synchronize`` waits for a
    CUDA device at each step's end. ``step_on`` is what ends a step. ``place`` is the rank of this process according to
    a launcher. ``assume`` are the assumptions for a simulated device, as texts. ``forced`` are changes to force on the
    script besides the precision. ``script_sha256`` is the digest of the script's file, if a command line started it.
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
    """The device with this name. Raises :class:`UsageError` if there is none."""
    if name not in tuple(Device):
        raise UsageError(f"unknown device {name!r}; choose from {', '.join(Device)}")
    return Device(name)
