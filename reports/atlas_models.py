"""The models of the atlas: how each is built, and what a batch of it looks like.

Each is built from the library's own configuration with random weights, on whatever torch's default device is. Nothing
is downloaded. A new model is one more entry of :data:`MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch: TypeAlias = dict[str, Tensor]


def loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers returns with its output."""
    loss: Tensor = model(**batch).loss
    return loss


def checkpointing_of_transformers(model: Any) -> None:
    """Activation checkpointing as transformers offers it."""
    model.gradient_checkpointing_enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasModel:
    """One model. ``sample`` says what one element of a batch is; ``library`` is the package that has the model.

    ``checkpointing`` turns activation checkpointing on; ``None`` where the library does not offer it.
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


# Batches.


def tokens(vocabulary: int, length: int, batch: int) -> Batch:
    """Token sequences without padding, each with the token to be predicted at every place."""
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": torch.randint(0, vocabulary, (batch, length))}


def masked_tokens(vocabulary: int, length: int, batch: int) -> Batch:
    """The same with the attention mask that a tokenizer makes."""
    mask = torch.ones(batch, length, dtype=torch.long)
    return tokens(vocabulary, length, batch) | {"attention_mask": mask}


def translated(vocabulary: int, source: int, target: int, batch: int) -> Batch:
    """Token sequences of a source and of a target."""
    ids = torch.randint(0, vocabulary, (batch, source))
    return {"input_ids": ids, "labels": torch.randint(0, vocabulary, (batch, target))}


def pictures(size: int, batch: int) -> Batch:
    """Pictures with one of 1,000 classes each, as transformers names them."""
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 1000, (batch,))}


def speech(batch: int) -> Batch:
    """Thirty seconds of speech as Whisper's spectrograms, with the tokens of what is said."""
    return {"input_features": torch.randn(batch, 80, 3000), "labels": torch.randint(0, 51865, (batch, 128))}


def waves(batch: int) -> Batch:
    """Ten seconds of sound at 16 kHz, with one of two classes."""
    return {"input_values": torch.randn(batch, 160_000), "labels": torch.randint(0, 2, (batch,))}


def captioned(batch: int) -> Batch:
    """Pictures and their captions, as CLIP takes them."""
    ids = torch.randint(0, 49408, (batch, 77))
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 224, 224)}


def inputs_and_targets(shape: tuple[int, ...], classes: int, batch: int) -> Batch:
    """Random numbers of ``shape``, with a class each."""
    return {"inputs": torch.randn(batch, *shape), "targets": torch.randint(0, classes, (batch,))}


def clicks(tables: int, batch: int) -> Batch:
    """Thirteen numbers and one index into each table, and whether somebody clicked."""
    return {
        "dense": torch.randn(batch, 13),
        "indices": torch.randint(0, 100_000, (batch, tables)),
        "targets": torch.rand(batch, 1),
    }


def noisy(batch: int) -> Batch:
    """Pictures, and pictures of the same size to be predicted from them."""
    return {"inputs": torch.randn(batch, 3, 128, 128), "targets": torch.randn(batch, 3, 128, 128)}


