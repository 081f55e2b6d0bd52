"""The batches at which timm's own benchmark trained its models on an RTX 3090 of 24 GB, under autocast.

It begins with 512, and takes the next smaller of 384, 256, 192, 128, 96, … whenever a step fails; its table has the
first that ran. So what it says of memory is that this batch fits. Why the one before failed, it does not say: that is
no verdict.
"""

from published.runs import PublishedRun

_TABLE = (
    "huggingface/pytorch-image-models: results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv (commit aa4b585), "
    "made by benchmark.py of version 0.6.6"
)
_TRIED = (512, 384, 256, 192, 128, 96, 64, 48)


def _run(model: str, batch: int, *, fitted: bool) -> PublishedRun:
    return PublishedRun(
        key=f"timm/{model}-b{batch}",
        source=_TABLE,
        family="transformer" if model.startswith(("vit", "swin", "mixer")) else "cnn",
        precision="amp-fp16",
        gpu="rtx3090",
        torch="1.12",
        what="fits",
        fitted=fitted,
        reason_known=fitted,
        address="https://github.com/huggingface/pytorch-image-models/tree/aa4b585/results",
        command=("timm_train.py", model, str(batch)),
        environment="timm",
    )


_RAN = {
    "resnext50_32x4d": 384,
    "resnet101": 256,
    "resnet152": 192,
    "densenet121": 256,
    "vgg19": 384,
    "efficientnet_b0": 384,
    "regnety_032": 384,
    "convnext_tiny": 256,
    "swin_tiny_patch4_window7_224": 256,
    "mixer_b16_224": 256,
    "vit_small_patch16_224": 384,
    "vit_base_patch16_224": 192,
    "vit_large_patch16_224": 64,
}
"""By model the batch that ran."""

_STEP_ABOVE = ("resnet101", "convnext_tiny", "swin_tiny_patch4_window7_224", "vit_base_patch16_224")

RUNS = (
    *(_run(model, batch, fitted=True) for model, batch in _RAN.items()),
    *(_run(model, _TRIED[_TRIED.index(_RAN[model]) - 1], fitted=False) for model in _STEP_ABOVE),
)
