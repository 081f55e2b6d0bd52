"""Recordings for tests, written as the story of a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ampmem.events import (
    UNKNOWN,
    Action,
    Columns,
    EventColumns,
    Fact,
    FactColumns,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PhaseColumns,
    PlaceRecord,
    PrecisionRecord,
    PredictionRecord,
    Recording,
    RunRecord,
    SegmentAction,
    SegmentColumns,
    StepRecord,
    TermsRecord,
)
from ampmem.recording import Batch, Description, RecordingWriter, add_plain_steps
from ampmem.vocabulary import SourceKind

_ColumnsT = TypeVar("_ColumnsT", bound=Columns)

RUN = RunRecord(
    ampmem="0.1.0",
    torch="2.13.0",
    python="3.11.7",
    source=SourceKind.CPU,
    device_type="cpu",
    device_name="a CPU",
    rank=0,
    world_size=1,
    script="train.py",
    arguments=("--epochs", "1"),
)
FP32 = PrecisionRecord(name="fp32", dtype=None, cache=None, scaler=False)
AMP = PrecisionRecord(name="amp", dtype="bfloat16", cache=True, scaler=False)
NO_CACHE = replace(AMP, name="amp-nocache", cache=False)


class Story:
    """Each call happens ten nanoseconds after the one before, in the phase entered last; the first in SETUP."""

    def __init__(self, *, weight: int | None = None, name: str = "weight", begins: Phase | None = None) -> None:
        """With ``weight`` the model has one parameter, called ``name``, at 0x1000, with so many elements.

        With ``begins`` the first step has begun, and then that phase.
        """
        self.now = 0
        self._step, self._phase = -1, Phase.SETUP
        self._started = 0
        self._texts = {"": 0}
        self._alive: dict[int, tuple[int, int]] = {}
        self._total = 0
        self._events: list[tuple[int, ...]] = []
        self._facts: list[tuple[int, ...]] = []
        self._phases: list[tuple[int, ...]] = []
        self._steps: list[StepRecord] = []
        self._parameters: list[ParameterRecord] = []
        self._segments: list[tuple[int, ...]] = []
        self.totals_known = True
        if weight is not None:
            self.parameter(0x1000, name, weight)
        if begins is not None:
            self.begin(0, begins)

    def enter(self, phase: Phase) -> int:
        """Enter ``phase``; says when."""
        self._phase = phase
        self._phases.append((self._tick(), self._step, phase))
        return self.now

    def begin(self, step: int, phase: Phase | None = None) -> int:
        """A new step starts, between two phases, and then ``phase``; says when the step started."""
        self._step = step
        self._started = self.enter(Phase.BETWEEN)
        if phase is not None:
            self.enter(phase)
        return self._started

    def end(
        self,
        phase: Phase | None = None,
        *,
        skipped: bool = False,
        loss: float | None = 1.5,
        scale: float | None = None,
    ) -> int:
        """The step ends, after ``phase`` was entered; says when."""
        if phase is not None:
            self.enter(phase)
        self._tick()
        self._steps.append(
            StepRecord(
                index=self._step,
                start_ns=self._started,
                end_ns=self.now,
                skipped_update=skipped,
                loss=loss,
                loss_scale=scale,
            )
        )
        return self.now

    def alloc(
        self,
        address: int,
        size: int,
        *,
        op: str = "",
        module: str = "",
        stack: str = "",
        block: int | None = None,
        action: Action = Action.ALLOC,
    ) -> int:
        """Allocate; says when."""
        self._alive[address] = (size, size if block is None else block)
        self._total += size
        self._event(action, address, self._text(op), self._text(module), self._text(stack))
        return self.now

    def free(self, *addresses: int) -> int:
        """Free; says when the last one was."""
        for address in addresses:
            self._total -= self._alive.get(address, (0, 0))[0]
            self._event(Action.FREE, address, 0, 0, 0)
        return self.now

    def scratch(self, address: int, size: int, **where: str | int) -> None:
        """Allocate as :meth:`alloc` does, and free at once."""
        self.alloc(address, size, **where)  # type: ignore[arg-type]
        self.free(address)

    def segment(
        self,
        address: int,
        size: int,
        action: SegmentAction = SegmentAction.RESERVE,
        *,
        small: bool = False,
        expandable: bool = False,
    ) -> int:
        """The allocator takes memory from the device, or gives it back; says when."""
        row = (self._tick(), len(self._events), action, address, size, 0, small, expandable)
        self._segments.append(row)
        return self.now

    def fact(
        self,
        fact: Fact,
        address: int,
        name: str = "",
        module: str = "",
        dtype: str = "",
        shape: str = "",
        *,
        at: int | None = None,
    ) -> int:
        """Something is seen about ``address``; says when."""
        when = self._tick() if at is None else at
        self._facts.append((when, address, fact, *map(self._text, (name, module, dtype, shape))))
        return when

    def tensor(
        self,
        fact: Fact,
        address: int,
        size: int,
        name: str = "",
        *,
        module: str = "",
        dtype: str = "",
        shape: str = "",
        op: str = "",
        stack: str = "",
        block: int | None = None,
        action: Action = Action.ALLOC,
    ) -> int:
        """Allocate; then ``fact`` is seen about it; says when that was."""
        self.alloc(address, size, op=op, module=module, stack=stack, block=block, action=action)
        return self.fact(fact, address, name, module, dtype, shape)

    def parameter(self, address: int, name: str, elements: int, *, trainable: bool = True) -> None:
        """A float32 parameter: its memory, its fact and its record."""
        self.alloc(address, 4 * elements)
        self.fact(Fact.PARAMETER, address, name, name.rpartition(".")[0] or "(model)")
        self._parameters.append(
            ParameterRecord(name=name, elements=elements, bytes=4 * elements, dtype="float32", trainable=trainable)
        )

    def recording(
        self, *, run: RunRecord = RUN, precision: PrecisionRecord = AMP, notes: Sequence[str] = ()
    ) -> Recording:
        """All that happened."""
        return Recording(
            run=run,
            precision=precision,
            texts=tuple(self._texts),
            events=_columns(EventColumns, self._events),
            facts=_columns(FactColumns, self._facts),
            phases=_columns(PhaseColumns, self._phases),
            segments=_columns(SegmentColumns, self._segments),
            steps=tuple(self._steps),
            parameters=tuple(self._parameters),
            optimizers=(OptimizerRecord(class_name="AdamW", implementation="foreach"),),
            notes=tuple(notes),
        )

    def _tick(self) -> int:
        self.now += 10
        return self.now

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _event(self, action: Action, address: int, op: int, module: int, stack: int) -> None:
        size, block = self._alive.get(address, (0, 0))
        total = self._total if self.totals_known else UNKNOWN
        where = (self._tick(), self._step, self._phase, action, address, size, block)
        self._events.append((*where, 0, op, module, stack, total))


def _columns(kind: type[_ColumnsT], rows: Sequence[tuple[int, ...]]) -> _ColumnsT:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(kind.names()))
    return kind(**{name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(kind.names())})


def precision_run(
    precision: PrecisionRecord = FP32,
    *,
    activations: int = 800,
    copies: int = 0,
    losses: tuple[float | None, ...] = (2.0, 1.0),
    skipped: tuple[int, ...] = (),
    elements: int = 100,
    script: str = "train.py",
    plain: tuple[int, ...] = (),
    notes: tuple[str, ...] = (),
) -> Recording:
    """One step per loss of a one-parameter model, with so many bytes of activations and of cast copies."""
    story = Story(weight=elements)
    for step, loss in enumerate(losses):
        story.begin(step, Phase.FORWARD)
        if copies:
            story.tensor(Fact.CAST_COPY, 0x2000, copies, "weight")
        story.tensor(Fact.SAVED, 0x3000, activations, "MmBackward0")
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x4000, 4 * elements, "weight")
        story.free(0x3000)
        if copies:
            story.free(0x2000)
        if step not in skipped:
            story.enter(Phase.OPTIMIZER)
        story.end(loss=loss, skipped=step in skipped)
        story.enter(Phase.BETWEEN)
        story.free(0x4000)
    recording = story.recording(run=replace(RUN, script=script), precision=precision, notes=notes)
    return replace(recording, plain_step_ns=plain)


def predicted(tensors: int, **changes: object) -> PredictionRecord:
    """Of a simulated GPU with 1 GiB, nothing outside of the allocator, and so many bytes of tensors at the peak."""
    terms = TermsRecord(tensors=tensors, workspaces={}, scratch={}, rounding=0, cached=0)
    record = PredictionRecord(
        total=1 << 30,
        outside=0,
        allocated=terms,
        reserved=terms,
        highest_allocated=tensors,
        highest_reserved=tensors,
        bounds={},
        unmodelled=(),
        ran_out=False,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def small_run(story: Story | None = None) -> Story:
    """Two steps of a two-layer model under autocast, after ``story``; the second makes no optimizer state."""
    story = Story() if story is None else story
    story.alloc(0x9000, 64, action=Action.BASELINE)
    story.parameter(0x1000, "layers.0.weight", 100)
    story.parameter(0x2000, "layers.1.weight", 50, trainable=False)
    for step in range(2):
        story.begin(step, Phase.DATA)
        story.alloc(0x3000, 32)
        story.enter(Phase.FORWARD)
        story.tensor(
            Fact.CAST_COPY,
            0x4000,
            200,
            "layers.0.weight",
            module="layers.0",
            op="aten::_to_copy",
            stack="train.py:9 main\nnet.py:3 forward",
        )
        story.tensor(Fact.SAVED, 0x5000, 1000, "MmBackward0", module="layers.0", op="aten::mm", block=1024)
        story.alloc(0x6000, 48, op="aten::add", module="layers.1")
        story.free(0x6000)
        story.enter(Phase.BACKWARD)
        story.alloc(0x7000, 400)
        story.alloc(0x6000, 16)
        story.free(0x6000, 0x5000, 0x4000)
        story.fact(Fact.GRADIENT, 0x7000, "layers.0.weight")
        story.enter(Phase.OPTIMIZER)
        if step == 0:
            story.tensor(Fact.OPTIMIZER_STATE, 0x8000, 800, "exp_avg of layers.0.weight")
        story.alloc(0x6000, 400, op="aten::_foreach_sqrt")
        story.free(0x6000)
        story.end(loss=2.5 - step)
        story.enter(Phase.BETWEEN)
        story.free(0x7000, 0x3000)
    return story


def gpu_run() -> Story:
    """:func:`small_run` in segments of a GPU, three that were there before and some that come and go."""
    story = Story()
    for number in range(3):
        story.segment(0x8000 + number * 0x800, 0x800, SegmentAction.BASELINE, small=True)
    story.alloc(0x8000, 64, action=Action.BASELINE, block=512)
    story.segment(0x10000, 0x1000, small=True)
    story.parameter(0x10000, "layers.0.weight", 100)
    story.parameter(0x10200, "layers.1.weight", 50, trainable=False)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.segment(0x20000, 0x2000)
        story.tensor(Fact.SAVED, 0x20000, 0x1F00, "MmBackward0", module="layers.0", op="aten::mm", block=0x2000)
        story.enter(Phase.BACKWARD)
        for page in range(3):
            story.segment(0x40000 + page * 0x1000, 0x1000, expandable=True)
        story.tensor(Fact.GRADIENT, 0x40200, 0x2100, "layers.0.weight", block=0x2200)
        story.free(0x20000)
        story.enter(Phase.OPTIMIZER)
        story.alloc(0x8800, 700, op="aten::_foreach_sqrt", block=1024)
        story.free(0x8800)
        story.end(loss=2.5 - step)
        story.enter(Phase.BETWEEN)
        story.free(0x40200)
        story.segment(0x20000, 0x2000, SegmentAction.RELEASE)
        story.segment(0x40000, 0x3000, SegmentAction.RELEASE, expandable=True)
    return story


def later(recording: Recording, by_ns: int) -> Recording:
    """``recording`` as if it had been made so many nanoseconds later."""
    steps = [replace(step, start_ns=step.start_ns + by_ns, end_ns=step.end_ns + by_ns) for step in recording.steps]
    columns = {name: getattr(recording, name) for name in ("events", "facts", "phases")}
    moved = {name: replace(column, time_ns=column.time_ns + by_ns) for name, column in columns.items()}
    return replace(recording, steps=tuple(steps), **moved)


def as_batches(recording: Recording, parts: int = 1) -> list[Batch]:
    """``recording`` cut into ``parts`` transactions; all texts come with the first."""
    return [
        Batch(
            texts=recording.texts[1:] if part == 0 else (),
            events=_cut(recording.events, part, parts),
            facts=_cut(recording.facts, part, parts),
            segments=_cut(recording.segments, part, parts),
            phases=_cut(recording.phases, part, parts),
            step=recording.steps[part] if part < len(recording.steps) else None,
            ooms=recording.ooms if part == parts - 1 else (),
        )
        for part in range(parts)
    ]


def described(recording: Recording) -> Description:
    """What ``recording`` has of the run as a whole."""
    return Description(
        precision=recording.precision,
        parameters=recording.parameters,
        optimizers=recording.optimizers,
        notes=recording.notes,
        allocator=recording.allocator,
        prediction=recording.prediction,
        place=PlaceRecord(
            rank=recording.run.rank,
            world_size=recording.run.world_size,
            local_rank=recording.run.local_rank,
            job=recording.run.job,
            mesh=recording.mesh,
            stages=recording.stages,
            stage_count=recording.stage_count,
        ),
    )


def write(path: Path, recording: Recording) -> Path:
    """``recording`` as a file, one transaction per step."""
    writer = RecordingWriter(path, recording.run)
    for batch in as_batches(recording, max(1, len(recording.steps))):
        writer.append(batch)
    writer.describe(described(recording))
    writer.close()
    if recording.plain_step_ns:
        add_plain_steps(path, recording.plain_step_ns)
    return path


def _cut(columns: _ColumnsT, part: int, parts: int) -> _ColumnsT:
    start, end = len(columns) * part // parts, len(columns) * (part + 1) // parts
    return type(columns)(**{name: getattr(columns, name)[start:end] for name in columns.names()})
