"""``ampmem estimate``: every size is that of a run of the written script, and other commands go on from the script."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.commands import ampmem

from ampmem.analysis.fine_tuning import estimate_schema
from ampmem.events import Action
from ampmem.recording import read

pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.slow

GPU = ("--gpu", "1GiB")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 64,
}


def estimated(folder: Path, *options: str) -> dict[str, Any]:
    """The JSON of ``ampmem estimate`` with the small model of CONFIG, whose script is ``train.py``."""
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(CONFIG))
    done = ampmem(folder, "estimate", "small", *GPU, "--json", "--write", "train.py", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, estimate_schema())
    assert done.stderr.count("\nrun ") == found["runs"]
    assert sorted(path.name for path in folder.iterdir()) == ["small", "train.py"]
    return found


def peak(folder: Path, gpu: str, *arguments: str) -> int:
    """The bytes that ``ampmem profile`` sees allocated at most."""
    options = ("--gpu", gpu, "--device", "sim", "--steps", "2", "--quiet", "--force", "-o", "run.ampmem")
    done = ampmem(folder, "profile", *options, "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    events = read(folder / "run.ampmem").events
    return int(np.cumsum(np.where(events.action == Action.FREE, -events.block_bytes, events.block_bytes)).max())


def test_a_cell_is_a_run_of_the_script_and_other_commands_go_on_from_it(tmp_path: Path) -> None:
    found = estimated(tmp_path, "--precision", "bf16", "--batch", "100")
    (cell,) = found["cells"]
    assert (cell["method"], cell["arm"], cell["arguments"]) == ("full", "bf16", "--method full --precision bf16")
    assert not cell["asked"]["may_fit"] and cell["asked"]["value"] == 100
    arguments = cell["arguments"].split()
    assert cell["asked"]["allocated_bytes"] == peak(tmp_path, "1GiB@64TiB", *arguments, "--batch", "100")
    largest = cell["largest_fitting"]
    assert 1 < largest < cell["smallest_not_fitting"] == largest + 1 < 100
    (point,) = (each for each in cell["points"] if each["value"] == largest)
    assert point["fits"] and point["allocated_bytes"] == peak(tmp_path, "1GiB", *arguments, "--batch", str(largest))
    varied = ("--points", "0", "--precision", "as-is", "--json", "train.py")
    fitted = ampmem(tmp_path, "fit", *GPU, *varied, "--vary", f"--batch={largest}:{largest + 1}")
    assert fitted.returncode == 0, fitted.stderr
    assert json.loads(fitted.stdout)["arms"][0]["largest_fitting"] == largest


def test_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    options = ("--lora", "4", "--quantize", "nf4", "--precision", "bf16", "--checkpointing", "--batch", "2")
    found = estimated(tmp_path, *options)
    full, lora, nf4 = found["cells"]
    for cell in (lora, nf4):
        arguments = cell["arguments"].split()
        assert cell["asked"]["allocated_bytes"] == peak(tmp_path, "1GiB", *arguments, "--batch", "2")
    assert full["method"] == "full" and lora["method"] == "lora" and nf4["method"] == "nf4"
