"""What a session does on a device besides reading its allocator: marks, phases, failures."""

from __future__ import annotations

import threading
from time import time_ns
from typing import TypeAlias

from ampmem.events import LayersRecord, OomRecord, Phase
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.placement import Placement
from ampmem.recorder.models.stacks import current_stack
from ampmem.recorder.running import RunningUpdate
from ampmem.recorder.sources.base import Place, Source
from ampmem.vocabulary import Mark

Taken: TypeAlias = tuple[list[LayersRecord], list[OomRecord]]


class DeviceWatch:
    """Takes marks, tags phases and locates failures for ``source``; checks at each mark where the models are."""

    def __init__(self, source: Source, log: Log, update: RunningUpdate, placement: Placement, *, stacks: bool) -> None:
        self._source = source
        self._placement = placement
        self._log = log
        self._update = update
        self._stacks = stacks
        self._thread = threading.get_ident()
        source.attach(self._locate, log)

    def begin(self) -> None:
        """Start to tag allocations with the phase."""
        self._log.stamp = self._source.stamp
        if self._log.stamp is not None:
            self._log.stamp(time_ns())

    def end(self) -> None:
        """Stop tagging allocations."""
        self._log.stamp = None

    def mark(self, mark: Mark) -> None:
        """Take ``mark`` of the running step."""
        self._placement.note()
        if self._log.step >= 0:
            self._source.mark(self._log.step, mark)

    def take(self) -> Taken:
        """The events that the source has settled since the last call; called when a step has ended."""
        self._placement.note()
        return self._source.take_layers(), self._source.take_ooms()

    def _locate(self) -> Place:
        return Place(
            step=self._log.step,
            op=self._running_op() or (self._update.name if self._log.phase == Phase.OPTIMIZER else ""),
            module=self._log.texts.value(self._log.module),
            stack=current_stack() if self._stacks else "",
        )

    def _running_op(self) -> str:
        """The op that the calling thread is running in forward; empty if there is none."""
        return self._log.texts.value(self._log.running_op) if threading.get_ident() == self._thread else ""
