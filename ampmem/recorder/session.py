"""One recording session in the user's process: owns the source, every hook, the steps and the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import time_ns

import torch
from torch.optim import Optimizer

from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.events import NO_STEP, Fact, Phase, StepRecord
from ampmem.recorder.device import DeviceWatch, Taken
from ampmem.recorder.hooks import data, memory_history, torch_profiler
from ampmem.recorder.hooks.backward import BackwardHooks
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.forward import ForwardMode, ForwardObserver, SavedTensors
from ampmem.recorder.hooks.modules import ModuleHooks, in_backward
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.join import Joiner
from ampmem.recorder.log import Log
from ampmem.recorder.models.live import collection_paused, live_objects
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.options import Options, run_record
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.sources.base import RawEvents
from ampmem.recorder.sources.baseline import Baseline
from ampmem.recorder.sources.choose import choose_source
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.sources.cuda.oom import ended_with
from ampmem.recorder.steering.arms import ArmSeen, arm_record
from ampmem.recorder.steering.steering import Steering
from ampmem.recorder.steps import Bench, OpenStep, Rounds, Stopwatch
from ampmem.recorder.texts import Texts
from ampmem.recording import Batch, Description, RecordingWriter
from ampmem.vocabulary import Arm, Mark

_active: Session | None = None


class Session:
    """Records from :meth:`start` to :meth:`close`; leaves nothing of itself behind in torch."""

    def __init__(
        self,
        options: Options,
        *,
        on_step: Callable[[int], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        if _active is not None:
            raise UsageError(
                "ampmem.profile() is active already and cannot be nested; leave the outer one first, "
                "or call ampmem.profile() only once"
            )
        self.options = options
        self.recording = False
        """Whether allocator events are being recorded now."""
        self.arm_seen = ArmSeen()
        self.texts = Texts()
        self.log = Log()
        self.models = Models(self.texts, self.log)
        self.updates = 0
        """Optimizer updates seen so far, skipped ones too."""
        self.outcome = Outcome(skip=options.skip)
        self._on_step = on_step
        self._on_done = on_done
        self._stacks = Stacks(options.stacks)
        self._casts = CastHooks(self.log, self.models, self.texts)
        mode = ForwardMode(self.log, self._casts, self._stacks, self.texts)
        self.forward = ForwardObserver(mode, SavedTensors(self.log, self.texts), self.note)
        self._joiner = Joiner(self.log, self._stacks, self.texts)
        self._baseline = Baseline()
        self._source = choose_source(options, self._baseline)
        self.device_type = self._source.device_type
        self._device = DeviceWatch(self._source, self.log, mode, self.texts, stacks=options.stacks)
        self._modules = ModuleHooks(self)
        self._backward = BackwardHooks(self)
        self._optimizers = OptimizerHooks(self)
        self._rounds = Rounds()
        self._bench = Bench(self._rounds)
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._undo = ExitStack()
        self._notes: dict[str, None] = {}
        self._described: tuple[object, ...] = ()
        self._manual_steps = False
        self.open_step = OpenStep()
        self.stopwatch = Stopwatch(synchronize=options.synchronize)
        self._steering: Steering | None = None
        if options.arm != Arm.AS_IS:
            self._steering = Steering(options.arm, options.dtype, self.device_type, self.note)
        self._update_began = (0, 0, 0)
        """When the running update began, and the ids of its name and of the stack that called it."""
        self._forward_ns = 0
        """When the last outermost forward began."""
        self._writer: RecordingWriter | None = None
        if not options.timed:
            self._writer = RecordingWriter(options.path, run_record(options, self._source), force=options.force)

    def start(self) -> None:
        """Install the hooks; recording begins at once or after the steps to skip."""
        global _active
        _active = self
        self._undo.callback(self._deactivate)
        if self._steering is not None:  # first, so that a region of ours is left before an update is marked
            self._undo.callback(self._steering.install())
        self._undo.callback(self._optimizers.install())
        if self.options.timed:
            self._undo.callback(self.stopwatch.install())
        elif self.options.skip == 0:
            try:
                self._begin()
            except UsageError:
                self.close()
                self.options.path.unlink()
                raise

    def close(self, failure: BaseException | None = None) -> None:
        """Stop recording, undo every hook, write what is left. Does nothing the second time.

        ``failure`` is what the script ended with, if that was no end of its own.
        """
        if _active is not self:
            return
        try:
            if self.recording:
                with collection_paused():
                    self._end_recording(failure)
        finally:
            self._undo.close()
            if self._writer is not None:
                self._writer.close()

    def check(self) -> None:
        """Raise :class:`NothingRecorded` when there is no step, no model or no backward to show."""
        missing = self.outcome.missing()
        if missing is not None:
            raise NothingRecorded(missing)

    def on_thread(self) -> bool:
        """Whether the calling thread is the one that is recorded, or a device's thread that runs its backward."""
        if threading.get_ident() == self._thread:
            return os.getpid() == self._process  # in a forked worker of a DataLoader this thread seems to go on
        return self.device_type != "cpu" and self._backward.running and in_backward()

    def note(self, message: str) -> None:
        """Keep ``message`` in the recording, once."""
        self._notes[message] = None

    def add_model(self, model: torch.nn.Module) -> None:
        """``model`` is what the user named."""
        self.models.add(model)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists: once its model has run, a step is over only when it has updated too."""
        self._bench.add(optimizer)

    def stop_recording(self, why: str) -> None:
        """End the recording although the script goes on."""
        self.outcome.stopped_by = why
        self.close()

    def forward_started(self, *, recomputing: bool) -> None:
        """An outermost module is about to run."""
        if not recomputing:
            if self.log.step == NO_STEP:
                self._open_step()
            self._forward_ns = time_ns()
            self.models.note()
            self.outcome.model |= bool(self.models.parameters_at)
            self._backward.watch_gradients()
            self.log.enter_phase(Phase.FORWARD)
        self.forward.enter(recomputing=recomputing)

    def forward_ended(self) -> None:
        """The outermost module has returned or raised."""
        if self.log.phase == Phase.BACKWARD:
            for address in self.forward.take_recomputed():
                self.log.fact(Fact.RECOMPUTED, address)
            self.forward.leave()
            return
        self.forward.forward_ended()
        if not torch.is_grad_enabled():
            self.log.enter_phase(self._resting_phase())

    def backward_started(self, loss: float | LateNumber | None) -> None:
        """The autograd engine is about to run."""
        self.forward.leave()
        if self._steering is not None:
            self._steering.leave()
        self.outcome.backwards += 1
        self.open_step.loss = loss
        self.open_step.autocast_in_backward |= torch.is_autocast_enabled(self.device_type)
        self.log.enter_phase(Phase.BACKWARD)
        self._device.mark(Mark.AFTER_FORWARD)

    def backward_ended(self) -> None:
        """The autograd engine has returned or raised."""
        self.log.enter_phase(self._resting_phase())
        self._device.mark(Mark.AFTER_BACKWARD)
        if self.open_step.due:
            self._end_step()

    def optimizer_started(self, optimizer: str) -> None:
        """An optimizer of this class, or a GradScaler for it, is about to update."""
        if self.recording:
            self.forward.leave()
            self.log.enter_phase(Phase.OPTIMIZER)
            self._device.update = f"{optimizer}.step"
            self._update_began = (time_ns(), self.texts.id(self._device.update), self._stacks.capture())

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        """The outermost ``step`` of ``optimizer`` has returned; ``skipped`` when a GradScaler left it out."""
        self.updates += 1
        if not self._bench.empty:
            parameters = {id(parameter) for _, parameter in self.models.parameters()}
            self._bench.bring_into_play(parameters if self.recording else None)
        self.open_step.skips.append(skipped)
        round_over = self._rounds.update(optimizer)
        if self.recording and self.log.phase == Phase.OPTIMIZER:
            self.log.op(*self._update_began)
            self.log.enter_phase(Phase.BACKWARD if in_backward() else Phase.BETWEEN)
            self._device.mark(Mark.AFTER_OPTIMIZER)
        if self._manual_steps or not round_over:
            return
        if in_backward():
            self.open_step.due = True  # an optimizer that steps inside backward: the step ends with that
        else:
            self._end_step()

    def scaled(self, scale: float | LateNumber | None) -> None:
        """A GradScaler is about to step with ``scale``."""
        self.arm_seen.scaler = True
        self.open_step.loss_scale = scale

    def data_started(self) -> Phase:
        """A DataLoader is about to make a batch; returns the phase to go back to."""
        before = self.log.phase
        if before in (Phase.SETUP, Phase.BETWEEN):
            self.log.enter_phase(Phase.DATA)
        return before

    def data_ended(self, before: Phase) -> None:
        """The batch is made, or there is none left."""
        if self.recording and self.log.phase == Phase.DATA:
            self.log.enter_phase(before)

    def manual_step(self) -> None:
        """The user says that a step ends here; from now on only that counts."""
        self._manual_steps = True
        if self.log.step == NO_STEP and self.recording:
            raise UsageError("prof.step() was called before any model ran forward; call it at the end of an iteration")
        self._end_step()

    def _begin(self) -> None:
        """Start the source and the hooks that only matter while it runs."""
        self._source.check()
        if self.options.baseline or self.options.skip:
            live = live_objects()
            self._baseline.add(live.tensors)
            for optimizer in live.optimizers:
                self.add_optimizer(optimizer)
        self._undo.callback(self._baseline.forget)
        self._undo.callback(self._source.install())
        self._undo.callback(self._modules.install())
        self._undo.callback(self._backward.install())
        self._undo.callback(self.forward.install())
        self._undo.callback(self._casts.install())
        self._undo.callback(data.install(self))
        self._undo.callback(torch_profiler.install(self))
        self._undo.callback(memory_history.install(self))
        self._undo.callback(self._device.end)
        self._source.start(self._baseline.blocks)
        self._device.begin()
        self.recording = True
        if self.options.skip:
            self._open_step()

    def _open_step(self) -> None:
        self.log.enter_phase(Phase.BETWEEN, step=self.outcome.steps)
        self.open_step = OpenStep()

    def _end_step(self) -> None:
        """A step has ended: write it, then go on or stop."""
        if self.options.timed:
            self._end_timed_step()
            return
        if not self.recording:
            self.outcome.steps += 1
            if self.outcome.steps == self.options.skip:
                try:
                    self._begin()
                except UsageError as error:
                    self._give_up(str(error))
            return
        with collection_paused():
            try:
                self._write(self._source.drain(), self._device.take(), self.open_step.record(self.outcome.steps))
            except RecordingError as error:
                self._give_up(str(error))
                return
            self.outcome.steps += 1
            self.outcome.recorded += 1
            self._open_step()
        if self._on_step is not None:
            self._on_step(self.outcome.recorded)
        if self.outcome.recorded == self.options.steps:
            self.close()
            if self._on_done is not None:
                self._on_done()

    def _end_timed_step(self) -> None:
        self.stopwatch.lap()
        self.outcome.steps += 1
        if self.outcome.steps == self.options.skip + (self.options.steps or 0):
            self.close()
            if self._on_done is not None:
                self._on_done()

    def _give_up(self, why: str) -> None:
        """The file cannot be written: that is no reason to stop somebody's training."""
        self.outcome.stopped_by = why
        self.note(why)
        if self.recording:
            self.forward.leave()
            self.recording = False
            self._source.stop()
        self.close()

    def _end_recording(self, failure: BaseException | None) -> None:
        self.forward.leave()
        if self._steering is not None:
            self._steering.leave()
        self.recording = False
        raw, taken, step = self._source.stop(), self._device.take(), None
        if ended_with(failure, taken[1], self._forward_ns):
            step = self._unfinished_step()
        self.models.note()  # as every forward does when it starts
        try:
            self._write(raw, taken, step)
        except RecordingError as error:  # as in _give_up: the script goes on
            self.outcome.stopped_by = str(error)

    def _unfinished_step(self) -> StepRecord:
        """The step in which memory ran out, or else the script's setup; notes what else is known by now."""
        self.models.add_registered()
        for optimizer in self._bench.optimizers():
            if optimizer.state:
                self._optimizers.note_state(optimizer)
        if self.log.phase == Phase.OPTIMIZER:
            self.log.op(*self._update_began)
        self.outcome.unfinished = self.outcome.steps
        return self.open_step.record(self.outcome.steps, finished=False)

    def _write(self, raw: RawEvents, taken: Taken, step: StepRecord | None) -> None:
        assert self._writer is not None
        joined = self._joiner.join(raw)
        self._casts.forget_dead()
        layers, ooms = taken
        self._writer.append(Batch(**joined, texts=self.texts.take_new(), step=step, layers=layers, ooms=ooms))
        notes = self._all_notes()
        known = (self.models.generation, self._optimizers.generation, self.arm_seen.copy(), notes)
        if not self.recording or known != self._described:  # going through all parameters in every step would cost
            self._described = known
            self._writer.describe(self._description())

    def _all_notes(self) -> tuple[str, ...]:
        """The session's own and the device's, which may have been worded otherwise a step ago."""
        return tuple(self._notes | dict.fromkeys(self._device.notes()))

    def _description(self) -> Description:
        parameters = [*self.models.records(), *self._optimizers.own_parameters.values()]
        wrapped = self._steering is not None and self._steering.wrapped
        return Description(
            arm=arm_record(self.arm_seen, parameters, forced=self.options.arm, wrapped=wrapped),
            parameters=tuple(map(self._optimizers.assign, parameters)),
            optimizers=tuple(self._optimizers.records()),
            notes=self._all_notes(),
            device_name=self._source.device_name,
            prediction=self._device.prediction(),
            allocator=self._device.allocator(),
            failure=self.outcome.failure,
        )

    def _resting_phase(self) -> Phase:
        return Phase.OPTIMIZER if self._optimizers.stepping else Phase.BETWEEN

    def _deactivate(self) -> None:
        global _active
        _active = None


def active() -> Session | None:
    """The session that is recording in this process."""
    return _active
