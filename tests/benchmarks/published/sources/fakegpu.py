"""Fine-tuning of Qwen3.5, whole, with adapters, on weights of 4 bits and on ranks, measured by another predictor.

That predictor's own figures are of the whole step, too, but they are not in bytes, so they are not compared.
"""

from __future__ import annotations

from published.runs import PublishedRun

_REPOSITORY = "github.com/FanBB2333/FakeGPU"
_PAGE = f"{_REPOSITORY}: docs/llm-sft-memory-estimation.md"
_THOUSANDTH = (1 << 30) // 1000
"""The figures are in GiB with three places."""
_RTX_PRO, _RTX_3090 = "rtxpro6000", "rtx3090"
_MEASURED_ON = {
    _RTX_PRO: "RTX PRO 5000 72GB, torch 2.8 (simulated as an RTX PRO 6000)",
    _RTX_3090: "RTX 3090 Ti, torch 2.12.1 (simulated as an RTX 3090)",
}
_BOTH = "; the same on an RTX PRO 5000 with torch 2.8"
_TORCH = {_RTX_PRO: "2.8.0", _RTX_3090: "2.12.1"}


def _run(
    method: str,
    tokens: int,
    gibibytes: str,
    *options: str,
    model: str = "0.8B",
    gpu: str = _RTX_PRO,
    ranks: int = 0,
    both: bool = False,
) -> PublishedRun:
    name = "-".join(
        [
            f"qwen3.5-{model.lower()}-{method}-s{tokens}",
            *(["accumulated"] if "--accumulate" in options else []),
            *(["checkpointed"] if "--checkpoint" in options else []),
            *([f"{ranks}ranks"] if ranks else []),
            *([gpu] if ranks and not both else []),
        ]
    )
    return PublishedRun(
        key=f"fakegpu/{name}",
        source=f"{_PAGE}: {_MEASURED_ON[gpu]}{_BOTH if both else ''}",
        address=f"https://{_REPOSITORY}",
        family="transformer",
        precision="bf16",
        gpu=gpu,
        gpu_assumed=True,
        torch=_TORCH[gpu],
        what="allocated",
        real=round(float(gibibytes) * (1 << 30)),
        resolution=_THOUSANDTH,
        command=("qwen_sft.py", model, method, str(tokens), *options),
        environment="qwen",
        ranks=ranks,
    )


RUNS = (
    _run("fsdp", 16, "3.308", gpu=_RTX_3090, ranks=2, both=True),
    _run("fsdp", 128, "3.357", gpu=_RTX_3090, ranks=2, both=True),
    _run("fsdp2-lora", 16, "1.961", gpu=_RTX_3090, ranks=2, both=True),
    _run("fsdp2-lora", 128, "2.687", gpu=_RTX_3090, ranks=2),
    _run("fsdp2-lora", 128, "2.689", ranks=2),
    _run("nf4", 16, "1.072"),
    _run("nf4", 128, "2.007"),
    _run("nf4", 128, "1.192", "--checkpoint"),
    _run("full", 16, "6.626", "--accumulate", "2"),
    _run("full", 128, "6.687"),
    _run("full", 128, "6.679", "--checkpoint"),
    _run("lora", 16, "1.756"),
    _run("lora", 128, "2.696"),
    _run("lora", 128, "1.876", "--checkpoint"),
    _run("fsdp2-lora", 16, "1.594", gpu=_RTX_3090, ranks=4),
    _run("fsdp2-lora", 64, "1.803", gpu=_RTX_3090, ranks=4),
    _run("fsdp2-lora", 128, "2.322", gpu=_RTX_3090, ranks=4),
    _run("nf4-nested", 16, "1.051"),
    _run("nf4-nested", 128, "1.986"),
    _run("nf4-nested", 128, "1.171", "--checkpoint"),
    _run("full", 16, "15.939", "--accumulate", "2", model="2B"),
    _run("lora", 128, "4.959", model="2B"),
    _run("nf4", 128, "2.136", "--checkpoint", model="2B"),
)
