"""Where the script's models were: on the device whose memory is recorded, or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampmem.events import ParameterRecord
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.models import Models
from ampmem.vocabulary import SourceKind


class Placement:
    """Looks at every mark of a step: a model that is moved to the device for its forward alone was there too."""

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
        """The device of each parameter that was not there so far."""
        self._offloaded: set[str] = set()
        """Those of them that FSDP2 brings to the device while modules run with them."""
        self._above: dict[str, tuple[int, ...]] = {}
        """Of each such parameter its module and those above it."""

    def note(self) -> None:
        """See where each parameter is now that was not on the device so far."""
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
        """``parameters`` without those that only lie on another device, such as the layers of other ranks' stages.

        What is offloaded stays: an optimizer has it, or its module runs, or a module above that.
        """
        for record in parameters:
            idle = record.name in self._elsewhere and self._log.entered.isdisjoint(self._above[record.name])
            if not idle or record.optimizer is not None or not self._here:
                yield record

    def missing(self) -> str | None:
        """Why the recording says nothing of the model; ``None`` when it does."""
        if self._here or self._offloaded or not self._elsewhere:
            return None
        places = " and ".join(sorted(set(self._elsewhere.values())))
        where = "the simulated GPU" if self._simulated else f"{self._device_type}, whose memory was recorded"
        return f"the model is on {places}: none of its {len(self._elsewhere)} parameters was on {where}"

    def notes(self) -> list[str]:
        """What is in none of the numbers."""
        if not ((self._here or self._offloaded) and self._elsewhere):
            return []
        name, place = next(iter(self._elsewhere.items()))
        count, all_of_them = len(self._elsewhere), len(self._elsewhere) + len(self._here)
        were, their = ("was", "its") if count == 1 else ("were", "their")
        return [
            f"{count} of {all_of_them} parameters {were} never on {self._device_type} (such as {name}, on {place}): "
            f"{their} memory was not recorded"
        ]
