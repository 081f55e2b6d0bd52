"""Which Python object holds a tensor, asked of the garbage collector."""

from __future__ import annotations

import gc
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampmem.events import Fact
from ampmem.names import StateName
from ampmem.recorder.facts.addresses import Blocks
from ampmem.recorder.facts.guests import attributes_of, gradient_of, is_parameter, is_tensor, states_of
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.parts import PLAIN, parts_of
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.models.live import collection_paused, live_modules, live_tensors
from ampmem.recorder.models.models import ROOT, Models
from ampmem.recorder.torch_private.general import BUFFERS, CHILDREN, PARAMETERS

_LEVELS = 8
"""How far up is looked: from a tensor to the object that a script knows by name."""
_OBJECTS = 2
"""How many objects of a class a name has at the most: a cache and its layer."""
_CONTAINERS = (list, tuple, deque)
_KEYS = (str, int, float, bool, bytes, type(None))
_CLASS_NAME = type.__dict__["__name__"].__get__
"""The name of a class, whatever its metaclass makes of it."""
_LOOKED_AT = 64
"""How many storages are asked for, the largest first: each level costs a walk through all objects."""


_DEPTH = 4
"""How many containers and objects deep an attribute of a module or an optimizer is looked into."""
_PARTS = frozenset((PARAMETERS, BUFFERS, CHILDREN))
"""The attributes of a module that are looked at elsewhere."""
_SHARE = 100
"""At a recording's end holders are looked for when nothing is known of more than one in so many bytes."""


