"""What the garbage collector knows, and keeping it from running."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torch import Tensor
from torch.nn import Module as Module
from torch.optim import Optimizer as Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveObjects:
    """Every live module, optimizer and tensor that the garbage collector tracks."""

    modules: list[Module]
    optimizers: list[Optimizer]
    tensors: list[Tensor]


def live_objects() -> LiveObjects:
    """Look at all objects once.

    Goes by the ``id`` of their exact types: no code of an object's, its class's or its metaclass's is run.
    """
    found = LiveObjects(modules=[], optimizers=[], tensors=[])
    add: dict[int, Callable[[Any], None]] = {
        **dict.fromkeys(_with_subclasses(Module), found.modules.append),
        **dict.fromkeys(_with_subclasses(Optimizer), found.optimizers.append),
        **dict.fromkeys(_with_subclasses(Tensor), found.tensors.append),
    }
    everything = gc.get_objects()
    for item in compress(everything, map(add.__contains__, map(id, map(type, everything)))):
        add[id(type(item))](item)
    return found


@contextmanager
def collection_paused() -> Iterator[None]:
    """Our own work must not set off the garbage collector: a free that it causes would go unseen."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _with_subclasses(kind: type) -> dict[int, type]:
    """By ``id``, ``kind`` and all classes below it."""
    types: dict[int, type] = {}
    pending: list[type] = [kind]
    while pending:
        found = pending.pop()
        if id(found) not in types:
            types[id(found)] = found
            pending.extend(type.__subclasses__(found))
    return types
