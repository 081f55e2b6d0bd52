"""Swaps what is in its parameters: data, set_, resize_, to, half, tied and replaced weights."""

import torch
from _training import small_model, train
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

model = small_model()


def swapped(batch: Tensor) -> Tensor:
    model[0].weight.data = model[0].weight.data.clone()
    model[2].weight.grad = None
    model[0].bias = nn.Parameter(model[0].bias.detach().clone())
    with torch.no_grad():
        model[2].bias.set_(torch.zeros(4))
    return model(batch).square().mean()


train(model, loss_of=swapped)
tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
tied[1].weight = tied[0].weight
train(tied)
normed = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 4)))
train(normed)
print(parametrize.is_parametrized(normed[0]), [name for name, _ in normed.named_parameters()])
half = small_model().to(torch.bfloat16).float().double().float()
train(half)
for parameter in half.parameters():
    parameter.requires_grad_(False)
half[0].weight.requires_grad_(True)
train(half, torch.optim.SGD([half[0].weight], lr=0.1))
half.apply(lambda module: module.train(False))
print([parameter.requires_grad for parameter in half.parameters()])
