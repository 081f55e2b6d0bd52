"""Runs that projects publish of their own benchmarks and recipes; each is repeated by a script of its own."""

from published.runs import NOT_EXPLAINED, Precision, PublishedRun

MIB = 1 << 20
_MILABENCH = "github.com/mila-iqia/milabench"
_CONTEXTS = {"h100": 1220, "l40s": 880, "h200": 1381}
"""MiB of the device that the runs on each GPU have in common beside what PyTorch reserves."""


def _milabench(gpu: str, mode: str, precision: Precision, batch: int, used: int) -> PublishedRun:
    return PublishedRun(
        key=f"projects/milabench-bert-{gpu}-{mode}-b{batch}",
        source=f"{_MILABENCH}: config/scaling/{gpu.upper()}.yaml, bert-{mode}, {used} MiB of the device less "
        f"{_CONTEXTS[gpu]} MiB, the same for all its runs on that GPU",
        precision=precision,
        gpu=gpu,
        what="reserved",
        real=(used - _CONTEXTS[gpu]) * MIB,
        resolution=2 * MIB,
        command=("hf_bert.py", "masked", str(batch), *(["--float16"] if precision == "amp-fp16" else [])),
        environment="milabench",
    )


_ONE_GPU = "huggingface.co/docs/transformers/v4.20.0/perf_train_gpu_one"
_BEFORE_BACKWARD = 1343
"""MiB that the document says its GPU has in use before any training."""
_SOFTMAX = (
    "torch before 1.11 kept softmax's input for its backward, not its output alone: 16 MiB for each layer and sample "
    "of these plain attentions"
)


def _one_gpu(name: str, precision: Precision, used: int, *arguments: str, rest: str = "") -> PublishedRun:
    return PublishedRun(
        key=f"projects/one-gpu-bert-large-{name}",
        source=f"{_ONE_GPU}: {name}, {used} MiB of the device less the {_BEFORE_BACKWARD} MiB in use before",
        precision=precision,
        gpu="v100",
        gpu_assumed=True,
        torch="1.10",
        what="reserved",
        real=(used - _BEFORE_BACKWARD) * MIB,
        resolution=2 * MIB,
        command=("hf_bert.py", "classes", *arguments),
        environment="milabench",
        why=f"{_SOFTMAX}; with them it is {rest}: the rest is {NOT_EXPLAINED}" if rest else _SOFTMAX,
    )


_LITGPT = "github.com/Lightning-AI/litgpt"


def _litgpt(name: str, gigabytes: str, *arguments: str) -> PublishedRun:
    return PublishedRun(
        key=f"projects/litgpt-{name}",
        source=f"{_LITGPT}: config_hub/finetune/README.md, {name} (0.3.0), the most allocated, in GB",
        precision="bf16",
        gpu="a10g",
        what="allocated",
        real=int(gigabytes.replace(".", "")) * 10_000_000,
        resolution=10_000_000,
        command=("litgpt_tune.py", *arguments),
        environment="litgpt",
    )


_PEFT = "github.com/huggingface/peft"
_LONGEST = 642
"""Tokens of the longest batch, chosen so that the first of these runs is met: the lengths are not published."""
_SECOND = (
    f"{NOT_EXPLAINED}: what the second step reserves varies much with the length; with 657 tokens it is 10.0 % too much"
)


def _peft(name: str, real: int, *arguments: str, tuned: bool = False, why: str = NOT_EXPLAINED) -> PublishedRun:
    return PublishedRun(
        key=f"projects/peft-llama-3b-{name}",
        source=f"{_PEFT}: method_comparison/MetaMathQA/results, {name} (peft 0.19.2.dev0), the most reserved; the "
        "length of the longest batch was chosen with the first of these runs in view",
        precision="bf16",
        gpu="l40s",
        torch="2.13.0",
        what="reserved",
        real=real,
        command=("peft_llama.py", arguments[0], str(_LONGEST), *arguments[1:]),
        environment="qwen",
        tuned=tuned,
        why=why,
    )


_TITAN = "github.com/pytorch/torchtitan"
_IN_2024 = f"{_TITAN}: benchmarks/llama3_h100_202412_torchtitan.md, table 1"
_WITHOUT_EXPANDABLE = (
    "whether its segments expand is not published: the launcher for one machine says so, the one for several does not; "
    "they do not here, because with them the first of these runs would be 3.5 % less"
)


def _titan(
    name: str, source: str, torch: str, gigabytes: str, *arguments: str, gpu: str, expandable: bool
) -> PublishedRun:
    tenths = len(gigabytes.partition(".")[2])
    return PublishedRun(
        key=f"projects/torchtitan-8b-{name}",
        source=f"{source}, the most reserved, in GiB" + ("" if expandable else f"; {_WITHOUT_EXPANDABLE}"),
        precision="bf16",
        gpu=gpu,
        torch=torch,
        what="reserved",
        real=round(float(gigabytes) * (1 << 30)),
        resolution=(1 << 30) // 10**tenths,
        command=("llama_fsdp2.py", *arguments),
        settings="expandable_segments:True" if expandable else "",
        ranks=8,
        tuned=not expandable,
    )


