"""Finds what holds a tensor: Python objects, by the garbage collector, and the script's variables.

A reader deletes those variables to free the memory.
"""

from __future__ import annotations

import dis
import gc
import operator
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from inspect import CO_OPTIMIZED
from itertools import chain, compress, islice, pairwise
from operator import itemgetter
from time import time_ns
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GetSetDescriptorType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampmem.events import Fact
from ampmem.names import StateName
from ampmem.own_code import OWN_FOLDERS, RECORDING_CODE, RUNNER, is_only_thread, is_torch
from ampmem.recorder.facts.addresses import PLAIN, AliveBlocks, parts_of
from ampmem.recorder.facts.guests import attributes_of, gradient_of, is_nn_parameter, is_tensor, states_of
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.anatomy import named_parameters
from ampmem.recorder.models.live import collection_paused, is_of_device, live_modules, live_tensors
from ampmem.recorder.models.models import ROOT, Models
from ampmem.recorder.torch_private.general import BUFFERS, CHILDREN, PARAMETERS

_LEVELS = 8
"""Maximum number of levels between a tensor and the object that the script knows by name."""
_OBJECTS = 2
"""Maximum number of class objects in a holder's name: a cache and its layer."""
_CONTAINERS = (list, tuple, deque)
_KEYS = (str, int, float, bool, bytes, type(None))
_CLASS_NAME = type.__dict__["__name__"].__get__
"""The name of a class, even if its metaclass overrides ``__name__``."""
_LOOKED_AT = 64
"""Maximum number of storages, largest first: each level costs a walk through all objects."""


_DEPTH = 4
"""Maximum depth of containers and objects inside an attribute of a module or optimizer, or inside a variable."""
_PARTS = frozenset((PARAMETERS, BUFFERS, CHILDREN))
"""Attributes of a module that are read elsewhere."""
_BARE = frozenset((str, bytes, int, float, bool, type(None), set, frozenset))
"""Types in which no tensors are looked for."""
_SEQUENCES, _MAPPINGS = frozenset((list, tuple)), frozenset((dict, OrderedDict))
"""Types of which an object contains no tensors if its items, or its values, are of such types."""
_SHARE = 100
"""At a recording's end, holders are looked for only if over 1 / ``_SHARE`` of the memory is unknown."""


_Variable: TypeAlias = tuple[str, int]
"""A name, and the text id of the place that assigned the variable with which it begins; 0 if unknown."""


