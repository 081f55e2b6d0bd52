"""Finds live modules, tensors and optimizers by the garbage collector, and pauses the collector."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress, starmap
from types import FunctionType, GeneratorType, MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module as Module
from torch.optim import Optimizer as Optimizer

from ampmem.patching import is_simulating
from ampmem.recorder.torch_private.general import never_made

_NO_MEMORY = frozenset(
    {
        "torch.nn.parameter.Buffer",  # makes plain tensors
        "torch.nn.parameter.UninitializedBuffer",
        "torch.nn.parameter.UninitializedParameter",
        "torch.nn.utils._expanded_weights.expanded_weights_impl.ExpandedWeight",  # has that of the module's parameter
    }
)
"""Classes of torch's whose tensors have no memory, or not their own."""
_FAKE = "torch._subclasses.fake_tensor.FakeTensor"
"""The class of a simulated device's tensors; without a simulation, they are a compiler's, and have no memory."""
_NAME: Callable[[type], str] = type.__dict__["__name__"].__get__
"""The name of a class, even if its metaclass overrides ``__name__``."""
_LEVELS = 6
"""Maximum number of levels between a variable and an optimizer; an object and its dictionary are two."""
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple)
_MOST_ITEMS = 512
"""Containers with more items are not searched."""
_SEARCHED = frozenset((MethodType, GeneratorType))
_NOT_SEARCHED = (type, Tensor)
_FLAGS: Callable[[type], int] = type.__dict__["__flags__"].__get__
"""The flags of a class, even if its metaclass overrides ``__flags__``."""
_IN_PYTHON = 1 << 9
"""The flag of classes that are made by a ``class`` statement (Python's Py_TPFLAGS_HEAPTYPE)."""


def live_modules() -> list[Module]:
    """Every live module; walks through all objects once.

    Compares the ``id`` of their exact types, so no code of an object, its class or its metaclass is run.
    """
    return _of_types(_with_subclasses(Module), map(gc.get_objects, (None,)))


def live_tensors() -> list[Tensor]:
    """Every live tensor whose class may have memory of its own; found as in :func:`live_at_start`."""
    return _with_types(_may_have_memory())


def live_at_start(variables: Iterable[Any] = (), *, tensors: bool = True) -> tuple[list[Optimizer], list[Tensor]]:
    """The live optimizers and, if ``tensors``, every live tensor whose class may have memory of its own.

    Optimizers are looked for in ``variables`` and in what they hold, a few levels deep; if there are none, it is every
    live one. So most recordings on a device do without a walk through all objects. The walk asks for the referrers of
    the classes, since each object refers to its own. For few classes that takes half as long as going through a list of
    all objects; modules have hundreds of classes, for which it would take longer.
    """
    kinds = {
        key: kind
        for key, kind in _with_subclasses(Optimizer).items()
        if not (_qualified(kind).startswith("torch.") and never_made(kind))
    }
    near = _optimizers_in(variables) if kinds else []
    if near:
        kinds = {}
    found = _with_types(kinds | _may_have_memory() if tensors else kinds)
    is_optimizer = [id(type(item)) in kinds for item in found]
    return near or list(compress(found, is_optimizer)), list(compress(found, map(operator.not_, is_optimizer)))


def _optimizers_in(variables: Iterable[Any]) -> list[Optimizer]:
    """The optimizers among ``variables``, and inside of them. No code of any object is run."""
    kinds = _with_subclasses(Optimizer)
    seen: set[int] = set()
    found: list[Optimizer] = []
    level = list(variables)
    with collection_paused():
        for _ in range(_LEVELS):
            new = {id(item): item for item in level if id(item) not in seen}
            seen |= new.keys()
            found += [item for item in new.values() if id(type(item)) in kinds]
            functions = [item for item in new.values() if type(item) is FunctionType]
            cells = chain.from_iterable(function.__closure__ or () for function in functions)
            level = [*gc.get_referents(*filter(_is_searched, new.values())), *gc.get_referents(*cells)]
    return found


def _is_searched(item: Any) -> bool:
    """Whether an optimizer may be a part of ``item``: a container that is not too large, or an object of a class."""
    kind = type(item)
    if kind in _SEARCHED:
        return True
    for container in _CONTAINERS:
        if issubclass(kind, container):
            return bool(container.__len__(item) <= _MOST_ITEMS)
    return bool(_FLAGS(kind) & _IN_PYTHON) and not issubclass(kind, _NOT_SEARCHED)


def dictionaries_with(item: object) -> list[dict[Any, Any]]:
    """Every dictionary that has ``item`` as a value or a key."""
    return _of_types(_with_subclasses(dict), starmap(gc.get_referrers, ((item,),)))


def _may_have_memory() -> dict[int, type]:
    """The tensor classes whose objects may have memory of their own, by ``id``.

    Each class more makes the walk through all objects a thirtieth longer.
    """
    # The classes of today: scripts define new ones at any time.
    kinds = _with_subclasses(Tensor).items()
    return {key: kind for key, kind in kinds if _qualified(kind) not in _NO_MEMORY and not _wraps_others(kind)}


def _with_types(kinds: dict[int, type]) -> list[Any]:
    """All objects of exactly these types."""
    if not kinds:
        return []
    return _of_types(kinds, starmap(gc.get_referrers, (tuple(kinds.values()),)))


def _of_types(types: Container[int], candidates: Iterator[list[Any]]) -> list[Any]:
    """The objects in the list that ``candidates`` makes whose exact type has its ``id`` in ``types``.

    A thread that is building a tuple fails if other code holds it, and the garbage collector already tracks it. So no
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
            # By way of `type`: a metaclass may have a method of that name.
            pending.extend(type.__subclasses__(found))
    return types


def _wraps_others(kind: type) -> bool:
    """Whether ``kind`` is a wrapper class of torch's: its tensors wrap the one that has the memory."""
    name = _qualified(kind)
    if not name.startswith(("torch.", "ampmem.")) or is_of_device(kind):  # ampmem's fake tensors are like torch's
        return False
    above = kind.__mro__
    return any("__torch_dispatch__" in vars(base) for base in above[: above.index(Tensor)])


def is_of_device(kind: type) -> bool:
    """Whether tensors of this class are those of a simulated device, which has their memory."""
    return _qualified(kind) == _FAKE and is_simulating()


def _qualified(kind: type) -> str:
    """The module and the name of ``kind``."""
    return f"{type.__getattribute__(kind, '__module__')}.{_NAME(kind)}"
