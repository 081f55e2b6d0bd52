"""Follows the script: translates what the hooks report into facts, ops, phases and marks in the log.

:mod:`ampmem.recorder.steps` decides what a report means; :class:`ScriptListener` carries that out. Whatever concerns
the recording itself (its source, its file, its end) it leaves to the session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import time_ns
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.events import Fact, Phase, StepRecord
from ampmem.names import warning
from ampmem.recorder.device import DeviceWatch, Placement
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.backward import GradientHooks
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.forward import ForwardMode, ForwardObserver, SavedTensors
from ampmem.recorder.models.holders import HolderLog, Variables
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.optimizers import Optimizers
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.options import Options
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.running import OpenStep, RunningUpdate
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.steering import depth
from ampmem.recorder.steering.precision import PrecisionSeen
from ampmem.recorder.steering.steering import Steering
from ampmem.recorder.steps import Actions, Do, EndStep, Enter, Say, SetMark, StepMachine
from ampmem.recorder.torch_private.general import in_backward, never_compiled
from ampmem.recording import MOST_STEPS
from ampmem.vocabulary import Precision, StepOn

_RAN_ELSEWHERE = (
    "the forward of {model} ran on a thread that is not recorded: its activations and cast copies cannot be attributed"
)


class ListenerSession(Protocol):
    """The part of a session that the listener calls."""

    def on_thread(self) -> bool:
        """Whether the calling thread is the recorded one, or an autograd thread that runs its backward."""

    def skim(self) -> None:
        """Follow the forwards of the script while it is not recorded."""

    def end_step(self, ended_ns: int | None) -> None:
        """End the step, now or earlier at ``ended_ns``; may begin or end the recording."""

    def begin_evaluation(self) -> None:
        """Begin the recording with the forward that is about to run, unless it is to be skipped."""

    def end_evaluation(self) -> None:
        """End the recording: the evaluation is over."""

    def stop_recording(self, why: str) -> None:
        """End the recording; the script goes on."""


# What the script calls in place of Python's own: the command line imports that module, and must not wait for torch.
for each in (depth.getrecursionlimit, depth.setrecursionlimit):
    never_compiled(each)


class ScriptListener:
    """The :class:`~ampmem.recorder.hooks.listener.Listener` of a session, which documents the methods of the hooks."""

    def __init__(
        self, driver: ListenerSession, options: Options, source: Source, outcome: Outcome, note: Callable[[str], None]
    ) -> None:
        self._driver = driver
        # Attributes, not methods that forward: each hook calls the first one.
        self.on_thread, self.stop_recording = driver.on_thread, driver.stop_recording
        self.remark = note
        self._outcome = outcome
        # The machine asks the optimizers, and they tell it of deaths: the lambda looks it up when one dies.
        self.optimizers = Optimizers(lambda optimizer: self.machine.rounds.died(optimizer))
        self.machine = StepMachine(options.step_on, self.optimizers)
        self.step = OpenStep()
        """The running step."""
        self._untrained = False
        """Whether the last forward that was not recorded was in eval mode or had no gradients."""
        self._loaded: int | None = None
        """Number of samples in the DataLoader's newest batch, if known."""
        self.forward_ns = 0
        """Time when the last outermost forward began."""
        self._forwards: list[tuple[int, int, int | None]] = []
        """Start, end (both in ns) and batch size of the first outermost forwards, as long as no backward has run."""
        self._batch_size: int | None = None
        """The batch size of the last outermost forward."""
        self._generation = -1
        """The generation of the models whose parameters were recorded before any backward."""
        self.stacks = Stacks(options.stacks)
        self.log = log = Log(source.addresses, source.see)
        log.misses.note = note
        self.models = Models(log)
        self.precision_seen = PrecisionSeen(device_type=source.device_type)
        self.steering: Steering | None = None
        if options.precision != Precision.AS_IS:
            self.steering = Steering(options.precision, options.dtype, source.device_type, note)
        self.update = RunningUpdate(log, self.stacks)
        self.placement = Placement(self.models, log, source.kind, source.device_type)
        self.device = DeviceWatch(source, log, self.update, self.placement, stacks=options.stacks)
        self.casts = CastHooks(log, self.models)
        self.mode = ForwardMode(log, self.casts, self.stacks)
        stays = options.step_on is StepOn.EVALUATION
        self.forward = ForwardObserver(log, self.mode, SavedTensors(log), source.owns_mode, stays=stays)
        self.gradients = GradientHooks(log, self.models)
        self.variables = Variables(log)
        self.holders = HolderLog(log, self.variables)
        self._does: dict[Do, tuple[Callable[[], None], ...]] = {
            Do.PAUSE: (source.pause,),
            Do.BEGIN: (driver.begin_evaluation,),
            Do.END: (driver.end_evaluation,),
            Do.BEGIN_STEP: (self.begin_step,),
            Do.SEE_MODEL: (self._see_model,),
            Do.LOOK: (self.variables.note,),
            Do.LOOK_INSIDE: (self.variables.note_inside,),
            Do.OBSERVE: (self.forward.enter, depth.make_room),
            Do.OBSERVE_AGAIN: (partial(self.forward.enter, recomputing=True), depth.make_room),
            Do.LEAVE_OPS: (self.forward.leave,),
            Do.LEAVE: (self.leave_forward,),
            Do.END_FORWARD: (self.forward.forward_ended,),
            Do.KEEP_RECOMPUTED: (self._keep_recomputed,),
            Do.NOTE_HOLDERS: (self.holders.note,),
            Do.BEGIN_BACKWARD: (self.forward.backward_started, self.gradients.backward_started),
            Do.END_BACKWARD: (self.forward.backward_ended, self.gradients.backward_ended),
            Do.NOTE_INPUTS: (self._note_inputs,),
            Do.END_UPDATE: (self.update.end,),
        }

    def act(self, actions: Actions) -> None:
        """Carry out each action before the machine yields the next: the end of a step may end the recording."""
        for action in actions:
            match action:
                case Do():
                    for call in self._does[action]:
                        call()
                case Enter(phase):
                    self.log.enter_phase(phase)
                case SetMark(mark):
                    self.device.mark(mark)
                case EndStep(ended_ns):
                    self._driver.end_step(ended_ns)
                case Say(message):
                    self.remark(message)

    @property
    def recording(self) -> bool:
        """Whether allocator events are being recorded now."""
        return self.machine.recording

    def begin_step(self) -> None:
        """Begin a step: the first, or the next after one was written."""
        self.log.enter_phase(Phase.BETWEEN, step=self._outcome.number)
        ended_ns = self.step.end_ns
        self.step = OpenStep() if ended_ns is None else OpenStep(start_ns=ended_ns)
        self.machine.step_began()

    # Forward.

    def forward_started(self, module: nn.Module, *, recomputing: bool) -> None:
        grad, observed = torch.is_grad_enabled(), self.forward.active
        if type(module).__name__ == self._outcome.in_place:  # it is seen after all: dynamo left this forward uncompiled
            self._outcome.in_place = None
        held = None if recomputing else self._held_by(module)
        started = self.machine.forward_started(
            held, grad=grad, observed=observed, recomputing=recomputing, trains=grad and module.training
        )
        self.act(started)

    def _held_by(self, module: nn.Module) -> frozenset[int] | None:
        """The optimizers that hold parameters of ``module``; ``None`` if it is not part of a step or no step waits."""
        takes_part = self.machine.rounds.several and (module.training or torch.is_grad_enabled())
        return self.optimizers.holding(module) if takes_part else None

    def _see_model(self) -> None:
        self.forward_ns = time_ns()
        self._note_models()
        self.gradients.watch(there=self.machine.infers)

    def _note_models(self) -> None:
        self.models.note()
        self._outcome.model |= bool(self.models.parameters_at)

    def forward_elsewhere(self, model: str) -> None:
        self._outcome.other_thread = model
        self.remark(warning(_RAN_ELSEWHERE.format(model=model)))

    def compiled_in_place(self, model: str | None) -> None:
        self._outcome.in_place = model

    def batch_seen(self, size: int) -> None:
        self._batch_size = size
        if self.machine.phase is Phase.FORWARD:
            self.step.batch_size = size
            self.step.batch_loaded = size == self._loaded

    def input_seen(self, tensor: torch.Tensor) -> None:
        self.gradients.add_input(tensor)

    def forward_ended(self, *, raised: bool) -> None:
        depth.take_room()
        stepping = bool(self.update.stepping)
        self.act(self.machine.forward_ended(raised=raised, grad=torch.is_grad_enabled(), stepping=stepping))
        if not (raised or self._outcome.backwards):
            if len(self._forwards) < MOST_STEPS:
                self._forwards.append((self.forward_ns, time_ns(), self._batch_size))
            if self.models.generation != self._generation:  # the model may be gone at the script's end
                self._generation = self.models.generation
                self.models.records(lambda record: record)

    def take_forwards(self, most: int) -> list[StepRecord]:
        """Make each of the first ``most`` outermost forwards a step, in a script that has run no backward."""
        if not self._forwards:
            return []
        starts, ends, sizes = zip(*self._forwards, strict=True)
        self.log.make_steps(starts, ends, most)
        spans = enumerate(zip((starts[0], *ends), ends[:most], sizes, strict=False))
        return [OpenStep(start_ns=start, end_ns=end, batch_size=size).record(n) for n, (start, end, size) in spans]

    def leave_forward(self) -> None:
        """Stop observing forward, and leave ampmem's autocast region; a second call does nothing."""
        depth.take_room()
        self.forward.leave()
        if self.steering is not None:
            self.steering.leave()

    def _keep_recomputed(self) -> None:
        for address in self.forward.take_recomputed():
            self.log.fact(Fact.RECOMPUTED, address)

    def skimmed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        evaluates = self.machine.infers and self._evaluates(module)
        self.act(self.machine.skimmed(self._held_by(module), evaluates=evaluates))

    def _evaluates(self, module: nn.Module) -> bool:
        """Whether the forward of ``module`` that starts now is one of an evaluation.

        A single one of a model that no optimizer trains may be a teacher's, in the middle of training.
        """
        was, self._untrained = self._untrained, not (module.training and torch.is_grad_enabled())
        return self._untrained and (was or bool(self.optimizers.holding(module)))

    def skimmed_over(self) -> None:
        self.act(self.machine.skimmed_over())

    # Backward.

    def backward_started(self, loss: float | LateNumber | None) -> None:
        in_forward = self.forward.active and self.log.module != 0
        self.act(self.machine.backward_started(in_forward=in_forward))
        if self.recording:
            self._outcome.backwards += 1
            self._forwards.clear()
            self.step.loss, self.step.backwards = loss, self.step.backwards + 1
            # ampmem's own region ends with forward, which is over by now.
            self.step.autocast_in_backward |= torch.is_autocast_enabled(self.precision_seen.device_type)

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        ended = self.machine.backward_ended(
            time_ns(),
            raised=raised,
            differentiable=differentiable,
            grad=torch.is_grad_enabled(),
            observed=self.forward.active,
            stepping=bool(self.update.stepping),
        )
        self.act(ended)

    def _note_inputs(self) -> None:
        if not self._outcome.model:
            # A model without parameters has run: under torch.func plain tensors take the parameters' places.
            self.models.changed = True
            self._note_models()
        self.gradients.note_inputs()

    # Updates.

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self._outcome.optimizer = True
        self.optimizers.add(optimizer)
        trains = self.optimizers.trains(id(optimizer))
        self.machine.rounds.made(id(optimizer), type(optimizer).__name__, trains=trains)
        if self.machine.rounds.several and not self.recording:
            self._driver.skim()  # the models that run between updates show whose step it is

    def optimizer_inside(self, optimizer: int) -> None:
        self.machine.rounds.step_inside(optimizer)

    def optimizer_started(self, optimizer: str) -> None:
        self.act(self.machine.update_started())
        if self.recording:
            self.update.begin(optimizer)

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        self.step.skips.append(skipped)
        self.act(self.machine.updated(optimizer, time_ns(), in_backward=in_backward()))

    def scaled(self, scale: float | LateNumber | None) -> None:
        self.precision_seen.scaler = True
        self.step.loss_scale = scale

    # Data, and what else the script does.

    def data_started(self, *, transform: bool = False) -> Phase:
        before = self.machine.phase
        self.act(self.machine.data_started(transform=transform))
        return before

    def batch_loaded(self, samples: int | None) -> None:
        self._loaded = samples

    def data_ended(self, before: Phase) -> None:
        self.act(self.machine.data_ended(before))

    def function_returned(self) -> None:
        self._outcome.returned = True
        self.act(self.machine.function_returned())

    def process_started(self) -> None:
        self._outcome.children += 1
        self.remark("the script started child processes, which are not recorded")
