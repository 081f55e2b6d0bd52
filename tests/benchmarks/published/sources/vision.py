"""Convolutional networks under mixed precision."""

from published.runs import Precision, PublishedRun

_RESNET = "an open benchmark of mixed precision (torchvision's ResNet-50, batch 256, on a GPU that is not named)"


def _resnet(mode: str, precision: Precision, mebibytes: float, *arguments: str) -> PublishedRun:
    return PublishedRun(
        key=f"vision/resnet50-b256-{mode}",
        source=f"{_RESNET}: mode {mode} of the table in its script, mean of ten runs",
        family="cnn",
        precision=precision,
        gpu="a100-80",
        gpu_assumed=True,
        what="allocated",
        real=round(mebibytes * (1 << 20)),
        resolution=round(0.1 * (1 << 20)),
        command=("resnet50.py", "256", *arguments),
    )


RUNS = (
    _resnet("fp32_tf32", "tf32", 21399.0),
    _resnet("fp32_strict", "fp32", 21399.2),
    _resnet("fp16_amp", "amp-fp16", 11210.3, "--amp", "float16"),
    _resnet("bf16_amp", "amp-bf16", 11210.3, "--amp", "bfloat16"),
)
