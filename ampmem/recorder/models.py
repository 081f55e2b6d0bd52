"""The script's models: which modules are roots, and the full names of all that hangs below them.

Holds weak references only: a model that the script drops must die as it would without ampmem.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ampmem.events import Fact, ParameterRecord
from ampmem.recorder.live import live_objects
from ampmem.recorder.log import Log, storage_address
from ampmem.recorder.texts import Texts

ROOT = "(model)"
"""Path of the only model's root module; with several models each has its class name instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where a parameter or buffer hangs; what hangs there is looked up anew each time."""

    module: weakref.ref[nn.Module]
    key: str
    name: str
    name_id: int
    path_id: int

    def tensor(self, kind: str) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else module.__dict__[kind].get(self.key)


class Models:
    """Names of modules, parameters and buffers, kept up to date with the script's models."""

    def __init__(self, texts: Texts, log: Log) -> None:
        self._texts = texts
        self._log = log
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._path_ids: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._parameters: list[_Slot] = []
        self._buffers: list[_Slot] = []
        self._records: dict[str, ParameterRecord] = {}
        self._registered: dict[int, weakref.ref[nn.Module]] = {}
        self.changed = True
        """Whether something was added to a module since the last :meth:`refresh`."""
        self.by_address: dict[int, int] = {}
        """Storage address of each parameter to the text id of its name."""

    def add(self, module: nn.Module) -> None:
        """Make ``module`` a root, named after its class unless it is the only one with parameters."""
        alone = _has_parameters(module) and not any(self._live_roots_with_parameters())
        self._add_roots([module], alone=alone)

    def registered(self, module: nn.Module) -> None:
        """Something was registered with ``module``: it may be a root, and names may have changed."""
        self.changed = True
        if id(module) not in self._registered:
            self._registered[id(module)] = weakref.ref(module)

    def add_registered(self) -> None:
        """Make roots of those registered modules that are nobody's child."""
        modules = [module for reference in self._registered.values() if (module := reference()) is not None]
        self._registered.clear()
        if self.changed:
            self.refresh()  # what hangs below a root is named now, and no root itself
        parents = _parents(modules)
        roots = [m for m in modules if self._known_path(m) is None and id(m) not in parents and _has_parameters(m)]
        if roots:
            self._add_roots(roots, alone=len(roots) == 1 and not any(self._live_roots_with_parameters()))

    def path_id(self, module: nn.Module) -> int:
        """Text id of ``module``'s path; a module never seen before is looked for, or becomes a root."""
        found = self._known_path(module)
        if found is None and self.changed:
            self.refresh()
            found = self._known_path(module)
        if found is None:  # it existed before, or was copied or unpickled, which registers nothing
            parents = _parents(live_objects().modules)
            root = module
            while id(root) in parents:
                root = parents[id(root)]
            self.add(root)
            found = self._known_path(module)
        return found or 0

    def note(self) -> None:
        """Log where all parameters and buffers are now."""
        if self.changed:
            self.refresh()
        self.by_address.clear()
        for slot, parameter in self.parameters():
            address = storage_address(parameter)
            self.by_address[address] = slot.name_id
            self._log.fact(Fact.PARAMETER, address, slot.name_id, slot.path_id)
        for slot in self._buffers:
            buffer = slot.tensor("_buffers")
            if buffer is not None:
                self._log.fact(Fact.BUFFER, storage_address(buffer), slot.name_id, slot.path_id)

    def parameters(self) -> Iterator[tuple[_Slot, nn.Parameter]]:
        """Every live parameter with where it hangs."""
        for slot in self._parameters:
            parameter = slot.tensor("_parameters")
            if parameter is not None:
                yield slot, parameter  # type: ignore[misc]

    def refresh(self) -> None:
        """Name everything below the roots again."""
        self.changed = False
        self._path_ids.clear()
        self._parameters.clear()
        self._buffers.clear()
        seen: set[int] = set()
        for root, prefix in self._roots:
            module = root()
            if module is not None:
                self._name_tree(module, prefix, seen)

    def records(self) -> list[ParameterRecord]:
        """Every parameter ever seen, by name. Parameters that share one memory appear once."""
        seen: set[tuple[int, int]] = set()
        for slot, parameter in self.parameters():
            place = (_data_address(parameter), parameter.numel())
            if place not in seen or place[0] == 0:
                self._records[slot.name] = parameter_record(slot.name, parameter)
            seen.add(place)
        return list(self._records.values())

    def _live_roots_with_parameters(self) -> Iterator[bool]:
        return (_has_parameters(module) for root, _ in self._roots if (module := root()) is not None)

    def _known_path(self, module: nn.Module) -> int | None:
        entry = self._path_ids.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _add_roots(self, modules: Iterable[nn.Module], *, alone: bool) -> None:
        taken = {prefix for _, prefix in self._roots}
        for module in modules:
            name = ROOT if alone else _unused(type(module).__name__, taken)
            taken.add(name)
            self._roots.append((weakref.ref(module), name))
        self.refresh()

    def _name_tree(self, root: nn.Module, prefix: str, seen: set[int]) -> None:
        lead = "" if prefix == ROOT else prefix
        for path, module in root.named_modules(prefix=lead):
            reference = weakref.ref(module)
            path_id = self._texts.id(path or prefix)
            self._path_ids.setdefault(id(module), (reference, path_id))
            for kind, slots in (("_parameters", self._parameters), ("_buffers", self._buffers)):
                for key, tensor in module.__dict__[kind].items():
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    name = f"{path}.{key}" if path else key
                    name_id = self._texts.id(name)
                    slots.append(_Slot(module=reference, key=key, name=name, name_id=name_id, path_id=path_id))


def parameter_record(name: str, parameter: torch.Tensor) -> ParameterRecord:
    """What the recording keeps of one parameter."""
    return ParameterRecord(
        name=name,
        elements=parameter.numel(),
        bytes=parameter.numel() * parameter.element_size(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parents(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """``id`` of each child to its parent."""
    return {id(child): parent for parent in modules for child in parent.__dict__.get("_modules", {}).values()}


def _unused(name: str, taken: set[str]) -> str:
    number = 1
    candidate = name
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    return candidate


def _data_address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
