"""The training script of ``ampmem estimate``: the model's configuration, and the parts of a template."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pprint import pformat
from string import Template
from typing import Any
from urllib.request import Request, urlopen

from ampmem.analysis.fine_tuning import Method, Training
from ampmem.errors import AmpmemError, UsageError
from ampmem.names import nearest

SHAPES: Mapping[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("estimate_shapes.toml").read_text(encoding="utf-8")
)
"""The values of ``config.json``, and the number of parameters, of the models that are known by name."""

_TEMPLATE = Path(__file__).with_name("estimate_script.txt")
"""A line that ends with ``#?`` and words is for scripts that one of these words describes."""

_LONGEST = 2048
"""The default number of tokens, if the model has that many positions."""
_HUB_S = 10.0


def script_text(training: Training, config: Mapping[str, Any]) -> str:
    """The script that trains the model of ``config``."""
    quantized = [method for method in training.methods if method in (Method.NF4, Method.INT8)]
    head, images = _head(config), training.seq is None
    words = {training.optimizer, *training.methods, "image" if images else "text"}
    words.add("alone" if training.world_size is None else "fsdp")
    asked = {"quantized": quantized, "adapters": training.methods[1:], "checkpointing": training.checkpointing}
    words.update(word for word, wanted in asked.items() if wanted)
    lines = (line.partition("  #? ") for line in _TEMPLATE.read_text(encoding="utf-8").splitlines())
    kept = [line for line, _, of in lines if not of or words.intersection(of.split())]
    return Template("\n".join(kept) + "\n").substitute(
        MODEL=training.model,
        DATA="images" if images else "tokens",
        HEAD=head,
        CONFIG="".join(
            ["{\n", *(f"    {json.dumps(name)}: {_written(value)},\n" for name, value in config.items()), "}"]
        ),
        METHODS=json.dumps(training.methods),
        METHOD=training.methods[-1],
        QUANTIZED="".join(quantized),
        LORA=training.lora,
        ALPHA=2 * training.lora,
        TASK=', task_type="CAUSAL_LM"' if head == "AutoModelForCausalLM" else "",
        BATCH=training.batch,
        SEQ=training.seq,
        WORLD=training.world_size,
    )


def imports_of(script: str) -> str:
    """The import statements at the top level of ``script``."""
    nodes = (node for node in ast.parse(script).body if isinstance(node, ast.Import | ast.ImportFrom))
    return "\n".join(map(ast.unparse, nodes))


def _written(value: object) -> str:
    """``value`` as Python's source, with double quotes if it has none itself."""
    text = pformat(value, width=100, sort_dicts=False)
    return text if '"' in text else text.replace("'", '"')


def configuration(model: str) -> dict[str, Any]:
    """The values of ``config.json`` of ``model``: a folder or file, a name in :data:`SHAPES`, or one on the hub.

    Raises :class:`UsageError` if there is none.
    """
    shape = SHAPES.get(model.lower())
    if shape is not None:
        return {name: value for name, value in shape.items() if name != "parameters"}
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    try:
        found = json.loads(path.read_bytes() if path.exists() else _of_hub(model))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        meant = nearest(model.lower().rpartition("/")[2], SHAPES) or f"; known without it: {', '.join(SHAPES)}"
        raise UsageError(
            f"{model}: there is no such folder or config.json, and the Hugging Face hub does not give one "
            f"({getattr(error, 'reason', error)}){meant}"
        ) from error
    found = found.get("text_config", found) if isinstance(found, dict) else {}
    if "model_type" not in found:
        raise UsageError(f"{path} is not a configuration of transformers: it has no model_type")
    left_out = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "quantization_config")
    return {name: value for name, value in found.items() if name not in left_out}


def _of_hub(model: str) -> bytes:
    """``config.json`` of a model on the hub, from its cache or in one request. Raises ``OSError``."""
    require("huggingface_hub")
    from huggingface_hub import constants, get_token, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise OSError("not a valid name") from error
    if isinstance(cached, str):
        return Path(cached).read_bytes()
    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set, and its cache has none")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = Request(f"{constants.ENDPOINT}/{model}/resolve/main/config.json", headers=headers)
    with urlopen(request, timeout=_HUB_S) as answer:
        content: bytes = answer.read()
    return content


def require(package: str, least: int = 0) -> None:
    """Raise :class:`AmpmemError` unless ``package`` is installed, with ``least`` as the first number of its version."""
    try:
        missing = int(version(package).partition(".")[0]) < least
    except PackageNotFoundError:
        missing = True
    if missing:
        wanted = f"'{package}>={least}'" if least else package
        raise AmpmemError(f"this needs the package {package}: pip install {wanted}")


def tokens(model: str, config: Mapping[str, Any], seq: int | None) -> int | None:
    """The tokens of a sample; ``None`` for images. Raises :class:`UsageError` if the model cannot have ``seq``."""
    if "image_size" in config:
        if seq is not None:
            raise UsageError(f"--seq: {model} takes images, of {config['image_size']} pixels")
        return None
    positions = next((config[name] for name in ("max_position_embeddings", "n_positions") if name in config), None)
    if seq is not None and positions is not None and seq > positions:
        raise UsageError(f"--seq {seq}: {model} has {positions} positions")
    return seq or min((positions or _LONGEST) // 8 * 8, _LONGEST)  # RoBERTa counts two positions more than it has


def _head(config: Mapping[str, Any]) -> str:
    """The class of transformers that makes the model with the head that its configuration names."""
    if "image_size" in config:
        return "AutoModelForImageClassification"
    if config.get("is_encoder_decoder"):
        return "AutoModelForSeq2SeqLM"
    masked = any(name.endswith("ForMaskedLM") for name in config.get("architectures") or ())
    return "AutoModelForMaskedLM" if masked else "AutoModelForCausalLM"
