"""The script's models: their root modules, and the full names of all modules, parameters and buffers.

Holds weak references only: a model that the script drops must be freed as without ampmem.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import Fact, ParameterRecord
from ampmem.recorder.facts.addresses import PLAIN, bytes_of, dtype_of, elements_of, parts_of
from ampmem.recorder.facts.log import Log, Repeated
from ampmem.recorder.models.anatomy import children, has_parameters, held_as, named_parameters, named_tensors, tree
from ampmem.recorder.models.live import dictionaries_with, live_modules
from ampmem.recorder.torch_private import distributed as private
from ampmem.recorder.torch_private.general import BUFFERS, PARAMETERS, base_of


class Sharded:
    """Maps shards to FSDP2's parameters. Weak references to FSDP2's own objects, none to tensors."""

    def __init__(self) -> None:
        self._by_shard: dict[int, weakref.ref[Any]] = {}
        """FSDP2's object for each shard, by the shard's ``id``."""
        self._by_stand_in: dict[int, weakref.ref[Any]] = {}
        """FSDP2's object for each tensor that modules have in place of the shard, by that tensor's ``id``."""

    def look(self, modules: Iterable[nn.Module]) -> Iterator[Any]:
        """Yield FSDP2's groups among ``modules``, and note their parameters."""
        if not private.fully_sharded():
            return
        for module in modules:
            for group in private.fsdp_groups(module):
                for param in private.params_of(group):
                    self.add(param)
                yield group

    def add(self, param: Any) -> None:
        """Note the tensors of FSDP2's object ``param``."""
        shard = private.shard_of(param)
        if shard is not None:
            self._by_shard[id(shard)] = weakref.ref(param)
        for tensor in private.stand_ins(param):
            self._by_stand_in[id(tensor)] = weakref.ref(param)

    def kept(self, parameter: nn.Parameter) -> nn.Parameter:
        """``parameter``, or this rank's shard if ``parameter`` stands in for one."""
        if not self._by_stand_in:
            return parameter
        reference = self._by_stand_in.get(id(parameter))
        param = None if reference is None else reference()
        if param is None or not any(tensor is parameter for tensor in private.stand_ins(param)):
            return parameter
        shard = private.shard_of(param)
        return parameter if shard is None else shard

    def manages(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is a shard of FSDP2's."""
        return self._param(parameter) is not None

    def offloaded(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is a shard that FSDP2 keeps on the CPU."""
        return private.is_offloaded(self._param(parameter))

    def padding(self, parameter: torch.Tensor) -> int:
        """Bytes of padding in the memory of the shard ``parameter``."""
        param = self._param(parameter)
        return 0 if param is None else private.padding_of(param) * parameter.element_size()

    def _param(self, parameter: torch.Tensor) -> Any:
        reference = self._by_shard.get(id(parameter))
        param = None if reference is None else reference()
        return param if param is not None and private.shard_of(param) is parameter else None


_MOST_RUNS = 100_000
"""Maximum number of contiguous runs; a tensor with more is assumed to share no memory."""


class Covered:
    """The address ranges of the parameters seen so far."""

    def __init__(self, data_address: Callable[[torch.Tensor], int]) -> None:
        self._data_address = data_address
        self._starts: list[int] = []
        self._ends: list[int] = []

    def place(self, parameter: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """The address ranges of ``parameter``; empty if unknown."""
        parts = [(self._data_address(part), part) for part in parts_of(parameter)]
        return tuple(
            (address + start, address + end) for address, part in parts if address for start, end in _runs(part)
        )

    def overlap(self, place: tuple[tuple[int, int], ...], size: int) -> int:
        """Number of the ``size`` bytes at ``place`` that overlap earlier parameters, or each other."""
        return size - sum(self._add_range(start, end) for start, end in place) if place else 0

    def _add_range(self, start: int, end: int) -> int:
        """Add a range; returns how many of its bytes are new."""
        first = last = bisect_left(self._ends, start)
        new, low, high = end - start, start, end
        while last < len(self._starts) and self._starts[last] <= end:
            new -= max(0, min(end, self._ends[last]) - max(start, self._starts[last]))
            low, high = min(low, self._starts[last]), max(high, self._ends[last])
            last += 1
        self._starts[first:last], self._ends[first:last] = [low], [high]
        return new


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The byte ranges of a strided ``tensor``'s elements, relative to its first element."""
    if tensor.numel() and tensor.is_contiguous():  # as a rule
        yield 0, tensor.nbytes
        return
    # Dimensions of one element have no stride that counts. The smallest strides first: they may make one contiguous
    # block.
    dimensions = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    block, pieces = 1, 1
    while dimensions and dimensions[0][0] == block:
        block *= dimensions.pop(0)[1]
    for _, size in dimensions:
        pieces *= size
    if pieces > _MOST_RUNS or not tensor.numel():
        return
    starts = [0]
    for stride, size in dimensions:
        starts = [start + number * stride for number in range(size) for start in starts]
    width = tensor.element_size()
    for start in starts:
        yield start * width, (start + block) * width


ROOT = "(model)"
"""Path of the root module if there is one model; with several, each has its class name instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a parameter or buffer in a model; its tensor is looked up anew each time."""

    module: weakref.ref[nn.Module]
    key: str
    name: str
    name_id: int
    path_id: int
    model: str
    """Path of the root."""
    above: tuple[int, ...]
    """Text ids of the paths from the root to the module."""

    def tensor(self, kind: str) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else held_as(module, kind, self.key)

    def kind(self) -> str:
        """The name of the module's class."""
        module = self.module()
        return "" if module is None else type(module).__name__


class TensorPlaces:
    """The addresses of named tensors; one storage may hold several."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._of: dict[int, dict[int, tuple[int, int]]] = {}
        """(end, name) by the address of the storage, then by that of the tensor's first element."""
        self.plain = True
        """Whether all of these tensors are plain ones."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def clear(self) -> None:
        """Forget all tensors."""
        self._of.clear()
        self.plain = True

    def add(self, tensor: torch.Tensor, name: int) -> None:
        """Note that ``tensor`` has this name; of several tensors in one place the first counts."""
        plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        self.plain &= plain
        for part in (tensor,) if plain else parts_of(tensor):
            storage = self._log.storage_address(part)
            if storage:  # an uninitialized parameter has no storage
                start = self._log.data_address(part)
                end = start + part.numel() * part.element_size()
                self._of.setdefault(storage, {}).setdefault(start, (end, name))

    def remove(self, storage: int) -> None:
        """Forget the tensors in the storage."""
        self._of.pop(storage, None)

    def find(self, storage: int, tensor: torch.Tensor) -> int | None:
        """Name of the known tensor in which ``tensor``, whose storage is at that address, begins."""
        return self.find_at(storage, self._log.data_address(tensor)) if storage in self._of else None

    def find_at(self, storage: int, start: int) -> int | None:
        """Name of the known tensor in which a tensor with its first element at ``start`` begins."""
        tensors = self._of.get(storage)
        if tensors is None:
            return None
        if start in tensors:
            return tensors[start][1]
        before = max((other for other in tensors if other < start), default=None)
        return tensors[before][1] if before is not None and start < tensors[before][0] else None


class Models:
    """Names of modules, parameters and buffers, kept up to date with the script's models."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._path_ids: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._parameters: list[Slot] = []
        self._buffers: list[Slot] = []
        self._records: dict[str, ParameterRecord] = {}
        self._recorded: list[object] = []
        """The properties of the parameters from which the records were made, to see whether one has changed."""
        self._registered: dict[int, weakref.ref[nn.Module]] = {}
        self.changed = True
        """Whether something was registered with a module since the last :meth:`refresh`."""
        self.generation = 0
        """Number of times that everything was named."""
        self.version = 0
        """Number of times that :meth:`note` has found other tensors than before."""
        self._noted = Repeated(log)
        self._noted_in_graph = True
        """Whether gradients were on when :meth:`note` last found other tensors."""
        self._parameter_places: list[object] = []
        self._buffer_places: list[object] = []
        """A weak reference to the module and the key of each parameter and buffer, for :class:`TensorReader`."""
        self.parameters_at = TensorPlaces(log)
        """Text ids of the parameters' names, as of the last :meth:`note`."""
        self.buffers_at = TensorPlaces(log)
        """Text ids of the buffers' names, as of the last :meth:`note`."""
        self.widths: dict[int, int] = {}
        """Bytes per element of each parameter in the newest forward with gradients on, by its name's text id."""
        self.swapped: set[str] = set()
        """Names of parameters whose ``data`` the script swaps: an update finds a wider dtype than each forward."""
        self.sharded = Sharded()
        """Shards and their stand-ins, as of the last :meth:`note`."""
        self._parts: set[int] = set()
        """``id`` of each module that is part of a root with parameters; a loss may be a root without."""
        self._strangers: dict[int, weakref.ref[nn.Module]] = {}
        """Modules without parameters that, as far as is known, are in no module with parameters."""

    def add(self, module: nn.Module) -> None:
        """Make ``module`` a root, named after its class unless it is the only one with parameters."""
        alone = has_parameters(module) and not any(self._live_roots_with_parameters())
        self._add_roots([module], alone=alone)

    def registered(self, module: nn.Module) -> None:
        """Note that something was registered with ``module``: it may be a root, and names may have changed."""
        self.changed = True
        self._strangers.clear()
        known = self._registered.get(id(module))
        if known is None or known() is not module:  # the id of a dead module may be reused
            self._registered[id(module)] = weakref.ref(module)

    def add_registered(self) -> None:
        """Make roots of the registered modules that have no parent."""
        registered, self._registered = self._registered, {}  # other threads may make modules meanwhile
        modules = [module for reference in registered.values() if (module := reference()) is not None]
        if self.changed:
            self.refresh()  # names the roots' submodules, which then are not roots
        # A module that is part of another is named with that one.
        parents = _parents(modules)
        roots = [m for m in modules if not self.known_path_id(m) and id(m) not in parents and has_parameters(m)]
        if roots:
            self._add_roots(roots, alone=len(roots) == 1 and not any(self._live_roots_with_parameters()))

    def root_with(self, addresses: Collection[int]) -> nn.Module | None:
        """The root that has a parameter at one of ``addresses``, of storages; ``None`` if there is none."""
        self.add_registered()
        for slot in self._parameters:
            tensor = slot.tensor(PARAMETERS)
            if tensor is not None and any(self._log.storage_address(part) in addresses for part in parts_of(tensor)):
                return next((reference() for reference, name in self._roots if name == slot.model), None)
        return None

    def owns(self, module: nn.Module) -> bool:
        """Whether ``module`` is part of a model: it has parameters, or is inside a module that has."""
        if self._is_stranger(module):
            return False
        if self._is_part(module) or has_parameters(module):
            return True
        if self.changed:
            self.refresh()
        if self._is_part(module) or has_parameters(_root_of(module)):
            return True
        self._strangers[id(module)] = weakref.ref(module)
        return False

    def path_id(self, module: nn.Module) -> int:
        """Text id of ``module``'s path; an unknown module is searched for, or becomes a root."""
        entry = self._path_ids.get(id(module))
        if entry is not None and entry[0]() is module:  # as a rule
            return entry[1]
        found = 0
        if self.changed:
            self.refresh()
            found = self.known_path_id(module)
        if not found:  # made before recording, copied or unpickled: nothing was registered
            self.add(module if self._is_stranger(module) else _root_of(module))
            found = self.known_path_id(module)
        return found

    def note(self) -> None:
        """Log the addresses of all parameters and buffers."""
        if self.changed:
            self.refresh()
        in_graph = torch.is_grad_enabled()
        # Widths are noted only with gradients on: what was noted without them has to be looked at once more.
        known = not self.swapped and self._noted_in_graph >= in_graph
        places = self._parameter_places, self._buffer_places
        read = (lambda reader, number, key: reader.modules(number, key, *places)) if known else None
        if not self._noted.log(self.generation, read, self._note):
            self.version += 1
            self._noted_in_graph = in_graph

    def _note(self) -> None:
        self.parameters_at.clear()
        self.buffers_at.clear()
        in_graph = torch.is_grad_enabled()
        for slot, parameter in self.parameters():
            self.parameters_at.add(parameter, slot.name_id)
            if in_graph and type(parameter) in PLAIN:
                if slot.name in self.swapped:
                    if parameter.element_size() > self.widths[slot.name_id]:
                        continue  # the recording has ended between an update and the next forward
                    kind = self._records[slot.name].kind
                    self._records[slot.name] = replace(
                        self._records[slot.name], **_sizes(parameter_record(slot.name, parameter, kind=kind))
                    )
                self.widths[slot.name_id] = parameter.element_size()
            self._log.about(Fact.PARAMETER, parameter, slot.name_id, slot.path_id)
        for slot, buffer in self.buffers():
            self.buffers_at.add(buffer, slot.name_id)
            self._log.about(Fact.BUFFER, buffer, slot.name_id, slot.path_id)

    def parameters(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """Every live parameter with its :class:`Slot`."""
        kept = self.sharded.kept
        for slot in self._parameters:
            module = slot.module()
            parameter = None if module is None else held_as(module, PARAMETERS, slot.key)
            if parameter is not None and (parameter.is_leaf or not _is_computed(parameter)):
                yield slot, kept(parameter)  # type: ignore[arg-type]

    def buffers(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Every live buffer with its :class:`Slot`."""
        for slot in self._buffers:
            buffer = slot.tensor(BUFFERS)
            if buffer is not None:
                yield slot, buffer

    def parameter_names(self) -> Iterator[str]:
        """The names of all parameters, including freed and uninitialized ones."""
        return (slot.name for slot in self._parameters)

    def modules(self) -> list[nn.Module]:
        """All live modules of the models."""
        return [module for reference, _ in self._path_ids.values() if (module := reference()) is not None]

    def known_path_id(self, module: nn.Module | None) -> int:
        """Text id of ``module``'s path; 0 if it has no name."""
        entry = self._path_ids.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else 0

    def roots(self) -> Iterator[nn.Module]:
        """The live root modules."""
        return (module for reference, _ in self._roots if (module := reference()) is not None)

    def idle(self, modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
        """The parameters of those ``modules`` that are not part of a model, each with a name and its outermost module.

        A module whose parameters have the shapes of a model's, in the same order, is called a copy of that model.
        """
        strangers = [module for module in modules if not self.known_path_id(module)]
        parents = _parents(strangers)
        models = [
            (_shapes(root), prefix, root) for reference, prefix in self._roots if (root := reference()) is not None
        ]
        for module in strangers:
            if id(module) in parents:
                continue
            parameters = list(named_parameters(module))
            names = [name for name, _ in parameters]
            for shapes, prefix, root in models:
                if names and shapes == _shapes(module):
                    lead = "" if prefix == ROOT else f"{prefix}."
                    names = [f"copy of {lead}{name}" for name, _ in named_parameters(root)]
                    break
            else:
                names = [f"{type(module).__name__}.{name}" for name in names]
            yield from ((name, each, module) for name, (_, each) in zip(names, parameters, strict=True))

    def refresh(self) -> None:
        """Name everything below the roots again."""
        self.changed = False
        self.generation += 1
        self._path_ids.clear()
        self._parts.clear()
        self._parameters.clear()
        self._buffers.clear()
        seen: set[int] = set()
        for root, prefix in self._roots:
            module = root()
            if module is not None:
                self._name_tree(module, prefix, seen)
        self._parameter_places = _places(self._parameters)
        self._buffer_places = _places(self._buffers)

    def records(self, assign: Callable[[ParameterRecord], ParameterRecord]) -> list[ParameterRecord]:
        """Every parameter ever seen, by name, with the first one that shares its memory.

        ``assign`` returns a record with its optimizer. If nothing has changed, it gets the records of the last call.
        """
        read: list[object] = [self.generation, len(self._log.entered), len(self._log.in_graph)]
        read += [
            (slot.kind(), *_fields(parameter), self._log.data_address(parameter))
            for slot, parameter in self.parameters()
        ]
        if read != self._recorded:
            self._recorded = read
            self._record_all()
        self._records = {name: assign(record) for name, record in self._records.items()}
        return list(self._records.values())

    def _record_all(self) -> None:
        first: dict[tuple[tuple[int, int], ...], str] = {}
        covered = Covered(self._log.data_address)
        flat = (private.flat_wholes(module) for module in self.modules())
        wholes = {id(parameter): elements for parameter, elements in chain.from_iterable(flat)}
        for slot, parameter in self.parameters():
            place = covered.place(parameter)
            owner = first.setdefault(place, slot.name) if place else slot.name
            shares = None if owner == slot.name else owner
            record = parameter_record(
                slot.name, parameter, kind=slot.kind(), shares=shares, model=slot.model, in_graph=self._in_graph(slot)
            )
            # Views of one storage, such as tied or fused weights, must be counted once.
            overlap = covered.overlap(place, record.bytes) if shares is None else 0
            padding = self.sharded.padding(parameter) if shares is None else 0
            if overlap or padding:
                record = replace(record, overlap=overlap, padding=padding)
            if id(parameter) in wholes:
                record = replace(record, global_elements=wholes[id(parameter)])
            if slot.name in self.swapped:
                record = replace(record, **_sizes(self._records[slot.name]))
            self._records[slot.name] = record

    def _in_graph(self, slot: Slot) -> bool | None:
        """Whether the module of ``slot`` ever ran with gradients on; ``None`` if it never ran."""
        return slot.path_id in self._log.in_graph if slot.path_id in self._log.entered else None

    def never_ran(self, optimizers: Iterable[Optimizer]) -> tuple[list[str], int]:
        """The trained modules that never ran and never had a gradient, and the number of all trained modules.

        An optimizer has state for the parameters that had a gradient; one without any state tells nothing.
        """
        tell = [optimizer for optimizer in optimizers if optimizer.state]
        trained = {id(each) for optimizer in tell for group in optimizer.param_groups for each in group["params"]}
        modules: dict[str, bool] = {}
        for slot, parameter in self.parameters():
            if id(parameter) in trained and parameter.requires_grad:
                used = slot.path_id in self._log.entered or any(parameter in optimizer.state for optimizer in tell)
                name = slot.name.rpartition(".")[0]
                modules[name] = modules.get(name, False) or used
        return [name for name, used in modules.items() if not used], len(modules)

    def _is_part(self, module: nn.Module) -> bool:
        return id(module) in self._parts and self.known_path_id(module) != 0

    def _is_stranger(self, module: nn.Module) -> bool:
        stranger = self._strangers.get(id(module))
        return stranger is not None and stranger() is module

    def _live_roots_with_parameters(self) -> Iterator[bool]:
        return map(has_parameters, self.roots())

    def _add_roots(self, modules: Iterable[nn.Module], *, alone: bool) -> None:
        taken = {prefix for _, prefix in self._roots}
        for module in modules:
            name = ROOT if alone else _unused(type(module).__name__, taken)
            taken.add(name)
            self._roots.append((weakref.ref(module), name))
        self.refresh()

    def _name_tree(self, root: nn.Module, prefix: str, seen: set[int]) -> None:
        lead = "" if prefix == ROOT else prefix
        part_of_model = has_parameters(root)
        above: dict[str, tuple[int, ...]] = {}
        for path, module in tree(root, lead):
            reference = weakref.ref(module)
            path_id = self._log.texts.id(path or prefix)
            _, known_id = self._path_ids.setdefault(id(module), (reference, path_id))
            above[path] = (*above.get(path.rpartition(".")[0], ()), known_id)
            if part_of_model:
                self._parts.add(id(module))
            for kind, slots in ((PARAMETERS, self._parameters), (BUFFERS, self._buffers)):
                for key, tensor in named_tensors(module, kind).items():
                    # A shared tensor has the name of its first place, as in named_parameters().
                    if id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    name = f"{path}.{key}" if path else key
                    name_id = self._log.texts.id(name)
                    slot = Slot(
                        module=reference,
                        key=key,
                        name=name,
                        name_id=name_id,
                        path_id=path_id,
                        model=prefix,
                        above=above[path],
                    )
                    slots.append(slot)


def _places(slots: Iterable[Slot]) -> list[object]:
    """Module and key of each slot, in turns."""
    return [part for slot in slots for part in (slot.module, slot.key)]


def _fields(parameter: torch.Tensor) -> tuple[object, ...]:
    """The properties that the record of ``parameter`` depends on, besides addresses; for other tensors never equal."""
    if type(parameter) not in PLAIN or parameter.layout is not torch.strided:
        return (object(),)
    return id(parameter), parameter.dtype, parameter.shape, parameter.stride(), parameter.requires_grad


def parameter_record(
    name: str,
    parameter: torch.Tensor,
    *,
    kind: str = "",
    shares: str | None = None,
    model: str = "",
    in_graph: bool | None = None,
) -> ParameterRecord:
    """The recording's record of ``parameter``."""
    return ParameterRecord(
        name=name,
        elements=elements_of(parameter),
        bytes=bytes_of(parameter),
        dtype=str(dtype_of(parameter)).removeprefix("torch."),
        trainable=parameter.requires_grad,
        shape=tuple(parameter.shape),
        kind=kind,
        shares=shares,
        model=model,
        in_graph=in_graph,
        global_elements=parameter.numel() if private.is_part_of_whole(parameter) else None,
    )


def _is_computed(parameter: torch.Tensor) -> bool:
    """Whether ``parameter``, not a leaf, was computed: a fast weight of meta-learning, in place of the module's own.

    A view of a leaf is not one: it shares the parameter's own memory.
    """
    base = base_of(parameter)
    return base is None or not base.is_leaf


def _sizes(record: ParameterRecord) -> dict[str, Any]:
    """The fields of ``record`` that change when the parameter's ``data`` is swapped."""
    return {"bytes": record.bytes, "dtype": record.dtype}


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for _, parameter in named_parameters(module)]


def _root_of(module: nn.Module) -> nn.Module:
    """The outermost module that contains ``module``."""
    # Most have no parent, and this check takes a third of the time of a walk through all modules.
    if not any(map(_may_be_children, dictionaries_with(module))):
        return module
    parents = _parents(live_modules())
    root = module
    while id(root) in parents:
        root = parents[id(root)]
    return root


def _may_be_children(found: dict[Any, Any]) -> bool:
    """Whether ``found`` may be a module's dictionary of submodules: all its values are modules."""
    return all(value is None or issubclass(type(value), nn.Module) for value in list(dict.values(found)))


def _parents(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """The parent of each submodule, by the submodule's ``id``."""
    return {id(child): parent for parent in modules for child in children(parent).values()}


def _unused(name: str, taken: set[str]) -> str:
    number = 1
    candidate = name
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate
