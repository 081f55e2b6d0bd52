"""Recordings of PyTorch's allocator that others made on their GPUs, in public repositories.

The figures are what the traces come to when ampmem's model of the allocator replays them, with no block moved. Where a
recording is at hand (``AMPMEM_SNAPSHOTS`` names its folder), its allocations are compared with those of the simulation,
one by one. Which GPU it was is guessed from the size of the cuBLAS workspaces. Left out: a run of LLaMA and LoRA with
kernels of its own, a synthetic file, and a small network under anomaly detection whose recording begins in the middle.
"""

from published.runs import Family, Precision, PublishedRun

COURSE = ("--mode", "backward", "--context", "512", "--warmup", "1", "--positions")
LARGEST = ("--layers", "32", "--heads", "32", "--width", "2560", "--hidden", "10240")
EARLIER = "possible: what ran before the recording began is not in it, and so neither is what that left in the cache"
UNLIKE = (
    "possible: only the model's sizes are known: its norm, positions and optimizer are those of another implementation"
)


def recorded(
    key: str,
    snapshot: str,
    origin: str,
    precision: Precision,
    gpu: str,
    peaks: tuple[int, int],
    command: tuple[str, ...],
    torch: str = "",
    why: str = "",
    family: Family = "transformer",
) -> list[PublishedRun]:
    """Both peaks of a recording, in bytes."""
    return [
        PublishedRun(
            key=f"snapshots/{key}-{what}",
            source=f"{origin}: {snapshot}",
            family=family,
            precision=precision,
            gpu=gpu,
            gpu_assumed=True,
            torch=torch,
            what=what,
            real=real,
            command=command,
            snapshot=snapshot,
            **({"why": why} if why else {}),
        )
        for what, real in zip(("allocated", "reserved"), peaks, strict=True)
    ]


BLOG = "PyTorch's blog on understanding GPU memory"
PUBLIC = "a repository of a student of the course cs336"
FIRST, SECOND = "github.com/kkaitlyn111/cs336-a2-systems", "github.com/Wedsonlin/assignment2-systems"
ABOUT = {
    "lm_small_ctx200_amp_3steps": "4 layers, three training steps under bfloat16 autocast, from an empty GPU",
    "lm_small_ctx200_fp32_3steps": "the same in FP32",
    "lm2700m_ctx512_amp_fwdbwd": "3.4 billion parameters, 512 tokens, forward and backward, bfloat16 autocast",
    "lm2700m_ctx512_fp32_fwdbwd": "the same in FP32",
    "lm_medium_ctx128_fp32_step": "24 layers, 128 tokens, training step, FP32",
    "lm_medium_ctx512_bf16_inference": "24 layers, 512 tokens, inference, bfloat16 autocast",
    "lm2700m_ctx128_fp32_forward": "3.4 billion parameters, 128 tokens, forward, FP32 (another implementation)",
    "lm2700m_ctx128_bf16_forward": "the same under bfloat16 autocast",
    "lm2700m_ctx128_fp32_step": "3.4 billion parameters, 128 tokens, training step, FP32 (another implementation)",
    "resnet50_fp32_3steps": "ResNet-50, one image, three training steps, FP32",
}
"""What each recording is of."""
RUNS = (
    *recorded(
        *("lm-small-3-steps-amp", "lm_small_ctx200_amp_3steps", PUBLIC, "amp-bf16", "a100-80"),
        *((984_657_920, 1_205_862_400), ("lm_by_hand.py", "--amp"), "2.6"),
    ),
    *recorded(
        *("lm-small-3-steps-fp32", "lm_small_ctx200_fp32_3steps", PUBLIC, "fp32", "a100-80"),
        *((1_234_635_264, 1_390_411_776), ("lm_by_hand.py",), "2.6"),
    ),
    *recorded(
        *("lm-2.7b-ctx512-backward-amp", "lm2700m_ctx512_amp_fwdbwd", PUBLIC, "amp-bf16", "h100"),
        (40_100_224_000, 41_827_696_640),
        ("course_lm.py", *LARGEST, *COURSE, "--autocast", "bfloat16", "--all-in-autocast"),
        *("2.6", EARLIER),
    ),
    *recorded(
        *("lm-2.7b-ctx512-backward-fp32", "lm2700m_ctx512_fp32_fwdbwd", PUBLIC, "fp32", "h100"),
        *((43_176_287_232, 46_646_951_936), ("course_lm.py", *LARGEST, *COURSE), "2.6", EARLIER),
    ),
    *recorded(
        *("lm-medium-ctx128-step-fp32", "lm_medium_ctx128_fp32_step", SECOND, "fp32", "a100-80"),
        *((7_026_606_592, 7_235_174_400), ("workload_lm.py", "1", "1")),
    ),
    *recorded(
        *("lm-medium-ctx512-inference-amp", "lm_medium_ctx512_bf16_inference", SECOND, "amp-bf16", "a100-80"),
        (1_951_309_824, 1_981_808_640),
        ("workload_lm.py", "1", "1", "--context", "512", "--precision", "amp", "--inference"),
    ),
    *recorded(
        *("lm-2.7b-ctx128-forward-fp32", "lm2700m_ctx128_fp32_forward", FIRST, "fp32", "h100"),
        *((19_498_420_224, 19_667_091_456), ("workload_lm.py", "0", "1", "--forward", *LARGEST), "", UNLIKE),
    ),
    *recorded(
        *("lm-2.7b-ctx128-forward-amp", "lm2700m_ctx128_bf16_forward", FIRST, "amp-bf16", "h100"),
        (24_024_505_344, 24_245_174_272),
        ("workload_lm.py", "0", "1", "--forward", *LARGEST, "--precision", "amp"),
        *("", UNLIKE),
    ),
    *recorded(
        *("lm-2.7b-ctx128-step-fp32", "lm2700m_ctx128_fp32_step", FIRST, "fp32", "h100"),
        *((55_079_000_576, 61_111_009_280), ("workload_lm.py", "0", "1", *LARGEST), "", UNLIKE),
    ),
    *recorded(
        *("resnet50-b1-3-steps-fp32", "resnet50_fp32_3steps", BLOG, "fp32", "a100-80"),
        *((525_862_400, 589_299_712), ("resnet50.py", "1"), "2.1"),
        why="possible: some convolutions ask for 128 MiB whatever their tensors are, more than the batch of one image",
        family="cnn",
    ),
)
