"""Runs from recipes, from books and from pull requests."""

from published.runs import Precision, PublishedRun

_RECIPE = (
    "a third party's comparison of training with and without tensor cores on a Tesla T4 (PyTorch 1.11, driver "
    "470.57.02), its printed outputs of PyTorch's amp_recipe.py"
)
_YOLO = "ultralytics/yolov5#5092: AutoBatch on an A100-SXM4-40GB (torch 1.9.0+cu111), reserved, in GB"
_BOOK = "github.com/rasbt/LLMs-from-scratch"
_FINE_TUNING = "github.com/rasbt/pytorch-memory-optim"
_PROFILED = "github.com/tonghuikang/optimizer-memory-profiles"
_WORKSPACE = 8_519_680
_UNSEEN = (
    f"{_WORKSPACE:,} bytes are added to it, cuBLAS's workspace of a forward before the profile began: it is not in the "
    "timeline, as that of backward is"
)
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


def _book(mode: str, precision: Precision, gibibytes: str, *arguments: str) -> PublishedRun:
    return PublishedRun(
        key=f"others/book-gpt-b8-{mode}",
        source=f"{_BOOK}: ch05/10_llm-training-speed/README.md (torch 2.6.0, A100), reserved, {mode}",
        precision=precision,
        gpu="a100-40",
        gpu_assumed=True,
        torch="2.6.0",
        what="reserved",
        real=round(float(gibibytes) * (1 << 30)),
        resolution=(1 << 30) // 10_000,
        command=("book_gpt.py", *arguments),
    )


def _vit(mode: str, precision: Precision, gigabytes: str) -> PublishedRun:
    return PublishedRun(
        key=f"others/vit-l-16-b64-{mode}",
        source=f"{_FINE_TUNING}: logs.md, {mode}, reserved, in GB (GPU not named)",
        precision=precision,
        gpu="a100-40",
        gpu_assumed=True,
        torch="2.1.0.dev20230623",
        what="reserved",
        real=int(gigabytes.replace(".", "")) * 10_000_000,
        resolution=10_000_000,
        command=("vit_finetuned.py", mode),
        environment="torchvision",
    )


def _profiled(optimizer: str, size: int) -> PublishedRun:
    return PublishedRun(
        key=f"others/resnet50-b1-{optimizer}-a10g",
        source=f"{_PROFILED}: the timeline of PyTorch's profiler, {optimizer}; {_UNSEEN}",
        family="cnn",
        precision="fp32",
        gpu="a10g",
        what="allocated",
        real=size + _WORKSPACE,
        resolution=1 << 20,  # the allocator rounds each of some thousand tensors up to 512 bytes, the timeline does not
        command=("resnet50_profiled.py", optimizer),
    )


RUNS = (
    _recipe("default", "fp32", 1_350_681_600, "full"),
    _recipe("mixed", "amp-fp16", 1_577_232_384, "scaled", "--after", "full"),
    _yolo(1, "0.296"),
    _yolo(2, "0.568"),
    _yolo(4, "1.007"),
    _yolo(8, "1.797"),
    _yolo(16, "3.280"),
    _book("fp32", "fp32", "26.2617"),
    _book("bf16", "bf16", "13.7871", "--bfloat16"),
    _book("bf16-native", "bf16", "11.5645", "--bfloat16", "--native"),
    _vit("full", "fp32", "26.79"),
    _vit("mixed", "amp-fp16", "18.21"),
    _vit("bfloat16", "bf16", "13.82"),
    _profiled("sgd", 283_144_680),
    _profiled("momentum", 389_571_048),
    _profiled("adam", 529_772_520),
)
