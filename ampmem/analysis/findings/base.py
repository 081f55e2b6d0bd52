"""Findings, the run that they are computed from, and which of them are remedies for a failed request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.casts import StepCasts
from ampmem.analysis.jsonable import NOT_IN_JSON, Signed
from ampmem.analysis.ops import plain_op, result_of
from ampmem.analysis.out_of_memory import FailedRequest, failure_position
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.analysis.timeline.marks import phase_at, unfinished_step
from ampmem.analysis.timeline.timeline import PARTS
from ampmem.events import NO_STEP, Column, Fact, Phase, Recording, StepRecord
from ampmem.names import MAPPED
from ampmem.units import format_bytes
from ampmem.vocabulary import AUTOCAST_PRECISIONS, LOW_PRECISION, Communication

Severity: TypeAlias = Literal["info", "advice", "warning"]

NOTABLE_BYTES = 1024
NOTABLE_SHARE = 0.005
"""Sizes below this share of the run's peak, or below a fixed size, are not worth a change of the script, nor a line."""
_NEARLY = 0.005
"""Steps whose peak is within this share of the run's peak count as equal to the step of the peak."""

_AT_LEAST = frozenset(
    {
        "attention-kernel",
        "autocast-in-backward",
        "cache-off-saves",
        "cache-on-saves",
        "copies-survive",
        "fp32-activations",
    }
)
"""Codes of the findings whose change may also save what cannot be computed, such as temporaries of backward."""


class Section(StrEnum):
    """The sections of the page, by their ids."""

    PEAK = "peak"
    TIMELINE = "timeline"
    STEPS = "steps"
    STATIC_MODEL = "static"
    ACTIVATIONS = "activations"
    CASTS = "casts"
    ALLOCATIONS = "allocations"
    OUT_OF_MEMORY = "out-of-memory"


_STARTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about the run: one plain sentence, its bytes, the evidence, and what to change.

    ``code`` is the name of its check, with dashes; it is empty until the check has returned, unless it has another.
    ``section`` is the section of the page that shows it. ``bytes`` is ``None`` for a finding without a size.
    ``off_peak`` is how many bytes the change takes off this run's peak, computed event by event; ``None`` if the change
    does not lower the peak, or that cannot be computed. ``off_failure`` is the same for what was alive when the last
    request failed; a run that ended with that request has no ``off_peak``. ``off_reserved`` is how many bytes the
    change takes off the peak of reserved memory, if it leaves the tensors as they are. Only a finding with one of the
    three is advice; advice without a number becomes information. ``least`` says that the change may save more than is
    known in this run. ``proof`` is the command that forces the change on the script and measures the saving; empty if
    no command does.
    """

    code: str = ""
    severity: Severity = "advice"
    section: Section = field(metadata=NOT_IN_JSON)
    message: str
    bytes: Signed | None
    change: str
    evidence: tuple[str, ...]
    off_peak: int | None = None
    off_failure: int | None = None
    off_reserved: int | None = None
    least: bool = field(default=False, metadata=NOT_IN_JSON)
    proof: str = ""

    @property
    def saved(self) -> int:
        """The bytes that the change takes off the peak, reserved memory or the failure; 0 if unknown."""
        return self.off_peak or self.off_reserved or self.off_failure or 0

    @property
    def saves(self) -> str:
        """The saving of the change, in words; empty if unknown."""
        if not self.saved:
            return ""
        of = "the peak" if self.off_peak else "reserved memory" if self.off_reserved else "the memory at the failure"
        return f"{self.at_least}{format_bytes(self.saved)} off {of}"

    @property
    def at_least(self) -> str:
        """``at least`` and a space if the change may also save what cannot be computed; else empty."""
        return "at least " if self.least or self.code in _AT_LEAST else ""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The finished steps of a run, and what several findings ask about them.

    A step in which memory ran out lacks at least an update: it counts for the run's peak only. With ``at_failure`` the
    instant of the last failed request takes the place of the run's peak.
    """

    analysis: Analysis
    at_failure: bool = False

    @property
    def recording(self) -> Recording:
        """The recording; it may have one step more than :attr:`steps`."""
        return self.analysis.recording

    @property
    def unfinished(self) -> StepRecord | None:
        """The step in which memory ran out."""
        return unfinished_step(self.recording)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The steps that ended."""
        return self.recording.steps if self.unfinished is None else self.recording.steps[:-1]

    @property
    def casts(self) -> tuple[StepCasts, ...]:
        """The casts of each of :attr:`steps`."""
        return self.analysis.casts.steps[: len(self.steps)]

    @property
    def peaks(self) -> tuple[int, ...]:
        """The position of the peak of each of :attr:`steps`."""
        return self.analysis.peaks[: len(self.steps)]

    @property
    def autocast(self) -> bool:
        """Whether the run was under autocast."""
        return self.analysis.recording.precision.name in AUTOCAST_PRECISIONS

    @property
    def last_forward(self) -> tuple[StepRecord, int] | None:
        """The last step with a forward, and the position at the end of its last forward."""
        for step, marks in reversed(tuple(zip(self.recording.steps, self.analysis.marks, strict=True))):
            if step.finished and marks.after_forward is not None:
                return step, self.analysis.timeline.position(marks.after_forward)
        return None

    @cached_property
    def peak(self) -> int:
        """The position of the run's peak, the last of equal ones; of the failure if that ended the run."""
        return failure_position(self.analysis) if self.at_failure else self.analysis.peak

    @property
    def kept_most(self) -> int | None:
        """The position at which autograd keeps the most: the end of the last forward, or the failure."""
        if self.at_failure:
            return self.peak
        return None if self.last_forward is None else self.last_forward[1]

    @property
    def instant(self) -> str:
        """The name of :attr:`peak` in a sentence."""
        return "the failure" if self.at_failure else "the peak"

    def peak_in(self, phase: Phase) -> bool:
        """Whether an event of ``phase`` made the peak."""
        if self.at_failure:
            return phase_at(self.recording.phases, self.recording.ooms[-1].time_ns) is phase
        return self.peak > 0 and bool(self.recording.events.phase[self.peak - 1] == phase)

    @cached_property
    def step_ends(self) -> Column:
        """The position at the end of each of :attr:`steps`."""
        return self.analysis.timeline.positions([step.end_ns for step in self.steps])

    @cached_property
    def first_end(self) -> Column:
        """For each allocation the place of the first step at whose end it counts as alive; past the last for none.

        A batch from a worker process, in mapped memory, counts from when a model is given it: a loader reads several
        ahead, more in some steps than in others.
        """
        lifetimes, facts = self.analysis.lifetimes, self.analysis.facts
        mapped = self.recording.naming(MAPPED)[lifetimes.op]
        begins = np.where(mapped, len(self.recording.events), lifetimes.born)
        rows = (facts.fact == Fact.INPUT) & mapped[facts.allocation]
        np.minimum.at(begins, facts.allocation[rows], self.analysis.timeline.positions(facts.time_ns[rows]))
        return np.searchsorted(self.step_ends, begins, side="right")

    @cached_property
    def pipelined(self) -> bool:
        """Whether other ranks send to this one, as pipeline stages do: then a schedule runs forward and backward."""
        return bool((self.analysis.communication.part == PARTS.index(Communication.RECEIVE_BUFFERS)).any())

    @cached_property
    def low_precision(self) -> Mask:
        """For each text, whether it names a type that autocast casts to."""
        return self.recording.naming(*LOW_PRECISION)

    @cached_property
    def peak_step(self) -> int:
        """The place, among the recording's steps, of the last step that reaches the run's peak, or nearly."""
        if self.at_failure:
            failed = self.recording.ooms[-1].time_ns
            return max((i for i, step in enumerate(self.recording.steps) if step.start_ns <= failed), default=0)
        total = self.analysis.timeline.total
        near = int(total[self.peak]) * (1 - _NEARLY)
        reached = [place for place, position in enumerate(self.analysis.peaks) if total[position] >= near]
        return reached[-1] if reached else len(self.recording.steps) - 1

    @property
    def peak_index(self) -> int:
        """The index of :attr:`peak_step` in the ``step`` columns of allocations and phases."""
        return self.recording.steps[self.peak_step].index if self.recording.steps else NO_STEP

    def off_peak(
        self, sizes: Column, since: Column | None = None, *, but: int = 0, place: int | None = None
    ) -> int | None:
        """How much lower the peak of :attr:`peak_step` is if each allocation is ``sizes`` bytes smaller.

        ``sizes`` and ``since`` have one entry per allocation: it is smaller as long as it is alive, or from the
        position ``since`` on. At each event ``but`` bytes of the saving are not counted. ``None`` if the peak is not
        lower. ``place`` is as in :meth:`off_peak_of_spans`.
        """
        lifetimes, events = self.analysis.lifetimes, len(self.recording.events)
        born, died = lifetimes.born + 1, np.where(lifetimes.died == ALIVE, events, lifetimes.died)
        first = born if since is None else np.maximum(born, since)
        mine = (sizes != 0) & (first <= died)
        return self.off_peak_of_spans(first[mine], died[mine], sizes[mine], but=but, place=place)

    def off_peak_of_spans(
        self, first: Column, last: Column, sizes: Column, *, but: int = 0, place: int | None = None
    ) -> int | None:
        """How much lower the peak is without ``sizes`` bytes from each position ``first`` to ``last``, both included.

        ``place`` is the step to look at instead of :attr:`peak_step`; the result is ``None`` if its peak is not the
        run's.
        """
        less = np.zeros(len(self.recording.events) + 2, dtype=np.int64)
        np.add.at(less, first, sizes)
        np.subtract.at(less, last + 1, sizes)
        if self.at_failure:
            return max(int(np.cumsum(less)[self.peak]) - but, 0) or None
        timeline, step = self.analysis.timeline, self.recording.steps[self.peak_step if place is None else place]
        span = slice(timeline.position(step.start_ns), timeline.position(step.end_ns) + 1)
        gone = np.cumsum(less)[:-1][span]
        if timeline.total[span].max() < timeline.total[self.peak] * (1 - _NEARLY):
            return None
        without = timeline.total[span] - np.where(gone > 0, np.maximum(gone - but, 0), gone)
        return max(int(timeline.total[span].max()) - int(without.max()), 0) or None

    def notable(self, size: int) -> bool:
        """Whether ``size`` bytes are worth a change of the script: large enough, also as a share of the peak.

        The peak counts without ``other``, which in a notebook may be anything allocated before.
        """
        own = int(self.analysis.timeline.total[self.peak]) - self.live(Category.OTHER, self.peak)
        return size >= NOTABLE_BYTES and size >= NOTABLE_SHARE * own

    def starts(self, phase: Phase) -> list[int]:
        """The instants at which ``phase`` was entered, in ns."""
        found: list[int] = self.recording.phases.time_ns[self.recording.phases.phase == phase].tolist()
        return found

    def starts_in(self, step: int, phase: Phase) -> list[int]:
        """The instants at which ``step`` (its index) entered ``phase``, in ns; for a very long step the last ones."""
        phases = self.recording.phases
        found: list[int] = phases.time_ns[(phases.phase == phase) & (phases.step == step)].tolist()
        return found[-_STARTS:]

    def with_fact(self, fact: Fact, after_ns: int | None = None, before_ns: int | None = None) -> Column:
        """How often each allocation had ``fact``, if given only from ``after_ns`` and up to ``before_ns``."""
        facts = self.analysis.facts
        rows = facts.fact == fact
        if after_ns is not None:
            rows &= facts.time_ns >= after_ns
        if before_ns is not None:
            rows &= facts.time_ns < before_ns
        return np.bincount(facts.allocation[rows], minlength=len(self.analysis.lifetimes))

    def most_alive(self, sizes: Column) -> int:
        """The first position at which the live allocations have the largest sum of ``sizes`` (one per allocation)."""
        lifetimes = self.analysis.lifetimes
        delta = np.zeros(len(self.recording.events) + 1, dtype=np.int64)
        np.add.at(delta, lifetimes.born + 1, sizes)
        freed = lifetimes.died != ALIVE
        np.subtract.at(delta, lifetimes.died[freed] + 1, sizes[freed])
        return int(np.argmax(np.cumsum(delta)))

    def marked(self, allocations: Column | Sequence[int]) -> Mask:
        """``allocations``, given by their indices, as a mask."""
        mine = np.zeros(len(self.analysis.lifetimes), dtype=np.bool_)
        mine[allocations] = True
        return mine

    def bytes_of(self, mine: Mask) -> int:
        """The bytes of the allocations in ``mine``."""
        return int(self.analysis.lifetimes.bytes[mine].sum())

    @cached_property
    def ever_kept_by_autograd(self) -> Mask:
        """The activations that autograd was seen to save, or that were made again for backward."""
        saved = self.with_fact(Fact.SAVED) + self.with_fact(Fact.RECOMPUTED) > 0
        return saved & self.analysis.classes.of(Category.ACTIVATIONS)

    def kept_by_autograd(self, position: int) -> Mask:
        """The allocations of :attr:`ever_kept_by_autograd` that are alive at ``position``.

        The other live activations, such as communication buckets, have no name in the script.
        """
        return self.ever_kept_by_autograd & self.analysis.lifetimes.alive_at(position)

    def text(self, index: int) -> str:
        """The text with the id ``index``."""
        return self.analysis.recording.texts[index]

    def describe(self, allocation: int) -> str:
        """An allocation in words: what it is, where it was made, and for which op autograd saved it."""
        lifetimes, classes = self.analysis.lifetimes, self.analysis.classes
        op, name = self.text(lifetimes.op[allocation]), self.text(classes.name[allocation])
        saved = name not in ("", op) and classes.of(Category.ACTIVATIONS)[allocation]
        tensors = self.analysis.tensors
        tensor = self.text(tensors.dtype[allocation]), self.text(tensors.shape[allocation])
        words = [result_of(op, *tensor) if op else ""] if saved or name in ("", op) else [op, name]
        module, stack = self.text(lifetimes.module[allocation]), self.text(lifetimes.stack[allocation])
        if module:
            words.append(f"in {module}")
        if stack:
            words.append(f"at {own_frame(stack.splitlines())}")
        made = " ".join(word for word in words if word)
        return ", ".join(filter(None, (made, f"saved for {plain_op(name)}" if saved else ""))) or "unknown"

    def largest(self, mine: Mask, limit: int = 3) -> tuple[str, ...]:
        """The ``limit`` largest allocations of ``mine`` in words, with their bytes."""
        places = np.flatnonzero(mine)
        sizes = self.analysis.lifetimes.bytes[places]
        order = np.argsort(-sizes, kind="stable")[:limit]
        return tuple(
            f"{format_bytes(int(size))}: {self.describe(int(place))}"
            for place, size in zip(places[order], sizes[order], strict=True)
        )

    def copied_parameters(self, sizes: Column) -> tuple[str, ...]:
        """The three parameters with the largest ``sizes`` (bytes, one per cast copy), in words, with those bytes."""
        totals: dict[str, int] = {}
        for parameter, size in zip(self.analysis.ledger.parameter.tolist(), sizes.tolist(), strict=True):
            if size:
                totals[self.text(parameter)] = totals.get(self.text(parameter), 0) + size
        ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        return tuple(f"{name}: {format_bytes(size)}" for name, size in ordered[:3])

    def live(self, category: Category, position: int) -> int:
        """Live bytes of ``category`` at ``position``."""
        return int(self.analysis.timeline.series(category)[position])


