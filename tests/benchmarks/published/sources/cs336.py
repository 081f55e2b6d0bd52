"""Language models that students of a course trained, each with the loop that they published beside the figures.

The GPU of the first source is not named, and assumed; of what it could be, the size of the cuBLAS workspace matters.
"""

from ampmem.allocator.settings import MIB
from published.runs import Precision, PublishedRun

FIRST = "github.com/SunnyRaymond/cs336-assignment2-systems: profiles/memory"
SECOND = "github.com/kesavanramakrishnan/assignment2-systems"
SMALL = ("--layers", "12", "--heads", "12", "--width", "768", "--hidden", "3072")
LARGE = ("--layers", "36", "--heads", "20", "--width", "1280", "--hidden", "5120")
LARGEST = ("--layers", "32", "--heads", "32", "--width", "2560", "--hidden", "10240")
SIZES = {"small": SMALL, "large": LARGE, "2.7b": LARGEST}


def first(size: str, context: int, mode: str, autocast: str, allocated: float, reserved: int) -> list[PublishedRun]:
    """A run of the first source: both its peaks, in MiB."""
    published = {"step": "train_step", "forward": "forward"}[mode]
    precision: Precision = "amp-fp16" if autocast == "float16" else "fp32"
    command = ("course_lm.py", *SIZES[size], "--context", str(context), "--mode", mode)
    options = ("--positions", "--optimizer", "torch", "--loss", "torch") + (
        ("--autocast", autocast) if autocast != "none" else ()
    )
    return [
        PublishedRun(
            key=f"cs336/{size}-ctx{context}-{mode}-{precision}-{what}",
            source=f"{FIRST}/{size}_ctx{context}_{published}_amp-{autocast}.json",
            precision=precision,
            gpu="a100-40",
            gpu_assumed=True,
            what=what,
            real=real,
            command=command + options,
            settings="expandable_segments:True",
        )
        for what, real in (("allocated", round(allocated * MIB)), ("reserved", reserved * MIB))
    ]


def second(mode: str, context: int, autocast: bool, allocated: float) -> PublishedRun:
    """A run of the second source, in MiB: one sample, bfloat16 around forward and loss."""
    options = ("--autocast", "bfloat16", "--all-in-autocast") if autocast else ()
    precision: Precision = "amp-bf16" if autocast else "fp32"
    return PublishedRun(
        key=f"cs336/2.7b-ctx{context}-{mode}-{precision}-b200",
        source=f"{SECOND}: memory-snapshots/memory_sweep_train/memory_sweep_train.csv",
        precision=precision,
        gpu="b200",
        what="allocated",
        real=round(allocated * MIB),
        command=("course_lm.py", *LARGEST, "--context", str(context), "--mode", mode, "--batch", "1", *options),
    )


def checkpointed(blocks: int, allocated: float) -> PublishedRun:
    """The same model, four samples, with so many blocks computed again at a time."""
    command = ("course_lm.py", *LARGEST, "--context", "2048", "--checkpoint", str(blocks))
    return PublishedRun(
        key=f"cs336/2.7b-ctx2048-checkpoint{blocks}-fp32-b200",
        source=f"{SECOND}: checkpoint-output/checkpoint-sweep-results/checkpoint-sweep-results.csv",
        precision="fp32",
        gpu="b200",
        what="allocated",
        real=round(allocated * MIB),
        command=command,
    )


RUNS = (
    *first("small", 128, "step", "none", 2489.15576171875, 2526),
    *first("small", 128, "step", "float16", 2479.39013671875, 2626),
    *first("small", 256, "step", "none", 3025.615234375, 3046),
    *first("small", 256, "step", "float16", 2690.638671875, 2728),
    *first("small", 512, "step", "none", 5140.478515625, 5192),
    *first("small", 512, "step", "float16", 4133.953125, 4232),
    *first("small", 128, "forward", "none", 1136.6923828125, 1146),
    *first("small", 128, "forward", "float16", 1133.3251953125, 1146),
    *first("small", 512, "forward", "none", 3916.6435546875, 3930),
    *first("small", 512, "forward", "float16", 2995.2294921875, 3030),
    *first("2.7b", 128, "forward", "none", 18359.77734375, 18410),
    *first("2.7b", 128, "forward", "float16", 22833.33984375, 22950),
    second("inference", 128, False, 13154.05078125),
    second("inference", 2048, False, 15305.681640625),
    second("inference", 128, True, 13194.05078125),
    second("inference", 2048, True, 14783.681640625),
    second("step", 128, False, 52633.99462890625),
    second("step", 2048, False, 93355.7294921875),
    second("step", 128, True, 52631.20947265625),
    second("step", 2048, True, 84484.1669921875),
    checkpointed(1, 65126.4365234375),
)
