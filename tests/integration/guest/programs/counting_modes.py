"""Counts every call and every op that there is, by name, with modes of its own."""

from collections import Counter

import torch
from _training import small_model, train
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchFunctionMode):
    """Counts calls of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.counts[resolve_name(func) or str(func)] += 1
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


for kind in (Calls, Ops):
    model = small_model()
    with kind() as around:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model = small_model()
    inside = kind()

    def loss_of(batch, inside=inside, model=model):
        with inside, torch.autocast("cpu", torch.bfloat16):
            return model(batch).square().mean()

    train(model, loss_of=loss_of)
    for counted in (around, inside):
        print(kind.__name__, sum(counted.counts.values()), sorted(counted.counts.items()))
