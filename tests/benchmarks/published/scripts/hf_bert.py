"""BERT from transformers on random tokens, 512 in each row.

    python hf_bert.py masked BATCH [--float16]
    python hf_bert.py classes BATCH [--float16] [--optimizer NAME] [--accumulate N] [--checkpoint]

``masked`` is the base model with its masked-language head, as milabench trains it: Adam, and the gradients of a step
are never set to zero. ``classes`` is the large one with two classes, as a document on training with one GPU did:
attention written in plain ops, AdamW, Adafactor or bitsandbytes' Adam8bit, and gradients that stay, as zeros.
``--float16`` is autocast with a gradient scaler.
"""

import argparse
from typing import Any

import torch
from transformers import Adafactor, BertConfig, BertForMaskedLM, BertForSequenceClassification
from transformers.modeling_utils import no_init_weights

LENGTH, VOCABULARY = 512, 30522


def built(task: str, checkpoint: bool) -> Any:
    """The model on the device."""
    with no_init_weights():
        if task == "masked":
            model = BertForMaskedLM._from_config(BertConfig())
        else:
            config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
            model = BertForSequenceClassification._from_config(config, attn_implementation="eager")
    model.tie_weights()
    model = model.cuda().train()
    if checkpoint:
        model.gradient_checkpointing_enable()
    return model


def batch(task: str, rows: int) -> dict[str, torch.Tensor]:
    """Random tokens and labels on the device."""
    labels = (rows, LENGTH) if task == "masked" else (rows,)
    most = VOCABULARY if task == "masked" else 2
    made = {"input_ids": torch.randint(100, VOCABULARY, (rows, LENGTH)), "labels": torch.randint(most, labels)}
    return {name: each.cuda() for name, each in made.items()}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["masked", "classes"])
    parser.add_argument("batch", type=int)
    parser.add_argument("--float16", action="store_true")
    parser.add_argument("--optimizer", choices=["adam", "adamw", "adafactor", "adam8bit"], default="adam")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N")
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    model = built(options.task, options.checkpoint)
    made: Any
    if options.optimizer == "adam8bit":
        from bitsandbytes.optim import Adam8bit as made
    else:
        made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adafactor": Adafactor}[options.optimizer]
    rest = {"foreach": False} if options.optimizer == "adamw" else {}
    rest |= {"lr": 1e-3, "relative_step": False, "scale_parameter": False} if options.optimizer == "adafactor" else {}
    optimizer = made(model.parameters(), **rest)
    scaler = torch.amp.GradScaler("cuda", enabled=options.float16)

    def step(data: dict[str, torch.Tensor], last: bool) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=options.float16):
            outputs = model(**data)
        loss: torch.Tensor = outputs.loss
        scaler.scale(loss).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            if options.task == "classes":
                model.zero_grad(set_to_none=False)  # as torch did then
        return loss

    for _ in range(3):
        for part in range(options.accumulate):
            data = batch(options.task, options.batch)
            loss = step(data, part == options.accumulate - 1)
    del loss


if __name__ == "__main__":
    main()
