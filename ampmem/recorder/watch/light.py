"""Follows a script's steps and phases, by those hooks of a session that cost little, and records nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import Phase
from ampmem.patching import hook
from ampmem.recorder.models.live import live_at_start
from ampmem.recorder.options import Options
from ampmem.recorder.session import Session
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.torch_private.general import in_backward, tree_leaves
from ampmem.recorder.torch_private.optimizers import on_step_before

_SHAPES = 3
"""So many tensors of a batch are named."""


class Passing(Protocol):
    """What is told of the script as it goes by."""

    def entered(self, phase: Phase) -> None:
        """The script is in another phase."""

    def fed(self, module: nn.Module, batch: str, size: int) -> None:
        """An outermost ``module`` is fed what ``batch`` says, of ``size`` elements."""

    def step_ended(self, number: int) -> None:
        """A step has ended."""


class LightSession(Session):
    """A session that only times steps, in which ``passing`` is told what comes by.

    ``look`` is called at the end of each module's forward, where the peak is the largest of what is seen then.
    """

    def __init__(
        self, options: Options, passing: Passing, *, source: Source | None, look: Callable[[], object] | None
    ) -> None:
        super().__init__(replace(options, timed=True, skip=0, steps=None), source=source)
        self._passing = passing
        self._look = look

    def _install(self) -> None:
        super()._install()
        if self.options.baseline:
            for optimizer in live_at_start(tensors=False)[0]:
                self.add_optimizer(optimizer)
        self.skim()
        self.at_end(hook(on_step_before, self._update_begins))

    def skimmed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():  # else it is computed again
            self._passing.fed(module, *_batch(args, sys._getframe(2).f_locals.get("kwargs")))
            self._passing.entered(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)
        super().skimmed(module, args)

    def skimmed_over(self) -> None:
        if not in_backward():
            self._passing.entered(Phase.BETWEEN)
        super().skimmed_over()

    def backward_started(self, loss: float | LateNumber | None) -> None:
        self._passing.entered(Phase.BACKWARD)
        super().backward_started(loss)

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        self._passing.entered(Phase.BETWEEN)
        super().backward_ended(raised=raised, differentiable=differentiable)

    def _update_begins(self, optimizer: Optimizer, *_: object) -> None:
        if self.on_thread() and not in_backward():
            self._passing.entered(Phase.OPTIMIZER)

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        super().updated(optimizer, skipped=skipped)  # whose step may end with that, in this phase
        if not in_backward():
            self._passing.entered(Phase.BETWEEN)

    def _end_step(self, ended_ns: int | None) -> None:
        self.outcome.steps += 1
        self._passing.step_ended(self.outcome.number - 1)


def _batch(args: tuple[Any, ...], kwargs: Any) -> tuple[str, int]:
    """The shapes and dtypes of the first tensors, ``8x512 int64``, and the elements of all."""
    given = (*args, *(kwargs or {}).values())
    if any(isinstance(each, dict | list | tuple) for each in given):
        given = tuple(tree_leaves(given))
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    said = [
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors[:_SHAPES]
    ]
    more = f" and {len(tensors) - _SHAPES} more" if len(tensors) > _SHAPES else ""
    return ", ".join(said) + more, sum(tensor.numel() for tensor in tensors)
