"""Joins allocator events to what the hooks logged: step, phase, module, op and stack by time."""

from __future__ import annotations

import numpy as np

from ampmem.events import Action, Column, EventColumns, FactColumns, Phase, PhaseColumns
from ampmem.recorder.log import Log
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.stacks import Stacks
from ampmem.recorder.texts import Texts


class Joiner:
    """Keeps what one window leaves for the next: the phase and the forward ops that backward refers to."""

    def __init__(self, log: Log, stacks: Stacks, texts: Texts) -> None:
        self._log = log
        self._stacks = stacks
        self._texts = texts
        self._last_phase = np.zeros((1, 3), dtype=np.int64)

    def join(self, raw: RawEvents) -> tuple[EventColumns, FactColumns, PhaseColumns]:
        """The events since the last call as the recording stores them, with the facts and phases."""
        phases = self._log.take_phases()
        step, phase = self._steps_and_phases(raw.time_ns, phases)
        born = (raw.action == Action.ALLOC).astype(np.int64)
        op_texts = np.array([self._texts.id(op) for op in raw.ops], dtype=np.int64)
        events = EventColumns(
            time_ns=raw.time_ns,
            step=step,
            phase=phase,
            action=raw.action,
            address=raw.address,
            bytes=raw.bytes,
            block_bytes=raw.bytes,
            stream=np.zeros_like(raw.bytes),
            op=op_texts[raw.op] * born,
            module=_at(raw.origin_ns, *self._log.take_modules()) * born,
            stack=self._stack(raw, phase) * born,
            allocated=raw.allocated,
        )
        return events, self._log.take_facts(), phases

    def _steps_and_phases(self, times: Column, phases: PhaseColumns) -> tuple[Column, Column]:
        rows = np.stack([phases.time_ns, phases.step, phases.phase], axis=1)
        rows = np.concatenate([self._last_phase, rows])
        if rows[0, 2] == 0:
            rows[0] = (0, rows[1, 1], rows[1, 2])
        self._last_phase = rows[-1:]
        index = np.searchsorted(rows[:, 0], times, side="right") - 1
        return rows[index, 1], rows[index, 2]

    def _stack(self, raw: RawEvents, phase: Column) -> Column:
        """Where the op of each event was called from; in backward, where its forward op was."""
        times, ids = self._log.take_ops()
        text_ids = np.array(self._stacks.text_ids(self._texts), dtype=np.int64)
        known = (phase == Phase.FORWARD) | (phase == Phase.OPTIMIZER) | (raw.origin_ns != raw.time_ns)
        stack: Column = _at(raw.origin_ns, times, text_ids[ids]) * known
        return stack


def _at(times: Column, since: Column, values: Column) -> Column:
    """The value of the last change at or before each of ``times``; 0 before the first."""
    before = np.zeros(1, dtype=np.int64)
    index = np.searchsorted(since, times, side="right")
    return np.concatenate([before, values]).take(index)
