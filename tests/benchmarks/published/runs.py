"""What is known of a published run, what a simulation of it came to, and how the two compare."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Family = Literal["transformer", "cnn", "mlp", "recurrent", "other"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
"""``bf16`` and ``fp16`` are weights of that type; ``amp-…`` is FP32 weights under autocast."""
What = Literal["allocated", "reserved", "device", "fits"]

NOT_EXPLAINED = "not explained"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A training run that somebody published, with the configuration that it takes to repeat it.

    ``command`` is a script of ``scripts/`` and its arguments: a plain training script for a GPU. What it allocates
    before it calls ``torch.cuda.reset_peak_memory_stats`` is not in its peaks, as on a GPU.
    """

    key: str
    """Its name: ``source/model-and-what-else``; ``--only`` takes parts of it."""
    source: str
    """Where the figure is published: repository and path, or address."""
    address: str = ""
    """Of ``source``, to be opened: the page that it begins with where none is given; empty where it is not known."""
    family: Family = "transformer"
    precision: Precision
    gpu: str
    """What to simulate: a name that ``--gpu`` takes, or an amount of memory. The real one where that is known."""
    gpu_assumed: bool = False
    """Where the source does not name it, or not surely."""
    torch: str = ""
    """The version of the published run; empty where it is not said."""
    what: What
    """What was measured: a peak of the allocator; ``device`` for what the driver or ``nvidia-smi`` said; ``fits`` for
    nothing but that it ran, or that it ran out of memory."""
    real: int = 0
    """Bytes; 0 for ``fits``."""
    fitted: bool | None = None
    """Whether it ran, for ``fits``."""
    reason_known: bool = True
    """Whether the source says that memory was why it failed; a row without that is no verdict."""
    resolution: int = 0
    """Bytes that the published figure is rounded to; 0 where it is exact."""
    others: Mapping[str, int] = field(default_factory=dict)
    """What other predictors said of this very run, in bytes."""
    command: tuple[str, ...]
    environment: str = ""
    """The list of libraries in ``environments/`` that the script needs beside torch; none where empty."""
    settings: str = ""
    """``PYTORCH_CUDA_ALLOC_CONF`` of the run."""
    ranks: int = 0
    """How many processes trained together; the figure is that of the first. 0 where no launcher started the script."""
    snapshot: str = ""
    """The name of the recording of the run, where it is at hand: then the allocations are compared one by one."""
    tuned: bool = False
    """Whether a constant of the simulation was chosen with this run among others."""
    why: str = NOT_EXPLAINED
    """What a miss is, or may be, explained by."""

    def __post_init__(self) -> None:
        if not self.address and self.source.startswith(("github.com/", "huggingface.co/")):
            object.__setattr__(self, "address", f"https://{re.split('[:, ]', self.source)[0]}")
        if (self.what == "fits") != (self.fitted is not None) or (self.what == "fits") == (self.real > 0):
            raise ValueError(f"{self.key}: a run has either bytes, or whether it fitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The least and the most bytes that a simulation takes to be possible, and what it takes to be likely; all the same
    where everything is known."""

    least: int
    likely: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation came to; bytes."""

    allocated: Peak
    reserved: Peak
    outside: Peak
    """What the device holds beside what is reserved: CUDA's context and libraries."""
    total: int
    ran_out: bool
    seconds: float
    sizes: tuple[int, ...] = ()
    """Of the allocations that its peaks cover, in order; only where a snapshot is compared."""

    def peak(self, what: What) -> Peak:
        """What corresponds to the published figure."""
        if what == "allocated":
            return self.allocated
        if what == "reserved":
            return self.reserved
        return Peak(
            least=self.reserved.least + self.outside.least,
            likely=self.reserved.likely + self.outside.likely,
            most=self.reserved.most + self.outside.most,
        )

    @property
    def fits(self) -> bool | None:
        """``None`` where it may."""
        device = self.peak("device")
        if self.ran_out or device.least > self.total:
            return False
        return True if device.most <= self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Two sequences of allocations: how long each is, how many allocations they share in order, and where they part.

    ``first_difference`` is the place of the first allocation that is another; -1 where they are equal.
    """

    real: int
    simulated: int
    common: int
    first_difference: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published run beside its simulation."""

    run: PublishedRun
    simulated: Simulated
    sequence: Sequence | None = None
    day: str = ""
    """When it was simulated: year, month and day."""

    @property
    def predicted(self) -> Peak:
        """Bytes; of a run that only fitted or not, what the device holds."""
        return self.simulated.peak(self.run.what)

    @property
    def error(self) -> float | None:
        """Of what is likely, as a fraction of what is real; ``None`` where there is only a verdict."""
        return None if self.run.fitted is not None else self.predicted.likely / self.run.real - 1

    @property
    def held(self) -> bool | None:
        """Whether the truth is inside of what was predicted, or the verdict not false ("may fit" is not).

        ``None`` where one number was predicted, whose error says it, and where the truth is not known.
        """
        if not self.run.reason_known:
            return None
        if self.run.fitted is not None:
            return self.simulated.fits is None or self.simulated.fits == self.run.fitted
        if self.predicted.least == self.predicted.most:
            return None
        slack = self.run.resolution // 2
        return self.predicted.least - slack <= self.run.real <= self.predicted.most + slack

    def error_of(self, predictor: str) -> float | None:
        """The same of another predictor; ``None`` where it said nothing of this run."""
        said = self.run.others.get(predictor)
        return None if said is None or self.run.real == 0 else said / self.run.real - 1