# Losses.


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of what the model says of ``inputs``."""
    return F.cross_entropy(model(batch["inputs"]), batch["targets"])


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy at every place of the sequences."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy at every place of the target."""
    logits = model(batch["input_ids"], batch["labels"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Whether somebody clicked."""
    logits = model(batch["dense"], batch["indices"])
    return F.binary_cross_entropy_with_logits(logits, batch["targets"])


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    """How far the predicted pictures are from the true ones."""
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    """CLIP's own loss."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


# Networks that no library has, or only with a package that is not installed.


class TransformerOfTorch(nn.Module):
    """``nn.Transformer`` in its base size, with embeddings of tokens and places, and a head."""

    def __init__(self, vocabulary: int = 37_000, width: int = 512, length: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.transformer = nn.Transformer(width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(
            self.embedding(source) + self.places,
            self.embedding(target) + self.places,
            tgt_mask=mask.to(self.places.dtype),
            tgt_is_causal=True,
        )
        logits: Tensor = self.head(hidden)
        return logits


class LstmLanguageModel(nn.Module):
    """Embeddings, two layers of LSTM, dropout and a head: Zaremba's large one."""

    def __init__(self, vocabulary: int = 10_000, width: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.65, batch_first=True)
        self.dropout = nn.Dropout(0.65)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(ids)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class MixerBlock(nn.Module):
    """One block of an MLP-Mixer: over the patches, then over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.over_patches = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.over_channels(self.norms[1](x))
        return mixed


class Mixer(nn.Module):
    """MLP-Mixer B/16 for 224 x 224 pixels."""

    def __init__(self, width: int = 768, depth: int = 12, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock((224 // patch) ** 2, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def layers_of(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, each with a ReLU."""
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


class Dlrm(nn.Module):
    """A recommender: 26 tables of 100,000 rows, dot products between all features, and two small MLPs."""

    def __init__(self, tables: int = 26, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = layers_of(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(layers_of(width + pairs, 1024, 1024, 512, 256), nn.Linear(256, 1))
        places = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("rows", places[0])
        self.register_buffer("columns", places[1])

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        low = self.bottom(dense)
        found = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([low, *(each.to(low.dtype) for each in found)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        logits: Tensor = self.top(torch.cat([low, products], dim=1))
        return logits


class UnetBlock(nn.Module):
    """Two convolutions with group norms, and a way around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.around(x) + self.second(self.first(x))
        return out


class Unet(nn.Module):
    """A U-Net of a diffusion model's usual shape, without attention."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 256, 512)) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        befores = (widths[0], *widths[:-1])
        self.down = nn.ModuleList(map(UnetBlock, befores, widths))
        self.middle = UnetBlock(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            UnetBlock(2 * width, before) for before, width in zip(befores[::-1], widths[::-1], strict=True)
        )
        self.last = nn.Sequential(nn.GroupNorm(32, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.first(images), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        out: Tensor = self.last(x)
        return out


def vgg16() -> nn.Module:
    """VGG-16 as it was published, with ReLUs in place."""
    widths: tuple[int, ...] = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
        before = width
    hidden = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    hidden += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(4096, 1000))


# The table.


def _of_transformers(kind: str, config: str, **settings: Any) -> nn.Module:
    """A model class of transformers with a configuration class of it; imported when it is built."""
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
    """An entry whose ``classes`` are ``"MODEL CONFIG"`` of transformers, with what differs from its defaults."""
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
    """A network of transformers for pictures, of a kind that it offers no checkpointing for."""
    return _transformers(
        name, CONVOLUTION, classes, partial(pictures, 224), PIXELS, checkpointing=False, num_labels=1000, **settings
    )


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
        "Mistral 7B",
        DECODER,
        "MistralForCausalLM MistralConfig",
        partial(tokens, 32_000, 2048),
        "2,048 tokens",
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
    _own("VGG-16", CONVOLUTION, vgg16, partial(inputs_and_targets, (3, 224, 224), 1000), PIXELS, class_loss),
    _own("U-Net", CONVOLUTION, Unet, noisy, "128 x 128 pixels", picture_loss),
    _own(
        "nn.Transformer base",
        BOTH,
        TransformerOfTorch,
        partial(translated, 37_000, 256, 256),
        "256 and 256 tokens",
        translation_loss,
    ),
    _own("LSTM", RECURRENT, LstmLanguageModel, partial(tokens, 10_000, 35), "35 tokens", token_loss),
    _own("MLP-Mixer B/16", MLP, Mixer, partial(inputs_and_targets, (3, 224, 224), 1000), PIXELS, class_loss),
    _own("DLRM", EMBEDDINGS, Dlrm, partial(clicks, 26), "13 numbers, 26 indices", click_loss),
)
"""In the order in which they are made and shown."""

BY_NAME = {model.name: model for model in MODELS}
