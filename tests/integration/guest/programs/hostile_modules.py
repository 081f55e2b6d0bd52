"""Modules whose attributes, properties and methods fail, or count that they are asked."""

import torch
from _training import small_model, train
from torch import Tensor, nn

asked: list[str] = []


class Guarded(nn.Module):
    """Lets nobody ask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def __getattr__(self, name):
        if name in ("body", "seen"):
            return super().__getattr__(name)
        asked.append(name)
        raise ValueError(f"nobody asks for {name}")

    @property
    def device(self):
        asked.append("device")
        raise RuntimeError("nobody asks for the device")

    def parameters(self, recurse=True):
        asked.append("parameters")
        raise RuntimeError("nobody asks for parameters")

    def named_parameters(self, *args, **kwargs):
        asked.append("named_parameters")
        raise KeyError("nobody asks for named_parameters")

    def named_modules(self, *args, **kwargs):
        asked.append("named_modules")
        raise OSError("nobody asks for modules")

    modules = children = named_children = buffers = named_buffers = named_modules

    def __eq__(self, other):
        asked.append("equal")
        raise TypeError("not to be compared")

    def __hash__(self):
        asked.append("hash")
        raise TypeError("not to be hashed")

    def __bool__(self):
        asked.append("bool")
        raise TypeError("neither true nor false")

    def __len__(self):
        asked.append("len")
        raise TypeError("without a length")

    def __repr__(self):
        asked.append("repr")
        raise TypeError("without words")


class Hidden(nn.Linear):
    """Has its dictionary behind a property, and its class, too."""

    @property
    def __dict__(self):
        asked.append("dict")
        raise RuntimeError("no dictionary")


class Shedding(nn.Module):
    """Deletes what every module has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for name in ("_buffers", "_modules", "_parameters"):
            self.__dict__.pop(name, None)
        return x * weight


class Unmade(nn.Module):
    """Never calls its base's ``__init__``."""

    def __init__(self) -> None:
        pass


guarded = Guarded()
train(guarded, torch.optim.AdamW(guarded.body.parameters()))
guarded.body.append(nn.ReLU())
train(guarded, torch.optim.AdamW(guarded.body.parameters()))
print("asked", asked)
unmade, shedding, body = Unmade(), Shedding(), small_model()
parameters = [*body.parameters(), shedding.weight]


def loss_of(batch: Tensor) -> Tensor:
    if "_parameters" not in vars(shedding):
        return body(batch).sum()
    return shedding(body(batch)).sum()


train(body, torch.optim.SGD(parameters, lr=0.1), loss_of=loss_of)
hidden = Hidden.__new__(Hidden)
print(type(unmade).__name__, asked)
