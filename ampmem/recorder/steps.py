"""When does a step end? After a whole round of optimizer updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from time import time_ns

import torch
from torch.optim import Optimizer

from ampmem.events import StepRecord
from ampmem.patching import hook
from ampmem.recorder.sources.cuda.late import LateNumber, settled
from ampmem.recorder.torch_private import on_module_before

_PATIENCE = 32
"""Updates of one optimizer in a round after which those that never updated are taken for idle.

A GAN may train its critic several times per generator update; an optimizer that a script makes
and never steps must not keep the first step open for ever.
"""


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """What is known of the step that is running; ``loss`` is scaled where a GradScaler scales."""

    start_ns: int = field(default_factory=time_ns)
    loss: float | LateNumber | None = None
    loss_scale: float | LateNumber | None = None
    batch_size: int | None = None
    batch_loaded: bool = False
    skips: list[float | LateNumber | None] = field(default_factory=list)
    """Of each update, something other than 0 when it was skipped."""
    due: bool = False
    """Whether the step ends with the backward that is running."""
    autocast_in_backward: bool = False

    def record(self, index: int, *, finished: bool = True) -> StepRecord:
        """The step, ending now; not ``finished`` where memory ran out in it."""
        loss, scale = settled(self.loss), settled(self.loss_scale)
        if loss is not None and scale:
            loss /= scale
        return StepRecord(
            index=index,
            start_ns=self.start_ns,
            end_ns=time_ns(),
            skipped_update=any(settled(skip) for skip in self.skips),
            loss=loss,
            loss_scale=scale,
            batch_size=self.batch_size,
            batch_loaded=self.batch_loaded,
            autocast_in_backward=self.autocast_in_backward,
            finished=finished,
        )


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


class Rounds:
    """Counts updates per optimizer: a round is over when every optimizer in play has had one."""

    def __init__(self) -> None:
        self._in_play: set[int] = set()
        self._idle: set[int] = set()
        self._updates: dict[int, int] = {}

    def add(self, optimizer: int) -> None:
        """``optimizer`` (its ``id``) exists; it takes part from now on."""
        if optimizer not in self._idle:
            self._in_play.add(optimizer)

    def remove(self, optimizer: int) -> None:
        """``optimizer`` no longer exists."""
        for group in (self._in_play, self._idle):
            group.discard(optimizer)
        self._updates.pop(optimizer, None)

    def update(self, optimizer: int) -> bool:
        """``optimizer`` made (or skipped) its update; ``True`` when that ends the step."""
        self._idle.discard(optimizer)
        self._in_play.add(optimizer)
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        waiting = self._in_play - self._updates.keys()
        if waiting and self._updates[optimizer] < _PATIENCE:
            return False
        self._in_play -= waiting
        self._idle |= waiting
        self._updates.clear()
        return True


class Optimizers:
    """The script's optimizers. Steps wait for those whose models have run: a process may hold left over ones."""

    def __init__(self) -> None:
        self._rounds = Rounds()
        self._waiting: list[weakref.ref[Optimizer]] = []
        self._in_play: list[weakref.ref[Optimizer]] = []

    def add(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists."""
        self._waiting.append(weakref.ref(optimizer))

    def __iter__(self) -> Iterator[Optimizer]:
        """Every optimizer that exists."""
        for reference in (*self._in_play, *self._waiting):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def updated(self, optimizer: int, parameters: Iterable[torch.Tensor] | None) -> bool:
        """The optimizer with this ``id`` made (or skipped) its update; ``True`` when that ends the step.

        From now on steps wait for those too that hold one of ``parameters``, or for all when it is ``None``.
        """
        if self._waiting:
            self._bring_into_play(None if parameters is None else {id(parameter) for parameter in parameters})
        return self._rounds.update(optimizer)

    def _bring_into_play(self, parameters: Container[int] | None) -> None:
        waiting, self._waiting = self._waiting, []
        for reference in waiting:
            optimizer = reference()
            if optimizer is None:
                continue
            if parameters is None or _holds_one_of(optimizer, parameters):
                self._play(optimizer)
            else:
                self._waiting.append(reference)

    def _play(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        self._rounds.add(key)
        self._in_play.append(weakref.ref(optimizer, lambda _: self._rounds.remove(key)))


def _holds_one_of(optimizer: Optimizer, parameters: Container[int]) -> bool:
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
