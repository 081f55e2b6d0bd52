"""Inference mode and no_grad between steps, and what may not be saved."""

import torch
from _training import small_model, train
from torch import Tensor

model, teacher = small_model(), small_model()


def distilled(batch: Tensor) -> Tensor:
    with torch.inference_mode():
        target = teacher(batch).softmax(-1)
    with torch.no_grad():
        start = teacher(batch)
    print(target.is_inference(), start.requires_grad)
    return (model(batch).log_softmax(-1) - target.clone()).square().sum() + (model(batch) - start).square().mean()


train(model, loss_of=distilled)
with torch.inference_mode():
    frozen = teacher(torch.ones(4, 8))
try:
    model(frozen).sum().backward()
except RuntimeError as error:
    print(error)
train(model)
