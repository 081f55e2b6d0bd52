"""``ampmem estimate`` without a run: the search, the script that is written, the configurations, the text."""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.command_line import ampmem_here
from support.golden_sections import Golden

from ampmem.allocator.gpus import GPUS, find_gpu
from ampmem.analysis.fine_tuning import Estimate, EstimateCell, Method, Training, estimate, estimate_schema, next_runs
from ampmem.analysis.fit import Memory, Points
from ampmem.analysis.jsonable import from_json
from ampmem.cli.estimate_script import SHAPES, configuration, script_text, tokens
from ampmem.errors import UsageError
from ampmem.reporters.text.fine_tuning import headline, render_estimate
from ampmem.vocabulary import Precision

MIB = 1 << 20
OUTSIDE = 300 * MIB
TRAINING = Training(
    model="gpt2",
    methods=(Method.FULL, Method.LORA),
    optimizer="adamw",
    lora=16,
    batch=2,
    seq=1024,
    checkpointing=False,
    world_size=None,
)
EVERY = (Method.FULL, Method.LORA, Method.NF4)
LLAMA = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64, "tie_word_embeddings": False}


def searched(batch: int, total: int, first: int, each: int) -> dict[EstimateCell, dict[int, Memory | None]]:
    """The runs of a search in which a batch of n takes ``first + n * each`` bytes."""
    cell = EstimateCell(Method.FULL, Precision.BF16)
    points: dict[EstimateCell, dict[int, Memory | None]] = {cell: {}, cell._replace(roomy=True): {}}
    while due := next_runs(points, batch, total):
        key, value = due[0]
        peak = first + value * each
        fits = key.roomy or peak + OUTSIDE <= total
        points[key][value] = Memory(allocated=peak, reserved=peak, used=peak + OUTSIDE) if fits else None
    return points


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 9, 40])
@pytest.mark.parametrize("most", [0, 1, 2, 8, 39, 300])
def test_the_search_ends_close_to_the_largest_batch_that_fits(batch: int, most: int) -> None:
    total = OUTSIDE + 500 * MIB + most * 100 * MIB + 99 * MIB
    points = searched(batch, total, 500 * MIB, 100 * MIB)
    here, roomy = points.values()
    assert (batch in here) and (roomy.keys() == ({batch} if batch > most else set()))
    fits = max((value for value, memory in here.items() if memory), default=0)
    too_large = min(value for value, memory in here.items() if memory is None and value > fits)
    assert fits <= most < too_large and too_large - fits <= max(1, fits // 16) and len(here) <= 8
    (cell,) = estimate(points, replace(TRAINING, batch=batch), gpu="h100", total=total, notes=()).cells
    assert cell.asked.allocated == 500 * MIB + batch * 100 * MIB and cell.asked.fits == (batch <= most)
    assert (cell.largest_fitting or 0, cell.smallest_not_fitting) == (fits, too_large)


@pytest.mark.parametrize(
    ("optimizer", "checkpointing", "world_size", "methods", "seq"),
    [
        *itertools.product(("adamw", "adamw8bit", "sgd", "adafactor", "muon"), (False, True), (None,), (EVERY,), (32,)),
        *itertools.product(("adamw",), (False,), (None, 8), ((Method.FULL,), EVERY[:2]), (32, None)),
        ("adamw", False, None, (Method.FULL, Method.LORA, Method.INT8), 32),
    ],
)
def test_the_script_has_what_was_asked_and_nothing_else(
    optimizer: str, checkpointing: bool, world_size: int | None, methods: tuple[Method, ...], seq: int | None
) -> None:
    about = replace(
        TRAINING, optimizer=optimizer, checkpointing=checkpointing, world_size=world_size, methods=methods, seq=seq
    )
    text = script_text(about, LLAMA if seq else {"model_type": "vit", "image_size": 32})
    compile(text, "train.py", "exec")
    assert "#?" not in text and "$" not in text and max(map(len, text.splitlines())) <= 120
    for word, wanted in {
        "peft": len(methods) > 1,
        "bitsandbytes": len(methods) > 2 or optimizer == "adamw8bit",
        "Linear4bit": Method.NF4 in methods,
        "Linear8bitLt": Method.INT8 in methods,
        "fully_shard": world_size is not None,
        "autocast": world_size is None,
        "gradient_checkpointing_enable": checkpointing,
        "pixel_values": seq is None,
        "input_ids": seq is not None,
        "AdamW(": optimizer in ("adamw", "muon"),
        "AdamW8bit": optimizer == "adamw8bit",
        "SGD": optimizer == "sgd",
        "Adafactor": optimizer == "adafactor",
        "Muon": optimizer == "muon",
    }.items():
        assert (word in text) == wanted, word


@pytest.mark.slow
def test_the_shapes_have_their_published_numbers_of_parameters() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    for name, shape in SHAPES.items():
        config = transformers.AutoConfig.for_model(**configuration(name))
        with torch.device("meta"):
            model = getattr(transformers, shape["architectures"][0])(config)
        model.tie_weights()
        assert sum(each.numel() for each in model.parameters()) == shape["parameters"], name


def test_a_configuration_is_found_by_folder_file_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    written: dict[str, Any] = {**LLAMA, "dtype": "bfloat16", "transformers_version": "5.0"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert configuration(str(tmp_path)) == configuration(str(tmp_path / "config.json")) == LLAMA
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": written}))
    assert configuration(str(tmp_path)) == LLAMA
    assert configuration("GPT2")["architectures"] == ["GPT2LMHeadModel"]
    for text, message in {"{": "is not JSON", "[]": "no model_type", '{"a": 1}': "no model_type"}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            configuration(str(tmp_path))


def test_the_tokens_are_those_that_the_model_has_positions_for() -> None:
    assert [tokens("m", LLAMA, seq) for seq in (None, 16, 64)] == [64, 16, 64]
    assert tokens("m", {"max_position_embeddings": 514}, None) == 512
    assert tokens("m", {"max_position_embeddings": 131_072}, None) == tokens("m", {}, None) == 2048
    assert tokens("m", {"image_size": 224}, None) is None
    for config in (LLAMA, {"image_size": 224}):
        with pytest.raises(UsageError, match="--seq"):
            tokens("m", config, 65)


def test_a_gpu_with_another_amount_of_memory() -> None:
    assert find_gpu("rtx4090@48GiB") == replace(GPUS["rtx4090"], name="rtx4090@48GiB", total_memory=48 << 30)
    for text in ("rtx4090@", "@24GiB", "rtx4091@24GiB"):
        with pytest.raises(UsageError):
            find_gpu(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", "--fsdp"), "--fsdp and --world-size N belong together"),
        (("gpt2", "--world-size", "8"), "--fsdp and --world-size N belong together"),
        (("gpt2", "--world-size", "8", "--fsdp", "--quantize", "nf4"), "--quantize is for one GPU"),
        (("gpt2", "--seq", "2048"), "--seq 2048: gpt2 has 1024 positions"),
        (("vit-l", "--seq", "16"), "--seq: vit-l takes images, of 224 pixels"),
        (("gpt2", "--precision", "amp-nocache"), "--precision: estimate cannot run amp-nocache"),
        (("gpt2", "--precision", "bf61"), "--precision: unknown precision 'bf61'"),
        (("gpt2", "--gpu", "h1000"), "unknown GPU 'h1000'"),
        (("gpt2", "--write", "no/train.py"), "cannot write no/train.py"),
        (("lama-3.1-8b",), "did you mean 'llama-3.1-8b'?"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampmem.cli.estimate_script._of_hub", no_hub)
    code, stdout, stderr = ampmem_here(tmp_path, "estimate", *arguments)
    assert (code, stdout) == (2, "")
    assert message in " ".join(stderr.split()) and "Traceback" not in stderr


def no_hub(model: str) -> bytes:
    raise OSError("it does not answer")


def test_the_answer_and_the_table(golden: Golden) -> None:
    found = example()
    assert headline(found) == (
        "gpt2 fits in 24 GiB with LoRA in bf16 up to a batch of 16; full fine-tuning in bf16 needs at least 30.3 GiB "
        "at a batch of 2."
    )
    golden(render_estimate(found, Path("my train.py")))
    assert "does not surely fit in 24 GiB; " in headline(replace(found, cells=found.cells[:2]))
    assert [cell["arm"] for cell in json.loads(found.to_json())["cells"]] == ["bf16", "amp", "bf16"]
    jsonschema.validate(json.loads(found.to_json()), estimate_schema())
    assert from_json(Estimate, json.loads(found.to_json())) == found


def test_the_page_has_the_answer_the_bars_and_the_table(tmp_path: Path) -> None:
    found = example()
    (tmp_path / "estimate.json").write_text(found.to_json())
    assert ampmem_here(tmp_path, "report", "estimate.json")[0] == 0
    page = re.sub(r'</?span( class="amount")?>', "", (tmp_path / "estimate.html").read_text(encoding="utf-8"))
    assert f'<h1 id="title">{headline(found)}</h1>' in page
    # The whole is the run of 41 GiB and what is outside, of which the GPU has 24.
    whole = (41 << 30) + OUTSIDE
    widths = [float(width) for width in re.findall(r"width: ([\d.]+)%; --fill", page)]
    sizes = [size for least in (30, 40, 3) for size in (least << 30, 1 << 30, OUTSIDE)]
    assert widths == [pytest.approx(100 * size / whole, abs=1e-3) for size in sizes]
    assert page.count(f'style="left: {100 * (24 << 30) / whole:.3f}%; width: 0.000%"') == 3
    cells = re.findall(r'<th scope="row">(.*?)</th><td data-head="precision">(.*?)</td>', page)
    assert cells == [("full fine-tuning", "bf16"), ("full fine-tuning", "amp"), ("LoRA", "bf16")]
    assert re.findall(r'<td data-head="largest batch" class="number">(.*?)</td>', page) == [
        "does not fit",
        "does not fit",
        "16 to 17",
    ]


def example() -> Estimate:
    """Full fine-tuning that does not fit in two precisions, and LoRA that does."""
    full, amp, lora = (
        EstimateCell(Method.FULL, Precision.BF16),
        EstimateCell(Method.FULL, Precision.AMP),
        EstimateCell(Method.LORA, Precision.BF16),
    )
    gib = 1 << 30

    def run(size: int) -> Memory:
        return Memory(allocated=size, reserved=size + gib, used=size + gib + OUTSIDE)

    points: Mapping[EstimateCell, Points] = {
        full: {2: None, 1: None},
        full._replace(roomy=True): {2: run(30 * gib)},
        amp: {2: None, 1: None},
        amp._replace(roomy=True): {2: run(40 * gib)},
        lora: {2: run(3 * gib), 16: run(20 * gib), 18: None},
        lora._replace(roomy=True): {},
    }
    return estimate(points, TRAINING, gpu="24GiB", total=24 * gib, notes=("simulated: no GPU was used",))
