"""One fine-tuning step of Qwen3.5's language model in bfloat16, whole, with adapters, or on several ranks.

    python qwen_sft.py MODEL METHOD TOKENS [--accumulate N] [--checkpoint]

MODEL is 0.8B or 2B. METHOD is ``full``; ``lora``, adapters of rank 8 on every linear layer but the head; ``nf4`` and
``nf4-nested``, the same on weights of 4 bits; ``fsdp``, whole in ``FullyShardedDataParallel``; or ``fsdp2-lora``,
adapters in ``fully_shard``. The last two are started with a launcher, and look before the update whether each gradient
is finite, as the published runs did: that leaves cached memory behind. One sample, AdamW without foreach; the first
half of the labels is masked. The peak is that from the first forward on.

The weights of 4 bits are stored and expanded as the published run did without a library: two codes a byte, an FP32
scale for each 64 weights, and one weight expanded by plain PyTorch ops where it is used, in forward and in backward.
``nf4-nested`` has the scales in 8 bits, with an FP32 scale for each 256 of them.
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.initialization import no_init_weights

SIZES = {"0.8B": (1024, 3584), "2B": (2048, 6144)}
"""Width of the model and of its feed-forward layers; 752,393,024 and 1,881,825,088 parameters."""
RANK, ALPHA = 8, 16
WEIGHTS_PER_SCALE, SCALES_PER_SCALE = 64, 256


def built(size: str) -> Any:
    """The model on the CPU, with whatever the memory holds as weights: values are not needed."""
    width, hidden = SIZES[size]
    config = Qwen3_5TextConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with no_init_weights():
        model = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.tie_weights()
    return model


class Packed(nn.Module):
    """The shape of a weight, and its 4-bit codes, scales and tables."""

    def __init__(self, weight: Tensor, nested: bool) -> None:
        super().__init__()
        self.shape, self.nested = weight.shape, nested
        scales = -(-weight.numel() // WEIGHTS_PER_SCALE)
        self.register_buffer("codes", torch.zeros(scales * WEIGHTS_PER_SCALE // 2, dtype=torch.uint8))
        self.register_buffer("pairs", torch.zeros(256, 2, dtype=weight.dtype))
        self.register_buffer("scales", torch.zeros(scales, dtype=torch.uint8 if nested else torch.float32))
        if nested:
            self.register_buffer("scales_of_scales", torch.zeros(-(-scales // SCALES_PER_SCALE)))
            self.register_buffer("offset", torch.zeros(()))
            self.register_buffer("levels", torch.zeros(256, 1))

    def expanded(self) -> Tensor:
        """The weight in 16 bits."""
        scales = self._scales().to(self.pairs.dtype)
        places = self.codes.to(torch.int32)
        values = functional.embedding(places, self.pairs).reshape(-1, WEIGHTS_PER_SCALE)
        del places
        scaled = values * scales.unsqueeze(1)
        del values, scales
        return scaled.reshape(-1)[: self.shape.numel()].view(self.shape)

    def _scales(self) -> Tensor:
        if not self.nested:
            return self.scales
        places = self.scales.to(torch.int32)
        values = functional.embedding(places, self.levels).reshape(-1)
        del places
        wide = self.scales_of_scales.repeat_interleave(SCALES_PER_SCALE)[: self.scales.numel()]
        return values.mul_(wide).add_(self.offset)


class FrozenProduct(torch.autograd.Function):
    """A linear layer whose weight is expanded again in backward, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return functional.linear(x, packed.expanded())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        needed = ctx.needs_input_grad[0]
        return gradient @ ctx.packed.expanded() if needed else None, None


class PackedWithAdapter(nn.Module):
    """A frozen linear layer in 4 bits, and its FP32 adapter."""

    def __init__(self, linear: nn.Linear, nested: bool) -> None:
        super().__init__()
        self.packed = Packed(linear.weight, nested)
        self.down = nn.Parameter(torch.zeros(RANK, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        out = FrozenProduct.apply(x, self.packed)
        adapted = functional.linear(functional.linear(x.to(self.down.dtype), self.down), self.up)
        summed: Tensor = out + adapted.to(out.dtype) * (ALPHA / RANK)
        return summed


def packed(model: Any, nested: bool) -> Any:
    """``model``, frozen, with its linear layers but the head in 4 bits."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                setattr(module, name, PackedWithAdapter(child, nested))
    return model


def with_adapters(model: Any) -> Any:
    """``model``, frozen, with PEFT's adapters."""
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM", bias="none")
    return get_peft_model(model, settings)


def sharded(model: Any, device: torch.device) -> Any:
    """In ``FullyShardedDataParallel``, a unit for each layer and one for the rest, without prefetching."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=device,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=None,
    )


def fully_sharded(model: Any, device: torch.device) -> Any:
    """With adapters, in ``fully_shard``, layer by layer; what is outside of the layers is sharded again, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = with_adapters(model).to(device)
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def prepared(size: str, method: str, checkpoint: bool, device: torch.device) -> Any:
    """The model on the device, ready to be trained."""
    model = built(size)
    if method in ("fsdp", "fsdp2-lora"):
        torch.distributed.init_process_group("nccl")
        return (sharded if method == "fsdp" else fully_sharded)(model.train(), device)
    if method == "lora":
        model = with_adapters(model)
    elif method != "full":
        model = packed(model, nested=method == "nf4-nested")
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if method != "full":
            model.enable_input_require_grads()
    return model.train().to(device)


def local(gradient: Any) -> Tensor:
    """What this rank holds of it."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def batch(tokens: int, device: torch.device) -> dict[str, Tensor]:
    """One sample, the first half of which is not learned."""
    ids = torch.randint(100, 248_320, (1, tokens))
    labels = ids.clone()
    labels[:, : tokens // 2] = -100
    places = torch.arange(tokens).expand(3, 1, tokens).clone()
    made = {"input_ids": ids, "labels": labels, "position_ids": places}
    return {name: each.to(device) for name, each in made.items()}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SIZES)
    parser.add_argument("method", choices=["full", "lora", "nf4", "nf4-nested", "fsdp", "fsdp2-lora"])
    parser.add_argument("tokens", type=int)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N")
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    model = prepared(options.model, options.method, options.checkpoint, device)
    batches = [batch(options.tokens, device) for _ in range(options.accumulate)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    torch.cuda.reset_peak_memory_stats()
    for number, each in enumerate(batches, start=1):
        outputs = model(**each, use_cache=False)
        loss = outputs.loss / len(batches)
        loss.backward()
        loss.item()
        if number < len(batches):
            del outputs, loss
    if options.method in ("fsdp", "fsdp2-lora"):
        for parameter in trained:
            torch.isfinite(local(parameter.grad)).all().item()
    optimizer.step()


if __name__ == "__main__":
    main()
