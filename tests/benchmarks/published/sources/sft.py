"""Fine-tuning on one GPU and on ranks: the first figures of ranks on real GPUs."""

from __future__ import annotations

from published.runs import PublishedRun

_SOURCE = "FanBB2333/FakeGPU, docs/llm-sft-memory-estimation.md: the peak that its own workers had on real GPUs"
_GIB = 1 << 30


def _run(name: str, gibibytes: float, *command: str, ranks: int = 1, ampere: bool = True) -> PublishedRun:
    """On an RTX 3090 Ti, or else an RTX PRO 5000; ampmem knows neither, so the nearest, or its memory, is assumed."""
    return PublishedRun(
        key=f"sft/qwen3.5-0.8b-{name}",
        source=_SOURCE,
        address="https://github.com/FanBB2333/FakeGPU/blob/main/docs/llm-sft-memory-estimation.md",
        family="transformer",
        precision="bf16",
        gpu="rtx3090" if ampere else "72GiB",
        gpu_assumed=True,
        torch="2.12.1" if ampere else "2.8.0",
        what="allocated",
        real=round(gibibytes * _GIB),
        resolution=_GIB // 1000,
        command=("sft.py", *command, *(("--ranks",) if ranks > 1 else ())),
        environment="sft",
        ranks=ranks,
    )


RUNS = (
    _run("full-16-accumulated-2", 6.630, "full", "16", "--accumulate", "2"),
    _run("full-128", 6.687, "full", "128", ampere=False),
    _run("full-128-checkpointed", 6.679, "full", "128", "--checkpointed", ampere=False),
    _run("lora-16", 1.756, "lora", "16", ampere=False),
    _run("lora-128", 2.696, "lora", "128", ampere=False),
    _run("lora-128-checkpointed", 1.876, "lora", "128", "--checkpointed"),
    _run("fsdp-full-16-2-ranks", 3.308, "full", "16", ranks=2),
    _run("fsdp-full-128-2-ranks", 3.357, "full", "128", ranks=2),
    _run("fsdp2-lora-16-2-ranks", 1.961, "lora", "16", ranks=2),
    _run("fsdp2-lora-128-2-ranks", 2.687, "lora", "128", ranks=2),
    _run("fsdp2-lora-16-4-ranks", 1.594, "lora", "16", ranks=4),
    _run("fsdp2-lora-64-4-ranks", 1.803, "lora", "64", ranks=4),
    _run("fsdp2-lora-128-4-ranks", 2.322, "lora", "128", ranks=4),
)
