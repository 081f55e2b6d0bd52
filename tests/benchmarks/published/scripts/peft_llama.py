"""Llama 3.2 3B in bfloat16, four rows, as PEFT compares its methods: with adapters in FP32, or whole.

    python peft_llama.py lora|ia3|full TOKENS [--rank N]

AdamW, the gradients' norm clipped. The rows differ in length, so attention has a mask. Two steps.
"""

import argparse
from typing import Any

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

ROWS, VOCABULARY = 4, 128_256


def built(method: str, rank: int) -> Any:
    """The model on the device."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    model = model.cuda()
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=64, task_type="CAUSAL_LM"))
    elif method == "ia3":
        model = get_peft_model(model, IA3Config(task_type="CAUSAL_LM"))
    return model.train()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["lora", "ia3", "full"])
    parser.add_argument("tokens", type=int)
    parser.add_argument("--rank", type=int, default=32)
    options = parser.parse_args()
    model = built(options.method, options.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    for _ in range(2):
        ids = torch.randint(0, VOCABULARY, (ROWS, options.tokens))
        mask = torch.ones_like(ids)
        mask[1:, -1] = 0
        batch = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
        batch["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=int(mask.sum()))
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
