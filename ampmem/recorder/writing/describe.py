"""What is known of a run by now, beside its events: the arm, the parameters, the optimizers, the allocator, notes."""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch

from ampmem.events import PlaceRecord, RunRecord
from ampmem.recorder.device import DeviceWatch
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.marker import Marker
from ampmem.recorder.models.models import Models
from ampmem.recorder.options import Options
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.ranks.places import Places
from ampmem.recorder.sources.base import Source
from ampmem.recorder.steering.arms import ArmSeen, arm_record
from ampmem.recorder.steering.steering import Steering
from ampmem.recording import Description
from ampmem.version import __version__
from ampmem.vocabulary import Arm, StepOn


def run_record(options: Options, source: Source) -> RunRecord:
    """What is run, on what, with which versions."""
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
        step_on=_words(options.step_on),
        local_rank=place.local_rank,
        job=place.job,
        assume=options.assume,
        script_sha256=options.script_sha256,
    )


def _words(step_on: StepOn | Marker) -> str:
    if isinstance(step_on, Marker):
        return step_on.text
    return "" if step_on is StepOn.FOUND else step_on.value


class Notes:
    """What a reader of the recording has to know, each once."""

    def __init__(self, messages: Iterable[str]) -> None:
        self._messages = dict.fromkeys(messages)

    def add(self, message: str) -> None:
        """Keep ``message``."""
        self._messages[message] = None

    def beside(self, others: list[str]) -> tuple[str, ...]:
        """All of them, and then the ``others``, which may have been worded otherwise a step ago."""
        return tuple(self._messages | dict.fromkeys(others))


class Describer:
    """Describes a run, and knows whether there is anything new to say."""

    def __init__(
        self,
        *,
        forced: Arm,
        source: Source,
        device: DeviceWatch,
        models: Models,
        optimizers: OptimizerHooks,
        arm_seen: ArmSeen,
        steering: Steering | None,
        notes: Notes,
        outcome: Outcome,
        places: Places,
    ) -> None:
        self._forced = forced
        self._source = source
        self._device = device
        self._models = models
        self._optimizers = optimizers
        self._arm_seen = arm_seen
        self._steering = steering
        self._notes = notes
        self._outcome = outcome
        self._places = places
        self._described: tuple[object, ...] = ()

    def changed(self) -> bool:
        """Whether something was seen since the last call that a description would say."""
        notes = self._all_notes()
        place = self._places.now()
        known = (self._models.generation, self._optimizers.generation, self._arm_seen.copy(), notes, place)
        changed, self._described = known != self._described, known
        return changed

    def description(self) -> Description:
        """The description as of now. Goes through all parameters."""
        known = [*self._models.records(), *self._optimizers.own_parameters.values()]
        parameters = tuple(self._device.of_the_run(map(self._optimizers.assign, known)))
        wrapped = self._steering is not None and self._steering.wrapped
        return Description(
            arm=arm_record(self._arm_seen, parameters, forced=self._forced, wrapped=wrapped),
            parameters=parameters,
            optimizers=tuple(self._optimizers.records()),
            notes=self._all_notes(),
            device_name=self._source.device_name,
            prediction=self._device.prediction(),
            allocator=self._device.allocator(),
            failure=self._outcome.failure,
            place=self._places.now(),
        )

    def _all_notes(self) -> tuple[str, ...]:
        return self._notes.beside([*self._source.notes(), *self._device.notes()])
