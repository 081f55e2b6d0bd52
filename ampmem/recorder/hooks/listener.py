"""What hooks say to whoever records, and what they ask: all that they know of a session."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import Phase
from ampmem.recorder.sources.cuda.late import LateNumber


class Listener(Protocol):
    """Follows a script by what the hooks report, in the order in which it happens."""

    @property
    def recording(self) -> bool:
        """Whether allocator events are being recorded now."""

    def on_thread(self) -> bool:
        """Whether the calling thread is the one that is recorded, or a device's thread that runs its backward."""

    def forward_started(self, module: nn.Module, *, recomputing: bool) -> None:
        """An outermost ``module`` is about to run; ``recomputing`` when backward computes a forward again."""

    def forward_elsewhere(self, model: str) -> None:
        """A model of this class runs forward on a thread that is not recorded."""

    def compiled_in_place(self, model: str) -> None:
        """A model of this class runs that ``model.compile()`` compiled in its place: no hook sees its forward."""

    def batch_seen(self, size: int) -> None:
        """The outermost module is fed tensors whose first dimension is ``size``."""

    def input_seen(self, tensor: torch.Tensor) -> None:
        """The outermost module is fed ``tensor``, a leaf that gets a gradient."""

    def forward_ended(self, *, raised: bool) -> None:
        """The outermost module has returned or ``raised``."""

    def backward_started(self, loss: float | LateNumber | None) -> None:
        """The autograd engine is about to run, from ``loss`` where it starts at one number."""

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        """The autograd engine has returned, or ``raised``; ``differentiable``: it made a graph of its own."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists."""

    def optimizer_inside(self, optimizer: int) -> None:
        """The optimizer with this ``id`` has stepped inside another's step."""

    def optimizer_started(self, optimizer: str) -> None:
        """An optimizer of this class, or a GradScaler for it, is about to update."""

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        """The outermost ``step`` of the optimizer with this ``id`` has returned.

        ``skipped`` is something other than 0 when a GradScaler left the update out.
        """

    def scaled(self, scale: float | LateNumber | None) -> None:
        """A GradScaler is about to step with ``scale``."""

    def data_started(self) -> Phase:
        """A DataLoader is about to make a batch; returns the phase to go back to."""

    def batch_loaded(self, samples: int | None) -> None:
        """A DataLoader has made a batch, of ``samples`` where that is a dimension of all its tensors."""

    def transform_started(self) -> Phase:
        """A module that is no part of a model is about to run; returns the phase to go back to."""

    def data_ended(self, before: Phase) -> None:
        """The batch is made or transformed, or there is none left."""

    def function_returned(self) -> None:
        """The function has returned whose returns end steps."""

    def process_started(self) -> None:
        """The script has started a child process."""

    def stop_recording(self, why: str) -> None:
        """The script needs what only one can have: the recording ends, the script goes on."""

    def remark(self, message: str) -> None:
        """A reader of the recording must know ``message``."""
