"""The summary of a recording, as typed values and as JSON (``ampmem.summary/1``).

The dataclasses have the names and the order of the JSON. ``None`` means not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np

from ampmem.analysis.activations import ActivationGroup, activation_groups
from ampmem.analysis.analyse import Analysis, Conservation, analyse, doubts_of
from ampmem.analysis.casts import Casts, cast_eligible
from ampmem.analysis.estimate import Prediction, prediction_in
from ampmem.analysis.findings import findings
from ampmem.analysis.findings.base import Finding
from ampmem.analysis.jsonable import (
    NOT_IN_JSON,
    AtLeast,
    Json,
    JsonDocument,
    OneOf,
    Positive,
    Signed,
    like,
    named,
    schema_of_printed,
)
from ampmem.analysis.largest import Held, LargeAllocation, held, largest
from ampmem.analysis.layers import outside_in
from ampmem.analysis.modules import ModuleMemory, modules
from ampmem.analysis.out_of_memory import FailedRequest, failure_position
from ampmem.analysis.parameters import Parameters, parameters_of
from ampmem.analysis.static_model.verdict import StaticComponent, StaticRecipe, unknown_of
from ampmem.analysis.timeline.categories import Breakdown, Category
from ampmem.analysis.timeline.marks import Instants, failure_ns, trains
from ampmem.analysis.timeline.timeline import ByPart, ByPhase, PhaseName, most_of
from ampmem.errors import NothingRecorded
from ampmem.events import AllocatorRecord, MeshAxis, Phase, Recording, StepRecord
from ampmem.names import STILL_WRITTEN, is_warning
from ampmem.output import Shown, in_short
from ampmem.units import format_peak
from ampmem.vocabulary import STEP_MARKS, Precision, SourceKind

SCHEMA = "ampmem.summary/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """The device of the run's tensors."""

    type: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSummary:
    """The precision mode: ``forced`` by ampmem or the script's own, ``wrapped`` in regions that ampmem opened."""

    name: Precision
    dtype: str | None
    cache: bool | None
    scaler: bool
    forced: bool
    wrapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer that stepped."""

    class_name: str = field(metadata=named("class"))
    implementation: Annotated[str, OneOf(("foreach", "fused", "for-loop"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The live bytes at the three marks of a step; ``None`` for a mark that the step does not have."""

    after_forward: Breakdown | None
    after_backward: Breakdown | None
    after_optimizer: Breakdown | None


class MeasuredPeak:
    """A peak that may have been measured in two ways."""

    __slots__ = ()
    bytes: int
    allocated: int | None

    @property
    def said(self) -> int:
        """The number that is called the peak: ``allocated`` where known, else ``bytes``."""
        return self.bytes if self.allocated is None else self.allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak(MeasuredPeak):
    """The peak of a step: the instant with the most bytes allocated, or on the CPU requested.

    ``temporaries_by_phase`` splits the temporaries by phase of birth, ``communication_by_part`` the communication by
    purpose; communication of unknown purpose is in no part.

    ``op`` and ``module`` are those of the alloc that reached the peak; ``None`` if not seen, and if no alloc of the
    step did.
    """

    bytes: int
    """Bytes requested at the peak: the sum of ``categories``. The peak itself if ``allocated`` is ``None``."""
    phase: PhaseName
    categories: Breakdown
    temporaries_by_phase: ByPhase
    communication_by_part: ByPart
    op: str | None = None
    module: str | None = None
    allocated: int | None = None
    """The peak of a caching allocator in bytes (blocks with their rounding), as ``torch.cuda.max_memory_allocated()``
    returns it. ``None`` without such an allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeak(Peak):
    """The largest of the steps' peaks."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsidePeak(Peak):
    """The peak outside of the recorded steps: before the first (model creation), or ``after`` the last (evaluation)."""

    after: bool


