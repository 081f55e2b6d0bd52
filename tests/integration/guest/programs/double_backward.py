"""Gradients of gradients: a penalty, and forces that a model computes inside its forward."""

import torch
from _training import small_model, train
from torch import Tensor, nn

model = small_model()


def penalty(batch: Tensor) -> Tensor:
    batch.requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).exp().sum(), batch, create_graph=True)
    print("node", slope.grad_fn.name(), slope.is_leaf)
    return (slope.square().sum(1).sqrt() - 1).square().mean()


train(model, loss_of=penalty)


class Forces(nn.Module):
    """Is its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.body(x).sin().sum(), x, create_graph=self.training)[0]


forces = Forces()
train(forces)
forces.eval()
print(forces(torch.ones(4, 8)).sum().item())
print(torch.autograd.gradcheck(lambda x: x.exp().square(), torch.ones(2, dtype=torch.double, requires_grad=True)))
print(torch.autograd.gradgradcheck(lambda x: x.exp(), torch.ones(2, dtype=torch.double, requires_grad=True)))
