"""When does a step end? After a whole round of optimizer updates."""

from __future__ import annotations

import weakref
from collections.abc import Container

from torch.optim import Optimizer

_PATIENCE = 32
"""Updates of one optimizer in a round after which those that never updated are taken for idle.

A GAN may train its critic several times per generator update; an optimizer that a script makes
and never steps must not keep the first step open for ever.
"""


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


class Bench:
    """Optimizers that exist, but whose models have not run: a process may hold some that are left over."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._waiting: list[weakref.ref[Optimizer]] = []
        self._in_play: list[weakref.ref[Optimizer]] = []

    @property
    def empty(self) -> bool:
        """Whether no optimizer is left to bring into play."""
        return not self._waiting

    def add(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists."""
        self._waiting.append(weakref.ref(optimizer))

    def bring_into_play(self, parameters: Container[int] | None) -> None:
        """Let steps wait for those that hold one of ``parameters`` (``id`` s), or for all when it is ``None``."""
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