class PeakPlace(StrEnum):
    """The part of a run that has its peak."""

    STEP = "step"
    BEFORE_STEPS = "before-steps"
    """Recorded before the first step, for example while the model is made."""
    AFTER_STEPS = "after-steps"
    """Recorded after the last step, for example in an evaluation."""
    NOT_RECORDED = "not-recorded"
    """After the end of the recording; the simulated device saw it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePeak:
    """The peak of the whole run, as far as it was recorded or simulated; budgets and comparisons use it.

    It equals ``torch.cuda.max_memory_allocated()``; on the CPU it is the peak of all tensors' bytes.
    """

    bytes: int
    at_most: int
    """``bytes`` with the upper bound of what a simulation does not know, such as cuDNN's workspaces."""
    requested: int
    """The requested part of ``bytes``, without the rounding of blocks."""
    where: PeakPlace
    step: int | None
    """The step of the peak; ``None`` outside of the recorded steps."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Step(Shown):
    """One step that ended; or the step in which memory ran out and the run ended, which is not ``finished``."""

    index: int
    finished: bool
    skipped_update: bool
    loss: float | None
    """The loss of the last of :attr:`backwards`, not a sum: several backwards are micro-batches or several losses."""
    loss_not_finite: Literal["nan", "inf", "-inf"] | None
    """The loss if it is not a finite number, which JSON does not have; ``loss`` is null then."""
    backwards: int
    loss_scale: float | None
    batch_size: int | None
    """The first dimension of the model's input."""
    batch_loaded: bool
    """Whether a DataLoader made a batch of that many samples: only then does the dimension surely count samples."""
    autocast_in_backward: bool
    duration_ns: int
    marks: Marks
    peak: Peak
    peak_reserved: int | None
    """The peak of bytes reserved during the step, which ``nvidia-smi`` counts as used."""

    def _in_short(self) -> str:
        return f"step {self.index}, peak {format_peak(self.peak.said)} in {self.peak.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """The allocator's layers at the run's peak, in bytes."""

    requested: int
    rounding: Signed
    allocated: int
    cached: Signed | None
    """Reserved bytes in no block; negative only if the segments contradict the blocks (see ``conservation``)."""
    reserved: int | None
    outside: Signed | None
    outside_process: Signed | None
    """The part of ``outside`` that the driver attributes to this process."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Summary(JsonDocument, Shown):
    """The summary of a recording."""

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    """The version of ampmem that made the recording."""
    torch: str
    source: SourceKind
    device: DeviceSummary
    rank: int
    world_size: Positive
    local_rank: int | None
    """The rank on its machine; ``None`` if unknown."""
    mesh: tuple[MeshAxis, ...]
    """The axes of the script's device mesh, outermost first, with this rank's place on each; empty without a mesh."""
    stages: tuple[int, ...]
    """The pipeline stages on this rank, from 0 on; empty if none was seen."""
    precision: PrecisionSummary = field(metadata=named("arm"))
    parameters: Parameters
    optimizer: tuple[Optimizer, ...]
    """The optimizers that stepped."""
    steps: Annotated[tuple[Step, ...], AtLeast(1)]
    """The recorded steps, in order."""
    out_of_memory: FailedRequest | None
    """The last request that failed for lack of memory; ``None`` if no request failed."""
    plain_step_ns: tuple[int, ...]
    """Durations in ns of the steps in a run without instrumentation; empty without such a run."""
    peak: RunPeak
    """The largest peak of the recorded steps."""
    outside_steps: OutsidePeak | None = None
    """The peak outside of the recorded steps, if it is above the peak of all steps; else ``None``."""
    whole: WholePeak = field(metadata=named("whole_peak"))
    """The peak of the whole run: the number that is meant by "the peak"."""
    most: Breakdown
    """The most bytes of each category at any event of the recorded steps, each at an instant of its own."""
    allocator: Allocator
    """The allocator's layers at the peak."""
    caching_allocator: AllocatorRecord | None
    """The caching allocator's settings and use; ``None`` without one."""
    prediction: Prediction | None
    """The memory that a simulated GPU would need; ``None`` for a measured run."""
    conservation: Conservation
    """The largest differences between the sums and the allocator's own totals."""
    inferred: Breakdown
    """Bytes at the peak whose category was inferred: no hook saw what they are."""
    static_recipe: StaticRecipe | None
    """The recipe that static memory is compared with; ``None`` without a verdict."""
    static_model: tuple[StaticComponent, ...]
    """The components of static memory, in order of mark; empty without a verdict."""
    static_problem: str | None
    """Why the static model gives no verdict on this run; ``None`` if it does."""
    static_unknown: tuple[str, ...] = field(metadata=NOT_IN_JSON)
    """The missing facts that would choose a rule of thumb; if there are any, there is no recipe."""
    activations: tuple[ActivationGroup, ...]
    """The activations by kind and type, at the end of the last forward that a backward followed."""
    casts: Casts
    """The copies of parameters in another precision."""
    modules: tuple[ModuleMemory, ...]
    """The memory of each module, in the model's order."""
    top: tuple[LargeAllocation, ...]
    """The largest allocations at the peak."""
    held: tuple[Held, ...]
    """The memory in ``other`` at the end of the last step, such as a key-value cache, by holder."""
    holders: tuple[Held, ...] = ()
    """The holders at the peak, or when memory ran out, of memory that is not the training's own: other memory,
    untrained models, buffers and workspaces."""
    findings: tuple[Finding, ...]
    """The findings: warnings, then advice by bytes saved, then information."""
    warnings: tuple[str, ...] = ()
    """Why the numbers cannot be trusted, or less so; empty if they can."""
    notes: tuple[str, ...] = ()
    """The recorder's other notes, such as what a simulated run assumed."""

    @property
    def ended_by(self) -> FailedRequest | None:
        """The failed request that ended the run, else ``None``; reports then show its instant instead of the peak."""
        oom = self.out_of_memory
        return oom if oom is not None and oom.ended_the_run else None

    @property
    def last_step(self) -> Step:
        """The last step that ended; if none did, the step in which memory ran out."""
        return ([step for step in self.steps if step.finished] or self.steps)[-1]

    def _in_short(self) -> str:
        precision, place = (self.precision.name, self.precision.dtype), (self.rank, self.world_size)
        run = in_short(self.source, self.device.name, precision, len(self.steps), place)
        peak, whole = self.peak, self.whole
        where = f"in {peak.phase} of step {peak.step}" if whole.where is PeakPlace.STEP else PLACES[whole.where]
        return f"{run}, peak {format_peak(whole.bytes)} {where}"


