"""The running step, the optimizer update in it, and a stopwatch for steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import time_ns

import torch

from ampmem.events import StepRecord
from ampmem.patching import hook
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources.cuda.late import LateNumber, settled_number
from ampmem.recorder.torch_private.general import on_module_before


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """The running step, as far as it is known; ``loss`` is scaled if a GradScaler scales it."""

    start_ns: int = field(default_factory=time_ns)
    end_ns: int | None = None
    """The time when the step ended, if that was only known later."""
    loss: float | LateNumber | None = None
    """The loss of its last backward."""
    backwards: int = 0
    loss_scale: float | LateNumber | None = None
    batch_size: int | None = None
    batch_loaded: bool = False
    skips: list[float | LateNumber | None] = field(default_factory=list)
    """One entry for each update: a number other than 0 if it was skipped."""
    autocast_in_backward: bool = False

    def record(self, index: int, *, finished: bool = True) -> StepRecord:
        """The record of the step, which ends now; not ``finished`` if memory ran out in it."""
        loss, scale = settled_number(self.loss), settled_number(self.loss_scale)
        if loss is not None and scale:
            loss /= scale
        return StepRecord(
            index=index,
            start_ns=self.start_ns,
            end_ns=self.end_ns or time_ns(),
            skipped_update=any(settled_number(skip) for skip in self.skips),
            loss=loss,
            loss_scale=scale,
            batch_size=self.batch_size,
            batch_loaded=self.batch_loaded,
            autocast_in_backward=self.autocast_in_backward,
            finished=finished,
            backwards=self.backwards,
        )


class RunningUpdate:
    """The optimizer's update as one op, ``Adam.step``: no dispatch mode is on in it.

    It runs from :meth:`begin` to :meth:`end`; afterwards it is the last update.
    """

    def __init__(self, log: Log, stacks: Stacks) -> None:
        self._log = log
        self.stacks = stacks
        self._began = (0, 0, 0)
        """The start of the update, and the ids of its name and of its caller's stack."""
        self.stepping: list[int] = []
        """``id`` of each optimizer whose ``step`` is running: wrappers step inside each other."""
        self.name = ""
        """The name of the update, such as ``Adam.step``."""

    def begin(self, optimizer: str) -> None:
        """Note that the ``step`` of an optimizer of this class begins."""
        self.name = f"{optimizer}.step"
        self._began = (time_ns(), self._log.texts.id(self.name), self.stacks.capture())

    def end(self) -> None:
        """Note that the update has ended, or memory ran out in it."""
        self._log.op(*self._began)


class Stopwatch:
    """Times each step in ns, from the first forward on."""

    def __init__(self, *, synchronize: bool = True) -> None:
        self._synchronize = synchronize
        self.durations_ns: list[int] = []
        self._since: int | None = None

    def install(self) -> Callable[[], None]:
        """Start with the first module that runs; returns the undo."""

        def begin(*_: object) -> None:
            self._since = time_ns()
            undo()

        undo = hook(on_module_before, begin)
        return undo

    def lap(self) -> None:
        """Note that a step has ended."""
        if self._synchronize and torch.cuda.is_initialized():  # without it, the time excludes the device's pending work
            torch.cuda.synchronize()
        now = time_ns()
        # The first step begins with the first module, not with the script.
        if self._since is not None:
            self.durations_ns.append(now - self._since)
        self._since = now
