"""Checkpointing, both ways, of modules and of functions."""

import torch
from _training import train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Blocks(nn.Module):
    """Some blocks that are run again in backward, and a function that is none."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.reentrant = reentrant

    def scaled(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp().tanh()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = checkpoint(self.scaled, x, use_reentrant=self.reentrant)
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)


for reentrant in (True, False):
    torch.manual_seed(0)
    model = Blocks(reentrant)
    train(model, loss_of=lambda batch, model=model: model(batch.requires_grad_()).square().mean())
    print({name: parameter.grad.sum().item() for name, parameter in model.named_parameters()})
