"""Objects all around that fail when anybody looks at them: as lazy proxies and mocks do."""

import torch
from _training import small_model, train

asked: list[str] = []


class Meta(type):
    """Classes that cannot be compared, hashed or asked for instances."""

    def __hash__(cls):
        asked.append("hash of a class")
        raise TypeError("not to be hashed")

    def __eq__(cls, other):
        asked.append("equality of a class")
        raise TypeError("not to be compared")

    def __instancecheck__(cls, instance):
        asked.append("instance check")
        raise TypeError("no instances")

    def __subclasscheck__(cls, subclass):
        asked.append("subclass check")
        raise TypeError("no subclasses")


class Proxy(metaclass=Meta):
    """Stands for something that would be loaded if it were asked."""

    def __init__(self, **held) -> None:
        object.__getattribute__(self, "__dict__").update(held)

    def __getattribute__(self, name):
        asked.append(name)
        raise RuntimeError(f"{name} was asked for")

    def _refuse(self, *args):
        asked.append("proxy")
        raise RuntimeError("asked")

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse


class Key:
    """A key without words."""

    def __repr__(self):
        asked.append("key")
        raise RuntimeError("without words")


held = torch.ones(100_000)
proxies = [Proxy(tensor=held) for _ in range(3)]
kept = {Key(): [torch.ones(100_000)], "proxy": proxies}
cycle = [kept]
cycle.append(cycle)
train(small_model())
with torch.no_grad():
    small_model()(torch.ones(4, 8))
print("asked", asked, len(cycle))