def own_frame(stack: Sequence[str]) -> str:
    """The innermost frame of ``stack`` (outermost first) outside torch; the innermost of all if there is none."""
    return next((frame for frame in reversed(stack) if "/torch/" not in frame.replace("\\", "/")), stack[-1])


Check: TypeAlias = Callable[[TrainingRun], Finding | None]


# All changes that may help a run that ran out of memory, in one list.

_OF_ITSELF = "out-of-memory"
_AT_MOST = "at most: computed from the tensors that were alive; ampmem advise runs the change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change, the reason for it, and the bytes that it saves at the failure (``None`` if unknown).

    ``finding`` is the finding behind it; ``None`` if the change comes from the failed request: then it saves these
    bytes at most.
    """

    change: str
    why: str
    bytes: int | None
    finding: Finding | None


def remedies(oom: FailedRequest, findings: Iterable[Finding]) -> tuple[Remedy, ...]:
    """The changes that ``findings`` and the request suggest, each once; those that save most at the failure first.

    Advice for any script is left out if bytes are known of another change.
    """
    found = [
        Remedy(change=finding.change, why=finding.message, bytes=finding.off_failure, finding=finding)
        for finding in findings
        if finding.off_failure
    ]
    found += [
        Remedy(change=f"{each.change} (ampmem profile {each.option})", why=_AT_MOST, bytes=each.bytes, finding=None)
        for each in oom.levers
    ]
    known = {remedy.finding.code for remedy in found if remedy.finding is not None}
    others = [each for each in oom.options if each.finding not in known and not (found and each.for_any_script)]
    found += [Remedy(change=each.change, why="", bytes=None, finding=None) for each in others]
    return tuple(sorted(found, key=lambda remedy: -(remedy.bytes or 0)))


def told_elsewhere(oom: FailedRequest | None, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The ``findings`` that the section about the failed request does not show already.

    If the script went on, changes for the peak are shown beside those for the failure.
    """
    if oom is None:
        return tuple(findings)
    own = (_OF_ITSELF, *((each.code for each in findings if each.off_failure) if oom.ended_the_run else ()))
    return tuple(finding for finding in findings if finding.code not in own)
