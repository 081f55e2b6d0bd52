"""Batches of any class, from a DataLoader and by hand."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import torch
from _training import small_model, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

asked: list[str] = []
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    """A batch with names."""

    x: Tensor


class Strange(dict):
    """A batch that fails when it is looked through."""

    def _refuse(self, *args):
        asked.append("strange")
        raise RuntimeError("not to be looked through")

    items = keys = values = __iter__ = __len__ = __bool__ = __eq__ = _refuse


class Proxy:
    """A batch that says it is of another class, and fails."""

    def __init__(self, x):
        object.__setattr__(self, "x", x)

    @property
    def __class__(self):
        asked.append("class")
        raise RuntimeError("no class")

    def __bool__(self):
        asked.append("bool")
        raise RuntimeError("neither")


class Model(nn.Module):
    """Takes its tensor out of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, batch, extra=None):
        if type(batch) is Strange:
            return self.body(dict.__getitem__(batch, "x"))
        if type(batch) in (dict, OrderedDict, UserDict):
            return self.body(batch["x"])
        return self.body(batch if type(batch) is Tensor else batch.x)


kinds = {
    "pair": lambda x: Pair(x, None),
    "record": Record,
    "strange": lambda x: Strange(x=x),
    "proxy": Proxy,
    "dict": lambda x: {"x": x},
    "user dict": lambda x: UserDict(x=x),
    "ordered": lambda x: OrderedDict(x=x),
}
for name, make in kinds.items():
    model = Model()
    train(model, loss_of=lambda x, model=model, make=make: model(make(x), extra=make(x)).sum(), steps=1)
    data = DataLoader(torch.ones(4, 8), batch_size=2, collate_fn=lambda rows, make=make: make(torch.stack(rows)))
    print(name, [model(batch).sum().item() for batch in data])
print(asked)