class HolderLog:
    """Logs who holds what a step of inference leaves behind, and what is still unknown when a recording ends."""

    def __init__(self, log: Log, variables: Variables) -> None:
        self._log = log
        self._variables = variables
        self._by_id: dict[int, _Variable] = {}
        self._states_of = log.misses.guarded(states_of)
        self._note_module = log.misses.guarded(self._note_attributes)

    def state_of(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        """The state tensors of ``optimizers``; none for an optimizer that cannot be read."""
        states = (state for each in optimizers for _, state in self._states_of(each) or ())
        return [tensor for state in states for tensor in _tensors(state)]

    def note(self) -> None:
        """Log each large storage that an object holds now, and its place in the object."""
        self._by_id = self._variables.by_id()
        with collection_paused():
            # What a variable itself refers to is the step's result, as a rule: no object holds it.
            mine = (each for each in live_tensors() if not (is_nn_parameter(each) or id(each) in self._by_id))
            self._note_holders(_largest(self._by_address(mine)))

    def note_rest(
        self,
        models: Models,
        states: Iterable[Any],
        blocks: AliveBlocks | None,
        inputs: Set[int] = frozenset(),
        untrained: list[nn.Module] | None = None,
        failure: BaseException | None = None,
    ) -> None:
        """Log parameters of modules that did not run, and the holders of unknown memory, if there is much.

        ``states`` is the optimizers' state of each parameter, as far as it was logged. ``blocks`` are the live blocks,
        if the source knows them; without tensors in unknown blocks there is no search. ``inputs`` are the addresses of
        inputs that are alive: facts say what they are, so nobody is looked for because of them. ``untrained`` are the
        models that no optimizer trains: their holders are logged, too. After a ``failure`` the variables are those of
        the frames that it left.
        """
        self._by_id = self._variables.by_id(_innermost(failure))
        known = self._known(models, states)
        for module in models.modules():
            self._note_module(module, models.known_path_id(module), known)
        self._note_models(untrained or [])
        if blocks is not None and not _much(blocks, blocks.unseen.keys() - known - inputs):
            return
        with collection_paused():
            optimizers = self._note_holders(self._unknown(models, known, blocks))
        for optimizer in optimizers:
            self._note_kept(optimizer, known)

    def _note_attributes(self, module: nn.Module, path: int, known: set[int]) -> None:
        """Log the tensors in attributes of ``module``, such as a mask that its first forward made."""
        for key, value in list(attributes_of(module).items()):
            if key not in _PARTS and not _is_bare(value):
                for name, tensor in _inside(value, key, _DEPTH):
                    if self._log.storage_address(tensor) not in known:
                        above = self._log.texts.value(path)
                        full = self._log.texts.id(name if above == ROOT else f"{above}.{name}")
                        self._log.fact(
                            Fact.ATTRIBUTE, self._log.storage_address(tensor), full, path, tensor=_plain(tensor)
                        )

    def _note_models(self, modules: list[nn.Module]) -> None:
        """Log the holder of each of ``modules`` as that of its parameters; no other list may hold the modules."""
        with collection_paused():
            for module, (name, place) in zip(modules, holders_of(modules, self._by_id), strict=True):
                for _, parameter in named_parameters(module) if name else ():
                    self._log.about(Fact.HELD, parameter, self._log.texts.id(name), place)

    def _note_kept(self, optimizer: Any, known: set[int]) -> None:
        """Log the tensors in attributes of ``optimizer``, which is not one of torch.optim's own.

        What it updates is not its state, nor are results of autograd: a differentiable optimizer holds updated weights.
        """
        for name, tensor in _inside(optimizer, "", _DEPTH):
            address = self._log.storage_address(tensor)
            updated = name.startswith("param_groups[") or tensor.grad_fn is not None
            if address and address not in known and not updated:
                state = str(StateName(state=name.removesuffix("._value"), parameter=""))
                self._log.fact(Fact.OPTIMIZER_STATE, address, self._log.texts.id(state), tensor=_plain(tensor))

    def _note_holders(self, tensors: list[Tensor]) -> list[Any]:
        """Log who holds ``tensors``; returns the holders that are optimizers, of any library.

        Nothing else of ampmem may hold ``tensors`` meanwhile: it would be found.
        """
        optimizers: dict[int, Any] = {}
        found = holders_of(tensors, self._by_id, optimizers)
        for tensor, (name, place) in zip(tensors, found, strict=True):
            if name:
                address = self._log.storage_address(tensor)
                self._log.fact(Fact.HELD, address, self._log.texts.id(name), place, tensor=_plain(tensor))
        return list(optimizers.values())

    def _unknown(self, models: Models, known: set[int], blocks: AliveBlocks | None) -> list[Tensor]:
        """One tensor of each of the largest unknown storages; none if they add up to little."""
        tensors = live_tensors()
        storages = self._by_address(tensors)
        if blocks is not None:
            if not _much(blocks, (blocks.unseen.keys() & storages.keys()) - known):
                return []  # the unknown blocks are a library's, or an op's scratch
            alive = blocks.unseen.keys() | blocks.seen
            storages = {address: found for address, found in storages.items() if address in alive}
        unknown = storages.keys() - known
        if any(self._log.storage_address(each) in unknown for each in tensors if _may_be_parameter(each)):
            self._note_idle(models, known)
        rest = {address: found for address, found in storages.items() if address not in known}
        much = sum(size for size, _ in rest.values()) * _SHARE > sum(size for size, _ in storages.values())
        return _largest(rest) if much else []

    def _note_idle(self, models: Models, known: set[int]) -> None:
        """Log the parameters of modules that did not run."""
        modules: dict[int, nn.Module] = {}
        for name, parameter, module in models.idle(live_modules()):
            address = self._log.storage_address(parameter)
            if address not in known:
                known.add(address)
                self._log.fact(Fact.PARAMETER_COPY, address, self._log.texts.id(name), tensor=_plain(parameter))
                modules[id(module)] = module
        found = list(modules.values())
        modules.clear()
        self._note_models(found)

    def _by_address(self, tensors: Iterable[Tensor]) -> dict[int, tuple[int, Tensor]]:
        """The storages of ``tensors`` by address: their bytes, and one tensor of each, if possible a variable's."""
        found: dict[int, tuple[int, Tensor]] = {}
        alone = is_only_thread()
        for tensor in tensors:
            address = self._log.storage_address(tensor)
            if address and (address not in found or id(tensor) in self._by_id):
                as_it_is = type(tensor) in PLAIN and not alone  # another thread may use the storage: see addresses.py
                size = tensor.nbytes if as_it_is else Tensor.untyped_storage(tensor).nbytes()
                found[address] = (size, tensor)
        return found

    def _known(self, models: Models, states: Iterable[Any]) -> set[int]:
        """Addresses of parameters, their gradients, buffers, and ``states``."""
        slots, alone = list(models.parameters()), is_only_thread()
        parameters: list[Tensor] = [parameter for _, parameter in slots]
        # Another thread's backward may be replacing the gradients of a model that has not run here.
        ours = (parameter for slot, parameter in slots if alone or slot.path_id in self._log.entered)
        gradients = [grad for parameter in ours if (grad := gradient_of(parameter)) is not None]
        buffers = [buffer for _, buffer in models.buffers()]
        tensors = [*parameters, *gradients, *buffers, *(tensor for state in states for tensor in _tensors(state))]
        return {self._log.storage_address(part) for tensor in tensors for part in parts_of(tensor)}


def _innermost(failure: BaseException | None) -> FrameType | None:
    """The innermost frame of the traceback of ``failure``."""
    trace = None if failure is None else failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _much(blocks: AliveBlocks, addresses: Iterable[int]) -> bool:
    """Whether the blocks at these ``addresses``, all unseen, are much of the live memory."""
    return sum(map(blocks.unseen.__getitem__, addresses)) * _SHARE > blocks.total


def _may_be_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` may be a module's parameter; some subclasses of ``Tensor`` are."""
    return type(tensor) is not Tensor or tensor.requires_grad


def _plain(tensor: Tensor) -> Tensor | None:
    """``tensor`` if reading its type and shape runs no code of the script, else ``None``."""
    return tensor if type(tensor) in PLAIN else None


def _largest(storages: dict[int, tuple[int, Tensor]]) -> list[Tensor]:
    ordered = sorted(storages.values(), key=lambda entry: entry[0], reverse=True)
    return [tensor for _, tensor in ordered[:_LOOKED_AT]]


def _tensors(state: Any) -> list[Tensor]:
    return list(filter(is_tensor, dict.values(state))) if issubclass(type(state), dict) else []


def _inside(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside ``value``, at most ``depth`` containers and objects deep, each with its path.

    Modules and optimizers inside it are left out: they are read by themselves. Of other objects only the dictionary is
    read.
    """
    kind = type(value)
    if is_tensor(value):
        if kind in PLAIN or is_of_device(kind):
            yield name, value
    elif depth and (name == "" or not issubclass(kind, (nn.Module, Optimizer, ModuleType, type))):
        attributes = attributes_of(value)
        for part, key in _parts(value):
            if part is not attributes and not _is_bare(part):
                yield from _inside(part, f"{name}{key}".removeprefix("."), depth - 1)


def _is_bare(value: Any) -> bool:
    """Whether no tensor can be inside ``value``, as in most attributes of a module: numbers, and containers of them."""
    kind = type(value)
    if kind in _SEQUENCES:
        return _BARE.issuperset(map(type, value))
    if kind in _MAPPINGS:
        return _BARE.issuperset(map(type, value.values()))
    return kind in _BARE


def _is_optimizer(owner: Any) -> bool:
    """Whether ``owner`` is an optimizer by its class name or methods: Keras' own, or a wrapper."""
    kinds = type(owner).__mro__
    if issubclass(type(owner), (nn.Module, Optimizer, ModuleType, type)):
        return False
    called = any("Optimizer" in str(_CLASS_NAME(kind)) for kind in kinds)
    return called or all(any(key in kind.__dict__ for kind in kinds) for key in ("step", "zero_grad"))


def holders_of(
    items: Sequence[Tensor | nn.Module], variables: Mapping[int, _Variable], optimizers: dict[int, Any] | None = None
) -> list[_Variable]:
    """The name of each item's holder, such as ``ema.shadow[0]`` or ``DynamicCache.layers[0].keys``, and its place.

    The name is empty if there is no holder. It begins with one of ``variables``, which are by the ``id`` of their
    values, or else with a module's variable or a class. Optimizers among the objects in the names are put into
    ``optimizers``, by ``id``.
    """
    if not items:
        return []  # save the walk through all objects, once per level
    up: dict[int, tuple[Any, str]] = {}
    level: list[Any] = [item for item in items if id(item) not in variables]
    own: list[Any] = [items, up]
    for _ in range(_LEVELS if level else 0):
        # One walk through all objects for a whole level, as it takes the same time for many as for one.
        owners = [owner for owner in gc.get_referrers(*level) if not _is_own(owner, level, own)]
        wanted = {id(item) for item in level}
        found: list[Any] = []
        own += [level, owners, found]
        for owner in sorted(owners, key=lambda owner: (id(owner) not in variables, *_rank(owner))):
            held = {
                id(item): (owner, part) for item, part in _parts(owner) if id(item) in wanted and id(item) not in up
            }
            up |= held
            known = id(owner) in up or id(owner) in variables
            if held and not known and not issubclass(type(owner), (nn.Module, ModuleType)):
                found.append(owner)
        own += up.values()
        level = found
        if not level:
            break
    names = []
    for each in items:
        named, objects = _name(each, up, variables)
        names.append(named)
        if optimizers is not None:
            optimizers |= {id(each): each for each in objects if _is_optimizer(each)}
    return names


def _is_own(owner: Any, level: list[Any], own: list[Any]) -> bool:
    """Whether ``owner`` is a frame, one of the lists above, or the arguments of the query itself."""
    if type(owner) is FrameType or owner is level or any(owner is each for each in own):
        return True
    if not issubclass(type(owner), tuple) or tuple.__len__(owner) != len(level):
        return False
    # Python packs the arguments of get_referrers(*level) into a tuple, which refers to all of them.
    return all(map(operator.is_, tuple.__iter__(owner), level))


def _rank(owner: Any) -> tuple[int, bool, str]:
    """Sort key of holders: objects of classes first, dictionaries last, public names before private ones.

    The class's name decides last, because the collector's own order changes with each collection.
    """
    kind = type(owner)
    name = str(_CLASS_NAME(kind))
    return 2 if issubclass(kind, dict) else issubclass(kind, _CONTAINERS), name.startswith("_"), name


def _parts(owner: Any) -> Iterator[tuple[Any, str]]:
    """The objects that ``owner`` holds, each with its place. No code of its class is run."""
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
    """``key`` of a dictionary as Python writes it; only the class if it is one of the script's."""
    return repr(key) if type(key) in _KEYS else type(key).__name__


def _name(item: Any, up: dict[int, tuple[Any, str]], variables: Mapping[int, _Variable]) -> tuple[_Variable, list[Any]]:
    """The name of a holder's path: from a variable of the script, or else from the outermost object of a class, a
    module's variable or a container.

    Returns the objects in the name, too.
    """
    path, name = "", ""
    objects: list[Any] = []
    seen: set[int] = set()
    while id(item) in up and id(item) not in seen and id(item) not in variables and len(objects) < _OBJECTS:
        seen.add(id(item))
        item, part = up[id(item)]
        path = _as_attribute(path) if part == "" else part + path
        if issubclass(type(item), ModuleType):
            return ((name if objects else path.lstrip(".")), 0), objects
        if issubclass(type(item), (dict, *_CONTAINERS)):
            name = name if objects else type(item).__name__ + path
        else:
            name = type(item).__name__ + path
            objects.append(item)
    if id(item) in variables:
        variable, place = variables[id(item)]
        return (variable + path, place), objects
    # A tuple without a holder is the arguments of a running call, such as a hook's.
    return ("" if type(item) is tuple and path.count("[") == 1 else name, 0), objects


def _as_attribute(path: str) -> str:
    """``['keys'][0]`` of an object's dictionary as ``.keys[0]``."""
    key, bracket, rest = path[2:].partition("']")
    return f".{key}{rest}" if bracket else path


_FRAMES = 40
"""Maximum number of the script's frames that are searched, innermost first."""
_NAMES = 2000
"""Namespaces with more names than this are not searched."""
_ITEMS = 16
"""Maximum number of items or attributes searched per object; of a list the last ones."""
_INSIDE = 4096
"""Maximum number of objects that are looked at on each level below the variables, or a few more."""
_INSIDE_IN_ALL = 1 << 14
"""Number of objects, looked at by all such searches of a recording, after which only variables are searched: so they
take a tenth of a second at most, and 0.2 ms each beside a small model."""
_TENSORS = 200
"""Maximum number of variables logged per search."""
_NO_HOLDERS = frozenset(
    (
        *(ModuleType, type, FunctionType, BuiltinFunctionType, str, int, float, bool, type(None)),
        *(ModuleSpec, SourceFileLoader),  # every module has these two
    )
)
"""Types that hold no results of the model; most variables have one of these."""
_NO_HOLDERS_EITHER = (nn.Module, ModuleType, type, nn.Parameter)
"""Types that, with their subclasses, are not searched: the tensors of modules are known by other ways."""
_SNAPSHOTS = sys.version_info < (3, 13)
"""Whether a function's ``f_locals`` is a dictionary that the frame keeps (before Python 3.13)."""
_TAKE_SNAPSHOTS = frozenset({"locals", "eval", "exec", "vars", "dir"})
"""Functions that return that dictionary; the last two only when called without arguments."""
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
"""The instructions that read a builtin."""
_REFERENCES = 3
"""References to a dictionary that only its frame and ampmem have: the frame's, ours, and the query's argument."""


class Variables:
    """Logs which variables of the script hold which tensors."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._codes: dict[int, _FrameCode] = {}
        """Code seen so far, by ``id``: hashing a code object takes time in proportion to its size."""
        self._places: dict[tuple[int, str, int | None], int] = {}
        """Text ids of places, by ``id`` of the code, variable and line."""
        self._held = _Held()
        self.note = log.misses.guarded(partial(self._note, self._held.tensors))
        """Log a fact for each variable of the script's running frames and modules that holds a tensor."""
        self.note_inside = log.misses.guarded(partial(self._note, self._held.inside))
        """The same, with the tensors that objects and modules in the variables hold, some levels deep."""

    def _note(self, find: Callable[[list[Any]], Iterator[tuple[int, str, Tensor]]]) -> None:
        now = time_ns()
        with collection_paused():
            for name, root, tensor, frame in islice(self._found(sys._getframe(1), find), _TENSORS):
                place = self._place_id(root, frame)
                self._log.about(Fact.VARIABLE, tensor, self._log.texts.id(name), place, at=now)

    def by_id(self, start: FrameType | None = None) -> dict[int, _Variable]:
        """The variables of the script's frames, the running ones or from ``start`` on, and modules, by their values'
        ``id``.
        """
        found: dict[int, _Variable] = {}
        for frame, space in self._spaces(start or sys._getframe(1)):
            for name, value in space.items():
                if type(value) not in _NO_HOLDERS and id(value) not in found:
                    found[id(value)] = name, self._place_id(name, frame)
        return found

    def values(self) -> list[Any]:
        """The values of all variables of the script's running frames and modules."""
        return [value for _, space in self._spaces(sys._getframe(1)) for value in space.values()]

    def _found(
        self, start: FrameType | None, find: Callable[[list[Any]], Iterator[tuple[int, str, Tensor]]]
    ) -> Iterator[tuple[str, str, torch.Tensor, FrameType]]:
        """(variable, its first name, its tensor, a frame that sees it) of each variable that holds a tensor."""
        found = self._spaces(start)
        for place, part, tensor in find(list(chain.from_iterable(space.values() for _, space in found))):
            frame, name = _variable(found, place)
            yield f"{name}{part}", name, tensor, frame

    def _spaces(self, start: FrameType | None) -> list[tuple[FrameType, dict[str, Any]]]:
        """The variables of each function and module of the script that runs, and a frame that sees them."""
        frames = list(islice(self._frames(start), _FRAMES))
        spaces: list[tuple[FrameType, Any]] = []
        found: list[tuple[FrameType, dict[str, Any]]] = []
        for frame in frames:
            code = frame.f_code
            if not code.co_flags & CO_OPTIMIZED:
                spaces.append((frame, frame.f_locals))
            elif not (_SNAPSHOTS and self._code(code).asks_for_locals):
                found.append((frame, _of_function(frame)))
        seen: set[int] = set()
        for frame, space in (*spaces, *((frame, frame.f_globals) for frame in frames)):
            if type(space) is dict and id(space) not in seen and len(space) <= _NAMES:
                seen.add(id(space))
                found.append((frame, space.copy()))
        return found

    def _frames(self, frame: FrameType | None) -> Iterator[FrameType]:
        """The frames of the script and its libraries, innermost first, down to the one that runs the script."""
        codes = self._codes
        while frame is not None:
            code = codes.get(id(frame.f_code)) or self._code(frame.f_code)
            if code.is_script:
                yield frame
            elif code.runs_script:
                return
            frame = frame.f_back

    def _code(self, code: CodeType) -> _FrameCode:
        found = self._codes.get(id(code))
        if found is None:
            found = self._codes[id(code)] = _FrameCode(code)
        return found

    def _place_id(self, name: str, frame: FrameType) -> int:
        key = (id(frame.f_code), name, frame.f_lineno)
        known = self._places.get(key)
        if known is None:
            known = self._places[key] = self._log.texts.id(self._place(name, frame))
        return known

    def _place(self, name: str, frame: FrameType) -> str:
        """``FILE:LINE FUNCTION`` of the line that assigned ``name``, if the frame's code has one."""
        code = frame.f_code
        known = self._code(code)
        if name not in known.names:  # a module variable that a function uses
            return f"{code.co_filename}:0 <module>"
        mine = known.assignments.get(name, [code.co_firstlineno])
        before = [line for line in mine if line <= (frame.f_lineno or 0)]
        return f"{code.co_filename}:{(before or mine)[-1]} {code.co_qualname}"


_Items: TypeAlias = list[tuple[Any, Any]]


def _variable(spaces: list[tuple[FrameType, dict[str, Any]]], place: int) -> tuple[FrameType, str]:
    """The frame and the name of the variable with the index ``place`` among those of all ``spaces``."""
    for frame, space in spaces:
        if place < len(space):
            return frame, next(islice(space, place, None))
        place -= len(space)
    raise IndexError(place)


def _of_function(frame: FrameType) -> dict[str, Any]:
    """The variables of a function; leaves no snapshot of ``f_locals`` behind."""
    variables = frame.f_locals
    found = dict(variables)
    # Before Python 3.13 a frame keeps the dictionary that f_locals made, and with it the values, until it ends.
    if _SNAPSHOTS and sys.getrefcount(variables) <= _REFERENCES:
        variables.clear()
    return found


class _Held:
    """Finds the tensors in variables, and in what they hold directly. No code of the values' classes is run."""

    def __init__(self) -> None:
        self._items: dict[int, Callable[[Any], _Items] | None] = dict.fromkeys(map(id, _NO_HOLDERS))
        """What returns the items of a value, by the ``id`` of its type; ``None`` if it holds nothing."""
        self._left = _INSIDE_IN_ALL
        """Number of objects that may still be looked at inside of others."""
        self._kinds: dict[int, weakref.ref[type]] = {}
        """The types, by ``id``: one that dies is forgotten."""

    def tensors(self, values: list[Any]) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(index of the value, path below it such as ``.logits``, tensor) of each tensor, but parameters."""
        items_of = self._of(values)
        holders = list(compress(enumerate(items_of), items_of))
        held = [items(values[place]) for place, items in holders]
        found = self._of(map(itemgetter(1), chain.from_iterable(held)))
        if _itself not in found:
            return
        end = 0
        for (place, items), inside in zip(holders, held, strict=True):
            start, end = end, end + len(inside)
            if _itself in found[start:end]:
                for (key, item), kind in zip(inside, found[start:end], strict=True):
                    part = "" if items is _itself else _part(type(values[place]), key)
                    if kind is _itself and part is not None:
                        yield place, part, item

    def inside(self, values: list[Any]) -> Iterator[tuple[int, str, torch.Tensor]]:
        """As :meth:`tensors`, with what objects and modules inside the values hold, :data:`_DEPTH` levels deep."""
        if self._left <= 0:
            yield from self.tensors(values)
            return
        level: list[tuple[int, str, Any]] = [(place, "", value) for place, value in enumerate(values)]
        seen: set[int] = set()
        for _ in range(_DEPTH + 1):
            self._left -= len(level)
            below: list[tuple[int, str, Any]] = []
            for (place, path, value), items in zip(level, self._of(value for *_, value in level), strict=True):
                if items is _itself:
                    yield place, path, value
                elif len(below) < _INSIDE and id(value) not in seen:
                    seen.add(id(value))
                    find = _of_module if issubclass(type(value), nn.Module) else items
                    parts = ((_part(type(value), key), item) for key, item in (find(value) if find else ()))
                    below += ((place, f"{path}{part}", item) for part, item in parts if part is not None)
            level = below

    def _of(self, values: Iterable[Any]) -> list[Any]:
        """What returns the items of each of ``values``. Loops in C, since most values hold nothing."""
        kinds = list(map(type, values))
        try:
            return list(map(self._items.__getitem__, map(id, kinds)))
        except KeyError:
            for kind in kinds:
                if id(kind) not in self._items:
                    self._add(kind)
        return list(map(self._items.__getitem__, map(id, kinds)))

    def _add(self, kind: type) -> None:
        key = id(kind)

        def forget(_: object) -> None:
            del self._items[key], self._kinds[key]

        self._items[key] = _items_of(kind)
        # A class may be freed, and another one get its id.
        self._kinds[key] = weakref.ref(kind, forget)


def _items_of(kind: type) -> Callable[[Any], _Items] | None:
    """What returns the items of values of type ``kind``; ``None`` if they hold nothing."""
    if issubclass(kind, _NO_HOLDERS_EITHER):
        return None
    kinds = ((torch.Tensor, _itself), (dict, _of_dict), (tuple, _of_tuple), (list, _of_list))
    own = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    others = None if own is None else _own_attributes if type(own) is GetSetDescriptorType else _of_object
    return next((items for base, items in kinds if issubclass(kind, base)), others)


def _itself(value: Any) -> _Items:
    return [("", value)]


def _of_dict(value: Any) -> _Items:
    return list(islice(dict.items(value), _ITEMS))


def _of_tuple(value: Any) -> _Items:
    return list(enumerate(tuple.__getitem__(value, slice(_ITEMS))))


def _of_list(value: Any) -> _Items:
    first = max(list.__len__(value) - _ITEMS, 0)
    return list(enumerate(list.__getitem__(value, slice(first, None)), first))


def _of_object(value: Any) -> _Items:
    return list(islice(attributes_of(value).items(), _ITEMS))


def _own_attributes(value: Any) -> _Items:
    """:func:`_of_object`, in a third of the time, if no class of ``value`` overrides ``__dict__``."""
    return list(islice(object.__getattribute__(value, "__dict__").items(), _ITEMS))


def _of_module(module: nn.Module) -> _Items:
    """The attributes of ``module``, and its children that have no parameters of their own, as metrics have none."""
    attributes = attributes_of(module)
    children = [each for each in attributes.get(CHILDREN, {}).items() if not attributes_of(each[1]).get(PARAMETERS)]
    own = (each for each in attributes.items() if each[0] not in _PARTS and not _is_bare(each[1]))
    return [*own, *children[:_ITEMS]]


def _part(kind: type, key: Any) -> str | None:
    """The item ``key`` of a value of type ``kind`` as the script would write it; ``None`` if it is left out."""
    if issubclass(kind, dict):
        if type(key) is not str:
            return None
        # Model libraries' outputs have their items as attributes, too, but setting one leaves the item in place.
        return f"[{key!r}]"
    if issubclass(kind, tuple):
        fields = next((base.__dict__["_fields"] for base in kind.__mro__ if "_fields" in base.__dict__), ())
        return f".{fields[key]}" if key < len(fields) else f"[{key}]"
    return f"[{key}]" if issubclass(kind, list) else f".{key}"


class _FrameCode:
    """What is known of the code object of a frame."""

    def __init__(self, code: CodeType) -> None:
        self._code = code  # kept alive, so that its id stays its own
        file = code.co_filename
        self.runs_script = file == RUNNER
        """Whether its frame is the one that runs the script."""
        self.is_script = not (
            self.runs_script or is_torch(file) or file.startswith((*OWN_FOLDERS, *RECORDING_CODE, "<frozen"))
        )
        """Whether it belongs to the script or one of its libraries."""
        own = (code.co_varnames, code.co_cellvars, code.co_freevars)
        self.names = frozenset(chain(*own) if code.co_flags & CO_OPTIMIZED else code.co_names)
        """The names of its variables; of a module's code, those that it uses."""

    @cached_property
    def asks_for_locals(self) -> bool:
        """Whether the script may use this function's ``locals()`` dictionary, which must then stay as it is."""
        code = self._code
        if "locals" in code.co_names or not _TAKE_SNAPSHOTS.intersection(code.co_names):
            return "locals" in code.co_names
        instructions = list(dis.get_instructions(code))
        # An attribute of such a name, as in model.eval(), is among the code's names, too.
        loads = [first for first in instructions if first.opname in _LOADS or "builtins" in code.co_names]
        return any(each.argval in ("eval", "exec") for each in loads) or any(
            first.argval in ("vars", "dir") and call.opname in ("PRECALL", "CALL") and call.arg == 0
            for first, call in pairwise(instructions)
        )

    @cached_property
    def assignments(self) -> dict[str, list[int]]:
        """The lines that assign each of its variables, in order."""
        found: dict[str, set[int]] = {}
        for instruction in dis.get_instructions(self._code):
            line = None if instruction.positions is None else instruction.positions.lineno
            stores = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_D")
            if line is not None and instruction.opname.startswith(stores):
                stored = instruction.argval  # since Python 3.13 one instruction may store two variables
                for name in stored if type(stored) is tuple else (stored,):
                    found.setdefault(str(name), set()).add(line)
        return {name: sorted(lines) for name, lines in found.items()}
