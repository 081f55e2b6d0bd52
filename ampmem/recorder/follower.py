"""Follows a script through its steps: what the hooks report becomes steps, phases and marks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import time_ns

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import NO_STEP, Fact, Phase
from ampmem.names import warning
from ampmem.recorder.device import DeviceWatch
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.backward import GradientHooks
from ampmem.recorder.hooks.forward import ForwardObserver
from ampmem.recorder.marker import Marker
from ampmem.recorder.models.holders import Holders
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.variables import Variables
from ampmem.recorder.outcome import IN_PLACE, Outcome
from ampmem.recorder.rounds import Optimizers
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.steering import depth
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.steering.steering import Steering
from ampmem.recorder.steps import OpenStep
from ampmem.recorder.torch_private.general import in_backward
from ampmem.recorder.update import RunningUpdate
from ampmem.vocabulary import Mark, StepOn

_ENDED_ELSEWHERE = "the recording was ended by another thread, and went on until the recorded one next ran something"
_RAN_ELSEWHERE = (
    "forward of {model} ran on another thread than the recorded one: its activations and cast copies cannot be "
    "attributed"
)

_MOST_LOOKS = 16
"""So often the script's variables are looked at in one step: some have a backward for each of many tasks."""


class Follower:
    """The hooks' listener. Calls ``end_step`` whenever a step has ended, ``stop`` when the recording must end.

    Calls ``skim`` when it must hear of forwards although nothing is recorded, ``note`` with what a reader must know.
    """

    def __init__(
        self,
        *,
        log: Log,
        models: Models,
        holders: Holders,
        variables: Variables,
        forward: ForwardObserver,
        gradients: GradientHooks,
        update: RunningUpdate,
        device: DeviceWatch,
        arm_seen: ArmSeen,
        steering: Steering | None,
        outcome: Outcome,
        note: Callable[[str], None],
        end_step: Callable[[], None],
        skim: Callable[[], None],
        stop: Callable[[str], None],
        end: Callable[[], None],
    ) -> None:
        self._log = log
        self._models = models
        self._holders = holders
        self._variables = variables
        self._forward = forward
        self._gradients = gradients
        self._update = update
        self._device = device
        self._arm_seen = arm_seen
        self._steering = steering
        self._outcome = outcome
        self._note = note
        self._end_step = end_step
        self._skim = skim
        self.stop_recording = stop
        self._end = end
        self.end_asked = False
        """Whether another thread has asked for the end of the session, for which ``end`` is to be called here."""
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
        self._thread: int | None = threading.get_ident()
        self._in_engine = False
        self._inside_forward = False
        """Whether the engine was started inside a forward."""
        self._ended_ns: int | None = None
        """When the step ended, unless the next forward shows that it goes on."""
        self._before_evaluation = Phase.SETUP
        self._observed_before = False
        """What there was when gradients were off and a model ran: the phase, and whether forward was observed."""
        self._model_ran = False
        """Whether one ran since the last batch: what a module without parameters is fed may be what the model gave."""

    def on_thread(self) -> bool:
        """Whether the calling thread is the one that is recorded, or a device's thread that runs its backward."""
        if self.on_own_thread():
            if self.end_asked:
                self.end_asked = False
                self._note(_ENDED_ELSEWHERE)
                self._end()
            return True
        return self._arm_seen.device_type != "cpu" and self._in_engine and in_backward()

    def on_own_thread(self) -> bool:
        """Whether the calling thread is the one that is recorded."""
        return threading.get_ident() == self._thread

    def _observe_forward(self, *, recomputing: bool = False) -> None:
        self._forward.enter(recomputing=recomputing)

    def _leave_forward(self) -> None:
        if self._forward.active:
            self._forward.leave()

    def leave_forward(self) -> None:
        """What is active in forward only must be active no longer."""
        depth.take_room()
        self._leave_forward()
        if self._steering is not None:
            self._steering.leave()

    def forget(self) -> None:
        """In a child that was forked: nothing that happens here is the recording's."""
        self.leave_forward()
        self.recording = self._in_engine = self._inside_forward = False
        self._thread = self._ended_ns = None

    def begin_step(self) -> None:
        """A step begins."""
        self._log.enter_phase(Phase.BETWEEN, step=self._outcome.number)
        ended_ns = self.open_step.end_ns
        self.open_step = OpenStep() if ended_ns is None else OpenStep(start_ns=ended_ns)
        self._model_ran = False

    def forward_started(self, module: nn.Module, *, recomputing: bool) -> None:
        """An outermost ``module`` is about to run; ``recomputing`` when backward computes a forward again."""
        if not recomputing:
            self._settle()
            if not self.recording:  # that was the last step
                return
            self.optimizers.ran(module)
            self._look_at_what_is_left()
            self._begin_forward()
        self._observe_forward(recomputing=recomputing)
        depth.make_room()

    def _begin_forward(self) -> None:
        self._device.pause()
        evaluates = self._evaluates()
        if self._log.step == NO_STEP and not evaluates:
            self.begin_step()
        self.forward_ns = time_ns()
        self._model_ran = True
        self._models.note()
        self._outcome.model |= bool(self._models.parameters_at)
        self._gradients.watch()
        if evaluates:
            self._outcome.evaluations += 1
            self._before_evaluation, self._observed_before = self._log.phase, self._forward.active
        self._log.enter_phase(Phase.EVALUATION if evaluates else Phase.FORWARD)

    def _evaluates(self) -> bool:
        """Whether a forward that starts now is none of a step's own, which inference has without gradients."""
        if torch.is_grad_enabled() or self._outcome.step_on is StepOn.FORWARD:
            return False
        return self._outcome.backwards > 0 or not isinstance(self._outcome.step_on, Marker)

    def forward_elsewhere(self, model: str) -> None:
        """A model of this class runs forward on a thread that is not recorded."""
        self._outcome.other_thread = model
        self._note(warning(_RAN_ELSEWHERE.format(model=model)))

    def compiled_in_place(self, model: str) -> None:
        """A model of this class runs that ``model.compile()`` compiled in its place: no hook sees its forward."""
        if self._outcome.in_place is None:
            self._outcome.in_place = model
            self._note(warning(IN_PLACE.format(model=model)))

    def batch_seen(self, size: int) -> None:
        """The outermost module is fed tensors whose first dimension is ``size``."""
        if self._log.phase == Phase.FORWARD:
            self.open_step.batch_size = size
            self.open_step.batch_loaded = size == self._loaded

    def input_seen(self, tensor: torch.Tensor) -> None:
        """The outermost module is fed ``tensor``, a leaf that gets a gradient."""
        self._gradients.add_input(tensor)

    def forward_ended(self, *, raised: bool) -> None:
        """The outermost module has returned or ``raised``."""
        depth.take_room()
        if self._log.phase == Phase.BACKWARD:
            for address in self._forward.take_recomputed():
                self._log.fact(Fact.RECOMPUTED, address)
            self._leave_forward()
            return
        if self._log.phase == Phase.EVALUATION:
            before = self._before_evaluation
            if before != Phase.FORWARD or not self._observed_before:  # else a step's own forward goes on
                self._forward.forward_ended()
            self._log.enter_phase(before)
            return
        self._forward.forward_ended()
        if not torch.is_grad_enabled():
            self._log.enter_phase(self._resting_phase())
        if self._outcome.step_on is StepOn.FORWARD and self.recording and not (self.manual_steps or raised):
            self.leave_forward()
            self._holders.note()
            self._finish()

    def backward_started(self, loss: float | LateNumber | None) -> None:
        """The autograd engine is about to run, from ``loss`` where it starts at one number."""
        if not self.recording:
            return
        self._in_engine = True
        self._inside_forward = self._forward.active and self._log.module != 0
        self.leave_forward()
        self._look_at_variables()
        self._forward.backward_started()
        self._outcome.backwards += 1
        self.open_step.loss = loss
        self.open_step.backwards += 1
        self.open_step.autocast_in_backward |= torch.is_autocast_enabled(self._arm_seen.device_type)
        self._log.enter_phase(Phase.BACKWARD)
        self._device.mark(Mark.AFTER_FORWARD)

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        """The autograd engine has returned, or ``raised``; ``differentiable``: it made a graph of its own."""
        ended_ns = time_ns()
        self._forward.backward_ended()
        if self.recording and not self._outcome.model:
            self._look_for_parameters()
        if self.recording:
            self._in_engine = False
            self._gradients.note_inputs()
            self._log.enter_phase(self._resting_phase())
            self._device.mark(Mark.AFTER_BACKWARD)
        inside_forward, self._inside_forward = self._inside_forward, False
        if inside_forward:  # torch.func.grad, or a model that computes forces
            self._begin_forward()
            self._observe_forward()
        elif differentiable and self.recording and self._log.step != NO_STEP and not self._update.stepping:
            self._log.enter_phase(Phase.FORWARD)  # a penalty on gradients: what follows is part of the loss
            self._observe_forward()
        elif not (self.manual_steps or raised):
            self._after_backward(ended_ns)

    def _look_for_parameters(self) -> None:
        """A model has run, and had no parameters: torch.func puts tensors in their places while it runs."""
        self._models.changed = True
        self._models.note()
        self._outcome.model |= bool(self._models.parameters_at)

    def _after_backward(self, ended_ns: int) -> None:
        step_on = self._outcome.step_on
        if self.open_step.due:
            self.open_step.due = False
            self._after_update(ended_ns)
        elif self.recording and self._log.step == NO_STEP:
            return
        elif step_on is StepOn.BACKWARD:
            self._finish()
        elif step_on is StepOn.FOUND and not self.optimizers.any:
            if self.recording:
                self._ended_ns = ended_ns  # the script may say by itself when the step ends: prof.step()
            else:
                self._finish()

    def _after_update(self, ended_ns: int) -> None:
        if self._outcome.step_on is StepOn.OPTIMIZER or self.optimizers.over():
            self._finish()
        else:
            self._ended_ns = ended_ns

    def _settle(self, *, script_over: bool = False) -> None:
        """A forward begins, or the script is over: the step may have ended some time ago."""
        ended_ns, self._ended_ns = self._ended_ns, None
        if ended_ns is None or self.manual_steps:
            return
        if not self.optimizers.any:
            self._note(
                "the script has no torch.optim optimizer: a step ends with each backward (--step-on names another end)"
            )
        elif not self.optimizers.settled(script_over=script_over):
            return
        self._finish(ended_ns)

    def _finish(self, ended_ns: int | None = None) -> None:
        """The step has ended, at ``ended_ns`` if that was before now."""
        self._ended_ns = None
        together = self.optimizers.end()
        if together is not None and self._outcome.step_on is StepOn.FOUND and not self.manual_steps:
            self._note(together)
        if ended_ns is not None and self.recording:
            self.open_step.end_ns = ended_ns
            self._log.begin_step(ended_ns, self._outcome.number + 1)
        self._end_step()

    def script_over(self) -> None:
        """The script has come to its end: a step may have ended that nothing has settled yet."""
        self._settle(script_over=True)

    def manual_step(self) -> None:
        """The user says that a step ends here; from now on only that counts."""
        self.manual_steps = True
        self._finish()

    def function_returned(self) -> None:
        """The function has returned whose returns end steps."""
        self._outcome.returned = True
        if self.manual_steps or (self.recording and self._log.step == NO_STEP):
            return
        if self.recording and self._outcome.backwards == 0:  # inference
            self._holders.note()
        self._finish()

    def process_started(self) -> None:
        """The script has started a child process."""
        self._outcome.children += 1
        self._note("the script started child processes: what happens there is not recorded")

    def remark(self, message: str) -> None:
        """A reader of the recording must know ``message``."""
        self._note(message)

    def skimmed(self, module: nn.Module) -> None:
        """An outermost ``module`` is about to run, and nothing is recorded."""
        self._settle()
        if not self.recording:
            self.optimizers.ran(module)

    def skimmed_over(self) -> None:
        """It has returned."""
        if self._outcome.step_on is StepOn.FORWARD and not self.recording:
            self._finish()

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists."""
        self._outcome.optimizer = True
        self.optimizers.add(optimizer)
        if self.optimizers.several and not self.recording:
            self._skim()  # which models run between updates says whose step it is

    def optimizer_inside(self, optimizer: int) -> None:
        """The optimizer with this ``id`` has stepped inside another's step."""
        self.optimizers.step_inside(optimizer)

    def optimizer_started(self, optimizer: str) -> None:
        """An optimizer of this class, or a GradScaler for it, is about to update."""
        if self.recording:
            self._leave_forward()
            self._look_at_variables()
            self._log.enter_phase(Phase.OPTIMIZER)
            self._update.begin(optimizer)

    def _look_at_what_is_left(self) -> None:
        """Log what holds memory of the step before, at the first forward that this step trains with."""
        if self._outcome.backwards and torch.is_grad_enabled() and not self.open_step.began:
            self.open_step.began = True
            self._look_at_variables()

    def _look_at_variables(self) -> None:
        """Log which variables of the script hold memory, unless the step has done so often already."""
        self.open_step.looks += 1
        if self.open_step.looks <= _MOST_LOOKS:
            self._variables.note()

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        """The outermost ``step`` of the optimizer with this ``id`` has returned.

        ``skipped`` is something other than 0 when a GradScaler left the update out.
        """
        self.optimizers.updated(optimizer)
        self.open_step.skips.append(skipped)
        ended_ns = time_ns()
        if self.recording and self._log.phase == Phase.OPTIMIZER:
            self._update.end()
            self._log.enter_phase(Phase.BACKWARD if in_backward() else Phase.BETWEEN)
            self._device.mark(Mark.AFTER_OPTIMIZER)
        if self.manual_steps or self._outcome.step_on not in (StepOn.FOUND, StepOn.OPTIMIZER):
            return
        if in_backward():
            self.open_step.due = True  # an optimizer that steps inside backward: the step ends with that
        else:
            self._after_update(ended_ns)

    def scaled(self, scale: float | LateNumber | None) -> None:
        """A GradScaler is about to step with ``scale``."""
        self._arm_seen.scaler = True
        self.open_step.loss_scale = scale

    def data_started(self) -> Phase:
        """A DataLoader is about to make a batch; returns the phase to go back to."""
        self._model_ran = False
        before = self._log.phase
        if before in (Phase.SETUP, Phase.BETWEEN):
            self._log.enter_phase(Phase.DATA)
        return before

    def batch_loaded(self, samples: int | None) -> None:
        """A DataLoader has made a batch, of ``samples`` where that is a dimension of all its tensors."""
        self._loaded = samples

    def transform_started(self) -> Phase:
        """A module that is no part of a model is about to run; returns the phase to go back to."""
        return self._log.phase if self._model_ran else self.data_started()

    def data_ended(self, before: Phase) -> None:
        """The batch is made, or there is none left."""
        if self.recording and self._log.phase == Phase.DATA:
            self._log.enter_phase(before)

    def _resting_phase(self) -> Phase:
        return Phase.OPTIMIZER if self._update.stepping else Phase.BETWEEN
