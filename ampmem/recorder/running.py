"""What runs: the step, the optimizer's update in it, and how long steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import time_ns

import torch

from ampmem.events import StepRecord
from ampmem.patching import hook
from ampmem.recorder.facts.log import Log, Texts
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.sources.cuda.late import LateNumber, settled_number
from ampmem.recorder.torch_private.general import on_module_before


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """What is known of the step that is running; ``loss`` is scaled where a GradScaler scales."""

    start_ns: int = field(default_factory=time_ns)
    end_ns: int | None = None
    """When it ended, where that was known only later."""
    loss: float | LateNumber | None = None
    """Of its last backward."""
    backwards: int = 0
    loss_scale: float | LateNumber | None = None
    batch_size: int | None = None
    batch_loaded: bool = False
    skips: list[float | LateNumber | None] = field(default_factory=list)
    """Of each update, something other than 0 when it was skipped."""
    autocast_in_backward: bool = False

    def record(self, index: int, *, finished: bool = True) -> StepRecord:
        """The step, ending now; not ``finished`` where memory ran out in it."""
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
    """The optimizer's update, a whole ``step``: one op, as no mode looks into it.

    From :meth:`begin` to :meth:`end` it runs; after that it is the one that ran last.
    """

    def __init__(self, log: Log, stacks: Stacks, texts: Texts) -> None:
        self._log = log
        self.stacks = stacks
        self._texts = texts
        self._began = (0, 0, 0)
        """When, and the ids of its name and of the stack that called it."""
        self.stepping: list[int] = []
        """``id`` of each optimizer whose ``step`` is running: wrappers step inside each other."""
        self.name = ""
        """``Adam.step``."""

    def begin(self, optimizer: str) -> None:
        """The ``step`` of an optimizer of this class begins."""
        self.name = f"{optimizer}.step"
        self._began = (time_ns(), self._texts.id(self.name), self.stacks.capture())

    def end(self) -> None:
        """It has ended, or memory ran out in it."""
        self._log.op(*self._began)


class Stopwatch:
    """How long each step takes, from the first forward on, in nanoseconds."""

    def __init__(self, *, synchronize: bool = True) -> None:
        self._synchronize = synchronize
        self.durations_ns: list[int] = []
        self._since: int | None = None

    def install(self) -> Callable[[], None]:
        """Start with the first module that runs; returns what undoes the waiting for it."""

        def begin(*_: object) -> None:
            self._since = time_ns()
            undo()

        undo = hook(on_module_before, begin)
        return undo

    def lap(self) -> None:
        """A step has ended."""
        if self._synchronize and torch.cuda.is_initialized():  # else only what the host did is timed
            torch.cuda.synchronize()
        now = time_ns()
        if self._since is not None:
            self.durations_ns.append(now - self._since)
        self._since = now
