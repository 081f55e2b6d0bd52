"""Which updates make one step, where a script has several optimizers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations

import torch
from torch import nn
from torch.optim import Optimizer

PATIENCE = 8
"""Updates of one optimizer in a step after which those that made none are taken for idle.

A GAN may train its critic several times per generator update (five times, as published most often); an
optimizer that a script makes and never steps must not keep a step open for ever.
"""


class Rounds:
    """Counts the updates of a step, and knows for whom it waits. An optimizer is its ``id`` here.

    A step waits for an optimizer whose model ran in it, apart from those of the optimizers that have updated: a GAN's
    generator runs while its discriminator is trained. It does not wait for one whose parameters are in a model with
    theirs: backward reached both, so both could have updated by the next forward. Two that have updated before, but
    never in one step, train in turn; so do two that both update several times in a row.
    """

    def __init__(self) -> None:
        self.updates: dict[int, int] = {}
        """Updates of this step, by optimizer, in the order of their first."""
        self._ran: set[frozenset[int]] = set()
        """Of each model that ran in this step, the optimizers that hold parameters of it, if any does."""
        self._ever: set[int] = set()
        self._idle: set[int] = set()
        self._together: set[frozenset[int]] = set()
        """Pairs that have updated in one step."""
        self._row: tuple[int, int] = (0, 0)
        """Who updated last, and how often in a row."""
        self._rows: dict[int, int] = {}
        """How often each has updated in a row at the most."""
        self._dead = 0
        """Stands for the last one that died: below 0, as no ``id`` is."""

    @property
    def beside(self) -> set[int]:
        """Those whose models ran in this step, and that have made no update in it."""
        return set().union(*self._ran) - self.updates.keys()

    @property
    def begun(self) -> bool:
        """Whether a model has run, and an update was made."""
        return bool(self._ran and self.updates)

    def ran(self, optimizers: frozenset[int]) -> None:
        """A model ran forward of which ``optimizers`` hold parameters."""
        self._ran.add(optimizers)

    def update(self, optimizer: int) -> None:
        """``optimizer`` made (or skipped) its update."""
        last, row = self._row
        self._row = (optimizer, row + 1 if last == optimizer else 1)
        self._rows[optimizer] = max(self._rows.get(optimizer, 0), self._row[1])
        self._idle.discard(optimizer)
        self._ever.add(optimizer)
        self.updates[optimizer] = self.updates.get(optimizer, 0) + 1

    def due(self, *, ever: bool = False) -> set[int]:
        """For whom the step waits; with ``ever`` only those who have updated before."""
        if max(self.updates.values(), default=0) >= PATIENCE:
            return set()
        beside = self.beside & self._ever if ever else self.beside
        return {optimizer for optimizer in beside if self._is_due(optimizer)}

    def end(self) -> None:
        """The step is over."""
        if max(self.updates.values(), default=0) >= PATIENCE:
            self._idle |= self.beside
        self._together |= set(map(frozenset, combinations(self.updates, 2)))
        self.updates, self._ran = {}, set()

    def died(self, optimizer: int) -> int:
        """``optimizer`` no longer exists, and another may get its ``id``: its updates of this step have that returned.

        It may be gone before the step is known to be over, as what a function has made for itself is.
        """
        self._dead -= 1
        if optimizer in self.updates:
            self.updates[self._dead] = self.updates[optimizer]
            self._ran = {each | {self._dead} if optimizer in each else each for each in self._ran}
        self.forget(optimizer)
        return self._dead

    def forget(self, optimizer: int) -> None:
        """Leave ``optimizer`` out of account."""
        for group in (self._ever, self._idle):
            group.discard(optimizer)
        for counts in (self.updates, self._rows):
            counts.pop(optimizer, None)
        self._ran = {each - {optimizer} for each in self._ran}
        self._together = {pair for pair in self._together if optimizer not in pair}

    def _is_due(self, optimizer: int) -> bool:
        if optimizer in self._idle or any(optimizer in each and each & self.updates.keys() for each in self._ran):
            return False
        return optimizer not in self._ever or any(self._take_turns(optimizer, other) for other in self.updates)

    def _take_turns(self, one: int, other: int) -> bool:
        in_rows = self._rows.get(one, 0) > 1 and self._rows.get(other, 0) > 1
        return frozenset((one, other)) in self._together and not in_rows


class Optimizers:
    """The script's optimizers, and the updates of theirs that are in the running step."""

    def __init__(self) -> None:
        self._rounds = Rounds()
        self._living: dict[int, weakref.ref[Optimizer]] = {}
        self._names: dict[int, str] = {}
        self._inside: set[int] = set()
        """Those that step inside another's step."""
        self._held: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}
        """Of each module that ran, by ``id``, the optimizers that hold parameters of it."""

    def __iter__(self) -> Iterator[Optimizer]:
        """Every optimizer that exists."""
        for reference in list(self._living.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    @property
    def any(self) -> bool:
        """Whether the script has, or had, an optimizer."""
        return bool(self._names)

    @property
    def several(self) -> bool:
        """Whether it has more than one."""
        return len(self._living.keys() - self._inside) > 1

    def add(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists."""
        key = id(optimizer)
        self._names[key] = type(optimizer).__name__
        self._living[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        self._held.clear()

    def step_inside(self, optimizer: int) -> None:
        """The optimizer with this ``id`` steps inside another's step: a step of training does not wait for it."""
        if optimizer not in self._inside:
            self._inside.add(optimizer)
            self._held.clear()
            self._rounds.forget(optimizer)

    def ran(self, module: nn.Module) -> None:
        """An outermost module runs. One in evaluation mode with gradients off is no part of a step."""
        if self.several and (module.training or torch.is_grad_enabled()):
            self._rounds.ran(self._holders(module))

    def updated(self, optimizer: int) -> None:
        """The optimizer with this ``id`` made (or skipped) its update."""
        self._names.setdefault(optimizer, "an optimizer")
        self._rounds.update(optimizer)

    def over(self) -> bool:
        """Whether the update just made ends the step, whatever comes; where it may, :meth:`settled` tells later."""
        if not self.several:
            return True
        return self.settled() and not any(map(self._has_gradients, self._rounds.beside))

    def settled(self, *, script_over: bool = False) -> bool:
        """Whether the last update has ended the step, as a forward comes next, or the script is over."""
        due = self._rounds.due(ever=script_over)
        return self._rounds.begun and not any(map(self._trains, due))

    def end(self) -> str | None:
        """The step is over; what there is to know of it where it puts several updates together."""
        waited = [self._names[key] for key in self._rounds.beside]
        parts = list(self._counted())
        optimizers, total = len(self._rounds.updates), sum(self._rounds.updates.values())
        self._rounds.end()
        if total <= 1:
            return None
        if optimizers > 1:
            return f"the updates of several optimizers are put together into one step: {', '.join(parts)}"
        if total < PATIENCE or not waited:
            return f"several updates of one optimizer are put together into one step: {parts[0]}"
        return (
            f"several updates are put together into one step ({parts[0]}), which waited for one of "
            f"{' and '.join(waited)}, whose model ran too; from then on nothing waits for that"
        )

    def _counted(self) -> Iterator[str]:
        """The optimizers that have updated in this step and how often, those of a class that did so alike as one."""
        alike = Counter((self._names.get(key, "an optimizer"), count) for key, count in self._rounds.updates.items())
        said: set[str] = set()
        for (name, count), optimizers in alike.items():
            other = name in said
            said.add(name)
            if optimizers > 1:
                yield f"{name} {_times(count)} each ({optimizers} {'other ' if other else ''}optimizers)"
            else:
                yield f"{'another ' if other else ''}{name} {_times(count)}"

    def _holders(self, module: nn.Module) -> frozenset[int]:
        known = self._held.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        parameters = set(map(id, module.parameters()))
        holders = frozenset(
            key
            for key, reference in self._living.items()
            if key not in self._inside
            and (optimizer := reference()) is not None
            and any(id(parameter) in parameters for parameter in _parameters(optimizer))
        )
        self._held[id(module)] = (weakref.ref(module), holders)
        return holders

    def _trains(self, optimizer: int) -> bool:
        """Whether any parameter of it takes a gradient now: a script may freeze a model while another is trained."""
        return any(parameter.requires_grad for parameter in self._parameters(optimizer))

    def _has_gradients(self, optimizer: int) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters(optimizer))

    def _parameters(self, optimizer: int) -> Iterator[torch.Tensor]:
        reference = self._living.get(optimizer)
        living = None if reference is None else reference()
        return iter(()) if living is None else _parameters(living)

    def _forget(self, optimizer: int) -> None:
        self._living.pop(optimizer, None)
        self._inside.discard(optimizer)
        self._held.clear()
        self._names[self._rounds.died(optimizer)] = self._names.get(optimizer, "an optimizer")


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """None where its class does not let them be asked for: a wrapper need not be set up as torch's are."""
    with suppress(Exception):
        for group in optimizer.param_groups:
            yield from group["params"]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
