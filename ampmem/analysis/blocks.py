"""The modules of a model that can be checkpointed, in the order in which the search takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.timeline import MemoryHistory
from ampmem.events import Fact, ParameterRecord, Phase


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The modules that can be checkpointed, none inside another, each list in the model's order.

    ``saved_bytes`` are the bytes that each forward keeps for backward except its result, and ``flops`` the cost of
    computing them again; both are empty where they were not measured, and ``flops`` on a real device.
    """

    names: tuple[str, ...]
    saved_bytes: tuple[int, ...] = ()
    flops: tuple[int, ...] = ()

    def first(self, count: int) -> tuple[str, ...]:
        """The ``count`` best blocks, in the model's order."""
        chosen = set(self.best[:count])
        return tuple(name for name in self.names if name in chosen)

    @cached_property
    def best(self) -> tuple[str, ...]:
        """The blocks' names, the most bytes saved per FLOP first; nearly equal blocks stay in the model's order."""
        worth = dict(zip(self.names, self._worth(), strict=True))
        return tuple(sorted(self.names, key=lambda name: -worth[name]))

    def _worth(self) -> list[float]:
        """For each block the bytes saved per FLOP, in hundredths of the largest."""
        if not self.saved_bytes:
            return [0.0] * len(self.names)
        flops = self.flops if any(self.flops) else (1,) * len(self.names)
        ratios = [inf if not count else size / count for size, count in zip(self.saved_bytes, flops, strict=True)]
        most = max((ratio for ratio in ratios if ratio != inf), default=0.0) or 1.0
        return [ratio if ratio == inf else round(ratio / most, 2) for ratio in ratios]

    def in_code(self, chosen: Sequence[str]) -> str:
        """``chosen`` as Python expressions, with ``model`` as the outermost module: ``model.blocks[:6]``."""
        lists = _lists(chosen)
        prefix, numbers = next(iter(lists.items()))
        if len(lists) > 1 or numbers != list(range(len(numbers))):
            names = ", ".join(f"'{name}'" for name in chosen)
            return f"map(model.get_submodule, ({names}{',' if len(chosen) == 1 else ''}))"
        return f"{in_code(prefix)}[:{len(numbers)}]"


def in_code(path: str) -> str:
    """The module at ``path`` as a Python expression: ``model.blocks[0]``."""
    held = "model"
    for part in filter(None, path.split(".")):
        held += f"[{part}]" if part.isdecimal() else f".{part}"
    return held


def _lists(names: Iterable[str]) -> dict[str, list[int]]:
    """The numbers of the modules in each list, by the list's name."""
    found: dict[str, list[int]] = {}
    for name in names:
        prefix, _, number = name.rpartition(".")
        found.setdefault(prefix, []).append(int(number))
    return found


# The modules that can be checkpointed.


@dataclass(slots=True, eq=False)
class _Module:
    """A module that has parameters; ``shapes`` has the shapes of all parameters inside, by name."""

    name: str
    inside: dict[str, _Module] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    """The classes of the modules inside that have parameters."""

    def numbered(self) -> list[_Module]:
        """The modules inside whose names are numbers, without leaves, which would recompute as much as they save."""
        return [each for key, each in self.inside.items() if key.isdecimal() and each.inside]


def _tree(parameters: Sequence[ParameterRecord]) -> _Module:
    root = _Module(name="")
    for record in parameters:
        *path, own = record.name.split(".")
        module = root
        for depth, part in enumerate((*path, "")):
            module.shapes[".".join((*path[depth:], own))] = record.shape
            module.kinds.add(record.kind)
            if part:
                name = f"{module.name}.{part}".removeprefix(".")
                module = module.inside.setdefault(part, _Module(name=name))
    return root


def _candidates(module: _Module, ran: frozenset[str]) -> Iterator[_Module]:
    """The blocks inside ``module``: the items of the outermost lists (``nn.ModuleList``) that have equal items.

    In a list of stages no two items are equal, but each stage has a list of blocks. Only items in ``ran``, if there are
    any, have a forward of their own; the others are lists themselves.
    """
    numbered = [each for each in module.numbered() if not ran or each.name in ran]
    shapes = [frozenset(each.shapes.items()) for each in numbered]
    alike = len(set(shapes)) < len(shapes)
    for each in module.inside.values():
        if each not in numbered:
            yield from _candidates(each, ran)
        elif alike:
            yield each
        else:
            yield from list(_candidates(each, ran)) or [each]


def names_of_blocks(parameters: Sequence[ParameterRecord], ran: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The names of the modules that can be checkpointed; empty if there are fewer than two.

    ``ran`` are the modules whose forward was seen, if known; an ``nn.ModuleList`` has none. Modules with a BatchNorm
    are left out if there are others, as recomputation would update its statistics twice.
    """
    tree = _tree(parameters)
    found = list(_candidates(tree, ran)) or list(_candidates(tree, frozenset()))  # compiled modules are not seen to run
    steady = [each for each in found if not any("BatchNorm" in kind for kind in each.kinds)]
    names = tuple(each.name for each in steady or found)
    return names if len(names) > 1 else ()


# The bytes that checkpointing the blocks saves.


def blocks_of(history: MemoryHistory, flops: Mapping[str, int]) -> Blocks | None:
    """The blocks of the recorded model; ``None`` if it has fewer than two.

    ``flops`` has, for each module whose forward ran, the FLOPs of its own code in a step's forwards.
    """
    names = names_of_blocks(history.recording.parameters, frozenset(flops))
    if not names:
        return None
    saved = _saved(history, names)
    if saved is None:
        return Blocks(names=names)
    if any(saved):  # a block that saves nothing runs without gradients
        names = tuple(name for name, size in zip(names, saved, strict=True) if size)
        saved = tuple(filter(None, saved))
    if len(names) < 2:
        return None
    computed = tuple(sum(count for path, count in flops.items() if _is_in(path, name)) for name in names)
    return Blocks(names=names, saved_bytes=saved, flops=computed if any(computed) else ())


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _saved(history: MemoryHistory, names: Sequence[str]) -> tuple[int, ...] | None:
    """Bytes that each block's forward keeps for backward, except its result, in the last step with a backward."""
    after = next((each.after_forward for each in reversed(history.marks) if each.after_forward is not None), None)
    if after is None:
        return None
    lifetimes, classes = history.lifetimes, history.classes
    kept = lifetimes.alive_at(history.timeline.position(after))
    kept &= classes.of(Category.ACTIVATIONS) | classes.of(Category.CAST_COPIES)
    return kept_inside(history, names, kept & (lifetimes.phase == Phase.FORWARD), after)


def kept_inside(history: MemoryHistory, names: Sequence[str], kept: Mask, until_ns: int) -> tuple[int, ...]:
    """The bytes of the allocations in ``kept`` inside each of the blocks ``names``, except the block's last result.

    The last result before ``until_ns`` is the next block's input, which that one keeps, recomputed or not.
    """
    lifetimes, facts, texts = history.lifetimes, history.facts, history.recording.texts
    returned = (facts.fact == Fact.OUTPUT) & (facts.time_ns <= until_ns)
    sizes = []
    for name in names:
        inside = np.array([_is_in(text, name) for text in texts], dtype=np.bool_)
        mine = kept & inside[lifetimes.module]
        last = np.flatnonzero(returned & inside[facts.module])
        if len(last):
            mine[facts.allocation[last[-1]]] = False
        sizes.append(int(lifetimes.bytes[mine].sum()))
    return tuple(sizes)
