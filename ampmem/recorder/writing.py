"""Writes each step into the recording: its events joined with the hooks' facts, and what is known of the run.

That is the precision, the parameters, the optimizers, the allocator and the notes.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ampmem.events import (
    Action,
    Column,
    EventColumns,
    Fact,
    Phase,
    PhaseColumns,
    PlaceRecord,
    RunRecord,
    StepRecord,
)
from ampmem.names import warning
from ampmem.recorder.compiled.code import BACKWARD, CompiledCode, Who
from ampmem.recorder.device import Taken
from ampmem.recorder.facts.log import ELSEWHERE, Log, OpColumns
from ampmem.recorder.hooks.every import Hooks
from ampmem.recorder.marker import step_on_text
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.options import Options
from ampmem.recorder.outcome import IN_PLACE, Outcome
from ampmem.recorder.process import leave_to_parent
from ampmem.recorder.script_listener import ScriptListener
from ampmem.recorder.sources.base import RawEvents, Source
from ampmem.recorder.steering.precision import precision_record
from ampmem.recording import Batch, Description, RecordingWriter
from ampmem.recording.database import written_here
from ampmem.version import __version__
from ampmem.vocabulary import LOW_PRECISION, Precision


def run_record(options: Options, source: Source) -> RunRecord:
    """The record of what is run, on which device, with which versions."""
    place = options.place or PlaceRecord(rank=0, world_size=1)
    return RunRecord(
        ampmem=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        source=source.kind,
        device_type=source.device_type,
        device_name=source.device_name,
        rank=place.rank,
        world_size=place.world_size,
        script=options.script,
        arguments=options.arguments,
        step_on=step_on_text(options.step_on) or "",
        local_rank=place.local_rank,
        job=place.job,
        assume=options.assume,
        script_sha256=options.script_sha256,
    )


class Notes:
    """Notes for the reader of the recording, each once."""

    def __init__(self, messages: Iterable[str]) -> None:
        self._messages = dict.fromkeys(messages)

    def add(self, message: str) -> None:
        """Add ``message``."""
        self._messages[message] = None

    def beside(self, others: list[str]) -> tuple[str, ...]:
        """All notes, followed by ``others``, whose wording may change from step to step."""
        return tuple(self._messages | dict.fromkeys(others))


@dataclass(kw_only=True)
class Describer:
    """Describes a run, and knows whether the description has changed."""

    forced: Precision
    source: Source
    listener: ScriptListener
    hooks: Hooks
    notes: Notes
    outcome: Outcome
    _described: tuple[object, ...] = field(default=(), init=False)

    def changed(self) -> bool:
        """Whether a new description would differ from the last."""
        seen, optimizers = self.listener, self.hooks.optimizers
        precision = (seen.precision_seen.copy(), self._low_precision(), bool(seen.log.casts))
        known = (seen.models.generation, optimizers.generation, precision, self._all_notes(), self.hooks.places.now())
        changed, self._described = known != self._described, known
        return changed

    def description(self) -> Description:
        """The current description. Goes through all parameters, and reads them anew if one has changed."""
        seen, optimizers = self.listener, self.hooks.optimizers
        own = map(optimizers.assign, optimizers.own_parameters.values())
        parameters = tuple(seen.placement.recorded([*seen.models.records(optimizers.assign), *own]))
        return Description(
            precision=precision_record(
                seen.precision_seen,
                parameters,
                low=self._low_precision(),
                casts=bool(seen.log.casts),
                forced=self.forced,
                wrapped=seen.steering is not None and seen.steering.wrapped,
            ),
            parameters=parameters,
            optimizers=tuple(optimizers.records()),
            notes=self._all_notes(),
            device_name=self.source.device_name,
            prediction=self.source.prediction(),
            allocator=self.source.allocator(),
            failure=self.outcome.failure,
            place=self.hooks.places.now(),
            step_on=step_on_text(self.outcome.step_on) or "",
        )

    def _low_precision(self) -> bool:
        return any(dtype in self.listener.log.texts for dtype in LOW_PRECISION)

    def _all_notes(self) -> tuple[str, ...]:
        model = self.outcome.in_place
        unseen = [] if model is None else [warning(IN_PLACE.format(model=model))]
        return self.notes.beside(
            [*unseen, *self.source.notes(), *self.listener.placement.notes(), *self.hooks.code.notes()]
        )


_NONE = np.zeros(1, dtype=np.int64)
_NO_OP = np.zeros((3, 1), dtype=np.int64)
"""Placeholders before the first module and op, so that ``searchsorted`` gives the index of the last one."""


class Joiner:
    """Joins events, facts and phases window after window; the last phase of one continues in the next."""

    def __init__(self, log: Log, stacks: Stacks, compiled: CompiledCode) -> None:
        self._log = log
        self._stacks = stacks
        self._compiled = compiled
        self._last_phase = np.zeros((3, 1), dtype=np.int64)
        """Time, step and phase of the last change of phase."""
        self._count = 0
        self._stack_ids = _NONE

    def join(self, raw: RawEvents) -> Batch:
        """The events since the last call in stored form, with the new facts, phases and texts."""
        phases = self._log.take_phases()
        # The last change of the window before goes on until the first one of this.
        step, phase = self._steps_and_phases(raw.time_ns, phases)
        ops = self._log.take_ops()
        module_times, modules = self._log.take_modules()
        modules = np.concatenate([_NONE, modules])
        module = modules[np.searchsorted(module_times, raw.time_ns, side="right")]
        # In backward modules only run for recomputation; what they allocate belongs to the backward op itself.
        recomputed = (phase == Phase.BACKWARD) & (module != 0)
        origin_ns = _origins(raw, ops)
        if recomputed.any():
            origin_ns = np.where(recomputed, raw.time_ns, origin_ns)
        own = origin_ns == raw.time_ns
        if not own.all():
            module = modules[np.searchsorted(module_times, origin_ns, side="right")]
        around = np.concatenate([_NO_OP, [ops.end_ns, ops.name, ops.stack]], axis=1)
        end_ns, op, stack = around.take(np.searchsorted(ops.start_ns, origin_ns, side="right"), axis=1)
        inside_op = origin_ns <= end_ns
        nodes = np.array([self._log.texts.id(name) for name in raw.ops], dtype=np.int64)
        stack = self._stack_texts()[stack] * inside_op
        # The first op of a compiled forward made the node of the whole backward, which has lines of its own.
        compiled = nodes[raw.op] == self._log.texts.id(BACKWARD) if BACKWARD in raw.ops else _NONE != 0
        if compiled.any():
            outside = {each: self._compiled.outside(each) for each in set(stack[compiled].tolist())}
            stack[compiled] = [outside[each] for each in stack[compiled].tolist()]
        if raw.stack is not None:
            taken = np.array([self._log.texts.id(text) for text in raw.stacks], dtype=np.int64)
            stack = np.where((stack == 0) | compiled, taken[raw.stack], stack)
        op = np.where(inside_op & own, op, nodes[raw.op])
        who = Who(*np.array([op, module, stack]) * (raw.action == Action.ALLOC))
        op, module, stack = self._compiled.attribute(raw.time_ns, raw.address, raw.bytes, raw.action, who)
        events = EventColumns(
            time_ns=raw.time_ns,
            step=step,
            phase=phase,
            action=raw.action,
            address=raw.address,
            bytes=raw.bytes,
            block_bytes=raw.block_bytes,
            stream=raw.stream,
            op=op,
            module=module,
            stack=stack,
            allocated=raw.allocated,
        )
        segments = raw.segments
        if len(segments):
            segments = replace(segments, position=segments.position + self._count)
        self._count += len(events)
        facts = self._compiled.name_saved(self._log.take_facts())
        texts = self._log.texts.take_new()
        return Batch(texts=texts, events=events, facts=facts, phases=phases, step=None, segments=segments)

    def _stack_texts(self) -> Column:
        """The text id of each stack so far."""
        known = self._stacks.text_ids(self._log.texts)
        if len(known) != len(self._stack_ids):
            self._stack_ids = np.array(known, dtype=np.int64)
        return self._stack_ids

    def _steps_and_phases(self, times: Column, phases: PhaseColumns) -> tuple[Column, Column]:
        changes = np.concatenate([self._last_phase, [phases.time_ns, phases.step, phases.phase]], axis=1)
        if changes[2, 0] == 0:
            changes[1:, 0] = changes[1:, 1]
        self._last_phase = changes[:, -1:]
        _, step, phase = changes.take(np.searchsorted(changes[0], times, side="right") - 1, axis=1)
        return step, phase


def _origins(raw: RawEvents, ops: OpColumns) -> Column:
    """The time of the op to which each event belongs: in backward the forward op's, elsewhere the event's own.

    Ops without a node carry the newest node's number, too, so the first op with a number made the node. A node that
    runs inside another on the engine's thread was made there, otherwise on the recorded thread.
    """
    made, first = np.unique(ops.sequence, return_index=True)
    if len(made) == 0:
        return raw.time_ns
    origins = raw.time_ns
    elsewhere = (raw.sequence >= ELSEWHERE).any()
    for sequence in (raw.sequence - ELSEWHERE, raw.sequence) if elsewhere else (raw.sequence,):
        place = np.minimum(np.searchsorted(made, sequence), len(made) - 1)
        known = (sequence >= 0) & (made[place] == sequence)
        origins = np.where(known, ops.start_ns[first][place], origins)
    return origins


class StepWriter:
    """Writes one recording."""

    def __init__(self, file: RecordingWriter, joiner: Joiner, describer: Describer) -> None:
        self.file = file
        self._joiner = joiner
        self._describer = describer
        self._given = self._freed = _NONE
        """Addresses of the models' inputs, and those that were freed, in the last transaction."""

    def inputs_left(self, raw: RawEvents) -> set[int]:
        """Addresses of the models' inputs of the last step that are alive after ``raw``, which came after that step."""
        freed = (self._freed, raw.address[raw.action == Action.FREE])
        return set(self._given.tolist()).difference(*(each.tolist() for each in freed))

    def write(self, raw: RawEvents, taken: Taken, step: StepRecord | None, *, last: bool) -> None:
        """Write one transaction: the events since the last, and ``step`` if one has ended; ``last`` at the end.

        Raises:
            RecordingError: the file cannot be written.
        """
        joined = self._joiner.join(raw)
        facts, events = joined.facts, joined.events
        self._given = facts.address[facts.fact == Fact.INPUT]
        self._freed = events.address[events.action == Action.FREE]
        layers, ooms = taken
        # Going through all parameters in every step would cost.
        description = self._describer.description() if self._describer.changed() or last else None
        self.file.append(replace(joined, step=step, layers=layers, ooms=ooms), description)

    def forget(self) -> None:
        """Leave the recording to the parent, in a forked child."""
        leave_to_parent(self.file, self.file.path)
        written_here.clear()
