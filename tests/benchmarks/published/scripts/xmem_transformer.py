"""Four updates of a transformer in FP32, as xMem's experiments train them.

    python xmem_transformer.py MODEL OPTIMIZER BATCH

Models are made from their configurations, without weights; a batch is padded to 128 tokens. The configurations are
those that the models' repositories have; what is not said here is the library's default.
"""

import sys
from typing import Any

import torch
import transformers
from transformers.modeling_utils import no_init_weights

TOKENS = 128
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {}),
    "distilgpt2": ("GPT2", {"n_layer": 6}),
    "Cerebras-GPT-111M": (
        "GPT2",
        {
            "n_layer": 10,
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "gpt-neo-125M": (
        "GPTNeo",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "opt-125m": ("OPT", {}),
    "opt-350m": (
        "OPT",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "T5-small": ("T5", {"decoder_start_token_id": 0}),
    "t5-base": (
        "T5",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
        },
    ),
    "Qwen3-4B": (
        "Qwen3",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
}
HEADS = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}


def built(name: str) -> torch.nn.Module:
    """The model called ``name``, ready to be trained."""
    kind, settings = CONFIGURATIONS[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    with no_init_weights():  # their values are not needed, and four billion of them take minutes
        model = getattr(transformers, kind + HEADS.get(kind, "ForCausalLM"))._from_config(config)
    model.tie_weights()
    trained: torch.nn.Module = model.train()
    return trained


def main() -> None:
    """Train."""
    name, optimizer_name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = built(name)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    model.to("cuda")
    for step in range(4):
        optimizer.zero_grad()
        tokens = torch.randint(100, (size, TOKENS))
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
        batch = {name: each.to("cuda") for name, each in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        if step < 3:
            scheduler.step()


if __name__ == "__main__":
    main()
