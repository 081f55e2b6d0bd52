"""One recording session in the user's process: owns the source, every hook, the steps and the file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch.optim import Optimizer

from ampmem.errors import RecordingError, UsageError
from ampmem.events import NO_STEP, OomRecord, Phase, StepRecord
from ampmem.failure import FailureRecord
from ampmem.patching import Undo
from ampmem.recorder.device import DeviceWatch, Taken
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.follower import Follower
from ampmem.recorder.hooks import children, skimming
from ampmem.recorder.hooks.backward import GradientHooks
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.every import Hooks
from ampmem.recorder.hooks.forward import ForwardMode, ForwardObserver, SavedTensors
from ampmem.recorder.models.holders import Holders
from ampmem.recorder.models.live import collection_paused, live_at_start
from ampmem.recorder.models.models import Models
from ampmem.recorder.models.placement import Placement
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.models.variables import Variables
from ampmem.recorder.options import Options
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.process.active import active, claim, release
from ampmem.recorder.process.forks import forked_since
from ampmem.recorder.sources.base import RawEvents, Source
from ampmem.recorder.sources.choose import check_torch, choose_source
from ampmem.recorder.sources.cuda.oom import ended_with
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.steering.steering import Steering
from ampmem.recorder.steps import Stopwatch
from ampmem.recorder.update import RunningUpdate
from ampmem.recorder.writing.describe import Describer, Notes, run_record
from ampmem.recorder.writing.join import Joiner
from ampmem.recorder.writing.writer import StepWriter
from ampmem.recording import MOST_STEPS, RecordingWriter
from ampmem.signals import SIGNALS, opened
from ampmem.vocabulary import Arm, StepOn


class Session:
    """Records from :meth:`start` to :meth:`close`; leaves nothing of itself behind in torch. There is one at a time.

    ``source`` records in place of the one that ``options.device`` names, which cannot name a simulated one.
    ``on_step`` is called with the number of recorded steps after each, ``on_done`` after the last.
    """

    def __init__(
        self,
        options: Options,
        *,
        source: Source | None = None,
        on_step: Callable[[int], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        claim(self)  # before anything that takes a while: another thread may be here, too
        try:
            self._make(options, source)
        except BaseException:
            release(self)
            raise
        self._on_step, self._on_done = on_step, on_done
        self._over = False
        """Whether the script has come to its end."""

    def _make(self, options: Options, source: Source | None) -> None:
        self._notes = Notes(check_torch(options))
        self.options = options
        self.outcome = Outcome(skip=options.skip, step_on=options.step_on, first_step=options.first_step)
        self.stopwatch = Stopwatch(synchronize=options.synchronize)
        self._undo = ExitStack()
        self._undo.callback(release, self)
        self.forked = forked_since()
        self._storages = Storages()
        self._source = choose_source(options, self._storages) if source is None else source
        texts, stacks = Texts(), Stacks(options.stacks)
        self.log = Log(self._source.addresses, texts, self._source.see)
        self.log.misses.note = self._notes.add
        self.models = Models(texts, self.log)
        arm_seen = ArmSeen(device_type=self._source.device_type)
        self._steering: Steering | None = None
        if options.arm != Arm.AS_IS:
            self._steering = Steering(options.arm, options.dtype, self._source.device_type, self._notes.add)
        self._update = RunningUpdate(self.log, stacks, texts)
        placement = Placement(self.models, self.log, self._source.kind, self._source.device_type)
        self._device = DeviceWatch(self._source, self.log, texts, self._update, placement, stacks=options.stacks)
        self._make_hooks(texts, stacks, arm_seen)
        self._open_file = partial(self._open, texts, stacks, arm_seen)
        self.writer: StepWriter | None = None

    def _make_hooks(self, texts: Texts, stacks: Stacks, arm_seen: ArmSeen) -> None:
        log, models = self.log, self.models
        self._casts = CastHooks(log, models)
        self._holders = Holders(log, texts)
        mode = ForwardMode(log, self._casts, stacks, texts, self._notes.add)
        forward = ForwardObserver(log, mode, SavedTensors(log), self._source.owns_mode, self._notes.add)
        self._gradients = GradientHooks(log, models, texts)
        listener = self._follower = Follower(
            log=log,
            models=models,
            holders=self._holders,
            variables=Variables(log, texts),
            forward=forward,
            gradients=self._gradients,
            update=self._update,
            device=self._device,
            arm_seen=arm_seen,
            steering=self._steering,
            outcome=self.outcome,
            note=self._notes.add,
            end_step=self._end_step,
            skim=self._skim,
            stop=self._stop_recording,
            end=self.close,
        )
        held = (mode.saved.let_go, self._casts.let_go)
        known = (listener, self._source, log, models, texts, self._update, arm_seen, self.options)
        self._hooks = Hooks(*known, hold_tensors=held)
        self.forked_child = partial(children.forked, listener)
        self._unskim: Undo | None = None
        self._recording_hooks: list[Callable[[], Undo]] = [
            self._source.install,
            self._hooks.modules.install,
            forward.install,
            self._casts.install,
            *self._hooks.others,
        ]

    def _open(self, texts: Texts, stacks: Stacks, arm_seen: ArmSeen) -> StepWriter:
        """Create the recording."""
        options = self.options
        describer = Describer(
            forced=options.arm,
            source=self._source,
            device=self._device,
            models=self.models,
            optimizers=self._hooks.optimizers,
            arm_seen=arm_seen,
            steering=self._steering,
            notes=self._notes,
            outcome=self.outcome,
            places=self._hooks.places,
        )
        file = RecordingWriter(options.path, run_record(options, self._source), force=options.force)
        return StepWriter(file, Joiner(self.log, stacks, texts), texts, describer)

    @opened  # a handler that had to wait raises here, where nothing is left of what was begun
    def start(self) -> None:
        """Install the hooks, to record at once or after some steps; where that fails, nothing and no file is left."""
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
        if self._steering is not None:  # first, so that a region of ours is left before an update is marked
            self._undo.callback(self._steering.install())
        for install in self._hooks.early:  # these say when steps end that are not recorded, too
            self._undo.callback(install())
        if self.options.timed:
            self._undo.callback(self.stopwatch.install())
        elif self.options.skip == 0:
            self._begin()
        elif self.options.baseline:
            for optimizer in live_at_start(tensors=False)[0]:
                self.add_optimizer(optimizer)
        if self.options.step_on is StepOn.FORWARD:
            self._skim()

    def _skim(self) -> None:
        """From now on follow the forwards of a script that is not recorded, if nobody does yet."""
        to_come = self.options.timed or self.outcome.steps < self.options.skip
        if self._unskim is None and to_come:
            self._unskim = skimming.install(self._follower, self._hooks.modules.before)
            self._undo.callback(self._unskim)

    def close(self, failure: BaseException | None = None) -> None:
        """Stop recording, undo every hook, write what is left; the second time do nothing.

        ``failure`` is what the script ended with, if that was no end of its own. Some of what is in place is a
        thread's own: called on another thread, this only asks for the end, which comes when the recorded one next
        runs a module, a backward or an optimizer, or when it is over.
        """
        if active() is not self:
            return
        if not self._follower.on_own_thread():
            self._follower.end_asked = True
            return
        try:
            if failure is None:
                self._over = True
                self._follower.script_over()
        finally:
            if active() is self:  # else that was the last step
                with SIGNALS:
                    self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        try:
            if self._follower.recording:
                with collection_paused():
                    self._end_recording(failure)
        finally:
            self._undo.close()
            if self.writer is not None:
                try:
                    self.writer.close()
                except RecordingError as error:
                    self.outcome.stopped_by = str(error)

    def forget(self) -> None:
        """This process is a child that was just forked: the recording is its parent's, and nothing of it stays here."""
        recording = self._follower.recording
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.forget()
        with suppress(Exception):  # whatever fails, it is none of the script's
            self._follower.forget()
            if recording:
                self._source.abandon()
        with suppress(Exception):
            self._undo.close()

    def check(self) -> None:
        """Raise :class:`NothingRecorded` when there is no step, no model or no backward to show.

        It is a :class:`ModelElsewhere` when the model was not on the device that was recorded. A child that was
        forked has nothing to show and is not to say so.
        """
        if self.forked():
            return
        if self._hooks.calls is not None:
            self.outcome.elsewhere = self._hooks.calls.elsewhere
        self.outcome.check(self._device.elsewhere(), self.log.misses.why(), self.nothing())

    def nothing(self) -> str | None:
        """Why no memory of the device was recorded; ``None`` where some was."""
        return self._device.nothing()

    @property
    def device_type(self) -> str:
        """The type of torch device whose memory is recorded."""
        return self._source.device_type

    def failed(self, failure: FailureRecord) -> None:
        """The script has failed, which the recording is to say."""
        self.outcome.failure = failure
        self._notes.add(failure.note)

    def notes(self) -> list[str]:
        """What a reader has to know by now of the source, which may be there after the recording."""
        return self._source.notes()

    def late_ooms(self) -> list[OomRecord]:
        """The requests that have failed for want of memory since the recording ended, as far as the source saw them."""
        return self._device.take_late()

    def add_model(self, model: torch.nn.Module) -> None:
        """``model`` is what the user named."""
        self.models.add(model)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """``optimizer`` is what the user named, or was there before the recording."""
        self._follower.optimizer_made(optimizer)

    def manual_step(self) -> None:
        """The user says that a step ends here; from now on only that counts."""
        if self.forked():
            return
        if not self._follower.on_own_thread():
            raise UsageError("prof.step() was called on another thread than the one that is recorded")
        if self.log.step == NO_STEP and self._follower.recording:
            self._follower.manual_steps = True
            raise UsageError(
                "prof.step() was called before any model ran forward; call it at the end of an iteration "
                "(for inference, which runs with gradients off, pass step_on='forward')"
            )
        self._follower.manual_step()

    def _begin(self) -> None:
        """Start the source and the hooks that only matter while it runs."""
        self._hooks.compiled.show()
        if self._unskim is not None:
            self._unskim()
        self._source.check()
        if self.options.baseline or self.options.skip:
            optimizers, tensors = live_at_start(tensors=self._source.see is not None)
            self._storages.add(tensors, self._holders.state_of(optimizers))
            for optimizer in optimizers:
                self.add_optimizer(optimizer)
        self._undo.callback(self._storages.forget)
        self._undo.callback(self._gradients.remove)
        for install in self._recording_hooks:
            self._undo.callback(install())
        self._undo.callback(self._hooks.compiled.show)
        self._undo.callback(self._device.end)
        self._source.start(self._storages.baseline | self._hooks.data_parallel.blocks())
        self._device.begin()
        self._follower.recording = True
        if self.options.skip:
            self._follower.begin_step()

    def _end_step(self) -> None:
        """A step has ended: write it, then go on or stop."""
        if active() is not self:  # it was forgotten in the middle of a step
            return
        if self.options.timed:
            self.stopwatch.lap()
            self.outcome.steps += 1
            if self.outcome.steps == self.options.skip + (self.options.steps or 0):
                self._done()
        elif self._follower.recording:
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
            raw, taken = self._source.drain(), self._device.take()
            self._write(raw, taken, self._follower.open_step.record(self.outcome.number))
        except RecordingError as error:
            self._give_up(str(error))
            return
        self.outcome.steps += 1
        self.outcome.recorded += 1
        self._follower.begin_step()

    def _step_recorded(self) -> None:
        try:
            if self._on_step is not None:
                self._on_step(self.outcome.recorded)
        finally:
            if self.outcome.recorded == self.options.steps:
                self._done()
            elif self.outcome.recorded == MOST_STEPS:
                self._stop_recording(f"the recording was full: it has at most {MOST_STEPS:,} steps")

    def _done(self) -> None:
        """All steps that were asked for have ended."""
        over = self._over  # the last step may be seen only when the script has ended: there is nothing to stop then
        try:
            self.close()
        finally:
            if self._on_done is not None and not over:
                self._on_done()

    def _stop_recording(self, why: str) -> None:
        """End the recording although the script goes on."""
        self.outcome.stopped_by = why
        self.close()

    def _give_up(self, why: str) -> None:
        """The file cannot be written: that is no reason to stop somebody's training."""
        self._notes.add(why)
        if self._follower.recording:
            self._follower.leave_forward()
            self._follower.recording = False
            self._source.stop()
        self._stop_recording(why)

    def _end_recording(self, failure: BaseException | None) -> None:
        self._follower.leave_forward()
        self._follower.recording = False
        raw, taken, step = self._source.stop(), self._device.take(), None
        if ended_with(failure, taken[1], self._follower.forward_ns):
            step = self._unfinished_step()
        self.models.note()  # as every forward does when it starts
        if failure is None:
            states = self._hooks.optimizers.note_idle(self._follower.optimizers)
            self._holders.note_rest(self.models, states, self._source.blocks())
        try:
            self._write(raw, taken, step)
        except RecordingError as error:  # as in _give_up: the script goes on
            self.outcome.stopped_by = str(error)

    def _unfinished_step(self) -> StepRecord:
        """The step in which memory ran out, or else the script's setup; notes what else is known by now."""
        self.models.add_registered()
        for optimizer in self._follower.optimizers:
            self._hooks.optimizers.note_kept(optimizer)
        self.log.misses.guarded(self._hooks.optimizers.note_waiting)(self._follower.optimizers)
        if self.log.phase == Phase.OPTIMIZER:
            self._update.end()
        self.outcome.unfinished = self.outcome.number
        return self._follower.open_step.record(self.outcome.number, finished=False)

    def _write(self, raw: RawEvents, taken: Taken, step: StepRecord | None) -> None:
        assert self.writer is not None
        self.writer.write(raw, taken, step, last=not self._follower.recording)
        self._casts.forget_dead()
