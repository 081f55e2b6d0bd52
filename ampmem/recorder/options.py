"""The options of a recording, in one form for the command line, Python, callbacks, pytest and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ampmem.allocator.gpus import DEFAULT_GPU, GPUS, GpuSpec, gpu_to_simulate
from ampmem.errors import UsageError
from ampmem.events import PlaceRecord
from ampmem.recorder.marker import Marker, step_on_of
from ampmem.vocabulary import FORCED_PRECISIONS, NOTHING_FORCED, AutocastDtype, Device, Forced, Precision, StepOn


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of a recording that a user gives."""

    steps: int | None = None
    """Number of steps to record; ``None`` for all."""
    skip: int = 0
    """Number of steps to skip before the first recorded one."""
    first_step: int = 0
    """The number of the first step, which may be skipped."""
    stacks: bool = True
    """Whether to record the Python stack of every op."""
    force: bool = False
    """Whether to replace existing files."""
    synchronize: bool = True
    """Whether to wait for a CUDA device at each step's end."""
    device: Device = Device.AUTO
    """The device whose memory to record."""
    gpu: GpuSpec | None = None
    """The GPU to simulate, if it was named."""
    assume: tuple[str, ...] = ()
    """Assumptions about data, which a simulated device does not have."""
    step_on: StepOn | Marker = StepOn.FOUND
    """The event or function that ends a step."""
    precision: Precision = Precision.AS_IS
    """The precision to force on the script."""
    dtype: AutocastDtype | None = None
    """The dtype that autocast casts to; ``None`` for the script's own choice."""
    seed: int | None = None
    """Seed of the random numbers; ``None`` leaves them alone."""
    forced: Forced = NOTHING_FORCED
    """Changes to force on the script besides the precision."""

    @property
    def gpu_or_default(self) -> GpuSpec:
        """The GPU that is simulated if one is."""
        return GPUS[DEFAULT_GPU] if self.gpu is None else self.gpu

    @property
    def simulated_gpu(self) -> GpuSpec | None:
        """The GPU to simulate; ``None`` for a real device."""
        return self.gpu_or_default if self.device is Device.SIMULATED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Asked):
    """The options of one recording: what is asked, and what is recorded into which file."""

    path: Path
    """The file to write."""
    script: str
    arguments: tuple[str, ...] = ()
    timed: bool = False
    """Whether to time the steps only, and write nothing."""
    baseline: bool = True
    """Whether storages may be alive already, because the script is running."""
    place: PlaceRecord | None = None
    """The rank of this process, according to a launcher."""
    script_sha256: str = ""
    """The digest of the script's file, if a command line started it."""

    @property
    def late(self) -> bool:
        """Whether the recording begins in the middle of the script: after skipped steps, or with an evaluation."""
        return self.skip > 0 or self.step_on is StepOn.EVALUATION


def options_of(asked: Asked, **of_recording: Any) -> Options:
    """``asked`` with the fields of :class:`Options` in ``of_recording``."""
    return Options(**{item.name: getattr(asked, item.name) for item in fields(Asked)}, **of_recording)


def asked_in_python(
    *,
    steps: object = None,
    skip: object = 0,
    first_step: int = 0,
    stacks: bool = True,
    force: bool = False,
    device: object = Device.AUTO.value,
    gpu: object = None,
    assume: object = (),
    step_on: object = None,
    precision: object = Precision.AS_IS.value,
    dtype: object = None,
    seed: object = None,
) -> Asked:
    """The arguments of :func:`ampmem.profile`, checked. Raises :class:`UsageError` for an invalid one."""
    return Asked(
        steps=None if steps is None else checked_count("steps", steps, 1, "of at least 1, or None for all"),
        skip=checked_count("skip", skip, 0, "of at least 0"),
        first_step=first_step,
        stacks=stacks,
        force=force,
        device=_device(device, gpu),
        gpu=_gpu(gpu),
        assume=_assumed(assume, simulated=gpu is not None or device == Device.SIMULATED),
        step_on=_step_on(step_on),
        precision=_precision(precision),
        dtype=_dtype(dtype, precision),
        seed=_seed(seed),
    )


def wrong_type(name: str, wanted: str, given: object) -> UsageError:
    """The error about an argument of another type than ``wanted``."""
    shown = repr(given) if isinstance(given, int | float | str) else type(given).__name__
    return UsageError(f"{name} must be {wanted}, not {shown}")


def checked_count(name: str, value: object, least: int, wanted: str, most: int | None = None) -> int:
    """``value`` if it is a whole number from ``least`` to ``most``. Raises :class:`UsageError` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(name, f"a whole number {wanted}", value)
    if value < least or (most is not None and value > most):
        raise UsageError(f"{name} must be a whole number {wanted}, not {value}")
    return value


def _device(device: object, gpu: object) -> Device:
    if not isinstance(device, str):
        raise wrong_type("device", f"one of {', '.join(Device)}", device)
    if device not in tuple(Device):
        raise UsageError(f"unknown device {device!r}; choose from {', '.join(Device)}")
    if gpu is not None and device not in (Device.AUTO, Device.SIMULATED):
        raise UsageError(f"gpu= simulates a GPU, and device={device!r} records a real device: leave one of them out")
    return Device(device)


def _gpu(gpu: object) -> GpuSpec | None:
    if gpu is not None and not isinstance(gpu, str):
        raise wrong_type("gpu", "a string such as 'h100' or '24GiB'", gpu)
    return None if gpu is None else gpu_to_simulate(gpu)


def _assumed(assume: object, *, simulated: bool) -> tuple[str, ...]:
    from ampmem.simulator.assumed import assumed_of

    if not isinstance(assume, Sequence) or not all(isinstance(each, str) for each in assume):
        raise wrong_type("assume", "a list of strings such as 'nonzero=0.5'", assume)
    texts = (assume,) if isinstance(assume, str) else tuple(assume)
    assumed_of(texts)
    if texts and not simulated:
        raise UsageError("assume= is for a simulated GPU only: give device='sim' or gpu=, too")
    return texts


def _step_on(step_on: object) -> StepOn | Marker:
    if step_on is not None and not isinstance(step_on, str):
        raise wrong_type("step_on", "a string such as 'backward' or 'train.py:train_step'", step_on)
    return step_on_of(step_on, option="step_on=")


def _precision(precision: object) -> Precision:
    if precision == Precision.BF16:
        raise UsageError(
            "precision='bf16' would leave the model of a block in bfloat16: cast it in the script, or record the whole "
            "script from the command line"
        )
    if precision not in tuple(Precision):
        raise UsageError(
            f"unknown precision {precision!r}; choose from {', '.join(FORCED_PRECISIONS)}, {Precision.AS_IS}"
        )
    return Precision(str(precision))


def _dtype(dtype: object, precision: object) -> AutocastDtype | None:
    if dtype is None:
        return None
    if dtype not in tuple(AutocastDtype):
        raise UsageError(f"unknown dtype {dtype!r}; choose from {', '.join(AutocastDtype)}")
    if not _precision(precision).autocast:
        raise UsageError(
            f"dtype is the type that autocast casts to: give precision='amp' or 'amp-nocache', not {precision}"
        )
    return AutocastDtype(str(dtype))


def _seed(seed: object) -> int | None:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise wrong_type("seed", "a whole number", seed)
    return seed
