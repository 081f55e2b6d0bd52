"""The batches and losses with which the models of the atlas are trained."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch: TypeAlias = dict[str, Tensor]


def tokens(vocabulary: int, length: int, batch: int) -> Batch:
    """Token sequences without padding, with the token to predict at every position."""
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": torch.randint(0, vocabulary, (batch, length))}


def masked_tokens(vocabulary: int, length: int, batch: int) -> Batch:
    """Token sequences with the attention mask that a tokenizer makes."""
    mask = torch.ones(batch, length, dtype=torch.long)
    return tokens(vocabulary, length, batch) | {"attention_mask": mask}


def translated(vocabulary: int, source: int, target: int, batch: int) -> Batch:
    """Token sequences in a source and a target language."""
    ids = torch.randint(0, vocabulary, (batch, source))
    return {"input_ids": ids, "labels": torch.randint(0, vocabulary, (batch, target))}


def pictures(size: int, batch: int) -> Batch:
    """Pictures, each with one of 1,000 classes, under the names of transformers."""
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 1000, (batch,))}


def speech(batch: int) -> Batch:
    """Thirty seconds of speech as Whisper's spectrograms, with the tokens of the text."""
    return {"input_features": torch.randn(batch, 80, 3000), "labels": torch.randint(0, 51865, (batch, 128))}


def waves(batch: int) -> Batch:
    """Ten seconds of sound at 16 kHz, with one of two classes."""
    return {"input_values": torch.randn(batch, 160_000), "labels": torch.randint(0, 2, (batch,))}


def captioned(batch: int) -> Batch:
    """Pictures and their captions, as CLIP takes them."""
    ids = torch.randint(0, 49408, (batch, 77))
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 224, 224)}


def inputs_and_targets(shape: tuple[int, ...], classes: int, batch: int) -> Batch:
    """Random inputs of ``shape``, each with a class."""
    return {"inputs": torch.randn(batch, *shape), "targets": torch.randint(0, classes, (batch,))}


def clicks(tables: int, batch: int) -> Batch:
    """Thirteen numbers, one index into each table, and whether the user clicked."""
    return {
        "dense": torch.randn(batch, 13),
        "indices": torch.randint(0, 100_000, (batch, tables)),
        "targets": torch.rand(batch, 1),
    }


def noisy(size: int, batch: int) -> Batch:
    """Pictures, and pictures of the same size to predict from them."""
    return {"inputs": torch.randn(batch, 3, size, size), "targets": torch.randn(batch, 3, size, size)}


def latents(size: int, words: int, batch: int) -> Batch:
    """Noisy latent pictures, the noise, and the condition: ``words`` embedded words, or else a class."""
    what = {"encoder_hidden_states": torch.randn(batch, words, 768)} if words else {}
    classes = {} if words else {"class_labels": torch.randint(0, 1000, (batch,))}
    pixels = (batch, 4, size, size)
    return {"inputs": torch.randn(pixels), "targets": torch.randn(pixels)} | what | classes


def segmented(batch: int) -> Batch:
    """Pictures with one of 150 classes for each pixel."""
    return {"pixel_values": torch.randn(batch, 3, 512, 512), "labels": torch.randint(0, 150, (batch, 512, 512))}


def videos(batch: int) -> Batch:
    """Videos of sixteen pictures, each with one of 400 classes."""
    return {"pixel_values": torch.randn(batch, 16, 3, 224, 224), "labels": torch.randint(0, 400, (batch,))}


def images_with_boxes(batch: int) -> Batch:
    """Pictures of 416 x 416 pixels, with the targets of YOLOv3 for the cells of its three grids."""
    grids = {f"grid{size}": torch.rand(batch, 3, size, size, 85) for size in (13, 26, 52)}
    return {"inputs": torch.randn(batch, 3, 416, 416)} | grids


def graphs(batch: int) -> Batch:
    """Graphs as large as those in PPI: 50 features and 121 labels per node."""
    nodes, edges = 2373 * batch, 34_113 * batch
    return {
        "features": torch.randn(nodes, 50),
        "edges": torch.randint(0, nodes, (2, edges)),
        "targets": torch.rand(nodes, 121),
    }


def spoken_letters(batch: int) -> Batch:
    """Ten seconds of speech as spectrograms, with 150 letters each."""
    return {"inputs": torch.randn(batch, 1, 161, 1000), "letters": torch.randint(1, 29, (batch, 150))}


# Losses.


def loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers returns with its output."""
    loss: Tensor = model(**batch).loss
    return loss


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the model's output for ``inputs``."""
    return F.cross_entropy(model(batch["inputs"]), batch["targets"])


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy at every position of the sequences."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy at every position of the target."""
    logits = model(batch["input_ids"], batch["labels"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross entropy of the clicks."""
    logits = model(batch["dense"], batch["indices"])
    return F.binary_cross_entropy_with_logits(logits, batch["targets"])


def picture_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The distance of the predicted pictures from the true ones."""
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    """CLIP's own loss."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The distance of the predicted noise from the true one, at a random time for each sample."""
    inputs, targets = batch["inputs"], batch["targets"]
    more = {name: batch[name] for name in ("encoder_hidden_states", "class_labels") if name in batch}
    time = torch.randint(0, 1000, (len(inputs),), device=inputs.device)
    predicted = model(inputs, timestep=time, **more).sample
    return F.mse_loss(predicted[:, : targets.shape[1]].float(), targets.float())


def reconstruction_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The distance of an autoencoder's output pictures from its input."""
    return F.mse_loss(model(batch["inputs"]).sample.float(), batch["inputs"].float())


def detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    """YOLOv3's loss: squared error of the boxes, and binary cross entropy of each cell's objects."""
    total = torch.zeros((), device=batch["inputs"].device)
    for size, found in model(batch["inputs"]).items():
        wanted = batch[f"grid{size}"].to(found.dtype)
        total = total + F.mse_loss(found[..., :4], wanted[..., :4])
        total = total + F.binary_cross_entropy_with_logits(found[..., 4:], wanted[..., 4:])
    return total


def label_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross entropy of every label of every node."""
    return F.binary_cross_entropy_with_logits(model(batch["features"], batch["edges"]), batch["targets"])


def transcription_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy with the letters spread evenly over time, as CTC's loss depends on the values."""
    logits, letters = model(batch["inputs"]), batch["letters"]
    spread = letters.repeat_interleave(logits.shape[1] // letters.shape[1] + 1, dim=1)[:, : logits.shape[1]]
    return F.cross_entropy(logits.flatten(0, 1), spread.flatten())
