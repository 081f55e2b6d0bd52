"""One update of a language model of 0.8 billion parameters in bfloat16, as a validation of July 2026 made it.

    python sft.py full|lora TOKENS [--ranks] [--checkpointed] [--accumulate N]

The model is Qwen3.5's for text, without weights. ``--ranks`` shards it over the ranks that there are: FSDP's full shard
of the model, or FSDP2 under the adapters. Peaks are those from the first forward on.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["TRANSFORMERS_NO_TORCHVISION"] = "1"

import torch
import torch.distributed as dist
import transformers

CONFIGURATION: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
PARAMETERS = 752_393_024


def built() -> Any:
    """The model on the CPU."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**CONFIGURATION)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with transformers.initialization.no_init_weights():
            model = transformers.Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.tie_weights()
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != PARAMETERS:
        raise SystemExit(f"the model has {found} parameters, not {PARAMETERS}")
    model.config.use_cache = False
    return model


def adapted(model: Any) -> Any:
    """Adapters of rank 8 on all linear layers, in FP32."""
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules="all-linear")
    return peft.get_peft_model(model, config)


def sharded(model: Any, layers: Any, *, flat: bool) -> Any:
    """Over all ranks: FSDP's full shard where ``flat``, else FSDP2."""
    dist.init_process_group("nccl")
    if flat:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            device_id=torch.device("cuda:0"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            backward_prefetch=None,
            limit_all_gathers=True,
        )
    from torch.distributed.fsdp import fully_shard

    model.to("cuda")
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("full", "lora"))
    parser.add_argument("tokens", type=int)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    model = built()
    layers = model.model.layers
    if options.method == "lora":
        model = adapted(model)
    if options.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.method == "lora":
            model.enable_input_require_grads()
    model.train()
    model = sharded(model, layers, flat=options.method == "full") if options.ranks else model.to("cuda")

    batches = []
    for _ in range(options.accumulate):
        tokens = torch.randint(100, CONFIGURATION["vocab_size"], (1, options.tokens))
        labels = tokens.clone()
        labels[:, : options.tokens // 2] = -100
        positions = torch.arange(options.tokens).view(1, 1, -1).expand(3, 1, -1).clone()
        batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        batches.append({name: each.to("cuda") for name, each in batch.items()})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        loss = model(**batch, use_cache=False).loss / options.accumulate
        loss.backward()
    optimizer.step()


if __name__ == "__main__":
    main()
