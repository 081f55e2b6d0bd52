"""Two numbers that are passed around without a source, and what is known of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The peaks of ``scripts/resnet50.py``, in bytes allocated: in FP32, and under float16 autocast."""

    batch: int
    fp32: int
    mixed: int
    real: bool = False
    """Measured on a GPU, and not simulated."""

    @property
    def ratio(self) -> float:
        """Of the mixed peak to that in FP32."""
        return self.mixed / self.fp32


CLAIMED = 12_400, 6_200
"""What a ResNet-50 is said to take, in MB, and what autocast is said to make of it."""

RESNET50 = (
    Training(batch=64, fp32=5_810_747_392, mixed=3_164_260_352),
    Training(batch=128, fp32=11_353_782_784, mixed=6_043_585_024),
    Training(batch=147, fp32=12_990_446_592, mixed=6_874_560_512),
    Training(batch=256, fp32=round(21399.2 * (1 << 20)), mixed=round(11210.3 * (1 << 20)), real=True),
)
"""Simulated on an A100, but for the last (``sources/vision.py``), which the simulation meets within 0.2 %."""

NEAREST = RESNET50[2]
"""The batch whose FP32 peak is next to what is claimed, taken as MiB."""

ABOVE_HALF = (
    (
        155,
        "activations that are not halved (by their shapes likely 112 of max pooling's int64 indices, and 42 of a copy "
        "of the input in 16 bit)",
    ),
    (49, "half of the parameters"),
    (49, "half of the momentum"),
    (45, "copies of weights"),
    (42, "half of the FP32 input images"),
    (10, "rounding"),
    (8, "workspaces"),
    (4, "half of the gradients alive then"),
)
"""At batch 147: what of the mixed peak is more than half of that in FP32, in MiB, by its categories in a simulation."""

BERT = 230_000_000
"""The parameters that are multiplied by 4 bytes to say what a BERT takes."""
