"""Runs from recipes and from pull requests."""

from __future__ import annotations

from published.runs import Precision, PublishedRun

_RECIPE = (
    "a third party's comparison of training with and without tensor cores on a Tesla T4 (PyTorch 1.11, driver "
    "470.57.02), its printed outputs of PyTorch's amp_recipe.py"
)
_YOLO = "ultralytics/yolov5#5092: AutoBatch on an A100-SXM4-40GB (torch 1.9.0+cu111), reserved, in GB"
_WORKSPACES = (
    "possible: PyTorch took cuBLAS's workspaces, 16.25 MiB, outside of its allocator then; without them the prediction "
    "is within 0.1 MiB"
)


def _recipe(mode: str, precision: Precision, real: int, *arguments: str) -> PublishedRun:
    return PublishedRun(
        key=f"others/amp-recipe-t4-{mode}",
        source=f"{_RECIPE}; {mode} precision",
        family="mlp",
        precision=precision,
        gpu="t4",
        torch="1.11",
        what="allocated",
        real=real,
        command=("mlp.py", "4096", *arguments, "--gradients-stay"),
        why=_WORKSPACES,
    )


def _yolo(batch: int, gigabytes: str) -> PublishedRun:
    return PublishedRun(
        key=f"others/yolov5s-640-b{batch}",
        source=_YOLO,
        address="https://github.com/ultralytics/yolov5/issues/5092",
        family="cnn",
        precision="amp-fp16",
        gpu="a100-40",
        torch="1.9.0",
        what="reserved",
        real=int(gigabytes.replace(".", "")) * 1_000_000,
        resolution=1_000_000,
        command=("yolov5s.py", str(batch)),
    )


RUNS = (
    _recipe("default", "fp32", 1_350_681_600, "full"),
    _recipe("mixed", "amp-fp16", 1_577_232_384, "scaled", "--after", "full"),
    _yolo(1, "0.296"),
    _yolo(2, "0.568"),
    _yolo(4, "1.007"),
    _yolo(8, "1.797"),
    _yolo(16, "3.280"),
)
