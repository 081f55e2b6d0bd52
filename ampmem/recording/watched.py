"""The contents of the file of a watched run: a row per step, full recordings of a few steps, and the run's end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ampmem.failure import FailureRecord


class Why(StrEnum):
    """Why a few steps of a watched run were recorded in full."""

    START = "start"
    EVERY = "every"
    HIGHEST = "highest"
    GROWTH = "growth"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedHeader:
    """The header of a watched run: what is watched. Sizes are bytes; ``limit`` is the device's memory, if known."""

    ampmem: str
    torch: str
    source: str
    device: str
    script: str
    arguments: tuple[str, ...]
    started_ns: int
    every: int
    limit: int | None = None
    rank: int = 0
    world_size: int = 1
    job: str = ""
    """Identifies the job if there are several ranks."""
    sampled: bool = False
    """Whether peaks are sampled (at each module's end and each change of phase), so they are lower bounds.

    Otherwise they are the allocator's own.
    """


@dataclass(frozen=True, slots=True)
class Row:
    """One step. Sizes are bytes."""

    step: int
    time_ns: int
    """Time of the end of the step."""
    peak: int
    """Peak of allocated memory in the step."""
    phase: str
    """Phase of the peak."""
    alive: int
    """Allocated memory at the end of the step."""
    reserved: int
    host: int
    """Resident memory of the process at the end of the step."""
    retries: int
    """Number of times so far that the allocator had to free its cache."""
    split: int
    """Free memory in segments in use: an upper bound for fragmentation."""
    batch: str
    """Shapes and dtypes of the model's first input."""
    full: bool
    """Whether the step is in a full recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A full recording of a few steps: the bytes of its file, compressed."""

    number: int
    why: Why
    first: int
    """Number of its first step in the run."""
    last: int
    packed: bytes = field(repr=False)


IDLE_PARAMETERS = "parameters of idle modules"
"""The name in :class:`HeldMemory` for parameters of modules that never ran, such as an EMA of the weights."""
EVERYTHING_ELSE = "everything else"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Memory allocated in one category, by one line of the script, or held by one holder."""

    what: str
    bytes: int
    count: int
    line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Memory allocated in the ``steps`` steps before the end of ``step`` and alive then, by holder."""

    step: int
    steps: int
    held: tuple[HeldMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the run; for an out-of-memory error with the request, its place, and the memory held then."""

    step: int
    """The step that was running."""
    time_ns: int
    failure: FailureRecord | None = None
    out_of_memory: bool = False
    asked: int | None = None
    free: int | None = None
    total: int | None = None
    reserved: int | None = None
    phase: str = ""
    batch: str = ""
    line: str = ""
    held: tuple[HeldMemory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """The content of the file of a watched run; ``running`` says whether it is still being written."""

    path: Path
    header: WatchedHeader
    rows: tuple[Row, ...]
    full: tuple[Full, ...]
    notes: tuple[str, ...]
    grown: tuple[Grown, ...]
    ending: Ending | None
    running: bool
