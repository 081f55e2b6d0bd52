"""What the garbage collector knows, and keeping it from running."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
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
    for item in _of_types(add):
        add[id(type(item))](item)
    return found


def _of_types(types: Container[int]) -> list[Any]:
    """All objects whose exact type has its ``id`` in ``types``.

    Another thread that is making a tuple fails where anybody else holds that, and the garbage collector knows it
    already. So no other thread may run while all objects are held: a list of them is made, gone through and emptied
    inside one call of C, which runs no Python.
    """
    everything: list[Any] = []
    made = map(everything.extend, map(gc.get_objects, (None,)))
    wanted = compress(everything, map(types.__contains__, map(id, map(type, everything))))
    emptied: Iterator[Any] = iter(everything.clear, None)
    with collection_paused():
        return list(chain(filter(None, made), wanted, emptied))


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
