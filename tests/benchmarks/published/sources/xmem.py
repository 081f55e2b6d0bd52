"""Transformers that xMem's authors trained in FP32 on three GPUs, and what four predictors said of each run.

A choice by hand of the runs that the repository lists. Left out are batches of which nobody knows how long their
longest text was: single samples without padding.

Measured was the driver's peak less what was in use at the start, which is what the allocator reserved.
"""

import re

from published.runs import NOT_EXPLAINED, Family, PublishedRun

_REPOSITORY = "github.com/Stone-ResearchLife/xMem: plot/data"
_GPUS = {
    "rtx3060": "NVIDIA-GeForce-RTX-3060",
    "rtx4060": "NVIDIA-GeForce-RTX-4060",
    "a100-40": "NVIDIA-A100-SXM4-40GB",
}
_STUDIES = {
    "anova": "001-Anova/Transformer/001",
    "random": "002-Monte Carlo/Transformer/001",
    "colab": "005-ScalabilityOnCoLab",
}
_OWNERS = "^(distilbert|EleutherAI|cerebras|facebook|openai-community|Qwen|deepseek-ai)-"
"""Whose a model is, before its name in a folder's."""
_WHY = {
    "Cerebras-GPT-111M-AdamW-10": "possible: the longest text of each batch is not known, and taken to have 128 "
    "tokens; shorter ones leave blocks of other sizes in the cache. With 100, 128, 120 and 128 tokens, which were "
    "picked for it, 3916 MiB are reserved, which is still 4.2 % less than the real figure"
}

# study/run, GPU, bytes (- where it ran out of memory), and what xMem, DNNMem, SchedTune and LLMem said
LISTED = """
anova/distilbert-distilgpt2_AdamW_10_1_10-4aee rtx3060 3160408064 3275751424 2061500416 2544138977 1641021440
anova/distilbert-distilgpt2_Adam_30_1_10-124e rtx3060 7377780736 7958691840 5119148032 2544138977 1836056576
anova/EleutherAI-gpt-neo-125M_SGD_5_1_10-2b7a rtx3060 2401239040 2327838720 1786773504 3855037235 4728029184
anova/EleutherAI-gpt-neo-125M_AdamW_10_1_10-6912 rtx3060 4445962240 4783603712 3292528640 3855037235 6328156160
anova/EleutherAI-gpt-neo-125M_Adam_30_1_10-78b8 rtx3060 9997123584 9693036544 8262778880 3855037235 12732858368
anova/T5-small_AdamW_10_1_0512 rtx3060 2766143488 2835349504 2799697920 2544138977
anova/T5-small_Adam_30_1_4a57 rtx3060 6517948416 6417285120 8638169088 2544138977
anova/T5-small_SGD_25_1_b30e rtx3060 5196742656 5066719232 6666846208 2544138977
anova/cerebras-Cerebras-GPT-111M_AdamW_10_1_8-fc0b rtx3060 4286578688 3749707776 2642411520 3855037235 1917845504
anova/cerebras-Cerebras-GPT-111M_SGD_25_1_8-954b rtx3060 5746196480 5880414208 5515509760 3855037235 2112880640
anova/cerebras-Cerebras-GPT-111M_Adam_20_1_8-ff7a rtx3060 5909774336 5916065792 4726980608 3855037235 2045771776
random/facebook-opt-125m_AdamW_11_0_8-0a25 rtx4060 3955228672 4349493248 3764387840 3761797857 6582960128
random/facebook-opt-125m_AdamW_38_1_8-e84e rtx3060 8906604544 9332326400 10775166976 3855037235 15213789184
random/facebook-opt-350m_AdamW_7_1_8-627c rtx3060 7442792448 7874805760 6035603456 4007510671 8385462272
random/facebook-opt-350m_AdamW_13_1_8-ad85 rtx3060 8896118784 9317646336 9470738432 4007510671 10394533888
random/openai-community-gpt2_AdamW_27_1_16-d5d6 rtx3060 9823059968 9992929280 7751073792 3855037235 2217738240
random/openai-community-gpt2_AdamW_35_1_16-9ace rtx3060 11435769856 11702108160 9529458688 3855037235 2330984448
random/t5-base_AdamW_46_1_135d rtx3060 - 12297699328 12746489856 4007510671
random/t5-base_AdamW_29_0_fc98 rtx4060 - 8281653248 8409579520 3937444823
random/T5-small_AdamW_41_0_a4f1 rtx4060 8206155776 8315207680 8046772224 2304046530
random/distilbert-distilgpt2_AdamW_22_0_10-bce9 rtx4060 5544869888 5991563264 3980394496 2304046530 1751121920
random/cerebras-Cerebras-GPT-111M_AdamW_16_0_8-5b15 rtx4060 4703911936 4815060992 3755999232 3761797857 1975517184
random/EleutherAI-gpt-neo-125M_AdamW_8_0_10-8d5e rtx4060 3982491648 4175429632 2782920704 3761797857 5672796160
colab/Qwen-Qwen3-4B_SGD_1_0_4-06f7 a100-40 36704354304 35103178752 20345520128
colab/deepseek-ai-DeepSeek-R1-Distill-Qwen-1.5B_SGD_1_0_11-1f12 a100-40 15229517824 15448670208 9924771840
"""


def published(
    family: Family, folder: str, gpu: str, name: str, real: str, said: list[str], why: str, *, tuned: bool = False
) -> PublishedRun:
    """The run in ``folder`` of the repository, whose ``name`` is its model, optimizer and batch, between hyphens."""
    return PublishedRun(
        key=f"xmem/{name}-{gpu}",
        source=f"{_REPOSITORY}/{folder}/{_GPUS[gpu]}/evaluation_result.json",
        family=family,
        precision="fp32",
        gpu=gpu,
        tuned=tuned,
        torch="2.6.0",
        what="fits" if real == "-" else "reserved",
        real=0 if real == "-" else int(real),
        fitted=False if real == "-" else None,
        others=dict(zip(("xMem", "DNNMem", "SchedTune", "LLMem"), map(int, said), strict=False)),
        command=(f"xmem_{family}.py", *name.rsplit("-", 2)),
        environment="torchvision" if family == "cnn" else "xmem",
        why=why,
    )


def _run(line: str) -> PublishedRun:
    folder, gpu, real, *said = line.split()
    study, _, run = folder.partition("/")
    name = re.sub(_OWNERS, "", "-".join(run.split("_")[:3]))
    why = _WHY.get(name, NOT_EXPLAINED)
    return published("transformer", f"{_STUDIES[study]}/{run}", gpu, name, real, said, why)


RUNS = tuple(_run(line) for line in LISTED.split("\n") if line)
