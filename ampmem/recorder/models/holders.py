"""Which Python object holds a tensor, asked of the garbage collector."""

from __future__ import annotations

import gc
import operator
from collections import deque
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from ampmem.events import Fact
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.models.live import collection_paused, live_objects

_LEVELS = 8
"""How far up is looked: from a tensor to the object that a script knows by name."""
_OBJECTS = 2
"""How many objects of a class a name has at the most: a cache and its layer."""
_CONTAINERS = (list, tuple, deque)
_LOOKED_AT = 64
"""How many storages are asked for, the largest first: each level costs a walk through all objects."""


class Holders:
    """Logs what a step of inference leaves behind in objects."""

    def __init__(self, log: Log, texts: Texts) -> None:
        self._log = log
        self._texts = texts

    def note(self) -> None:
        """Log each large storage that an object holds now, and where it hangs there."""
        with collection_paused():
            tensors = self._largest()
            for tensor, name in zip(tensors, names_of_holders(tensors), strict=True):
                if name:
                    self._log.fact(Fact.HELD, self._log.storage_address(tensor), self._texts.id(name))

    def _largest(self) -> list[Tensor]:
        """One tensor of each of the largest storages, parameters left out."""
        by_address: dict[int, tuple[int, Tensor]] = {}
        for tensor in live_objects().tensors:
            address = 0 if isinstance(tensor, nn.Parameter) else self._log.storage_address(tensor)
            if address and address not in by_address:
                by_address[address] = (tensor.untyped_storage().nbytes(), tensor)
        ordered = sorted(by_address.values(), key=lambda entry: entry[0], reverse=True)
        return [tensor for _, tensor in ordered[:_LOOKED_AT]]


def names_of_holders(tensors: list[Tensor]) -> list[str]:
    """For each of ``tensors`` where it hangs, such as ``DynamicCache.layers[0].keys``; empty where nobody holds it.

    What only a local variable of a function holds is held by nobody here: the collector does not see those.
    """
    up: dict[int, tuple[Any, str]] = {}
    level: list[Any] = list(tensors)
    own: list[Any] = [tensors, up]
    for _ in range(_LEVELS):
        owners = [owner for owner in gc.get_referrers(*level) if not _is_own(owner, level, own)]
        wanted = {id(item) for item in level}
        found: list[Any] = []
        own += [level, owners, found]
        for owner in sorted(owners, key=_rank):
            held = {
                id(item): (owner, part) for item, part in _parts(owner) if id(item) in wanted and id(item) not in up
            }
            up |= held
            if held and id(owner) not in up and not isinstance(owner, (nn.Module, ModuleType)):
                found.append(owner)
        own += up.values()
        level = found
        if not level:
            break
    return [_name(tensor, up) for tensor in tensors]


def _is_own(owner: Any, level: list[Any], own: list[Any]) -> bool:
    """Whether it is a frame, one of the lists above, or the arguments of the question itself."""
    if isinstance(owner, FrameType) or owner is level or any(owner is each for each in own):
        return True
    return isinstance(owner, tuple) and len(owner) == len(level) and all(map(operator.is_, owner, level))


def _rank(owner: Any) -> int:
    """An object of a class tells the most, a dictionary the least."""
    return 2 if isinstance(owner, dict) else isinstance(owner, _CONTAINERS)


def _parts(owner: Any) -> Iterator[tuple[Any, str]]:
    """What ``owner`` holds, and as what."""
    if isinstance(owner, dict):
        yield from ((item, f"[{key!r}]") for key, item in list(owner.items()))
    if isinstance(owner, _CONTAINERS):
        yield from ((item, f"[{index}]") for index, item in enumerate(list(owner)))
    attributes = getattr(owner, "__dict__", None)
    if isinstance(attributes, dict):
        yield attributes, ""
        yield from ((item, f".{key}") for key, item in list(attributes.items()))


def _name(item: Any, up: dict[int, tuple[Any, str]]) -> str:
    """From the outermost object of a class; where there is none, from a module's variable or a container."""
    path, name, objects = "", "", 0
    seen: set[int] = set()
    while id(item) in up and id(item) not in seen and objects < _OBJECTS:
        seen.add(id(item))
        item, part = up[id(item)]
        path = _as_attribute(path) if part == "" else part + path
        if isinstance(item, ModuleType):
            return name if objects else path.lstrip(".")
        if isinstance(item, (dict, *_CONTAINERS)):
            name = name if objects else type(item).__name__ + path
        else:
            name, objects = type(item).__name__ + path, objects + 1
    return name


def _as_attribute(path: str) -> str:
    """``['keys'][0]`` of an object's dictionary as ``.keys[0]``."""
    key, bracket, rest = path[2:].partition("']")
    return f".{key}{rest}" if bracket else path
