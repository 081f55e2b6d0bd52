"""The interface between the hooks and the session: what hooks report, what they ask, and where they write."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import Phase
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.models import Models
from ampmem.recorder.running import RunningUpdate
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.steering.precision import PrecisionSeen


class Listener(Protocol):
    """Receives what the hooks report, in the order in which it happens; has what they write into."""

    log: Log
    models: Models
    update: RunningUpdate
    precision_seen: PrecisionSeen

    @property
    def recording(self) -> bool:
        """Whether allocator events are being recorded now."""

    def on_thread(self) -> bool:
        """Whether the calling thread is the recorded one, or an autograd thread that runs its backward."""

    def forward_started(self, module: nn.Module, *, recomputing: bool) -> None:
        """An outermost ``module`` is about to run; ``recomputing`` if backward recomputes a forward."""

    def forward_elsewhere(self, model: str) -> None:
        """A model of this class runs forward on a thread that is not recorded."""

    def compiled_in_place(self, model: str | None) -> None:
        """A model of this class, compiled by ``model.compile()``, runs, and no hook has seen its forward so far.

        ``None`` if one sees it now.
        """

    def batch_seen(self, size: int) -> None:
        """The outermost module gets tensors whose first dimension is ``size``."""

    def input_seen(self, tensor: torch.Tensor) -> None:
        """The outermost module gets ``tensor``, a leaf that requires a gradient."""

    def forward_ended(self, *, raised: bool) -> None:
        """The outermost module has returned, or ``raised``."""

    def skimmed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """An outermost ``module`` is about to run with the arguments ``args`` while nothing is recorded (yet)."""

    def skimmed_over(self) -> None:
        """The outermost module has returned, while nothing is recorded."""

    def backward_started(self, loss: float | LateNumber | None) -> None:
        """The autograd engine is about to run; ``loss`` is its root if that is a single number."""

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        """The autograd engine has returned, or ``raised``; ``differentiable`` if it made a graph (``create_graph``)."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """``optimizer`` was made, or found."""

    def optimizer_inside(self, optimizer: int) -> None:
        """The optimizer with this ``id`` has stepped inside another optimizer's step."""

    def optimizer_started(self, optimizer: str) -> None:
        """An optimizer of this class, or a GradScaler for it, is about to update."""

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        """The outermost ``step`` of the optimizer with this ``id`` has returned.

        ``skipped`` is a number other than 0 if a GradScaler skipped the update.
        """

    def scaled(self, scale: float | LateNumber | None) -> None:
        """A GradScaler is about to step with ``scale``."""

    def data_started(self, *, transform: bool = False) -> Phase:
        """A DataLoader is about to make a batch; returns the phase to go back to.

        With ``transform`` a module that is not part of a model is about to run, probably on a batch.
        """

    def batch_loaded(self, samples: int | None) -> None:
        """A DataLoader has made a batch; ``samples`` is the common first dimension of its tensors, if there is one."""

    def data_ended(self, before: Phase) -> None:
        """The batch is made or transformed, or the DataLoader is exhausted; go back to phase ``before``."""

    def function_returned(self) -> None:
        """The function named by ``--step-on`` has returned."""

    def process_started(self) -> None:
        """The script has started a child process."""

    def stop_recording(self, why: str) -> None:
        """End the recording because the script needs what only one can have; the script goes on."""

    def remark(self, message: str) -> None:
        """Put ``message`` into the recording's notes."""
