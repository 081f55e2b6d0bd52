"""Watches tensors, nodes and modules die: nothing of ampmem's may keep one."""

import gc
import weakref

import torch
from _training import small_model, train
from torch import Tensor, nn

gc.disable()
died: list[str] = []


class Watching(nn.Module):
    """Notes when each of its intermediate results has died."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        z = y.cos()
        weakref.finalize(y, died.append, "linear")
        weakref.finalize(z, died.append, "cos")
        w = z + 1
        died.append("added")
        del y, z
        died.append("deleted")
        v = w.exp()
        del w
        died.append("over")
        return v.relu()


model = Watching()
train(model)
print(died)
gone = small_model()
train(gone, steps=1)
weakref.finalize(gone, print, "model died")
weakref.finalize(gone[0].weight, print, "weight died")
del gone
print("end", torch.is_grad_enabled())
