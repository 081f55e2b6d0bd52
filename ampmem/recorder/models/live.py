"""What the garbage collector knows, and keeping it from running."""

from __future__ import annotations

import gc
import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import chain, compress, starmap
from typing import Any

from torch import Tensor
from torch.nn import Module as Module
from torch.optim import Optimizer as Optimizer

from ampmem.recorder.torch_private.general import never_made


def live_modules() -> list[Module]:
    """Every live module. Looks at all objects once.

    Goes by the ``id`` of their exact types: no code of an object's, its class's or its metaclass's is run.
    """
    return _of_types(_with_subclasses(Module), map(gc.get_objects, (None,)))


def live_tensors() -> list[Tensor]:
    """Every live tensor whose class may have memory of its own; found as in :func:`live_at_start`."""
    return _with_types(_may_have_memory())


def live_at_start(*, tensors: bool = True) -> tuple[list[Optimizer], list[Tensor]]:
    """Every live optimizer, and every live tensor whose class may have memory of its own, where ``tensors`` asks so.

    Asks who refers to their classes, as each object does to its own. For few classes that takes half as long as to
    look at all objects; for modules, of which there are hundreds of classes, it would take longer.
    """
    optimizers = {key: kind for key, kind in _with_subclasses(Optimizer).items() if not _is_idle(kind)}
    found = _with_types(optimizers | _may_have_memory() if tensors else optimizers)
    is_optimizer = [id(type(item)) in optimizers for item in found]
    return list(compress(found, is_optimizer)), list(compress(found, map(operator.not_, is_optimizer)))


def dictionaries_with(item: object) -> list[dict[Any, Any]]:
    """Every dictionary that has ``item`` as a value or a key."""
    return _of_types(_with_subclasses(dict), starmap(gc.get_referrers, ((item,),)))


def _may_have_memory() -> dict[int, type]:
    """By ``id``, the classes of tensors whose objects may have memory of their own."""
    return {key: kind for key, kind in _with_subclasses(Tensor).items() if not _wraps_others(kind)}


def _with_types(kinds: dict[int, type]) -> list[Any]:
    """All objects of exactly these types."""
    return _of_types(kinds, starmap(gc.get_referrers, (tuple(kinds.values()),)))


def _of_types(types: Container[int], candidates: Iterator[list[Any]]) -> list[Any]:
    """All objects whose exact type has its ``id`` in ``types``, of the one list that ``candidates`` makes.

    Another thread that is making a tuple fails where anybody else holds that, and the garbage collector knows it
    already. So no other thread may run while they are held: a list of them is made, gone through and dropped
    inside one call of C, which runs no Python.
    """
    held: list[list[Any]] = []
    made = map(held.append, candidates)
    is_wanted = map(types.__contains__, map(id, map(type, chain.from_iterable(held))))
    wanted = compress(chain.from_iterable(held), is_wanted)
    rest = filter(None, is_wanted)  # nothing: at its end it lets go of the list
    dropped: Iterator[Any] = iter(held.clear, None)
    with collection_paused():
        return list(chain(filter(None, made), wanted, rest, dropped))


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


def _is_idle(kind: type) -> bool:
    """Whether ``kind`` is one of torch's own optimizers of which none was made."""
    return _is_of_torch(kind) and kind is not Optimizer and never_made(kind)


def _wraps_others(kind: type) -> bool:
    """Whether ``kind`` is one of torch's own classes that take ops themselves: they wrap what has the memory."""
    if not _is_of_torch(kind):
        return False
    above = kind.__mro__
    return any("__torch_dispatch__" in vars(base) for base in above[: above.index(Tensor)])


def _is_of_torch(kind: type) -> bool:
    return str(type.__getattribute__(kind, "__module__")).startswith("torch.")
