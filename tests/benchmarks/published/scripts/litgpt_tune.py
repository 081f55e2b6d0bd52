"""Fine-tuning by litgpt's own model and loss in bfloat16, 512 tokens in each row.

    python litgpt_tune.py MODEL full|lora ROWS ACCUMULATED [--rank N] [--everywhere]

AdamW; the logits are in FP32, as Lightning's Fabric returns what a model in bfloat16 returns. Gradients of ACCUMULATED
batches are summed for each of two updates. ``--everywhere`` has adapters on all linear layers, not only on queries and
values.
"""

import argparse
import importlib
from typing import Any

import torch

LENGTH = 512
_PARTS = ("query", "key", "value", "projection", "mlp", "head")


def built(name: str, adapted: bool, rank: int, everywhere: bool) -> Any:
    """The model on the device, in bfloat16."""
    module = importlib.import_module("litgpt.lora" if adapted else "litgpt.model")
    config = importlib.import_module("litgpt.lora" if adapted else "litgpt.config").Config
    where = {f"lora_{part}": everywhere or part in ("query", "value") for part in _PARTS}
    settings = {"lora_r": rank, "lora_alpha": 16, "lora_dropout": 0.05, **where} if adapted else {}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = module.GPT(config.from_name(name, **settings))
    torch.set_default_dtype(torch.float32)
    if adapted:
        module.mark_only_lora_as_trainable(model)
    model.max_seq_length = LENGTH
    return model


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("method", choices=["full", "lora"])
    parser.add_argument("rows", type=int)
    parser.add_argument("accumulated", type=int)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--everywhere", action="store_true")
    options = parser.parse_args()
    loss_of = importlib.import_module("litgpt.utils").chunked_cross_entropy
    adapted = options.method == "lora"
    model = built(options.model, adapted, options.rank, options.everywhere)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    for number in range(2 * options.accumulated):
        ids = torch.randint(0, 30_000, (options.rows, LENGTH)).cuda()
        targets = ids.clone()
        if adapted:
            logits = [each.float() for each in model(ids, lm_head_chunk_size=128)]
            logits[-1] = logits[-1][..., :-1, :]
            loss = loss_of(logits, targets[..., 1:])
        else:
            logits = model(ids).float()
            loss = loss_of(logits[..., :-1, :], targets[..., 1:])
        (loss / options.accumulated).backward()
        if number % options.accumulated == options.accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
