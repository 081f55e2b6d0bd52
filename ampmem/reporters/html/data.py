"""What the page says about one recording: typed values that become its JSON under the same names.

A *position* is a number of events that have happened. Where a value is not known it is ``None``, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampmem.analysis.activations import Saving
from ampmem.analysis.analyse import Conservation
from ampmem.analysis.casts import ParameterCasts, StepCasts
from ampmem.analysis.jsonable import named
from ampmem.analysis.static_model.explain import Term
from ampmem.analysis.summary import Allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One large number and what it is; ``value`` is how it reads."""

    label: str
    value: str
    detail: str
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding; ``jump`` is the id of the section that shows it, ``saves`` what the change takes off the peak."""

    code: str
    severity: str
    message: str
    change: str
    evidence: tuple[str, ...]
    saves: str
    jump: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step: the positions of its start, end and peak, and what ``ampmem show`` prints of it."""

    index: int
    finished: bool
    first: int
    last: int
    peak: int
    peak_bytes: int
    """What was requested then, as the timeline draws it."""
    said: str
    """The peak in words, which has the rounding of blocks where there are some."""
    rounded: bool
    """Whether it is another number than ``peak_bytes``."""
    peak_reserved: int | None
    phase: str
    loss: str
    loss_scale: str
    update: str
    took: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakView:
    """The largest of the steps' peaks."""

    position: int
    bytes: int
    """What was requested then, as the timeline draws it."""
    said: str
    """The peak in words, which has the rounding of blocks where there are some."""
    rounded: bool
    """Whether it is another number than ``bytes``."""
    step: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAtView:
    """The instant that modules, stacks, addresses and allocations show: ``name`` is ``peak``, or ``failure``."""

    position: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkView:
    """One of the instants of a step at which its memory is worth a look."""

    step: int
    name: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """Bytes of one category."""

    key: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionView:
    """What a peak is made of, largest first."""

    rows: tuple[SizeRow, ...]
    temporaries_by_phase: Mapping[str, int]
    communication_by_part: Mapping[str, int]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactView:
    """One line of what is known."""

    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyView:
    """Something to change, why, and the bytes that it is about."""

    change: str
    why: str
    bytes: int | None
    evidence: tuple[str, ...]
    code: str
    jump: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTensorView:
    """Equal tensors among the largest: ``bytes`` of each, ``kind`` is their type and shape."""

    bytes: int
    count: str
    kind: str
    category: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryView:
    """The last request that failed: ``position`` is when, ``frames`` (outermost first) where in the script.

    ``available`` is what the device has, or the process may take, ``used`` what of it was in use, and ``segment`` what
    was asked of the device; ``None`` where another device was recorded. ``block`` says that on the timeline.
    ``commands`` can be run next, ``hint`` says how to write one. ``later`` says that it came after the recorded steps:
    the charts do not have that instant.
    """

    headline: str
    position: int
    later: bool
    available: int | None
    used: int
    segment: int
    block: str
    largest: tuple[LargeTensorView, ...]
    commands: tuple[str, ...]
    hint: str
    facts: tuple[FactView, ...]
    frames: tuple[str, ...]
    remedies: tuple[RemedyView, ...]
    alive: CompositionView


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """Bytes of one category, one cell per column."""

    key: str
    cells: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownView:
    """Live bytes at the marks of one step and at its peak."""

    step: int
    columns: tuple[str, ...]
    rows: tuple[CellRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentView:
    """One component of the static model: ``model + sum of the terms + residual == measured``."""

    component: str
    model: int = field(metadata=named("told"))
    measured: int
    terms: tuple[Term, ...]
    residual: int
    explained: bool
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkComponents:
    """The static model at one mark."""

    name: str
    rows: tuple[ComponentView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticModelView:
    """The recipe that the run is measured against, what became of it, and the components."""

    head: str
    verdict: str
    holds: bool
    marks: tuple[MarkComponents, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionBar:
    """Bytes of activations: ``full`` are float32 or float64, ``low`` bfloat16 or float16, ``other`` no such numbers.

    ``ops`` are those that the bar is about, as torch names them, each with a type of what it saved or made; ``None``
    for what was not seen. ``module`` is the path of the modules that it is about, with ``*`` for any number, and
    ``None`` for none. ``detail`` says more.
    """

    label: str
    detail: str
    full: int
    low: int
    other: int
    ops: tuple[tuple[str | None, str | None], ...]
    module: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionWords:
    """How the parts of :class:`PrecisionBar` are called; empty for one that no activation is of."""

    full: str
    low: str
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsView:
    """What the activations are, and in which type.

    ``kinds`` are by the op that saved them, or where none was seen to save any by the op that made them (``by`` is
    ``saved for`` or ``made by``). ``modules_rest`` is what the modules that are left out come to. ``position`` is that
    of the instant at which they live, ``when`` the same in words.
    """

    when: str
    position: int
    by: str
    words: PrecisionWords
    whole: PrecisionBar
    kinds: tuple[PrecisionBar, ...]
    modules: tuple[PrecisionBar, ...]
    modules_rest: PrecisionBar | None
    savings: tuple[Saving, ...]
    savings_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastsView:
    """The cast ledger; of very many parameters and steps only the largest and the last."""

    copies: int
    bytes: int
    peak_bytes: int
    cache_hits: int | None
    by_parameter: tuple[ParameterCasts, ...]
    parameters_left_out: int
    steps: tuple[StepCasts, ...]
    steps_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One segment of the allocator: ``blocks`` are (offset, bytes, category or ``cached``)."""

    address: int
    bytes: int
    blocks: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressMapView:
    """The allocator's segments at the peak, where the events come without addresses."""

    segments: tuple[SegmentView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """The events, packed; ``note`` says what was left out, empty in mode ``exact``.

    ``addresses`` says whether the events come with addresses, from which the page makes its address map.
    """

    mode: str
    events: int
    note: str
    addresses: bool
    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One recording; sections without anything to show are ``None`` or empty.

    ``timed`` says whether the times of its events were measured; else they only order them.
    """

    label: str
    arm: str
    title: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """Why the numbers of this run prove nothing; empty where they add up."""
    headlines: tuple[Headline, ...]
    out_of_memory: OutOfMemoryView | None
    findings: tuple[FindingView, ...]
    parameters: int
    source: str
    timed: bool
    steps: tuple[StepView, ...]
    peak: PeakView | None
    instant: ShownAtView | None
    """The peak, or the failure where memory ran out and the run ended; ``None`` where nothing is alive."""
    phase_runs: tuple[tuple[int, str], ...]
    marks: tuple[MarkView, ...]
    composition: CompositionView | None
    breakdown: BreakdownView
    static_model: StaticModelView | None
    activations: ActivationsView | None
    casts: CastsView | None
    allocator: Allocator
    conservation: Conservation
    address_map: AddressMapView | None
    stream: StreamView