def summary_schema() -> dict[str, Json]:
    """The JSON Schema of a :class:`Summary`."""
    return schema_of_printed(Summary, SCHEMA, "ampmem show")


def summarize(recording: Recording) -> Summary:
    """The summary of a recording.

    Raises :class:`NothingRecorded` for a run without a step, a backward or a model, and
    :class:`~ampmem.errors.RecordingError` when the events contradict each other.
    """
    require_training(recording)
    return summary_of(analyse(recording))


def summary_of(analysis: Analysis) -> Summary:
    """The summary of an existing analysis."""
    recording, run = analysis.recording, analysis.recording.run
    require_training(recording)
    verdict = analysis.verdict
    steps = tuple(
        _step(analysis, step, marks, position)
        for step, marks, position in zip(recording.steps, analysis.marks, analysis.peaks, strict=True)
    )
    top, position, oom = analysis.top, analysis.peak, analysis.failed_request
    peak, outside = like(RunPeak, steps[top].peak, step=steps[top].index), _outside_steps(analysis)
    prediction = prediction_in(recording)
    return like(
        Summary,
        run,
        schema=SCHEMA,
        device=DeviceSummary(type=run.device_type, name=run.device_name),
        mesh=recording.mesh,
        stages=recording.stages,
        precision=like(PrecisionSummary, recording.precision),
        parameters=parameters_of(analysis, cast_eligible(analysis)),
        optimizer=tuple(like(Optimizer, record) for record in recording.optimizers),
        steps=steps,
        out_of_memory=oom,
        plain_step_ns=recording.plain_step_ns,
        peak=peak,
        outside_steps=outside,
        whole=whole_peak_of(peak, outside, prediction),
        most=most_of(analysis.timeline, recording.steps),
        allocator=_allocator(analysis, position, steps[top].index),
        prediction=prediction,
        caching_allocator=recording.allocator,
        conservation=analysis.conservation,
        inferred=analysis.inferred_at(position),
        static_recipe=None if verdict is None else verdict.recipe,
        static_model=() if verdict is None else verdict.components,
        static_problem=None if verdict is None else verdict.problem,
        static_unknown=unknown_of(recording),
        activations=_activations(analysis),
        casts=analysis.casts,
        modules=modules(analysis),
        top=largest(analysis, analysis.tensors, position),
        held=held(analysis, analysis.timeline.position(recording.steps[-1].end_ns), (Category.OTHER,), depth=1),
        holders=held(analysis, failure_position(analysis) if oom and oom.ended_the_run else position),
        findings=findings(analysis),
        warnings=doubts_of(analysis.conservation, None if verdict is None else verdict.problem, recording.notes),
        notes=tuple(note for note in recording.notes if not is_warning(note)),
    )


def require_training(recording: Recording) -> None:
    """Raise :class:`NothingRecorded` if there is nothing to sum up."""
    if not recording.steps and STILL_WRITTEN in recording.notes:
        raise NothingRecorded(
            "nothing to show yet: the recording is being written, and no step has ended; try again later"
        )
    if not recording.steps:
        raise NothingRecorded(
            "nothing to show: no step ended during the recording; "
            "a step ends with an optimizer update, so let the script run until optimizer.step() has been called"
        )
    # A snapshot has what its ring buffer still held: maybe only a forward, without names of parameters. And memory may
    # run out before there is a model.
    if recording.run.source == SourceKind.SNAPSHOT or not recording.steps[-1].finished:
        return
    if trains(recording) and not (recording.phases.phase == Phase.BACKWARD).any():
        raise NothingRecorded(
            "nothing to show: no backward pass was recorded; call loss.backward() in the steps that are recorded, "
            "or record inference with --step-on forward"
        )
    if not recording.parameters:
        raise NothingRecorded(
            "nothing to show: no model parameters were found; train a torch.nn.Module, "
            "or pass the model to ampmem.profile(model)"
        )


