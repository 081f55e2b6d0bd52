"""Small models of transformers, each with a function that makes a batch."""

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

Batch = Callable[[], dict[str, torch.Tensor]]


def tokens(vocabulary: int = 1000, *, rows: int = 4, length: int = 64) -> dict[str, torch.Tensor]:
    """A batch of text, which is its own target."""
    ids = torch.randint(vocabulary, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def bert() -> tuple[nn.Module, Batch]:
    config = hf.BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    return hf.BertForMaskedLM(config), tokens


def gpt2() -> tuple[nn.Module, Batch]:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=1000, n_embd=128, n_layer=2, n_head=4, n_positions=128)), tokens


def _decoder(config: type[hf.PretrainedConfig]) -> hf.PretrainedConfig:
    return config(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )


def llama() -> tuple[nn.Module, Batch]:
    return hf.LlamaForCausalLM(_decoder(hf.LlamaConfig)), tokens


def qwen() -> tuple[nn.Module, Batch]:
    return hf.Qwen3ForCausalLM(_decoder(hf.Qwen3Config)), tokens


def t5() -> tuple[nn.Module, Batch]:
    config = hf.T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config), tokens


def vit() -> tuple[nn.Module, Batch]:
    config = hf.ViTConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, image_size=64, num_labels=10
    )
    return hf.ViTForImageClassification(config), lambda: {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.randint(10, (4,)),
    }


def whisper() -> tuple[nn.Module, Batch]:
    config = hf.WhisperConfig(
        vocab_size=1000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=64,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hf.WhisperForConditionalGeneration(config), lambda: {
        "input_features": torch.randn(4, 80, 128),
        "labels": torch.randint(1000, (4, 32)),
    }


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "qwen": qwen,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
}
