"""The memory of each module, with that of its submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.marks import failure_ns
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import PLACED, Column
from ampmem.vocabulary import SourceKind

ROOT = "(model)"
"""The name of the row for the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Bytes of one module and all below it: ``gradients`` after backward, the rest after forward."""

    name: str
    parameters: int
    activations: int
    cast_copies: int
    gradients: int


def modules(history: MemoryHistory) -> tuple[ModuleMemory, ...]:
    """The modules at the last step with a backward, each parent before its children; of inference, at the last step.

    If memory ran out before such a step, they are as of that instant. Activations made outside every module (by a loss
    function in the script) belong to no module. Snapshots have no modules.
    """
    positions = _positions(history)
    if positions is None or history.recording.run.source is SourceKind.SNAPSHOT:
        return ()
    after_forward, after_backward = positions
    tables = {
        "parameters": _cumulative(
            _by_owner(history, Category.PARAMETERS, after_forward)
            + _by_owner(history, Category.UNTRAINED, after_forward)
        ),
        "activations": _cumulative(_by_birthplace(history, after_forward)),
        "cast_copies": _cumulative(_by_owner(history, Category.CAST_COPIES, after_forward)),
        "gradients": _cumulative(_by_owner(history, Category.GRADIENTS, after_backward)),
    }
    paths = _in_tree_order(_all_paths(history))
    return tuple(
        ModuleMemory(name=path or ROOT, **{key: table.get(path, 0) for key, table in tables.items()}) for path in paths
    )


def in_module(history: MemoryHistory, category: Category, name: str) -> Mask:
    """The allocations that :func:`modules` counts as ``category`` of the module ``name``."""
    positions = _positions(history)
    if positions is None:
        return np.zeros(len(history.lifetimes), dtype=np.bool_)
    position = positions[category is Category.GRADIENTS]
    mine = history.classes.of(category) & history.lifetimes.alive_at(position)
    if category is Category.PARAMETERS:
        mine |= history.classes.of(Category.UNTRAINED) & history.lifetimes.alive_at(position)
    if category is Category.ACTIVATIONS:
        return mine & _within(history, history.lifetimes.module, name, _path)
    said = history.classes.module != 0
    by_module = _within(history, history.classes.module, name, _path)
    return mine & np.where(said, by_module, _within(history, history.classes.name, name, _owner_path))


def _within(history: MemoryHistory, texts: Column, wanted: str, path_of: Callable[[str], str]) -> Mask:
    """Which ``texts`` (text ids) name the module ``wanted`` or one below it; empty texts never do."""
    distinct, place = np.unique(texts, return_inverse=True)
    top = _path(wanted)
    found = [
        index != 0 and top in _with_ancestors(path_of(history.recording.texts[index])) for index in distinct.tolist()
    ]
    return np.asarray(found, dtype=np.bool_)[place]


def _positions(history: MemoryHistory) -> tuple[int, int] | None:
    """The positions after forward and after backward; ``None`` if there was neither."""
    forward = [mark for mark in history.marks if mark.after_forward is not None]
    marks = [mark for mark in forward if mark.after_backward is not None] or forward
    failed = failure_ns(history.recording)
    if not marks and failed is None:
        return None
    after_forward = _position(history, marks[-1].after_forward if marks else failed)
    return after_forward, _position(history, marks[-1].after_backward if marks else failed)


def _position(history: MemoryHistory, instant_ns: int | None) -> int:
    return 0 if instant_ns is None else history.timeline.position(instant_ns)


def _path(module: str) -> str:
    """``module``, as the recorder writes it, as a path; the root is the empty path."""
    return "" if module == ROOT else module


def _owner_path(parameter: str) -> str:
    """The path of the module that has the parameter of that full name."""
    return parameter.rpartition(".")[0]


def _by_owner(history: MemoryHistory, category: Category, position: int) -> list[tuple[str, int]]:
    """(path, bytes) for a category whose allocations belong to a parameter."""
    mine = history.classes.of(category) & history.lifetimes.alive_at(position)
    module, name = history.classes.module[mine], history.classes.name[mine]
    size = history.lifetimes.bytes[mine]
    texts, said = history.recording.texts, module != 0
    owned = [(_path(texts[index]), total) for index, total in _sums(module[said], size[said])]
    return owned + [(_owner_path(texts[index]), total) for index, total in _sums(name[~said], size[~said])]


def _by_birthplace(history: MemoryHistory, position: int) -> list[tuple[str, int]]:
    """(path, bytes) for the activations, by the module whose forward made them."""
    mine = history.classes.of(Category.ACTIVATIONS) & history.lifetimes.alive_at(position)
    mine &= history.lifetimes.module != 0
    sums = _sums(history.lifetimes.module[mine], history.lifetimes.bytes[mine])
    return [(_path(history.recording.texts[index]), total) for index, total in sums]


def _sums(key: Column, size: Column) -> list[tuple[int, int]]:
    """(key, sum of its sizes), one entry per key."""
    keys, row = np.unique(key, return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, row, size)
    return list(zip(keys.tolist(), total.tolist(), strict=True))


def _with_ancestors(path: str) -> Iterator[str]:
    """The path and those of all modules above: ``a.b``, ``a`` and the root for ``a.b``."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _cumulative(sums: Iterable[tuple[str, int]]) -> dict[str, int]:
    table: dict[str, int] = {}
    for path, size in sums:
        for above in _with_ancestors(path):
            table[above] = table.get(above, 0) + size
    return table


def _all_paths(history: MemoryHistory) -> list[str]:
    """Every module path in the recording, in the order of the recorder's names, which is the model's."""
    recording = history.recording
    facts = recording.facts
    of_facts = facts.module[~np.isin(facts.fact, PLACED)]
    mentioned = np.unique(np.concatenate([np.unique(recording.events.module), np.unique(of_facts)]))
    paths = [_owner_path(parameter.name) for parameter in recording.parameters]
    return [_path(recording.texts[index]) for index in mentioned] + paths


def _in_tree_order(paths: Sequence[str]) -> list[str]:
    """``paths`` and all modules above them, each followed by its children in order of first mention."""
    children: dict[str, dict[str, None]] = {"": {}}
    for path in paths:
        for above in _with_ancestors(path):
            children.setdefault(above, {})
            if above:
                children.setdefault(above.rpartition(".")[0], {}).setdefault(above)
    ordered: list[str] = []
    waiting = [""]
    while waiting:
        path = waiting.pop()
        ordered.append(path)
        waiting.extend(reversed(children[path]))
    return ordered