_TUNE = "github.com/pytorch/torchtune"


def _tune(name: str, gigabytes: str, *arguments: str) -> PublishedRun:
    return PublishedRun(
        key=f"projects/torchtune-3b-{name}",
        source=f"{_TUNE}: README.md, optimization flags, the most active, in GiB",
        precision="bf16",
        gpu="a100-80",
        what="allocated",
        real=round(float(gigabytes) * (1 << 30)),
        resolution=(1 << 30) // 10,
        command=("llama_tune.py", *arguments),
    )


RUNS = (
    _milabench("h100", "fp32", "fp32", 1, 3915),
    _milabench("h100", "fp32", "fp32", 24, 16231),
    _milabench("h100", "fp32", "fp32", 64, 40341),
    _milabench("h100", "fp16", "amp-fp16", 1, 3885),
    _milabench("h100", "fp16", "amp-fp16", 24, 12421),
    _milabench("h100", "fp16", "amp-fp16", 64, 29845),
    _milabench("l40s", "fp32", "fp32", 64, 39949),
    _milabench("l40s", "fp16", "amp-fp16", 64, 29483),
    _milabench("h200", "fp32", "fp32", 32, 21188),
    _milabench("h200", "fp16", "amp-fp16", 32, 16048),
    _litgpt("tiny-llama-full", "14.10", "tiny-llama-1.1b", "full", "4", "8"),
    _litgpt("tiny-llama-lora", "13.50", "tiny-llama-1.1b", "lora", "8", "1", "--everywhere"),
    _litgpt("llama-2-7b-lora", "19.77", "Llama-2-7b-hf", "lora", "2", "4"),
    _litgpt("phi-2-lora", "13.98", "phi-2", "lora", "4", "2", "--rank", "8", "--everywhere"),
    _peft("lora-32", 22_292_725_760, "lora", tuned=True),
    _peft("lora-64", 22_552_772_608, "lora", "--rank", "64"),
    _peft("ia3", 23_234_347_008, "ia3"),
    _peft("full", 38_868_615_168, "full", why=_SECOND),
    _one_gpu("batch-4", "fp32", 14949, "4", "--optimizer", "adamw"),
    _one_gpu("accumulate-1x4", "fp32", 8681, "1", "--accumulate", "4", "--optimizer", "adamw", rest="-1.7 %"),
    _one_gpu("checkpointing-1x4", "fp32", 6775, "1", "--accumulate", "4", "--optimizer", "adamw", "--checkpoint"),
    _one_gpu("batch-4-adafactor", "fp32", 12295, "4", "--optimizer", "adafactor"),
    _one_gpu("batch-4-adam8bit", "fp32", 13085, "4", "--optimizer", "adam8bit"),
    _one_gpu("batch-4-fp16", "amp-fp16", 13939, "4", "--optimizer", "adamw", "--float16", rest="-3.1 %"),
    # The H100 with 96 GB has the chip and the memory of the GH200.
    _titan("2x8192-selective", _IN_2024, "2.6.0.dev", "82.4", "2", "8192", "selective", gpu="gh200", expandable=False),
    _titan(
        "2x8192-selective-compiled",
        *(_IN_2024, "2.6.0.dev", "77.0", "2", "8192", "selective", "--compile"),
        gpu="gh200",
        expandable=False,
    ),
    _titan("1x4096-none", f"{_TITAN} 0.1.0", "", "53.12", "1", "4096", "none", "--fused", gpu="h100", expandable=True),
    _titan("1x4096-full", f"{_TITAN} 0.1.0", "", "28.07", "1", "4096", "full", "--fused", gpu="h100", expandable=True),
    _tune("packed", "60.0"),
    _tune("compiled", "51.0", "--compile"),
    _tune("chunked", "42.9", "--compile", "--chunked"),
    _tune("checkpointed", "24.9", "--compile", "--chunked", "--checkpoint"),
    _tune("step-in-backward", "23.1", "--compile", "--chunked", "--checkpoint", "--step-in-backward"),
    PublishedRun(
        key="projects/nanochat-d20",
        source="github.com/karpathy/nanochat: base training of depth 20 on 8 H100s, peak memory usage in seven reports",
        precision="amp-bf16",
        gpu="h100",
        torch="2.8.0",
        what="allocated",
        real=round(75422.02 * MIB),
        resolution=MIB // 100,
        command=("nanochat_gpt.py",),
        settings="expandable_segments:True",
        ranks=8,
        why="torch 2.13 has rms_norm among the ops that autocast computes in FP32, 2.8 has not",
    ),
)
