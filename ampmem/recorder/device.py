"""What a session does on a CUDA or simulated device besides reading its allocator: marks, phases, failures."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from time import time_ns
from typing import TypeAlias

from ampmem.events import AllocatorRecord, LayersRecord, OomRecord, ParameterRecord, Phase, PredictionRecord
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.placement import Placement
from ampmem.recorder.models.stacks import current_stack
from ampmem.recorder.running import RunningUpdate
from ampmem.recorder.sources.base import DeviceSource, Place, Source
from ampmem.vocabulary import Mark

Taken: TypeAlias = tuple[list[LayersRecord], list[OomRecord]]


class DeviceWatch:
    """Takes marks, tags phases and locates failures for a source that watches a device's allocator.

    For any other ``source`` it only checks, at each mark, whether the models are on the source's device.
    """

    def __init__(self, source: Source, log: Log, update: RunningUpdate, placement: Placement, *, stacks: bool) -> None:
        self._source = source if isinstance(source, DeviceSource) else None
        self._placement = placement
        self._log = log
        self._update = update
        self._stacks = stacks
        self._thread = threading.get_ident()
        if self._source is not None:
            self._source.attach(self._locate, log)

    def begin(self) -> None:
        """Start to tag allocations with the phase."""
        if self._source is not None:
            self._log.stamp = self._source.stamp
            if self._log.stamp is not None:
                self._log.stamp(time_ns())

    def end(self) -> None:
        """Stop tagging allocations."""
        self._log.stamp = None

    def mark(self, mark: Mark) -> None:
        """Take ``mark`` of the running step."""
        self._placement.note()
        if self._source is not None and self._log.step >= 0:
            self._source.mark(self._log.step, mark)

    def pause(self) -> None:
        """Note that the script is between two phases of the running step."""
        if self._source is not None:
            self._source.pause()

    def take(self) -> Taken:
        """The events that the source has settled since the last call; called when a step has ended."""
        self._placement.note()
        return ([], []) if self._source is None else (self._source.take_layers(), self._source.take_ooms())

    def take_late(self) -> list[OomRecord]:
        """Out-of-memory errors after the recording ended, as far as the source saw them."""
        return [] if self._source is None else self._source.take_ooms()

    def notes(self) -> list[str]:
        """Notes for the reader on where the models were."""
        return self._placement.notes()

    def of_the_run(self, parameters: Iterable[ParameterRecord]) -> Iterator[ParameterRecord]:
        """Leave out the ``parameters`` that have nothing to do with what was recorded."""
        return self._placement.of_the_run(parameters)

    def elsewhere(self) -> str | None:
        """Why the recording says nothing about the model; ``None`` when it does."""
        return self._placement.missing()

    def nothing(self) -> str | None:
        """Why nothing of the device was recorded; ``None`` if something was, or if the source is not a device's."""
        return None if self._source is None else self._source.nothing()

    def allocator(self) -> AllocatorRecord | None:
        """The settings and statistics of the caching allocator so far."""
        return None if self._source is None else self._source.allocator()

    def prediction(self) -> PredictionRecord | None:
        """The predicted memory of the run so far; ``None`` where memory is measured."""
        return None if self._source is None else self._source.prediction()

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
