"""Bounds of the values in a recording, checked before anything is computed from a file.

A recording is untrusted. Values within these bounds can be added in 64 bits and fit into memory in proportion
to the file's size; a real run stays far inside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from ampmem.events import NO_STEP, UNKNOWN, Action, Column, Columns, EventColumns, Fact, Phase, Recording, SegmentAction
from ampmem.names import shape_of

MOST = 1 << 62
"""The largest size, address or time (ns): two of them can be added in 64 bits. As a time it is the year 2116."""

INT64 = (-(1 << 63), (1 << 63) - 1)

INTEGERS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("time_ns", "start_ns", "end_ns"), (-(1 << 60), MOST)),  # a clock may be before its zero
    "step": (NO_STEP, 1 << 40),
    "index": (0, 1 << 40),
    "allocated": (UNKNOWN, MOST),
    "stream": INT64,  # an address on the device, or a number
    "device": (-1, 1 << 20),
    **dict.fromkeys(("first", "last", "steps"), (0, 1 << 40)),
    **dict.fromkeys(("rank", "local_rank", "coordinate"), (0, 1 << 30)),
    **dict.fromkeys(("world_size", "size"), (1, 1 << 30)),
    **dict.fromkeys(("elements", "global_elements"), (0, 1 << 53)),
    "small": (0, 1),
    "expandable": (0, 1),
}
"""Minimum and maximum by name of a column or field; for all others 0 and :data:`MOST`."""

MOST_STEPS = 30_000
"""Maximum number of steps of a recording, which ends then."""

MOST_WATCHED = 60_000
"""Maximum number of rows of a watched run, whose older half is thinned out then."""

MOST_KEPT = 100
"""Maximum number of a watched run's regular full recordings; a few more have other reasons."""

MOST_ROWS: Mapping[str, int] = {
    "meta": 100,
    "note": 10_000,
    "optimizer": 10_000,
    "oom": 10_000,
    "step": MOST_STEPS,
    "plain_step": 100_000,
    "layers": 120_000,
    "parameter": 100_000,
    "text": 10_000_000,
    "ended_step": MOST_WATCHED,
    "full_recording": MOST_KEPT + 10,
    "grown": 10_000,
}
"""Maximum number of rows by table; events, facts, phases and segments are limited by the file's size."""

NAME = 10_000
"""Maximum characters of a name: of a module, a parameter, an op, a class, a device."""

MODULES = 100_000
"""Maximum number of modules of all models together."""

MODULE_NAMES = 1 << 24
"""Maximum characters of all modules' full names together; also of all parameters', and of their classes'."""

NAMES_OF_ROWS = 1 << 26
NAMES_OF_ROW = 200
"""Maximum characters of the names in all events, or facts: this many, and this many more per row of the table.

One long name shared by a million rows makes a short file, but an endless table of its allocations.
"""

STACK_LINES = 1 << 18
"""Maximum number of frames in all distinct stacks together; a long run has a thousand."""

POSITIONS_OF_STEPS = 100_000_000
POSITIONS_OF_EVENT = 10
"""Maximum number of events of all steps together: this many, and this many more per event.

Steps follow one another; but a clock may be set back, and then two steps may share some events.
"""

IMPLEMENTATIONS = ("foreach", "fused", "for-loop")

TEXT = 1 << 20
"""Maximum characters of a longer text: a stack, a note, an error's message, an argument."""

STATE = 1 << 23
"""Maximum characters of an allocator's state at an out-of-memory error, or of a row of the header."""

ITEMS = 1 << 20
"""Maximum number of entries of a list in a cell, such as a script's arguments."""

DIMENSIONS = 1_000
"""Maximum number of dimensions of a tensor's shape."""


def integers_of(name: str) -> tuple[int, int]:
    """Minimum and maximum of a column or field called ``name``."""
    return INTEGERS.get(name, (0, MOST))


