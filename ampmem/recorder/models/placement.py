"""Where the script's models were: on the recorded device or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampmem.events import ParameterRecord
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.models import Models
from ampmem.vocabulary import SourceKind


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
        """The generation of names all of which were on the device."""
        self._elsewhere: dict[str, str] = {}
        """The device of each parameter that was never on the recorded one."""
        self._offloaded: set[str] = set()
        """Names of the parameters that FSDP2 brings to the device only while their modules run."""
        self._above: dict[str, tuple[int, ...]] = {}
        """The module of each offloaded parameter, and the modules above it."""

    def note(self) -> None:
        """Check the device of each parameter that was not on the recorded one so far."""
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

    def of_the_run(self, parameters: Iterable[ParameterRecord]) -> Iterator[ParameterRecord]:
        """``parameters`` without those that only exist on another device, such as the layers of other ranks' stages.

        Offloaded parameters stay if an optimizer has them, or their module or one above it runs.
        """
        for record in parameters:
            idle = record.name in self._elsewhere and self._log.entered.isdisjoint(self._above[record.name])
            if not idle or record.optimizer is not None or not self._here:
                yield record

    def missing(self) -> str | None:
        """Why the recording says nothing about the model; ``None`` when it does."""
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
