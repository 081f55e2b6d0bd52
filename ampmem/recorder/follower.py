"""Follows a script through its steps: what the hooks report becomes steps, phases and marks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import time_ns

import torch
from torch.optim import Optimizer

from ampmem.events import NO_STEP, Fact, Phase
from ampmem.recorder.device import DeviceWatch
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.backward import GradientHooks
from ampmem.recorder.hooks.forward import ForwardObserver
from ampmem.recorder.models.models import Models
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.steering.steering import Steering
from ampmem.recorder.steps import OpenStep, Optimizers
from ampmem.recorder.torch_private import in_backward
from ampmem.recorder.update import RunningUpdate
from ampmem.vocabulary import Mark


class Follower:
    """The hooks' listener. Calls ``end_step`` whenever a step has ended, ``stop`` when the recording must end."""

    def __init__(
        self,
        *,
        log: Log,
        models: Models,
        forward: ForwardObserver,
        gradients: GradientHooks,
        update: RunningUpdate,
        device: DeviceWatch,
        arm_seen: ArmSeen,
        steering: Steering | None,
        outcome: Outcome,
        end_step: Callable[[], None],
        stop: Callable[[str], None],
    ) -> None:
        self._log = log
        self._models = models
        self._forward = forward
        self._gradients = gradients
        self._update = update
        self._device = device
        self._arm_seen = arm_seen
        self._steering = steering
        self._outcome = outcome
        self._end_step = end_step
        self.stop_recording = stop
        self.recording = False
        """Whether allocator events are being recorded now."""
        self.open_step = OpenStep()
        self._loaded: int | None = None
        """How many samples a DataLoader made into the newest batch, where that is known."""
        self.optimizers = Optimizers()
        self.manual_steps = False
        """Whether the user says when steps end; then updates no longer do."""
        self.forward_ns = 0
        """When the last outermost forward began."""
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._in_engine = False
        self._inside_forward = False
        """Whether the engine was started inside a forward."""

    def on_thread(self) -> bool:
        """Whether the calling thread is the one that is recorded, or a device's thread that runs its backward."""
        if threading.get_ident() == self._thread:
            return os.getpid() == self._process  # in a forked worker of a DataLoader this thread seems to go on
        return self._arm_seen.device_type != "cpu" and self._in_engine and in_backward()

    def leave_forward(self) -> None:
        """What is active in forward only must be active no longer."""
        self._forward.leave()
        if self._steering is not None:
            self._steering.leave()

    def begin_step(self) -> None:
        """A step begins."""
        self._log.enter_phase(Phase.BETWEEN, step=self._outcome.steps)
        self.open_step = OpenStep()

    def forward_started(self, *, recomputing: bool) -> None:
        """An outermost module is about to run; ``recomputing`` when backward computes a forward again."""
        if not recomputing:
            if self._log.step == NO_STEP:
                self.begin_step()
            self.forward_ns = time_ns()
            self._models.note()
            self._outcome.model |= bool(self._models.parameters_at)
            self._gradients.watch()
            self._log.enter_phase(Phase.FORWARD)
        self._forward.enter(recomputing=recomputing)

    def batch_seen(self, size: int) -> None:
        """The outermost module is fed tensors whose first dimension is ``size``."""
        self.open_step.batch_size = size
        self.open_step.batch_loaded = size == self._loaded

    def forward_ended(self) -> None:
        """The outermost module has returned or raised."""
        if self._log.phase == Phase.BACKWARD:
            for address in self._forward.take_recomputed():
                self._log.fact(Fact.RECOMPUTED, address)
            self._forward.leave()
            return
        self._forward.forward_ended()
        if not torch.is_grad_enabled():
            self._log.enter_phase(self._resting_phase())

    def backward_started(self, loss: float | LateNumber | None) -> None:
        """The autograd engine is about to run, from ``loss`` where it starts at one number."""
        self._in_engine = True
        self._inside_forward = self._forward.active and self._log.module != 0
        self.leave_forward()
        self._outcome.backwards += 1
        self.open_step.loss = loss
        self.open_step.autocast_in_backward |= torch.is_autocast_enabled(self._arm_seen.device_type)
        self._log.enter_phase(Phase.BACKWARD)
        self._device.mark(Mark.AFTER_FORWARD)

    def backward_ended(self) -> None:
        """The autograd engine has returned or raised."""
        self._in_engine = False
        self._log.enter_phase(self._resting_phase())
        self._device.mark(Mark.AFTER_BACKWARD)
        if self.open_step.due:
            self._end_step()
        if self._inside_forward:  # torch.func.grad, or a model that computes forces
            self.forward_started(recomputing=False)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists: once its model has run, a step is over only when it has updated too."""
        self.optimizers.add(optimizer)

    def optimizer_started(self, optimizer: str) -> None:
        """An optimizer of this class, or a GradScaler for it, is about to update."""
        if self.recording:
            self._forward.leave()
            self._log.enter_phase(Phase.OPTIMIZER)
            self._update.begin(optimizer)

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        """The outermost ``step`` of the optimizer with this ``id`` has returned.

        ``skipped`` is something other than 0 when a GradScaler left the update out.
        """
        parameters = (parameter for _, parameter in self._models.parameters())
        round_over = self.optimizers.updated(optimizer, parameters if self.recording else None)
        self.open_step.skips.append(skipped)
        if self.recording and self._log.phase == Phase.OPTIMIZER:
            self._update.end()
            self._log.enter_phase(Phase.BACKWARD if in_backward() else Phase.BETWEEN)
            self._device.mark(Mark.AFTER_OPTIMIZER)
        if self.manual_steps or not round_over:
            return
        if in_backward():
            self.open_step.due = True  # an optimizer that steps inside backward: the step ends with that
        else:
            self._end_step()

    def scaled(self, scale: float | LateNumber | None) -> None:
        """A GradScaler is about to step with ``scale``."""
        self._arm_seen.scaler = True
        self.open_step.loss_scale = scale

    def data_started(self) -> Phase:
        """A DataLoader is about to make a batch; returns the phase to go back to."""
        before = self._log.phase
        if before in (Phase.SETUP, Phase.BETWEEN):
            self._log.enter_phase(Phase.DATA)
        return before

    def data_ended(self, before: Phase, *, samples: int | None) -> None:
        """The batch is made, or there is none left; of ``samples`` where that is a dimension of all its tensors."""
        self._loaded = samples
        if self.recording and self._log.phase == Phase.DATA:
            self._log.enter_phase(before)

    def _resting_phase(self) -> Phase:
        return Phase.OPTIMIZER if self._update.stepping else Phase.BETWEEN
