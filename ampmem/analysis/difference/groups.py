"""All that is alive at an instant, in groups: what is of one tensor, or was made by the same line of the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.modules import in_module
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.analysis.timeline.marks import phase_at
from ampmem.analysis.timeline.timeline import PhaseName, largest_positions
from ampmem.events import Column, Phase
from ampmem.names import shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Allocations of which the same is known; ``None`` where nothing is.

    ``stack`` is ``file:line function``, outermost first. ``shape`` is that of each of them, and ``bytes`` are those of
    all ``count`` together.
    """

    category: Category
    module: str | None
    name: str | None
    op: str | None
    stack: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something was so; ``op`` and ``module`` are those of the alloc that made it so, where that is known."""

    step: int
    phase: PhaseName
    op: str | None
    module: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """What a run held at its peak, and what of each category at the instant at which that was largest.

    The bytes of ``peak`` add up to the run's peak, those of each entry of ``most`` to the summary's ``most``;
    ``moments`` says when each of those was. ``analysis`` has what was alive at all other instants.
    """

    peak: tuple[Group, ...]
    most: Mapping[Category, tuple[Group, ...]]
    moments: Mapping[Category, Moment]
    analysis: Analysis


def groups_of(analysis: Analysis) -> Groups:
    """The groups of a run."""
    most = largest_positions(analysis.timeline, analysis.recording.steps)
    return Groups(
        peak=groups_at(analysis, analysis.peak),
        most={category: groups_at(analysis, position, category) for category, position in most.items()},
        moments={category: _moment(analysis, position) for category, position in most.items()},
        analysis=analysis,
    )


def _moment(analysis: Analysis, position: int) -> Moment:
    recording, timeline = analysis.recording, analysis.timeline
    step = [step for step in recording.steps if timeline.position(step.start_ns) <= position][-1]
    op = module = ""
    if position == timeline.position(step.start_ns):
        phase = phase_at(recording.phases, step.start_ns)
    else:
        phase = Phase(int(recording.events.phase[position - 1]))
        op, module = analysis.born_at(position)
    return Moment(step=step.index, phase=phase.name.lower(), op=op or None, module=module or None)


def groups_in_module(analysis: Analysis, category: Category, name: str) -> tuple[Group, ...]:
    """What the summary counts as ``category`` of the module ``name``, at the instant at which it does."""
    return groups_among(analysis, in_module(analysis, category, name))


def groups_at(analysis: Analysis, position: int, category: Category | None = None) -> tuple[Group, ...]:
    """What is alive at ``position``, or of it what is in ``category``; in order of birth."""
    mine = analysis.lifetimes.alive_at(position)
    return groups_among(analysis, mine if category is None else mine & analysis.classes.of(category))


def groups_among(analysis: Analysis, mine: Mask) -> tuple[Group, ...]:
    """The allocations of ``mine``; in order of birth."""
    lifetimes, tensors = analysis.lifetimes, analysis.tensors
    rows = np.flatnonzero(mine & (lifetimes.bytes > 0))
    if not len(rows):
        return ()
    columns = [column[rows] for column in (*_made(analysis), tensors.dtype, tensors.shape)]
    return _grouped(np.stack(columns), lifetimes.bytes[rows], analysis.recording.texts)


def makers_of(analysis: Analysis) -> tuple[tuple[Group, ...], Column]:
    """What made all that was ever allocated, without types, shapes and bytes; and which of it each allocation is of."""
    columns = _made(analysis)
    place = np.zeros(len(analysis.lifetimes), dtype=np.int64)
    for column in columns:  # one by one: of rows of several columns numpy is slow to tell which are distinct
        place = np.unique(place * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1].reshape(-1)
    first = np.unique(place, return_index=True)[1]
    texts = analysis.recording.texts
    keys = np.stack(columns)[:, first].T.tolist()
    return tuple(_group([*key, 0, 0], _lines(texts[key[4]]), 0, 0, texts) for key in keys), place


def _made(analysis: Analysis) -> tuple[Column, ...]:
    """For each allocation its category, module, name, op and stack."""
    lifetimes, classes = analysis.lifetimes, analysis.classes
    module = np.where(lifetimes.module != 0, lifetimes.module, classes.module)
    return classes.category, module, classes.name, lifetimes.op, lifetimes.stack


def _grouped(keys: Column, sizes: Column, texts: tuple[str, ...]) -> tuple[Group, ...]:
    """A group for each column of ``keys`` (category, module, name, op, stack, type, shape) that differs."""
    distinct, first, place = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    size = np.zeros(len(first), dtype=np.int64)
    np.add.at(size, place, sizes)
    found = zip(distinct.T.tolist(), size.tolist(), np.bincount(place).tolist(), strict=True)
    stacks = {stack: _lines(texts[stack]) for stack in np.unique(keys[4]).tolist()}
    groups = [_group(key, stacks[key[4]], held, count, texts) for key, held, count in found]
    return tuple(groups[i] for i in np.argsort(first).tolist())


def _lines(stack: str) -> tuple[str, ...]:
    return tuple(line for line in stack.split("\n") if line)


def _group(key: list[int], stack: tuple[str, ...], size: int, count: int, texts: tuple[str, ...]) -> Group:
    category, module, name, op, _, dtype, shape = key
    return Group(
        category=CATEGORIES[category],
        module=texts[module] or None,
        name=texts[name] or None,
        op=texts[op] or None,
        stack=stack,
        dtype=texts[dtype] or None,
        shape=shape_of(texts[shape]),
        bytes=size,
        count=count,
    )