class Holders:
    """Logs who holds what a step of inference leaves behind, and what nothing is known of when a recording ends."""

    def __init__(self, log: Log, texts: Texts) -> None:
        self._log = log
        self._texts = texts
        self._states_of = log.misses.guarded(states_of)
        self._note_module = log.misses.guarded(self._note_attributes)

    def state_of(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        """The tensors that ``optimizers`` keep for their parameters; of one that cannot be asked there are none."""
        states = (state for each in optimizers for _, state in self._states_of(each) or ())
        return [tensor for state in states for tensor in _tensors(state)]

    def note(self) -> None:
        """Log each large storage that an object holds now, and where it hangs there."""
        with collection_paused():
            self._note_holders(self._left_behind())

    def note_rest(self, models: Models, states: Iterable[Any], blocks: Blocks | None) -> None:
        """Log parameters of modules that did not run, and who holds what else nothing is known of, if that is much.

        ``states`` is what optimizers keep of each parameter, as far as that was logged.
        ``blocks`` are those that are alive, where the source knows them: then nobody is asked in vain.
        """
        known = self._known(models, states)
        for module in models.modules():
            self._note_module(module, models.known_path_id(module), known)
        if blocks is not None:
            unknown = sum(size for address, size in blocks.unseen.items() if address not in known)
            if unknown * _SHARE <= blocks.total:
                return
        with collection_paused():
            optimizers = self._note_holders(self._unknown(models, known))
        for optimizer in optimizers:
            self._note_kept(optimizer, known)

    def _note_attributes(self, module: nn.Module, path: int, known: set[int]) -> None:
        """Log what attributes of ``module`` hold, such as a mask that its first forward has made."""
        for key, value in list(attributes_of(module).items()):
            if key not in _PARTS:
                for name, tensor in _inside(value, key, _DEPTH):
                    if self._log.storage_address(tensor) not in known:
                        above = self._texts.value(path)
                        full = self._texts.id(name if above == ROOT else f"{above}.{name}")
                        self._log.fact(
                            Fact.ATTRIBUTE, self._log.storage_address(tensor), full, path, tensor=_plain(tensor)
                        )

    def _note_kept(self, optimizer: Any, known: set[int]) -> None:
        """Log what ``optimizer``, which is none of torch.optim's own kind, keeps in its attributes."""
        for name, tensor in _inside(optimizer, "", _DEPTH):
            address = self._log.storage_address(tensor)
            if address and address not in known:
                state = str(StateName(state=name.removesuffix("._value"), parameter=""))
                self._log.fact(Fact.OPTIMIZER_STATE, address, self._texts.id(state), tensor=_plain(tensor))

    def _note_holders(self, tensors: list[Tensor]) -> list[Any]:
        """Log who holds ``tensors``; returns those holders that are optimizers of whatever library.

        Nothing else of ours may hold ``tensors`` now: it would be found.
        """
        optimizers: dict[int, Any] = {}
        for tensor, name in zip(tensors, names_of_holders(tensors, optimizers), strict=True):
            if name:
                self._log.fact(
                    Fact.HELD, self._log.storage_address(tensor), self._texts.id(name), tensor=_plain(tensor)
                )
        return list(optimizers.values())

    def _left_behind(self) -> list[Tensor]:
        """One tensor of each of the largest storages, parameters left out."""
        return _largest(self._by_address(tensor for tensor in live_tensors() if not is_parameter(tensor)))

    def _unknown(self, models: Models, known: set[int]) -> list[Tensor]:
        """One tensor of each of the largest storages of which nothing is known; none where they come to little."""
        tensors = live_tensors()
        storages = self._by_address(tensors)
        if any(map(_may_be_parameter, (each for each in tensors if self._log.storage_address(each) not in known))):
            self._note_idle(models, known)
        rest = {address: found for address, found in storages.items() if address not in known}
        much = sum(size for size, _ in rest.values()) * _SHARE > sum(size for size, _ in storages.values())
        return _largest(rest) if much else []

    def _note_idle(self, models: Models, known: set[int]) -> None:
        """Log the parameters of modules that did not run."""
        for name, parameter in models.idle(live_modules()):
            address = self._log.storage_address(parameter)
            if address not in known:
                known.add(address)
                self._log.fact(Fact.PARAMETER_COPY, address, self._texts.id(name), tensor=_plain(parameter))

    def _by_address(self, tensors: Iterable[Tensor]) -> dict[int, tuple[int, Tensor]]:
        """The storages with their bytes, and one tensor of each."""
        found: dict[int, tuple[int, Tensor]] = {}
        for tensor in tensors:
            address = self._log.storage_address(tensor)
            if address and address not in found:
                found[address] = (Tensor.untyped_storage(tensor).nbytes(), tensor)
        return found

    def _known(self, models: Models, states: Iterable[Any]) -> set[int]:
        """Addresses of parameters, their gradients, and of ``states``."""
        parameters: list[Tensor] = [parameter for _, parameter in models.parameters()]
        gradients = [grad for parameter in parameters if (grad := gradient_of(parameter)) is not None]
        tensors = [*parameters, *gradients, *(tensor for state in states for tensor in _tensors(state))]
        return {self._log.storage_address(part) for tensor in tensors for part in parts_of(tensor)}


def _may_be_parameter(tensor: Tensor) -> bool:
    """Whether a module may have ``tensor`` as a parameter: of other classes than ``Tensor`` some are."""
    return type(tensor) is not Tensor or tensor.requires_grad


def _plain(tensor: Tensor) -> Tensor | None:
    """``tensor`` where asking for its type and shape runs no code of the script's."""
    return tensor if type(tensor) in PLAIN else None


def _largest(storages: dict[int, tuple[int, Tensor]]) -> list[Tensor]:
    ordered = sorted(storages.values(), key=lambda entry: entry[0], reverse=True)
    return [tensor for _, tensor in ordered[:_LOOKED_AT]]


def _tensors(state: Any) -> list[Tensor]:
    return list(filter(is_tensor, dict.values(state))) if issubclass(type(state), dict) else []


def _inside(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors that ``value`` holds, at most ``depth`` containers and objects deep, each with its path.

    Modules and optimizers inside of it have their own; of other objects only their dictionary is looked at.
    """
    kind = type(value)
    if is_tensor(value):
        if type(value) in PLAIN:
            yield name, value
    elif depth and (name == "" or not issubclass(kind, (nn.Module, Optimizer, ModuleType, type))):
        for part, key in _parts(value):
            if part is attributes_of(value):
                continue
            yield from _inside(part, f"{name}{key}".removeprefix("."), depth - 1)


def _is_optimizer(owner: Any) -> bool:
    """Whether ``owner`` is called an optimizer, or steps and zeroes gradients as one: Keras' own, or a wrapper."""
    kinds = type(owner).__mro__
    if issubclass(type(owner), (nn.Module, Optimizer, ModuleType, type)):
        return False
    called = any("Optimizer" in str(_CLASS_NAME(kind)) for kind in kinds)
    return called or all(any(key in kind.__dict__ for kind in kinds) for key in ("step", "zero_grad"))


def names_of_holders(tensors: list[Tensor], optimizers: dict[int, Any] | None = None) -> list[str]:
    """For each of ``tensors`` where it hangs, such as ``DynamicCache.layers[0].keys``; empty where nobody holds it.

    Those of the objects in the names that are optimizers are put into ``optimizers``, by ``id``.
    What only a local variable of a function holds is held by nobody here: the collector does not see those.
    """
    if not tensors:
        return []  # each level is a walk through all objects
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
            if held and id(owner) not in up and not issubclass(type(owner), (nn.Module, ModuleType)):
                found.append(owner)
        own += up.values()
        level = found
        if not level:
            break
    names = []
    for tensor in tensors:
        name, objects = _name(tensor, up)
        names.append(name)
        if optimizers is not None:
            optimizers |= {id(each): each for each in objects if _is_optimizer(each)}
    return names


def _is_own(owner: Any, level: list[Any], own: list[Any]) -> bool:
    """Whether it is a frame, one of the lists above, or the arguments of the question itself."""
    if type(owner) is FrameType or owner is level or any(owner is each for each in own):
        return True
    if not issubclass(type(owner), tuple) or tuple.__len__(owner) != len(level):
        return False
    return all(map(operator.is_, tuple.__iter__(owner), level))


def _rank(owner: Any) -> tuple[int, bool, str]:
    """An object of a class tells the most, a dictionary the least; then what is not private.

    The collector's own order is another one whenever it has run, so the class's name decides in the end.
    """
    kind = type(owner)
    name = str(_CLASS_NAME(kind))
    return 2 if issubclass(kind, dict) else issubclass(kind, _CONTAINERS), name.startswith("_"), name


def _parts(owner: Any) -> Iterator[tuple[Any, str]]:
    """What ``owner`` holds, and as what. Its class is not asked."""
    for kind in _CONTAINERS:
        if issubclass(type(owner), kind):
            yield from ((item, f"[{index}]") for index, item in enumerate(list(kind.__iter__(owner))))
    if issubclass(type(owner), dict):
        yield from ((item, f"[{_key(key)}]") for key, item in list(dict.items(owner)))
    if not issubclass(type(owner), type):
        attributes = attributes_of(owner)
        yield attributes, ""
        yield from ((item, f".{key}") for key, item in list(attributes.items()))


def _key(key: Any) -> str:
    """``key`` of a dictionary, as Python writes it; of a class of the script's only that class."""
    return repr(key) if type(key) in _KEYS else type(key).__name__


def _name(item: Any, up: dict[int, tuple[Any, str]]) -> tuple[str, list[Any]]:
    """From the outermost object of a class; where there is none, from a module's variable or a container.

    Returns the objects in the name, too.
    """
    path, name = "", ""
    objects: list[Any] = []
    seen: set[int] = set()
    while id(item) in up and id(item) not in seen and len(objects) < _OBJECTS:
        seen.add(id(item))
        item, part = up[id(item)]
        path = _as_attribute(path) if part == "" else part + path
        if issubclass(type(item), ModuleType):
            return (name if objects else path.lstrip(".")), objects
        if issubclass(type(item), (dict, *_CONTAINERS)):
            name = name if objects else type(item).__name__ + path
        else:
            name = type(item).__name__ + path
            objects.append(item)
    # A tuple that nothing holds is the arguments of a call that is running, such as that of a hook.
    return ("" if type(item) is tuple and path.count("[") == 1 else name), objects


def _as_attribute(path: str) -> str:
    """``['keys'][0]`` of an object's dictionary as ``.keys[0]``."""
    key, bracket, rest = path[2:].partition("']")
    return f".{key}{rest}" if bracket else path
