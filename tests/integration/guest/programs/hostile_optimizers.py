"""Optimizers with odd states, and with objects in them that let nobody look."""

from collections.abc import Mapping

import torch
from _training import small_model, train

asked: list[str] = []


class Closed:
    """Fails whatever it is asked."""

    __slots__ = ("tensor", "unset")

    def __init__(self) -> None:
        self.tensor = torch.ones(3)

    def _refuse(self, *args):
        asked.append("closed")
        raise RuntimeError("closed")

    __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __repr__ = __getattr__ = keys = items = _refuse


class Table(dict):
    """A dictionary that is no such thing when it is asked."""

    def _refuse(self, *args):
        asked.append("table")
        raise RuntimeError("no table")

    items = keys = values = __iter__ = __len__ = _refuse


class View(Mapping):
    """Fails when it is looked through, which nothing can be known of without."""

    def _refuse(self, *args):
        raise ZeroDivisionError("no view")

    __iter__ = __len__ = __getitem__ = _refuse


class Pretending:
    """Says that it is a tensor."""

    @property
    def __class__(self):
        asked.append("class")
        raise RuntimeError("no class")


class Endless:
    """Makes an attribute whenever it is asked for one."""

    def __getattr__(self, name):
        asked.append(name)
        return Endless()


class Odd(torch.optim.SGD):
    """Whose state and groups are made when they are asked for."""

    @property
    def param_groups(self):
        return self.__dict__["groups"]

    @param_groups.setter
    def param_groups(self, groups):
        self.__dict__["groups"] = groups


model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train(model, optimizer, steps=1)
weight = model[0].weight
table = Table()
dict.__setitem__(table, "inside", torch.ones(5))
optimizer.state[weight]["closed"] = Closed()
optimizer.state[weight]["table"] = table
optimizer.state[weight]["pretending"] = Pretending()
optimizer.state[weight]["endless"] = Endless()
optimizer.state[weight]["loop"] = [optimizer.state]
optimizer.state["a text"] = torch.ones(2)
optimizer.state[model[0].bias] = None
model[2].requires_grad_(False)
optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]
train(model, optimizer, steps=1)
model = small_model()
odd = Odd(model.parameters(), lr=0.1)
odd.state[model[0].weight] = {
    "closed": Closed(),
    "table": table,
    "loop": odd,
    "list": [Closed(), Pretending()],
    "view": View(),
}
train(model, odd)
del odd.state
odd.__dict__["state"] = {model[0].weight: 3}
train(model, odd, steps=1)
print("asked", asked)
