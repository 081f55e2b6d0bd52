"""Ops and Functions of the script's own: custom_op, a nested Function, one that fails, one that changes its input."""

import torch
from _training import small_model, train
from torch import Tensor


@torch.library.custom_op("guest::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


def setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output)


def back(ctx, gradient: Tensor) -> Tensor:
    x, y = ctx.saved_tensors
    print("saved", x.grad_fn is not None, torch.equal(y, 2 * x))
    return 2 * gradient


doubled.register_autograd(back, setup_context=setup)


class Inner(torch.autograd.Function):
    """Runs inside another, and keeps its result."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.mark_non_differentiable()
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class Outer(torch.autograd.Function):
    """Makes a graph of its own in forward, and changes its input."""

    @staticmethod
    def forward(ctx, x: Tensor, fails: bool) -> Tensor:
        ctx.save_for_backward(x)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            ctx.slope = torch.autograd.grad(Inner.apply(leaf).sum(), leaf)[0]
        if fails:
            raise ValueError("as it should")
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3 + ctx.slope, None


model = small_model()


def loss_of(batch: Tensor) -> Tensor:
    try:
        Outer.apply(model(batch), True)
    except ValueError as error:
        print(error)
    y = Outer.apply(doubled(model(batch)) + 1, False)
    print(y.grad_fn.name(), len(y.grad_fn.saved_tensors))
    return Inner.apply(y).square().mean()


train(model, loss_of=loss_of)
