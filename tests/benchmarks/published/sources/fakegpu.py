"""Fine-tuning of Qwen3.5, whole, with adapters, on weights of 4 bits and on ranks, measured by another predictor.

That predictor's own figures are rounded to a percentage, so they are not compared.
"""

from published.runs import PublishedRun

_REPOSITORY = "github.com/FanBB2333/FakeGPU"
_PAGE = f"{_REPOSITORY}: docs/llm-sft-memory-estimation.md"
_THOUSANDTH = (1 << 30) // 1000
"""The figures are in GiB with three places."""
_RTX_PRO = "RTX PRO 5000 72GB, torch 2.8"
_RTX_3090 = "RTX 3090 Ti, torch 2.12.1"


def _run(
    method: str, tokens: int, gibibytes: str, *options: str, ranks: int = 0, measured: str = _RTX_PRO
) -> PublishedRun:
    """All are simulated as an RTX 3090: on an RTX PRO 5000, torch 2.8 took the same workspace of cuBLAS, 8.1 MiB, and
    later versions take 32 MiB."""
    name = "-".join(
        [
            f"{method}-s{tokens}",
            *(["accumulated"] if "--accumulate" in options else []),
            *(["checkpointed"] if "--checkpoint" in options else []),
            *([f"{ranks}ranks"] if ranks else []),
        ]
    )
    return PublishedRun(
        key=f"fakegpu/qwen3.5-0.8b-{name}",
        source=f"{_PAGE}: {measured} (simulated as an RTX 3090)",
        precision="bf16",
        gpu="rtx3090",
        gpu_assumed=True,
        torch="2.8.0" if measured is _RTX_PRO else "2.12.1",
        what="allocated",
        real=round(float(gibibytes) * (1 << 30)),
        resolution=_THOUSANDTH,
        command=("qwen_sft.py", "0.8B", method, str(tokens), *options),
        environment="qwen",
        ranks=ranks,
    )


_BOTH = f"{_RTX_3090}, and the same on an {_RTX_PRO}"
RUNS = (
    _run("full", 16, "6.626", "--accumulate", "2"),
    _run("full", 128, "6.687"),
    _run("full", 128, "6.679", "--checkpoint"),
    _run("lora", 16, "1.756"),
    _run("lora", 128, "2.696"),
    _run("lora", 128, "1.876", "--checkpoint"),
    _run("nf4", 16, "1.072"),
    _run("nf4", 128, "2.007"),
    _run("nf4", 128, "1.192", "--checkpoint"),
    _run("fsdp", 16, "3.308", ranks=2, measured=_BOTH),
    _run("fsdp", 128, "3.357", ranks=2, measured=_BOTH),
    _run("fsdp2-lora", 16, "1.961", ranks=2, measured=_BOTH),
    _run("fsdp2-lora", 128, "2.687", ranks=2, measured=f"{_RTX_3090}, and 2.689 GiB on an {_RTX_PRO}"),
)
