"""One recording session in the script's process: owns the source, all hooks, the steps and the file.

The hooks call :class:`Session`, :mod:`ampmem.recorder.steps` decides what follows, and the session carries it out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from time import time_ns
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.errors import ChangeNotForced, RecordingError, UsageError
from ampmem.events import NO_STEP, Fact, Phase, StepRecord
from ampmem.failure import FailureRecord
from ampmem.names import warning
from ampmem.patching import Undo
from ampmem.recorder.device import DeviceWatch, Placement, Taken
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks import boundaries, children
from ampmem.recorder.hooks.backward import GradientHooks
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.every import Hooks
from ampmem.recorder.hooks.forward import ForwardMode, ForwardObserver, SavedTensors
from ampmem.recorder.models.holders import HolderLog, Variables
from ampmem.recorder.models.live import collection_paused, live_at_start
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.optimizers import Optimizers
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.options import Options
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.process import active, become_active, forked_since, release
from ampmem.recorder.running import OpenStep, RunningUpdate, Stopwatch
from ampmem.recorder.sources.base import RawEvents, Source
from ampmem.recorder.sources.choose import check_torch, choose_source
from ampmem.recorder.sources.cuda.late import LateNumber
from ampmem.recorder.sources.cuda.oom import ended_with
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.steering import depth
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.steering.changes import ForcedChanges
from ampmem.recorder.steering.steering import Steering
from ampmem.recorder.steps import Actions, Do, EndStep, Enter, Say, SetMark, StepMachine
from ampmem.recorder.torch_private.general import in_backward
from ampmem.recorder.writing import Describer, Joiner, Notes, StepWriter, run_record
from ampmem.recording import MOST_STEPS, RecordingWriter
from ampmem.signals import SIGNALS, let_in
from ampmem.vocabulary import Arm, SourceKind, StepOn

_ENDED_ELSEWHERE = "another thread ended the recording, which continued until the recorded thread next ran something"
_NEVER_RAN = (
    "{idle} of {trained} trained modules never ran, such as {name}: their activations and gradients are in no number. "
    "If the script chooses modules by data, which a simulated device does not have, give the choice with --assume"
)
_RAN_ELSEWHERE = (
    "the forward of {model} ran on a thread that is not recorded: its activations and cast copies cannot be attributed"
)


class Session:
    """Records from :meth:`start` to :meth:`close`, and leaves nothing of itself behind in torch; one at a time.

    ``source`` replaces the one that ``options.device`` names, which cannot be a simulated one. ``on_step`` is called
    after each step with the number of recorded steps, ``on_done`` after the last.
    """

    def __init__(
        self,
        options: Options,
        *,
        source: Source | None = None,
        on_step: Callable[[int], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        become_active(self)  # first of all: another thread may start a session, too
        try:
            self._make(options, source)
        except BaseException:
            release(self)
            raise
        self._on_step, self._on_done = on_step, on_done
        self._over = False
        """Whether the script has ended."""
        self._end_asked = False
        """Whether another thread has asked to end the session."""

    def _make(self, options: Options, source: Source | None) -> None:
        self._notes = Notes(check_torch(options))
        self.options = options
        self.outcome = Outcome(skip=options.skip, step_on=options.step_on, first_step=options.first_step)
        self.stopwatch = Stopwatch(synchronize=options.synchronize)
        self._thread: int | None = threading.get_ident()
        """The recorded thread; ``None`` in a forked child."""
        self.optimizers = Optimizers(lambda optimizer: self._machine.rounds.died(optimizer))
        self._machine = StepMachine(options.step_on, self.optimizers)
        self._open_step = OpenStep()
        self._loaded: int | None = None
        """Number of samples in the DataLoader's newest batch, if known."""
        self._forward_ns = 0
        """Time when the last outermost forward began."""
        self._undo = ExitStack()
        self._undo.callback(release, self)
        self.forked = forked_since()
        self._storages = Storages()
        self.source = choose_source(options, self._storages) if source is None else source
        stacks = Stacks(options.stacks)
        self.log = Log(self.source.addresses, self.source.see)
        self.log.misses.note = self._notes.add
        self.models = Models(self.log)
        self._arm_seen = ArmSeen(device_type=self.source.device_type)
        self._steering: Steering | None = None
        if options.arm != Arm.AS_IS:
            self._steering = Steering(options.arm, options.dtype, self.source.device_type, self._notes.add)
        self._changes = ForcedChanges(options.forced, self._notes.add)
        self._update = RunningUpdate(self.log, stacks)
        self._placement = Placement(self.models, self.log, self.source.kind, self.source.device_type)
        self._device = DeviceWatch(self.source, self.log, self._update, self._placement, stacks=options.stacks)
        self._make_hooks(stacks)
        self._open_file = partial(self._open, stacks)
        self.writer: StepWriter | None = None

    def _make_hooks(self, stacks: Stacks) -> None:
        log, models = self.log, self.models
        self._casts = CastHooks(log, models)
        self._holders = HolderLog(log)
        self._variables = Variables(log)
        mode = ForwardMode(log, self._casts, stacks, self._notes.add)
        self._forward = ForwardObserver(log, mode, SavedTensors(log), self.source.owns_mode, self._notes.add)
        self._gradients = GradientHooks(log, models)
        self._does: dict[Do, Callable[[], None]] = {
            Do.PAUSE: self.source.pause,
            Do.BEGIN_STEP: self._begin_step,
            Do.SEE_MODEL: self._see_model,
            Do.COUNT_EVALUATION: self.outcome.count_evaluation,
            Do.LOOK: self._variables.note,
            Do.OBSERVE: self._observe,
            Do.OBSERVE_AGAIN: partial(self._observe, recomputing=True),
            Do.LEAVE_OPS: self._leave_ops,
            Do.LEAVE: self._leave_forward,
            Do.END_FORWARD: self._forward.forward_ended,
            Do.KEEP_RECOMPUTED: self._keep_recomputed,
            Do.NOTE_HOLDERS: self._holders.note,
            Do.BEGIN_BACKWARD: self._begin_backward,
            Do.END_BACKWARD: self._end_backward,
            Do.NOTE_INPUTS: self._note_inputs,
            Do.END_UPDATE: self._update.end,
        }
        held = (mode.saved.let_go, self._casts.let_go)
        known = (self, self.source, log, models, self._update, self._arm_seen, self.options)
        self._hooks = Hooks(*known, hold_tensors=held)
        self.computes_again = self._hooks.code.computes_again
        self.forked_child = partial(children.forked, self)
        self._unskim: Undo | None = None
        self._look: Callable[[], object] | None = None
        """Called after each module while the script is not recorded."""
        self._recording_hooks: list[Callable[[], Undo]] = [
            self.source.install,
            self._hooks.modules.install,
            self._forward.install,
            self._casts.install,
            *self._hooks.others,
        ]

    def _open(self, stacks: Stacks) -> StepWriter:
        """Create the recording."""
        options = self.options
        describer = Describer(
            forced=options.arm,
            source=self.source,
            placement=self._placement,
            models=self.models,
            optimizers=self._hooks.optimizers,
            arm_seen=self._arm_seen,
            steering=self._steering,
            notes=self._notes,
            outcome=self.outcome,
            places=self._hooks.places,
            compiled=self._hooks.code,
            log=self.log,
        )
        file = RecordingWriter(options.path, run_record(options, self.source), force=options.force)
        return StepWriter(file, Joiner(self.log, stacks, self._hooks.code), self.log.texts, describer)

    @let_in  # a delayed signal handler raises here, when everything is undone
    def start(self) -> None:
        """Install the hooks, and record at once or after ``skip`` steps; an error leaves nothing, not even a file."""
        try:
            self._undo.callback(SIGNALS.hold())
            with SIGNALS:
                if not self.options.timed:
                    self.writer = self._open_file()
                self._install()
        except BaseException as error:
            self.close(error)
            if self.writer is not None:
                self.options.path.unlink(missing_ok=True)
            raise

    def _install(self) -> None:
        if self._steering is not None:  # first: ampmem's autocast region must be left before an update is marked
            self._undo.callback(self._steering.install())
        self._undo.callback(self._changes.install())
        for install in self._hooks.early:  # they also find the ends of steps that are not recorded
            self._undo.callback(install())
        if self.options.timed:
            self._undo.callback(self.stopwatch.install())
        elif self.options.skip == 0:
            self._begin()
        elif self.options.baseline:
            self._find_optimizers(tensors=False)
        if self.options.step_on is StepOn.FORWARD:
            self.skim()

    def _find_optimizers(self, *, tensors: bool) -> list[torch.Tensor]:
        """Add the optimizers that exist already; one that is not found here is added after its first update.

        Returns the live tensors, if ``tensors``.
        """
        optimizers, found = live_at_start(self._variables.values(), tensors=tensors)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        return found

    def at_end(self, undo: Undo) -> None:
        """Call ``undo`` when the session ends."""
        self._undo.callback(undo)

    def skim(self) -> None:
        """Follow the forwards of the script while it is not recorded, if they are not followed yet."""
        to_come = self.options.timed or self.outcome.steps < self.options.skip
        if self._unskim is None and to_come:
            self._unskim = boundaries.install_skimming(self, self._hooks.modules.before, self._look)
            self._undo.callback(self._unskim)

    def close(self, failure: BaseException | None = None) -> None:
        """Stop recording, undo every hook, and write what is left; a second call does nothing.

        ``failure`` is the exception that ended the script, if it was an error. Some hooks are per thread: on another
        thread this only asks for the end, which comes when the recorded thread next runs a module, a backward or an
        optimizer, or ends.
        """
        if active() is not self:
            return
        if not self._on_own_thread():
            self._end_asked = True
            return
        try:
            if failure is None:
                self._over = True
                self._act(self._machine.script_over())
        finally:
            if active() is self:  # else that step was the last and has ended the session
                with SIGNALS:
                    self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        try:
            if self.recording:
                with collection_paused():
                    self._end_recording(failure)
        finally:
            self._undo.close()
            if self.writer is not None:
                try:
                    self.writer.file.close()
                except RecordingError as error:
                    self.outcome.stopped_by = str(error)

    def forget(self) -> None:
        """Drop the recording in a forked child: it is the parent's."""
        recording = self.recording
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.forget()
        with suppress(Exception):  # the script must not see errors of ampmem
            self._leave_forward()
            self._machine.forget()
            self._thread = None
            if recording:
                self.source.abandon()
        with suppress(Exception):
            self._undo.close()

    def check(self) -> None:
        """Raise :class:`NothingRecorded` if there is no step, no model or no backward to show.

        Raises :class:`ModelElsewhere` if the model was not on the recorded device. Does nothing in a forked child,
        which has nothing to show.
        """
        if self.forked():
            return
        if self._hooks.calls is not None:
            self.outcome.elsewhere = self._hooks.calls.elsewhere
        self.outcome.check(self._placement.missing(), self.log.misses.why(), self.source.nothing())

    def check_forced(self) -> None:
        """Raise :class:`ChangeNotForced` if a change to force was not made, or not everywhere."""
        unmet = [] if self.forked() else [*self._changes.unmet(), *self._other_settings()]
        if unmet:
            raise ChangeNotForced(f"{'; '.join(unmet)}: the recording does not show the script with this change")

    def _other_settings(self) -> list[str]:
        """A message if the script has set other allocator settings than the forced ones."""
        wanted = self.options.forced.allocator
        found = self.source.allocator() if wanted else None
        if found is None or wanted in found.settings:
            return []
        return [f"--force-allocator {wanted}: the script has set the allocator to {found.settings or 'its defaults'}"]

    def failed(self, failure: FailureRecord) -> None:
        """Note ``failure``, with which the script failed, for the recording."""
        self.outcome.failure = failure
        self._notes.add(failure.note)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add ``optimizer``, which the user named or which existed before the recording."""
        self.optimizer_made(optimizer)

    def manual_step(self) -> None:
        """End the step here; from now on only this method ends steps."""
        if self.forked():
            return
        if not self._on_own_thread():
            raise UsageError("prof.step() was called on a thread that is not recorded")
        if self.log.step == NO_STEP and self.recording:
            self._machine.manual = True
            raise UsageError(
                "prof.step() was called before any model ran forward; call it at the end of an iteration "
                "(for inference, which runs with gradients off, pass step_on='forward')"
            )
        self._act(self._machine.manual_step())

    def _begin(self) -> None:
        """Start the source, and install the hooks that are needed only while it runs."""
        self._hooks.compiled.show()
        if self._unskim is not None:
            self._unskim()
        self.source.check()
        if self.options.baseline or self.options.skip:
            tensors = self._find_optimizers(tensors=self.source.see is not None)
            if tensors:
                self._storages.add(tensors, self._holders.state_of(self.optimizers))
        self._undo.callback(self._storages.forget)
        self._undo.callback(self._gradients.remove)
        for install in self._recording_hooks:
            self._undo.callback(install())
        self._undo.callback(self._hooks.compiled.show)
        self._undo.callback(self._device.end)
        self.source.start(self._storages.baseline | self._hooks.data_parallel.blocks())
        self._device.begin()
        self._machine.recording = True
        if self.options.skip:
            self._begin_step()

    # Called by the hooks: what each call reports is said in `Listener`.

    @property
    def recording(self) -> bool:
        """Whether allocator events are being recorded now."""
        return self._machine.recording

    def on_thread(self) -> bool:
        """Whether the calling thread is the recorded one, or an autograd thread that runs its backward."""
        if threading.get_ident() == self._thread:  # called by each hook
            if self._end_asked:
                self._end_asked = False
                self._notes.add(_ENDED_ELSEWHERE)
                self.close()
            return True
        return self._arm_seen.device_type != "cpu" and self._machine.in_engine and in_backward()

    def _on_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def forward_started(self, module: nn.Module, *, recomputing: bool) -> None:
        grad, observed = torch.is_grad_enabled(), self._forward.active
        held = None if recomputing else self._held_by(module)
        self._act(self._machine.forward_started(held, grad=grad, observed=observed, recomputing=recomputing))

    def _held_by(self, module: nn.Module) -> frozenset[int] | None:
        """The optimizers that hold parameters of ``module``; ``None`` if it is not part of a step or no step waits."""
        takes_part = self._machine.rounds.several and (module.training or torch.is_grad_enabled())
        return self.optimizers.holding(module) if takes_part else None

    def forward_elsewhere(self, model: str) -> None:
        self.outcome.other_thread = model
        self._notes.add(warning(_RAN_ELSEWHERE.format(model=model)))

    def compiled_in_place(self, model: str | None) -> None:
        self.outcome.in_place = model

    def batch_seen(self, size: int) -> None:
        if self._machine.phase is Phase.FORWARD:
            self._open_step.batch_size = size
            self._open_step.batch_loaded = size == self._loaded

    def input_seen(self, tensor: torch.Tensor) -> None:
        self._gradients.add_input(tensor)

    def forward_ended(self, *, raised: bool) -> None:
        depth.take_room()
        stepping = bool(self._update.stepping)
        self._act(self._machine.forward_ended(raised=raised, grad=torch.is_grad_enabled(), stepping=stepping))

    def skimmed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """An outermost ``module`` is about to run while nothing is recorded."""
        self._act(self._machine.skimmed(self._held_by(module)))

    def skimmed_over(self) -> None:
        self._act(self._machine.skimmed_over())

    def backward_started(self, loss: float | LateNumber | None) -> None:
        in_forward = self._forward.active and self.log.module != 0
        self._act(self._machine.backward_started(in_forward=in_forward))
        if self.recording:
            self.outcome.backwards += 1
            step = self._open_step
            step.loss, step.backwards = loss, step.backwards + 1
            # ampmem's own region ends with forward, which is over by now.
            step.autocast_in_backward |= torch.is_autocast_enabled(self._arm_seen.device_type)

    def backward_ended(self, *, raised: bool, differentiable: bool) -> None:
        ended = self._machine.backward_ended(
            time_ns(),
            raised=raised,
            differentiable=differentiable,
            grad=torch.is_grad_enabled(),
            observed=self._forward.active,
            stepping=bool(self._update.stepping),
        )
        self._act(ended)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self.outcome.optimizer = True
        self.optimizers.add(optimizer)
        trains = self.optimizers.trains(id(optimizer))
        self._machine.rounds.made(id(optimizer), type(optimizer).__name__, trains=trains)
        if self._machine.rounds.several and not self.recording:
            self.skim()  # the models that run between updates show whose step it is

    def optimizer_inside(self, optimizer: int) -> None:
        self._machine.rounds.step_inside(optimizer)

    def optimizer_started(self, optimizer: str) -> None:
        self._act(self._machine.update_started())
        if self.recording:
            self._update.begin(optimizer)

    def updated(self, optimizer: int, *, skipped: float | LateNumber | None) -> None:
        self._open_step.skips.append(skipped)
        self._act(self._machine.updated(optimizer, time_ns(), in_backward=in_backward()))

    def scaled(self, scale: float | LateNumber | None) -> None:
        self._arm_seen.scaler = True
        self._open_step.loss_scale = scale

    def data_started(self) -> Phase:
        before = self._machine.phase
        self._act(self._machine.data_started())
        return before

    def batch_loaded(self, samples: int | None) -> None:
        self._loaded = samples

    def transform_started(self) -> Phase:
        before = self._machine.phase
        self._act(self._machine.transform_started())
        return before

    def data_ended(self, before: Phase) -> None:
        self._act(self._machine.data_ended(before))

    def function_returned(self) -> None:
        self.outcome.returned = True
        self._act(self._machine.function_returned())

    def process_started(self) -> None:
        self.outcome.children += 1
        self._notes.add("the script started child processes, which are not recorded")

    def remark(self, message: str) -> None:
        self._notes.add(message)

    def stop_recording(self, why: str) -> None:
        """End the recording; the script goes on."""
        self.outcome.stopped_by = why
        self.close()

    # What the session does then.

    def _act(self, actions: Actions) -> None:
        """Carry out each action before the machine yields the next: the end of a step may end the recording."""
        for action in actions:
            match action:
                case Do():
                    self._does[action]()
                case Enter(phase):
                    self.log.enter_phase(phase)
                case SetMark(mark):
                    self._device.mark(mark)
                case EndStep(ended_ns):
                    self._end_step(ended_ns)
                case Say(message):
                    self._notes.add(message)

    def _begin_step(self) -> None:
        self.log.enter_phase(Phase.BETWEEN, step=self.outcome.number)
        ended_ns = self._open_step.end_ns
        self._open_step = OpenStep() if ended_ns is None else OpenStep(start_ns=ended_ns)
        self._machine.step_began()

    def _see_model(self) -> None:
        self._forward_ns = time_ns()
        self._note_models()
        self._gradients.watch()

    def _note_models(self) -> None:
        self.models.note()
        self.outcome.model |= bool(self.models.parameters_at)

    def _observe(self, *, recomputing: bool = False) -> None:
        self._forward.enter(recomputing=recomputing)
        depth.make_room()

    def _leave_ops(self) -> None:
        if self._forward.active:
            self._forward.leave()

    def _leave_forward(self) -> None:
        depth.take_room()
        self._leave_ops()
        if self._steering is not None:
            self._steering.leave()

    def _keep_recomputed(self) -> None:
        for address in self._forward.take_recomputed():
            self.log.fact(Fact.RECOMPUTED, address)

    def _begin_backward(self) -> None:
        self._forward.backward_started()
        self._gradients.backward_started()

    def _end_backward(self) -> None:
        self._forward.backward_ended()
        self._gradients.backward_ended()

    def _note_inputs(self) -> None:
        if not self.outcome.model:
            # A model without parameters has run: under torch.func plain tensors take the parameters' places.
            self.models.changed = True
            self._note_models()
        self._gradients.note_inputs()

    def _end_step(self, ended_ns: int | None) -> None:
        """Write the step that has ended, now or earlier at ``ended_ns``; then go on or stop."""
        if ended_ns is not None and self.recording:
            self._open_step.end_ns = ended_ns
            self.log.begin_step(ended_ns, self.outcome.number + 1)
        if active() is not self:  # the session was forgotten in the middle of a step
            return
        if self.options.timed:
            self.stopwatch.lap()
            self.outcome.steps += 1
            if self.outcome.steps == self.options.skip + (self.options.steps or 0):
                self._done()
        elif self.recording:
            self._end_recorded_step()
        else:
            self._end_skipped_step()

    def _end_skipped_step(self) -> None:
        self.outcome.steps += 1
        if self.outcome.steps == self.options.skip:
            try:
                with SIGNALS:
                    self._begin()
            except UsageError as error:
                self._give_up(str(error))

    def _end_recorded_step(self) -> None:
        before = self.outcome.recorded
        try:
            with SIGNALS, collection_paused():
                self._append_step()
        finally:
            if self.outcome.recorded > before:
                self._step_recorded()

    def _append_step(self) -> None:
        try:
            raw, taken = self.source.drain(), self._device.take()
            self._write(raw, taken, self._open_step.record(self.outcome.number))
        except RecordingError as error:
            self._give_up(str(error))
            return
        self.outcome.steps += 1
        self.outcome.recorded += 1
        self._begin_step()

    def _step_recorded(self) -> None:
        try:
            if self._on_step is not None:
                self._on_step(self.outcome.recorded)
        finally:
            if self.outcome.recorded == self.options.steps:
                self._done()
            elif self.outcome.recorded == MOST_STEPS:
                self.stop_recording(f"the recording was full: it has at most {MOST_STEPS:,} steps")

    def _done(self) -> None:
        """End the recording: all requested steps have ended."""
        over = self._over  # if so, the last step was found at the script's end, and nothing is left to stop
        try:
            self.close()
        finally:
            if self._on_done is not None and not over:
                self._on_done()

    def _give_up(self, why: str) -> None:
        """End the recording because the file cannot be written; the training goes on."""
        self._notes.add(why)
        if self.recording:
            self._leave_forward()
            self._machine.recording = False
            self.source.stop()
        self.stop_recording(why)

    def _end_recording(self, failure: BaseException | None) -> None:
        self._leave_forward()
        self._machine.recording = False
        raw, taken, step = self.source.stop(), self._device.take(), None
        if ended_with(failure, taken[1], self._forward_ns):
            step = self._unfinished_step()
        self.models.note()  # as at the start of every forward
        if failure is None:
            if self.source.kind is SourceKind.SIMULATED:
                self.log.misses.guarded(self._warn_of_modules)()
            states = self._hooks.optimizers.note_idle(self.optimizers)
            inputs = self.writer.inputs_left(raw) if self.writer is not None else set()
            self._holders.note_rest(self.models, states, self.source.blocks(), inputs)
        try:
            self._write(raw, taken, step)
        except RecordingError as error:  # as in _give_up: the script goes on
            self.outcome.stopped_by = str(error)

    def _warn_of_modules(self) -> None:
        """Warn of trained modules that never ran: on a device without data the script may have passed them over."""
        idle, trained = self.models.never_ran(self.optimizers)
        if idle:
            self._notes.add(warning(_NEVER_RAN.format(idle=len(idle), trained=trained, name=idle[0])))

    def _unfinished_step(self) -> StepRecord:
        """The step in which memory ran out, or the script's setup; notes what else is known by then."""
        self.models.add_registered()
        for optimizer in self.optimizers:
            self._hooks.optimizers.note_kept(optimizer)
        self.log.misses.guarded(self._hooks.optimizers.note_waiting)(self.optimizers)
        if self.log.phase == Phase.OPTIMIZER:
            self._update.end()
        self.outcome.unfinished = self.outcome.number
        return self._open_step.record(self.outcome.number, finished=False)

    def _write(self, raw: RawEvents, taken: Taken, step: StepRecord | None) -> None:
        assert self.writer is not None
        self.writer.write(raw, taken, step, last=not self.recording)
        self._casts.forget_dead()
