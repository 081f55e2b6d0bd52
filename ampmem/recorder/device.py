"""Marks of a step, phases of allocations, places of failures, and the devices on which the models are."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from time import time_ns
from typing import TypeAlias

from ampmem.events import LayersRecord, OomRecord, ParameterRecord, Phase
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import current_stack
from ampmem.recorder.running import RunningUpdate
from ampmem.recorder.sources.base import Place, Source
from ampmem.vocabulary import Mark, SourceKind

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
        source.models_at = placement.devices

    def begin(self) -> None:
        """Start to tag allocations with the phase."""
        self._log.stamp, self._log.stamps_ops = self._source.stamp, self._source.stamps_ops
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
        """The marks and out-of-memory errors that the source has settled since the last call, when a step has ended."""
        self._placement.note()
        return self._source.take_layers(), self._source.take_ooms()

    def _locate(self) -> Place:
        # The log has the op of the recorded thread; memory may run out on a thread of the autograd engine.
        running = (
            self._log.texts.value(self._log.running_op or self._log.running_in_cpp())
            if threading.get_ident() == self._thread
            else ""
        )
        return Place(
            step=self._log.step,
            op=running or (self._update.name if self._log.phase == Phase.OPTIMIZER else ""),
            module=self._log.texts.value(self._log.module),
            stack=current_stack() if self._stacks else "",
        )


class Placement:
    """Checks the models' device at every mark, so a model moved to the device only for its forward counts, too."""

    def __init__(self, models: Models, log: Log, kind: SourceKind, device_type: str) -> None:
        self._models = models
        self._log = log
        self._simulated = kind is SourceKind.SIMULATED
        self._device_type = device_type
        self._here: set[str] = set()
        """Names of the parameters that were on the device at a mark."""
        self._all_here_in: int | None = None
        """The generation of names in which all parameters have been on the device."""
        self._elsewhere: dict[str, str] = {}
        """The device of each parameter that was never on the recorded one."""
        self._offloaded: set[str] = set()
        """Names of the parameters that FSDP2 brings to the device only while their modules run."""
        self._above: dict[str, tuple[int, ...]] = {}
        """The module of each offloaded parameter, and the modules above it."""

    def note(self) -> None:
        """Check the device of each parameter that was not on the recorded one so far."""
        # Called at each mark: once all were on the device, nothing new can be found until names change.
        if self._all_here_in == self._models.generation:
            return
        if self._here.issuperset(self._models.parameter_names()):
            self._all_here_in = self._models.generation
            return
        for slot, parameter in self._models.parameters():
            if slot.name in self._here:
                continue
            if parameter.device.type == self._device_type:
                self._here.add(slot.name)
                self._elsewhere.pop(slot.name, None)
            else:
                self._elsewhere[slot.name] = parameter.device.type
                if self._models.sharded.offloaded(parameter):
                    self._offloaded.add(slot.name)
                self._above[slot.name] = slot.above

    def devices(self) -> frozenset[int]:
        """The indices of this type's devices that have trained parameters; of all parameters if none is trained."""
        every = [each for _, each in self._models.parameters() if each.device.type == self._device_type]
        return frozenset(each.device.index or 0 for each in [each for each in every if each.requires_grad] or every)

    def recorded(self, parameters: Iterable[ParameterRecord]) -> Iterator[ParameterRecord]:
        """``parameters`` without those that only exist on another device, such as the layers of other ranks' stages.

        Offloaded parameters stay if an optimizer has them, or their module or one above it runs.
        """
        for record in parameters:
            idle = record.name in self._elsewhere and self._log.entered.isdisjoint(self._above[record.name])
            if not idle or record.optimizer is not None or not self._here:
                yield record

    def missing(self) -> str | None:
        """The error if no parameter was ever on the recorded device; ``None`` otherwise."""
        if self._here or self._offloaded or not self._elsewhere:
            return None
        places = " and ".join(sorted(set(self._elsewhere.values())))
        where = "the simulated GPU" if self._simulated else f"{self._device_type}, whose memory was recorded"
        return f"the model is on {places}: none of its {len(self._elsewhere)} parameters was on {where}"

    def notes(self) -> list[str]:
        """Notes on the parameters that none of the numbers include."""
        if not ((self._here or self._offloaded) and self._elsewhere):
            return []
        name, place = next(iter(self._elsewhere.items()))
        count, all_of_them = len(self._elsewhere), len(self._elsewhere) + len(self._here)
        were, their = ("was", "its") if count == 1 else ("were", "their")
        return [
            f"{count} of {all_of_them} parameters {were} never on {self._device_type} (such as {name}, on {place}): "
            f"{their} memory was not recorded"
        ]