def check_bounds(recording: Recording) -> None:
    """Raise ``ValueError`` for a recording that no run writes, though each of its rows may be well formed.

    That is: numbers out of bounds, sums over 64 bits, indices without an entry (a missing text, an unknown enum
    member), steps that do not follow each other, and names too long to make a tree of.
    """
    for table, columns in (
        ("event", recording.events),
        ("fact", recording.facts),
        ("phase", recording.phases),
        ("segment", recording.segments),
    ):
        _check_columns(table, columns, _codes(recording))
    sizes = (recording.events.bytes, recording.events.block_bytes, recording.segments.bytes)
    steps = [step.index for step in recording.steps]
    optimizers = (*recording.optimizers, *recording.waiting)
    problems = {
        "its sizes add up to an impossible total": any(size.sum(dtype=np.float64) > MOST for size in sizes),
        "its steps are not in order": any(second <= first for first, second in pairwise(steps)),
        "unknown optimizer implementation": any(each.implementation not in IMPLEMENTATIONS for each in optimizers),
        "a parameter shares more memory than its own size": any(
            record.overlap > record.bytes for record in recording.parameters
        ),
        "its rank is not in the job": recording.run.rank >= recording.run.world_size,
        "its place is not in its device mesh": any(axis.coordinate >= axis.size for axis in recording.mesh),
        "its stage is not in the pipeline": any(stage >= recording.stage_count for stage in recording.stages),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(problem)
    for check in (_check_extents, _check_texts, _check_shapes, _check_names):
        check(recording)


def _codes(recording: Recording) -> Mapping[str, tuple[int, int]]:
    """The bounds of the columns that are indices or codes."""
    text = (0, len(recording.texts) - 1)
    return {
        **dict.fromkeys(("op", "module", "stack", "name", "dtype", "shape"), text),
        "phase": (min(Phase), max(Phase)),
        "fact": (min(Fact), max(Fact)),
        "position": (0, len(recording.events)),
    }


def _check_columns(table: str, columns: Columns, codes: Mapping[str, tuple[int, int]]) -> None:
    if not len(columns):
        return
    actions = Action if isinstance(columns, EventColumns) else SegmentAction
    bounds = {**codes, "action": (min(actions), max(actions))}
    for name in columns.names():
        low, high = bounds.get(name) or integers_of(name)
        column: Column = getattr(columns, name)
        if not low <= int(column.min()) <= int(column.max()) <= high:
            raise ValueError(f"{table}.{name} has a value outside {low} to {high}")


def _check_extents(recording: Recording) -> None:
    """Raise ``ValueError`` if the steps together have too many events: the work per step grows with its events."""
    times = np.maximum.accumulate(recording.events.time_ns)
    starts = np.array([step.start_ns for step in recording.steps], dtype=np.int64)
    ends = np.array([step.end_ns for step in recording.steps], dtype=np.int64)
    covered = np.maximum(np.searchsorted(times, ends) - np.searchsorted(times, starts), 0).sum()
    if covered > POSITIONS_OF_STEPS + POSITIONS_OF_EVENT * len(times):
        raise ValueError("overlapping steps")


def _check_texts(recording: Recording) -> None:
    """Raise ``ValueError`` if names and stacks are too long in total: each row is shown with its own."""
    lengths = np.fromiter(map(len, recording.texts), dtype=np.int64, count=len(recording.texts))
    events, facts = recording.events, recording.facts
    for columns in ((events.op, events.module), (facts.name, facts.module), (facts.dtype, facts.shape)):
        size = sum(int(lengths[column].sum()) for column in columns)
        if size > NAMES_OF_ROWS + NAMES_OF_ROW * len(columns[0]):
            raise ValueError("its names are too long for so many rows")
    if sum(recording.texts[index].count("\n") for index in np.unique(events.stack).tolist()) > STACK_LINES:
        raise ValueError("its stacks have too many frames")
    if sum(len(record.name) + len(record.kind) for record in recording.parameters) > MODULE_NAMES:
        raise ValueError("the names of its parameters are too long")


def _check_shapes(recording: Recording) -> None:
    """Raise ``ValueError`` for a text that is neither a shape nor empty."""
    for index in np.unique(recording.facts.shape).tolist():
        shape = shape_of(recording.texts[index])
        if index and (shape is None or max(shape, default=0) > MOST):
            raise ValueError("invalid tensor shape")


def _check_names(recording: Recording) -> None:
    """Raise ``ValueError`` if module names are too long in total: each module is shown with all above it."""
    events, facts, texts = recording.events, recording.facts, recording.texts
    parents = {record.name.rpartition(".")[0] for record in recording.parameters}
    modules = parents | {
        texts[index] for column in (events.module, facts.module) for index in np.unique(column).tolist()
    }
    names = {texts[index] for column in (events.op, facts.name, facts.dtype) for index in np.unique(column).tolist()}
    if any(len(name) > NAME for name in modules | names):
        raise ValueError(f"a name has more than {NAME} characters")
    tree: set[str] = set()
    size = 0
    for name in modules:
        while name and name not in tree:
            tree.add(name)
            size += len(name)
            if len(tree) > MODULES or size > MODULE_NAMES:
                raise ValueError("it has too many modules, or they are nested too deeply")
            name = name.rpartition(".")[0]
