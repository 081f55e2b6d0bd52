"""What mixed precision made of the peaks of real GPUs: figures that others published; what is ours is in a doubt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The same run in FP32 and in mixed precision, in ``unit`` as it was published."""

    what: str
    source: str
    measured: str = "allocated"
    """How: allocated, reserved, or what the driver says."""
    precision: str = "fp16 autocast"
    fp32: float
    mixed: float
    unit: str = "MiB"
    address: str = ""
    """Of ``source``, to be opened; empty where it is not known."""
    doubt: str = ""
    """What is not known of it, or speaks against it."""

    @property
    def ratio(self) -> float:
        """Of the mixed peak to that in FP32."""
        return self.mixed / self.fp32


COURSE = "github.com/SunnyRaymond/cs336-assignment2-systems, profiles/memory"
SWEEP = "github.com/kesavanramakrishnan/assignment2-systems, memory-snapshots/memory_sweep_train"
DEEP = "github.com/mryab/efficient-dl-systems, the week on mixed precision, practice.ipynb"
NOTEBOOK = "https://github.com/mryab/efficient-dl-systems"
OPENMM = "github.com/open-mmlab"
OLD = "logs of 2020, from before torch 1.6 had torch.autocast: fp16 is another implementation"
BERT = "transformers' documentation, performance.md: bert-base-cased, MRPC at 128 tokens, two GPUs"
NO_UNIT = "the source has no unit, and nvidia-smi counts MiB; --fp16 was apex or AMP, which is not said"
T4 = "a third party's comparison on a T4 (PyTorch 1.11), printed outputs"
BEFORE = "measured after other cells in the same process, and what those left alive is in it"

SAVINGS = (
    Saving(
        what="ResNet-50, batch 256 at 224, SGD with momentum",
        source="an open benchmark script and its printed results (GPU not named)",
        precision="fp16 autocast with a gradient scaler; bfloat16 autocast the same",
        fp32=21399.2,
        mixed=11210.3,
    ),
    *(
        Saving(
            what=f"language model of 128 million parameters, training step, AdamW, batch 4, {context} tokens",
            source=COURSE,
            address=f"https://{COURSE.partition(',')[0]}",
            fp32=fp32,
            mixed=mixed,
        )
        for context, fp32, mixed in (
            (128, 2489.156, 2479.390),
            (256, 3025.615, 2690.639),
            (512, 5140.479, 4133.953),
        )
    ),
    *(
        Saving(
            what=f"language model of 3.4 billion parameters, training step, AdamW, batch 1, {context} tokens",
            source=SWEEP,
            address=f"https://{SWEEP.partition(',')[0]}",
            doubt="the batch is the default of its script",
            precision="bfloat16 autocast",
            fp32=fp32,
            mixed=mixed,
        )
        for context, fp32, mixed in ((128, 52633.995, 52631.209), (2048, 93355.729, 84484.167))
    ),
    Saving(
        what="language model of 3.4 billion parameters, forward with gradients, batch 4, 128 tokens",
        source=COURSE,
        address=f"https://{COURSE.partition(',')[0]}",
        fp32=18359.777,
        mixed=22833.340,
    ),
    *(
        Saving(
            what=f"BERT base, training, batch {batch}",
            source=BERT,
            address="https://github.com/huggingface/transformers",
            measured="nvidia-smi",
            precision="fp16: apex or AMP",
            fp32=fp32,
            mixed=mixed,
            doubt=NO_UNIT,
        )
        for batch, fp32, mixed in ((8, 4247, 4163), (16, 4971, 4793), (32, 6827, 6207), (64, 10037, 8061))
    ),
    Saving(
        what="three linear layers of 6144, batch 512, SGD",
        source=DEEP,
        fp32=2271,
        mixed=2327,
        unit="MB",
        address=NOTEBOOK,
        doubt=f"{BEFORE}; simulated alone it is 2,313 MB",
    ),
    Saving(
        what="the same, with a gradient scaler",
        source=DEEP,
        precision="fp16 autocast with a gradient scaler",
        fp32=2271,
        mixed=2535,
        unit="MB",
        address=NOTEBOOK,
        doubt=f"{BEFORE}; simulated alone it is 2,313 MB, as without the scaler",
    ),
    Saving(
        what="the same course in 2022",
        source=DEEP,
        fp32=2380.75,
        mixed=2500.28,
        unit="MB",
        address=NOTEBOOK,
        doubt=BEFORE,
    ),
    Saving(
        what="the same course in 2022, with a gradient scaler",
        source=DEEP,
        precision="fp16 autocast with a gradient scaler",
        fp32=2380.75,
        mixed=2896.74,
        unit="MB",
        address=NOTEBOOK,
        doubt=f"{BEFORE}; without the scaler, and with fewer cells before it, it was 105 %",
    ),
    Saving(
        what="a small CNN on MNIST, batch 512, on a T4",
        source=T4,
        precision="fp16 autocast with a gradient scaler",
        fp32=398.0,
        mixed=167.3,
    ),
    Saving(
        what="the loop of PyTorch's recipe for AMP, on a T4",
        source=f"{T4} of PyTorch's amp_recipe.py",
        precision="fp16 autocast with a gradient scaler",
        fp32=1288.1,
        mixed=1504.2,
        doubt="the second loop ran after the first, in the same process; simulated alone it is 103.4 % of FP32",
    ),
    *(
        Saving(
            what=f"{name} with R-101-D8 at 512x1024, two images a GPU",
            source=f"{OPENMM}/mmsegmentation, model zoo",
            address=f"https://{OPENMM}/mmsegmentation",
            measured="not said",
            precision="fp16",
            fp32=fp32,
            mixed=mixed,
            unit="GB",
            doubt=OLD,
        )
        for name, fp32, mixed in (("FCN", 9.2, 5.37), ("PSPNet", 9.6, 5.34))
    ),
    *(
        Saving(
            what=f"{name}, R-50-FPN",
            source=f"{OPENMM}/mmdetection, model zoo",
            address=f"https://{OPENMM}/mmdetection",
            measured="not said",
            precision="fp16",
            fp32=fp32,
            mixed=mixed,
            unit="GB",
            doubt=OLD,
        )
        for name, fp32, mixed in (("Faster R-CNN", 4.0, 3.4), ("Mask R-CNN", 4.4, 3.6), ("RetinaNet", 3.8, 2.8))
    ),
)
