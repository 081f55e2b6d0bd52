"""A Function that finds what the script has hung at a weight, as Megatron's do, in what it saved."""

import torch
from _training import train
from torch import Tensor, nn


class Accumulating(torch.autograd.Function):
    """A product whose weight's gradient goes into ``main_grad``."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        print("saved", weight is model.weight, type(weight).__name__, x.grad_fn is not None)
        return gradient @ weight, None


class Parallel(nn.Linear):
    """A layer whose weight has a gradient of its own making."""

    def forward(self, x: Tensor) -> Tensor:
        return Accumulating.apply(x.exp(), self.weight) + self.bias


torch.manual_seed(0)
model = Parallel(8, 4)
model.weight.main_grad = torch.zeros(4, 8)
train(model, loss_of=lambda batch: model(batch.requires_grad_()).square().mean())
print("main_grad", model.weight.main_grad.sum().item(), model.weight.grad)
