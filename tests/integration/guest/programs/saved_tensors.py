"""Looks at what autograd saved, by identity, and puts hooks of its own on it."""

import torch
from _training import small_model, train
from torch import Tensor, nn


def look(x: Tensor, where: str) -> Tensor:
    """Prints what the nodes of some ops have, and hooks one."""
    y = x.exp()
    z = x.sin()
    w = y * z
    print(where, "leaf", x.is_leaf, "input", z.grad_fn._saved_self is x, "output", y.grad_fn._saved_result is y)
    print(where, "both", w.grad_fn._saved_self is y, w.grad_fn._saved_other is z)
    print(where, "node", y.grad_fn._saved_result.grad_fn is y.grad_fn, y.grad_fn._saved_result.requires_grad)
    squared = y.square()
    squared.grad_fn._raw_saved_self.register_hooks(lambda saved: 2 * saved, lambda kept: kept / 2)
    print(where, "hooked", torch.equal(squared.grad_fn._saved_self, y))
    return w + squared


class Looking(nn.Module):
    """Does so in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        print("weight", self.body[0](x).grad_fn._saved_mat1 is x)
        return look(self.body(x), "inside") + look(self.shift, "parameter")


leaf = torch.ones(3, requires_grad=True)
look(leaf, "before").sum().backward()
model = Looking()
train(model)
look(leaf, "after").sum().backward()
train(model, loss_of=lambda batch: look(model.shift, "no module yet").sum() + model(batch).sum())
print(leaf.grad)