def _step(analysis: Analysis, step: StepRecord, marks: Instants, position: int) -> Step:
    layers, between = analysis.layers, tuple(map(analysis.timeline.position, (step.start_ns, step.end_ns)))
    return like(
        Step,
        step,
        loss_not_finite=None if step.loss is None or math.isfinite(step.loss) else str(step.loss),
        duration_ns=step.end_ns - step.start_ns,
        marks=Marks(**{name: _breakdown(analysis, getattr(marks, name)) for name in STEP_MARKS}),
        peak=_peak_at(analysis, position, *analysis.made_by(position, step)),
        peak_reserved=None if layers is None else layers.peak_between(*between),
    )


def _activations(analysis: Analysis) -> tuple[ActivationGroup, ...]:
    """The activations at the end of the last forward that a backward followed, or else when memory ran out."""
    forwards = [marks.after_forward for marks in analysis.marks if marks.after_forward is not None]
    instant = forwards[-1] if forwards else failure_ns(analysis.recording)
    if instant is None:
        return ()
    return activation_groups(analysis, analysis.saved_as, analysis.timeline.position(instant))


def _breakdown(analysis: Analysis, instant_ns: int | None) -> Breakdown | None:
    if instant_ns is None:
        return None
    return analysis.timeline.breakdown(analysis.timeline.position(instant_ns))


def _peak_at(analysis: Analysis, position: int, phase: Phase, op: str, module: str) -> Peak:
    timeline = analysis.timeline
    return Peak(
        bytes=int(timeline.total[position]),
        phase=phase.name.lower(),
        categories=timeline.breakdown(position),
        temporaries_by_phase=timeline.temporaries_by_phase(position),
        communication_by_part=analysis.communication.at(position),
        op=op or None,
        module=module or None,
        allocated=None if analysis.layers is None else int(analysis.layers.allocated[position]),
    )


def _outside_steps(analysis: Analysis) -> OutsidePeak | None:
    """The peak outside of the steps, if it is above the steps' peak."""
    sizes, steps = analysis.sizes, analysis.recording.steps
    first, last = map(analysis.timeline.position, (steps[0].start_ns, steps[-1].end_ns))
    outside = sizes.copy()
    outside[first : last + 1] = 0
    position = int(np.argmax(outside))
    if outside[position] <= sizes[analysis.peak]:
        return None
    phase = Phase(int(analysis.recording.events.phase[position - 1]))
    return like(OutsidePeak, _peak_at(analysis, position, phase, *analysis.born_at(position)), after=position > last)


PLACES = {
    PeakPlace.BEFORE_STEPS: "before the first step",
    PeakPlace.AFTER_STEPS: "after the last step",
    PeakPlace.NOT_RECORDED: "outside the recorded steps",
}
"""The place of a peak outside of the steps, in words."""


def whole_peak_of(peak: RunPeak, outside: OutsidePeak | None, prediction: Prediction | None) -> WholePeak:
    """The largest of the steps' peak, the recorded peak outside of them, and the simulated device's peak."""
    step: int | None = peak.step
    size, requested, where = peak.said, peak.bytes, PeakPlace.STEP
    if outside is not None:
        size, requested, step = outside.said, outside.bytes, None
        where = PeakPlace.AFTER_STEPS if outside.after else PeakPlace.BEFORE_STEPS
    if prediction is not None and (terms := prediction.at_peak_allocated).allocated > size:
        size, requested, step = terms.allocated, terms.allocated - terms.rounding, None
        where = PeakPlace.NOT_RECORDED
    at_most = size if prediction is None else max(size, prediction.most_allocated)
    return WholePeak(bytes=size, at_most=at_most, requested=requested, where=where, step=step)


def _allocator(analysis: Analysis, position: int, step: int) -> Allocator:
    requested = int(analysis.timeline.total[position])
    allocated = int(analysis.lifetimes.block_bytes[analysis.lifetimes.alive_at(position)].sum())
    reserved = None if analysis.layers is None else int(analysis.layers.reserved[position])
    outside, outside_process = outside_in(analysis.recording, step)
    return Allocator(
        requested=requested,
        rounding=allocated - requested,
        allocated=allocated,
        cached=None if reserved is None else reserved - allocated,
        reserved=reserved,
        outside=outside,
        outside_process=outside_process,
    )
