"""Tensors of classes that count what they are asked, refuse it, or wrap others."""

from collections import Counter

import torch
from _training import small_model, train
from torch import nn

asked: Counter[str] = Counter()


class Counting(torch.Tensor):
    """Counts the functions that are called with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        asked[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Refusing(torch.Tensor):
    """Has no address and no storage for anybody."""

    def data_ptr(self):
        asked["data_ptr of Refusing"] += 1
        raise OSError("no address")

    def untyped_storage(self):
        asked["storage of Refusing"] += 1
        raise KeyError("no storage")

    @property
    def layout(self):
        asked["layout of Refusing"] += 1
        raise ZeroDivisionError("no layout")


class Wrapper(torch.Tensor):
    """Holds another tensor, and counts ops."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        asked["repr"] += 1
        raise RuntimeError("without words")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        asked[str(func)] += 1

        def open_(value):
            return value.inner if isinstance(value, Wrapper) else value

        result = func(*map(open_, args), **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


class Scaled(nn.Module):
    """A model with a weight of such a class."""

    def __init__(self, weight) -> None:
        super().__init__()
        self.body = small_model()
        self.weight = nn.Parameter(weight)
        self.register_buffer(
            "offset", torch.zeros(4).as_subclass(type(weight)) if type(weight) is not Wrapper else None
        )

    def forward(self, x):
        y = self.body(x) * self.weight
        return y if self.offset is None else y + self.offset


for weight in (torch.ones(4).as_subclass(Counting), torch.ones(4).as_subclass(Refusing), Wrapper(torch.ones(4))):
    asked.clear()
    model = Scaled(weight)
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)

    def loss_of(batch, model=model):
        loss = model(batch).square().mean()
        return model.body(batch).sum() if isinstance(loss, Wrapper) else loss.as_subclass(torch.Tensor)

    train(model, optimizer, loss_of=loss_of)
    print(type(weight).__name__, sorted(asked.items()))
