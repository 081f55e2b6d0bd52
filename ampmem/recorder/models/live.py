"""Finds live modules, tensors and optimizers by the garbage collector, and pauses the collector."""

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
    """Every live module; walks through all objects once.

    Compares the ``id`` of their exact types, so no code of an object, its class or its metaclass is run.
    """
    return _of_types(_with_subclasses(Module), map(gc.get_objects, (None,)))


def live_tensors() -> list[Tensor]:
    """Every live tensor whose class may have memory of its own; found as in :func:`live_at_start`."""
    return _with_types(_may_have_memory())


def live_at_start(*, tensors: bool = True) -> tuple[list[Optimizer], list[Tensor]]:
    """Every live optimizer and, if ``tensors``, every live tensor whose class may have memory of its own.

    It asks for the referrers of their classes, since each object refers to its own. For few classes that takes half as
    long as walking through all objects; modules have hundreds of classes, for which it would take longer.
    """
    optimizers = {key: kind for key, kind in _with_subclasses(Optimizer).items() if not _is_idle(kind)}
    found = _with_types(optimizers | _may_have_memory() if tensors else optimizers)
    is_optimizer = [id(type(item)) in optimizers for item in found]
    return list(compress(found, is_optimizer)), list(compress(found, map(operator.not_, is_optimizer)))


def dictionaries_with(item: object) -> list[dict[Any, Any]]:
    """Every dictionary that has ``item`` as a value or a key."""
    return _of_types(_with_subclasses(dict), starmap(gc.get_referrers, ((item,),)))


def _may_have_memory() -> dict[int, type]:
    """The tensor classes whose objects may have memory of their own, by ``id``."""
    return {key: kind for key, kind in _with_subclasses(Tensor).items() if not _wraps_others(kind)}


def _with_types(kinds: dict[int, type]) -> list[Any]:
    """All objects of exactly these types."""
    return _of_types(kinds, starmap(gc.get_referrers, (tuple(kinds.values()),)))


def _of_types(types: Container[int], candidates: Iterator[list[Any]]) -> list[Any]:
    """All objects whose exact type has its ``id`` in ``types``, from the list that ``candidates`` makes.

    A thread that is building a tuple fails if anybody else holds it, and the garbage collector already tracks it. So no
    other thread may run while the candidates are held: their list is made, filtered and dropped inside one call of C,
    which runs no Python.
    """
    held: list[list[Any]] = []
    made = map(held.append, candidates)
    is_wanted = map(types.__contains__, map(id, map(type, chain.from_iterable(held))))
    wanted = compress(chain.from_iterable(held), is_wanted)
    rest = filter(None, is_wanted)  # yields nothing, but drops the list at its end
    dropped: Iterator[Any] = iter(held.clear, None)
    with collection_paused():
        return list(chain(filter(None, made), wanted, rest, dropped))


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector during ampmem's own work: a free that it caused would be missed."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _with_subclasses(kind: type) -> dict[int, type]:
    """``kind`` and all its subclasses, by ``id``."""
    types: dict[int, type] = {}
    pending: list[type] = [kind]
    while pending:
        found = pending.pop()
        if id(found) not in types:
            types[id(found)] = found
            pending.extend(type.__subclasses__(found))
    return types


def _is_idle(kind: type) -> bool:
    """Whether ``kind`` is one of torch's own optimizers and has no instance."""
    return _is_of_torch(kind) and kind is not Optimizer and never_made(kind)


def _wraps_others(kind: type) -> bool:
    """Whether ``kind`` is a wrapper class of torch's: its tensors wrap the one that has the memory."""
    if not _is_of_torch(kind):
        return False
    above = kind.__mro__
    return any("__torch_dispatch__" in vars(base) for base in above[: above.index(Tensor)])


def _is_of_torch(kind: type) -> bool:
    return str(type.__getattribute__(kind, "__module__")).startswith("torch.")
