"""The models of the atlas: how each is built, and what a batch of it looks like.

Each is built from the library's own configuration with random weights, on whatever torch's default device is. Nothing
is downloaded. A new model is one more entry of :data:`MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import atlas_networks as networks
from atlas_batches import (
    Batch,
    captioned,
    class_loss,
    click_loss,
    clicks,
    contrastive_loss,
    denoising_loss,
    detection_loss,
    graphs,
    images_with_boxes,
    inputs_and_targets,
    label_loss,
    latents,
    loss_of_output,
    masked_tokens,
    noisy,
    picture_loss,
    pictures,
    reconstruction_loss,
    segmented,
    speech,
    spoken_letters,
    token_loss,
    tokens,
    transcription_loss,
    translated,
    translation_loss,
    videos,
    waves,
)
from torch import Tensor, nn


def checkpointing_of_transformers(model: Any) -> None:
    """Turn on activation checkpointing in a model of transformers."""
    model.gradient_checkpointing_enable()


def checkpointing_of_diffusers(model: Any) -> None:
    """Turn on activation checkpointing in a model of diffusers."""
    model.enable_gradient_checkpointing()


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasModel:
    """A model of the atlas. ``sample`` is the name of one element of a batch; ``library`` is the model's package.

    ``checkpointing`` turns activation checkpointing on; ``None`` if the library does not offer it.
    """

    name: str
    family: str
    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    sample: str
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of_output
    checkpointing: Callable[[Any], None] | None = None


ENCODER, DECODER, BOTH = "encoder", "decoder", "encoder-decoder"
VISION, CONVOLUTION, SPEECH = "vision transformer", "convolutional", "speech"
RECURRENT, EMBEDDINGS, MLP, IMAGE_TEXT = "recurrent", "embedding tables", "mlp", "image and text"
DIFFUSION, DETECTION, GRAPH, STATE_SPACE = "diffusion", "detection", "graph", "state space"
VIDEO = "video"


# The table.


def _of_transformers(kind: str, config: str, **settings: Any) -> nn.Module:
    """A model class of transformers with its configuration class; imported when the model is built."""
    library = import_module("transformers")
    model: nn.Module = getattr(library, kind)(getattr(library, config)(**settings))
    return model


def _transformers(
    name: str,
    family: str,
    classes: str,
    batch: Callable[[int], Batch],
    sample: str,
    *,
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of_output,
    checkpointing: bool = True,
    **settings: Any,
) -> AtlasModel:
    """A model of transformers: ``classes`` are ``"MODEL CONFIG"``, and ``settings`` differ from its defaults."""
    kind, config = classes.split()
    return AtlasModel(
        name=name,
        family=family,
        library="transformers",
        build=partial(_of_transformers, kind, config, **settings),
        batch=batch,
        sample=sample,
        loss=loss,
        checkpointing=checkpointing_of_transformers if checkpointing else None,
    )


def _convolutional(name: str, classes: str, **settings: Any) -> AtlasModel:
    """A convolutional network of transformers for pictures, without checkpointing."""
    return _transformers(
        name, CONVOLUTION, classes, partial(pictures, 224), PIXELS, checkpointing=False, num_labels=1000, **settings
    )


def _diffusers(
    name: str, kind: str, batch: Callable[[int], Batch], sample: str, loss: Any, **settings: Any
) -> AtlasModel:
    """A model of diffusers, with its changes from the defaults of ``kind``."""
    return AtlasModel(
        name=name,
        family=DIFFUSION,
        library="diffusers",
        build=partial(_of_diffusers, kind, **settings),
        batch=batch,
        sample=sample,
        loss=loss,
        checkpointing=checkpointing_of_diffusers,
    )


def _of_diffusers(kind: str, **settings: Any) -> nn.Module:
    """A model class of diffusers, imported when the model is built."""
    model: nn.Module = getattr(import_module("diffusers"), kind)(**settings)
    return model


def _own(
    name: str,
    family: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    sample: str,
    loss: Callable[[nn.Module, Batch], Tensor],
) -> AtlasModel:
    return AtlasModel(name=name, family=family, library="torch", build=build, batch=batch, sample=sample, loss=loss)


PIXELS = "224 x 224 pixels"
DEBERTA_V3 = {
    "vocab_size": 128_100,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "use_cache": False,
}
QWEN_HALF_B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_cache": False,
}
GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "use_cache": False,
}
MINISTRAL_3B = {
    "vocab_size": 131_072,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": False,
}
PYTHIA_410M = {
    "vocab_size": 50_304,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "use_cache": False,
}
SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "use_cache": False,
}
QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "use_cache": False,
}
MAMBA2_130M = {
    "vocab_size": 50_288,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "n_groups": 1,
    "tie_word_embeddings": True,
    "use_cache": False,
}
BART_BASE = {
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "use_cache": False,
}
DDPM_CIFAR10 = {
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": None,
    "norm_eps": 1e-6,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
}
STABLE_DIFFUSION_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
WHISPER_SMALL = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "use_cache": False,
}
RESNET_18 = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
EFFICIENTNET_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 224}
T5_BASE = {
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "use_cache": False,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}

PUBLISHED = {
    "GPT-2": ("xmem/gpt2-",),
    "OPT 125M": ("xmem/opt-125m-",),
    "T5 base": ("xmem/t5-base-",),
    "ViT B/16": ("mesa/deit-b-", "timm/vit_base_"),
    "ViT L/16": ("timm/vit_large_", "others/vit-l-16-"),
    "DeiT tiny": ("mesa/deit-ti-",),
    "Swin tiny": ("mesa/swin-ti-", "timm/swin_tiny_"),
    "ConvNeXt tiny": ("xmem/ConvNeXtTiny-", "timm/convnext_tiny-"),
    "ResNet-50": ("others/resnet50-", "snapshots/resnet50-", "vision/resnet50-"),
    "ResNet-152": ("xmem/ResNet152-", "timm/resnet152-"),
    "MobileNet v2": ("xmem/MobileNetV2-",),
    "EfficientNet B0": ("timm/efficientnet_b0-",),
    "VGG-16": ("xmem/VGG16-",),
    "DenseNet-121": ("timm/densenet121-",),
    "MLP-Mixer B/16": ("timm/mixer_b16_",),
}
"""By model, the beginnings of the keys of its runs in published.json."""
MODELS: tuple[AtlasModel, ...] = (
    _transformers(
        "BERT base", ENCODER, "BertForMaskedLM BertConfig", partial(masked_tokens, 30_522, 512), "512 tokens"
    ),
    _transformers(
        "RoBERTa base",
        ENCODER,
        "RobertaForMaskedLM RobertaConfig",
        partial(masked_tokens, 50_265, 512),
        "512 tokens",
        vocab_size=50_265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    _transformers(
        "DeBERTa v3 base",
        ENCODER,
        "DebertaV2ForMaskedLM DebertaV2Config",
        partial(masked_tokens, 128_100, 512),
        "512 tokens",
        **DEBERTA_V3,
    ),
    _transformers(
        "BERT large",
        ENCODER,
        "BertForMaskedLM BertConfig",
        partial(masked_tokens, 30_522, 512),
        "512 tokens",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    _transformers(
        "DistilBERT base",
        ENCODER,
        "DistilBertForMaskedLM DistilBertConfig",
        partial(masked_tokens, 30_522, 512),
        "512 tokens",
        checkpointing=False,
    ),
    _transformers(
        "ALBERT base",
        ENCODER,
        "AlbertForMaskedLM AlbertConfig",
        partial(masked_tokens, 30_000, 512),
        "512 tokens",
        checkpointing=False,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
    ),
    _transformers(
        "ModernBERT base",
        ENCODER,
        "ModernBertForMaskedLM ModernBertConfig",
        partial(masked_tokens, 50_368, 1024),
        "1,024 tokens",
    ),
    _transformers(
        "GPT-2", DECODER, "GPT2LMHeadModel GPT2Config", partial(tokens, 50_257, 1024), "1,024 tokens", use_cache=False
    ),
    _transformers(
        "OPT 125M", DECODER, "OPTForCausalLM OPTConfig", partial(tokens, 50_272, 2048), "2,048 tokens", use_cache=False
    ),
    _transformers(
        "Qwen2 0.5B",
        DECODER,
        "Qwen2ForCausalLM Qwen2Config",
        partial(tokens, 151_936, 2048),
        "2,048 tokens",
        **QWEN_HALF_B,
    ),
    _transformers(
        "Llama 3.2 1B",
        DECODER,
        "LlamaForCausalLM LlamaConfig",
        partial(tokens, 128_256, 2048),
        "2,048 tokens",
        **LLAMA_1B,
    ),
    _transformers(
        "Gemma 2B", DECODER, "GemmaForCausalLM GemmaConfig", partial(tokens, 256_000, 2048), "2,048 tokens", **GEMMA_2B
    ),
    _transformers(
        "Ministral 3B",
        DECODER,
        "MistralForCausalLM MistralConfig",
        partial(tokens, 131_072, 2048),
        "2,048 tokens",
        **MINISTRAL_3B,
    ),
    _transformers(
        "GPT-2 medium",
        DECODER,
        "GPT2LMHeadModel GPT2Config",
        partial(tokens, 50_257, 1024),
        "1,024 tokens",
        n_embd=1024,
        n_layer=24,
        n_head=16,
        use_cache=False,
    ),
    _transformers(
        "T5 base",
        BOTH,
        "T5ForConditionalGeneration T5Config",
        partial(translated, 32_128, 512, 128),
        "512 and 128 tokens",
        **T5_BASE,
    ),
    _transformers(
        "BART base",
        BOTH,
        "BartForConditionalGeneration BartConfig",
        partial(translated, 50_265, 512, 128),
        "512 and 128 tokens",
        **BART_BASE,
    ),
    _transformers(
        "Whisper small",
        SPEECH,
        "WhisperForConditionalGeneration WhisperConfig",
        speech,
        "30 s of speech, 128 tokens",
        **WHISPER_SMALL,
    ),
    _transformers(
        "wav2vec 2.0 base",
        SPEECH,
        "Wav2Vec2ForSequenceClassification Wav2Vec2Config",
        waves,
        "10 s of speech",
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    _transformers(
        "ViT B/16",
        VISION,
        "ViTForImageClassification ViTConfig",
        partial(pictures, 224),
        PIXELS,
        num_labels=1000,
    ),
    _transformers(
        "ViT L/16",
        VISION,
        "ViTForImageClassification ViTConfig",
        partial(pictures, 224),
        PIXELS,
        num_labels=1000,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    _transformers(
        "DeiT tiny",
        VISION,
        "ViTForImageClassification ViTConfig",
        partial(pictures, 224),
        PIXELS,
        num_labels=1000,
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
    ),
    _transformers(
        "SegFormer B0",
        VISION,
        "SegformerForSemanticSegmentation SegformerConfig",
        segmented,
        "512 x 512 pixels",
        checkpointing=False,
        num_labels=150,
    ),
    _transformers(
        "VideoMAE base",
        VIDEO,
        "VideoMAEForVideoClassification VideoMAEConfig",
        videos,
        "16 pictures of 224 x 224 pixels",
        num_labels=400,
    ),
    _transformers(
        "Swin tiny",
        VISION,
        "SwinForImageClassification SwinConfig",
        partial(pictures, 224),
        PIXELS,
        num_labels=1000,
    ),
    _transformers(
        "CLIP ViT B/32",
        IMAGE_TEXT,
        "CLIPModel CLIPConfig",
        captioned,
        "224 x 224 pixels, 77 tokens",
        loss=contrastive_loss,
    ),
    _convolutional("ConvNeXt tiny", "ConvNextForImageClassification ConvNextConfig"),
    _convolutional("ResNet-50", "ResNetForImageClassification ResNetConfig"),
    _convolutional("ResNet-18", "ResNetForImageClassification ResNetConfig", **RESNET_18),
    _convolutional("ResNet-152", "ResNetForImageClassification ResNetConfig", depths=[3, 8, 36, 3]),
    _convolutional("MobileNet v2", "MobileNetV2ForImageClassification MobileNetV2Config"),
    _convolutional("EfficientNet B0", "EfficientNetForImageClassification EfficientNetConfig", **EFFICIENTNET_B0),
    _own("VGG-16", CONVOLUTION, networks.vgg16, partial(inputs_and_targets, (3, 224, 224), 1000), PIXELS, class_loss),
    _own(
        "DenseNet-121",
        CONVOLUTION,
        networks.DenseNet,
        partial(inputs_and_targets, (3, 224, 224), 1000),
        PIXELS,
        class_loss,
    ),
    _own("YOLOv3", DETECTION, networks.Yolo, images_with_boxes, "416 x 416 pixels", detection_loss),
    _diffusers(
        "DiT B/2",
        "DiTTransformer2DModel",
        partial(latents, 32, 0),
        "256 x 256 pixels",
        denoising_loss,
        out_channels=8,
        num_attention_heads=12,
        attention_head_dim=64,
        num_layers=12,
    ),
    _diffusers(
        "DDPM CIFAR-10 UNet",
        "UNet2DModel",
        partial(noisy, 32),
        "32 x 32 pixels",
        denoising_loss,
        **DDPM_CIFAR10,
    ),
    _diffusers(
        "Stable Diffusion VAE",
        "AutoencoderKL",
        partial(noisy, 256),
        "256 x 256 pixels",
        reconstruction_loss,
        **STABLE_DIFFUSION_VAE,
    ),
    _own("U-Net", CONVOLUTION, networks.Unet, partial(noisy, 128), "128 x 128 pixels", picture_loss),
    _own(
        "nn.Transformer base",
        BOTH,
        networks.TransformerOfTorch,
        partial(translated, 37_000, 256, 256),
        "256 and 256 tokens",
        translation_loss,
    ),
    _own("LSTM", RECURRENT, networks.LstmLanguageModel, partial(tokens, 10_000, 35), "35 tokens", token_loss),
    _own("Deep Speech 2", RECURRENT, networks.DeepSpeech, spoken_letters, "10 s of speech", transcription_loss),
    _own("GraphSAGE", GRAPH, networks.GraphSage, graphs, "a graph of 2,373 nodes, 34,113 edges", label_loss),
    _own("MLP-Mixer B/16", MLP, networks.Mixer, partial(inputs_and_targets, (3, 224, 224), 1000), PIXELS, class_loss),
    _own("DLRM", EMBEDDINGS, networks.Dlrm, partial(clicks, 26), "13 numbers, 26 indices", click_loss),
    _transformers(
        "Mamba-2 130M",
        STATE_SPACE,
        "Mamba2ForCausalLM Mamba2Config",
        partial(tokens, 50_288, 1024),
        "1,024 tokens",
        **MAMBA2_130M,
    ),
    _transformers(
        "BLOOM 560M",
        DECODER,
        "BloomForCausalLM BloomConfig",
        partial(tokens, 250_880, 2048),
        "2,048 tokens",
        vocab_size=250_880,
        hidden_size=1024,
        n_layer=24,
        n_head=16,
        use_cache=False,
    ),
    _transformers(
        "Qwen3 0.6B",
        DECODER,
        "Qwen3ForCausalLM Qwen3Config",
        partial(tokens, 151_936, 2048),
        "2,048 tokens",
        **QWEN3_06B,
    ),
    _transformers(
        "SmolLM2 135M",
        DECODER,
        "LlamaForCausalLM LlamaConfig",
        partial(tokens, 49_152, 2048),
        "2,048 tokens",
        **SMOLLM2_135M,
    ),
    _transformers(
        "Pythia 410M",
        DECODER,
        "GPTNeoXForCausalLM GPTNeoXConfig",
        partial(tokens, 50_304, 2048),
        "2,048 tokens",
        **PYTHIA_410M,
    ),
    _diffusers(
        "Stable Diffusion 1.5 UNet",
        "UNet2DConditionModel",
        partial(latents, 64, 77),
        "512 x 512 pixels, 77 tokens",
        denoising_loss,
        sample_size=64,
        cross_attention_dim=768,
    ),
)
"""The models in the order in which they are run and shown."""

BY_NAME = {model.name: model for model in MODELS}
