"""One recording session in the script's process: it owns the source, the file, and the undos of all hooks.

What the hooks report goes to the session's :class:`~ampmem.recorder.script_listener.ScriptListener`, which writes it
down and tells the session of the ends of steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampmem.errors import ChangeNotForced, RecordingError, UsageError
from ampmem.events import NO_STEP, Phase, StepRecord
from ampmem.failure import FailureRecord
from ampmem.names import warning
from ampmem.patching import Undo
from ampmem.recorder.device import Taken
from ampmem.recorder.hooks import boundaries, children
from ampmem.recorder.hooks.every import Hooks
from ampmem.recorder.models.live import collection_paused, live_at_start
from ampmem.recorder.options import Options
from ampmem.recorder.outcome import Outcome
from ampmem.recorder.process import active, become_active, forked_since, release
from ampmem.recorder.running import Stopwatch
from ampmem.recorder.script_listener import ScriptListener
from ampmem.recorder.sources.base import RawEvents, Source
from ampmem.recorder.sources.choose import check_torch, choose_source
from ampmem.recorder.sources.cuda.oom import ended_with
from ampmem.recorder.sources.storages import Storages
from ampmem.recorder.steering.changes import ForcedChanges
from ampmem.recorder.torch_private.general import in_backward
from ampmem.recorder.writing import Describer, Joiner, Notes, StepWriter, run_record
from ampmem.recording import MOST_STEPS, RecordingWriter
from ampmem.signals import SIGNALS, let_in
from ampmem.vocabulary import OF_INFERENCE, SourceKind, StepOn

_ENDED_ELSEWHERE = "another thread ended the recording, which continued until the recorded thread next ran something"
_NEVER_RAN = (
    "{idle} of {trained} trained modules never ran, such as {name}: their activations and gradients are in no number. "
    "If the script chooses modules by data, which a simulated device does not have, give the choice with --assume"
)

_INFERENCE = "no backward ran, so this is a recording of inference: each forward of a model is a step"


class Session:
    """Records from :meth:`start` to :meth:`close`, and leaves nothing of itself behind in torch; one at a time.

    ``source`` replaces the one that ``options.device`` names, which cannot be a simulated one. ``inside`` is the ``id``
    of the outermost module that is running. ``on_step`` is called after each step with the number of recorded steps,
    ``on_done`` after the last.
    """

    LISTENER: type[ScriptListener] = ScriptListener
    """The class of the session's listener."""

    def __init__(
        self,
        options: Options,
        *,
        source: Source | None = None,
        inside: int | None = None,
        on_step: Callable[[int], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        become_active(self)  # first of all: another thread may start a session, too
        try:
            self._make(options, source)
        except BaseException:
            release(self)
            raise
        self._inside, self._on_step, self._on_done = inside, on_step, on_done
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
        self._undo = ExitStack()
        self._undo.callback(release, self)
        self.forked = forked_since()
        self._storages = Storages()
        self.source = choose_source(options, self._storages) if source is None else source
        self.listener = listener = self.LISTENER(self, options, self.source, self.outcome, self._notes.add)
        self.forked_child = partial(children.forked, listener)
        self.log, self.models, self.optimizers = listener.log, listener.models, listener.optimizers
        self._changes = ForcedChanges(options.forced, self._notes.add, options.precision)
        hold_tensors = (listener.mode.saved.before_swap, listener.casts.before_swap)
        self._hooks = Hooks(listener, self.source, options, hold_tensors=hold_tensors)
        self.computes_again = self._hooks.code.computes_again
        self._unskim: Undo | None = None
        self._look: Callable[[], object] | None = None
        """Called after each module while the script is not recorded."""
        self.writer: StepWriter | None = None

    def _open(self) -> StepWriter:
        """Create the recording."""
        describer = Describer(
            forced=self.options.precision,
            source=self.source,
            listener=self.listener,
            hooks=self._hooks,
            notes=self._notes,
            outcome=self.outcome,
        )
        file = RecordingWriter(self.options.path, run_record(self.options, self.source), force=self.options.force)
        return StepWriter(file, Joiner(self.log, self.listener.stacks, self._hooks.code), describer)

    @let_in  # a delayed signal handler raises here, when everything is undone
    def start(self) -> None:
        """Install the hooks, and record at once or after ``skip`` steps; an error leaves nothing, not even a file."""
        try:
            # First, and so undone at last: no handler of the script may raise in the middle of an undo.
            self._undo.callback(SIGNALS.hold())
            with SIGNALS:
                if not self.options.timed:
                    self.writer = self._open()
                self._install()
        except BaseException as error:
            self.close(error)
            if self.writer is not None:
                self.options.path.unlink(missing_ok=True)
            raise

    def _install(self) -> None:
        if (
            self.listener.steering is not None
        ):  # first: ampmem's autocast region must be left before an update is marked
            self._undo.callback(self.listener.steering.install())
        self._undo.callback(self._changes.install())
        for install in self._hooks.early:  # they also find the ends of steps that are not recorded
            self._undo.callback(install())
        if self.options.timed:
            self._undo.callback(self.stopwatch.install())
        elif not self.options.late:
            self._begin()
        elif self.options.baseline:
            self._find_optimizers(tensors=False)
        if self.options.step_on in OF_INFERENCE:
            self.skim()

    def _find_optimizers(self, *, tensors: bool) -> list[torch.Tensor]:
        """Add the optimizers that exist already; one that is not found here is added after its first update.

        Returns the live tensors, if ``tensors``.
        """
        optimizers, found = live_at_start(self.listener.variables.values(), tensors=tensors)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        return found

    def skim(self) -> None:
        """Follow the forwards of the script while it is not recorded, if they are not followed yet."""
        steps, skip = self.outcome.steps, self.options.skip
        to_come = self.options.timed or steps < skip or (self.options.step_on is StepOn.EVALUATION and steps == skip)
        if self._unskim is None and to_come:
            self._unskim = boundaries.install_skimming(
                self.listener, self._hooks.modules.before, self._look, self._inside
            )
            self._undo.callback(self._unskim)

    def follow(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin the recording with the forward of the outermost ``module`` if that is due, before its hooks run."""
        self.listener.skimmed(module, args)
        if self.recording:
            self._hooks.modules.before(module, args)

    def close(self, failure: BaseException | None = None) -> None:
        """Stop recording, undo every hook, and write what is left; a second call does nothing.

        ``failure`` is the exception that ended the script, if it was an error. Some hooks are per thread: on another
        thread this only asks for the end, which comes when the recorded thread next runs a module, a backward or an
        optimizer, or ends.
        """
        if active() is not self:
            return
        if threading.get_ident() != self._thread:
            self._end_asked = True
            return
        try:
            if failure is None:
                self._over = True
                self.listener.act(self.listener.machine.script_over())
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
            # Whatever the last transaction raised: torch must be as it was.
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
        # A copy of the parent: its hooks are undone here, its file must not be touched.
        with suppress(Exception):  # the script must not see errors of ampmem
            self.listener.leave_forward()
            self.listener.machine.forget()
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
        self.outcome.check(self.listener.placement.missing(), self.log.misses.why(), self.source.nothing())

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
        self.listener.optimizer_made(optimizer)

    def manual_step(self) -> None:
        """End the step here; from now on only this method ends steps."""
        if self.forked():
            return
        if threading.get_ident() != self._thread:
            raise UsageError("prof.step() was called on a thread that is not recorded")
        if self.log.step == NO_STEP and self.recording:
            self.listener.machine.manual = True
            raise UsageError(
                "prof.step() was called before any model ran forward; call it at the end of an iteration "
                "(for inference, which runs with gradients off, pass step_on='forward')"
            )
        self.listener.act(self.listener.machine.manual_step())

    def _begin(self) -> None:
        """Start the source, and install the hooks that are needed only while it runs."""
        # Compiled code may run now, with the module hooks out of place. They must be back before one is removed.
        self._hooks.compiled.show()
        if self._unskim is not None:
            self._unskim()
        self.source.check()
        if self.options.baseline or self.options.late:
            tensors = self._find_optimizers(tensors=self.source.see is not None)
            if tensors:
                self._storages.add(tensors, self.listener.holders.state_of(self.optimizers))
        self._undo.callback(self._storages.forget)
        # Before the hooks below, so it is undone after them: hooks on parameters are added while the script runs.
        self._undo.callback(self.listener.gradients.remove)
        observers = (self._hooks.modules, self.listener.forward, self.listener.casts)
        for install in (self.source.install, *(each.install for each in observers), *self._hooks.others):
            self._undo.callback(install())
        self._undo.callback(self._hooks.compiled.show)
        self._undo.callback(self.listener.device.end)
        # At last: each event from here on must find its facts in the log.
        self.source.start(self._storages.baseline | self._hooks.data_parallel.blocks())
        self.listener.device.begin()
        self.listener.machine.recording = True
        if self.options.late:
            self.listener.begin_step()

    @property
    def recording(self) -> bool:
        """Whether allocator events are being recorded now."""
        return self.listener.recording

    # Called by the listener.

    def on_thread(self) -> bool:
        """Whether the calling thread is the recorded one, or an autograd thread that runs its backward."""
        if threading.get_ident() == self._thread:  # called by each hook
            if self._end_asked:
                self._end_asked = False
                self._notes.add(_ENDED_ELSEWHERE)
                self.close()
            return True
        return self.source.device_type != "cpu" and self.listener.machine.in_engine and in_backward()

    def stop_recording(self, why: str) -> None:
        """End the recording; the script goes on."""
        self.outcome.stopped_by = why
        self.close()

    def end_step(self, ended_ns: int | None) -> None:
        """Write the step that has ended, now or earlier at ``ended_ns``; then go on or stop."""
        if ended_ns is not None and self.recording:
            self.listener.step.end_ns = ended_ns
            self.log.begin_step(ended_ns, self.outcome.number + 1)
        if active() is not self:  # the session was forgotten in the middle of a step
            return
        if self.options.timed:
            self.stopwatch.lap()
            self.outcome.steps += 1
            if self.outcome.steps == self.options.skip + (self.options.steps or 0):
                self._end_after_last_step()
        elif self.recording:
            self._end_recorded_step()
        else:
            self._end_skipped_step()

    def _end_skipped_step(self) -> None:
        self.outcome.steps += 1
        if self.outcome.steps == self.options.skip and self.options.step_on is not StepOn.EVALUATION:
            self._begin_now()

    def begin_evaluation(self) -> None:
        """Begin the recording with the forward that is about to run, unless it is to be skipped."""
        if self.outcome.steps == self.options.skip and not self.options.timed:
            self._begin_now()

    def end_evaluation(self) -> None:
        """End the recording: the evaluation is over."""
        self.outcome.stopped_by = "the evaluation was over"
        self._end_after_last_step()

    def _begin_now(self) -> None:
        try:
            with SIGNALS:
                self._begin()
        except UsageError as error:
            self._give_up(str(error))

    def _end_recorded_step(self) -> None:
        before = self.outcome.recorded
        try:
            # What the garbage collector freed meanwhile would be freed earlier than without ampmem.
            with SIGNALS, collection_paused():
                self._append_step()
        finally:
            if self.outcome.recorded > before:
                self._step_recorded()

    def _append_step(self) -> None:
        try:
            raw, taken = self.source.drain(), self.listener.device.take()
            self._write(raw, taken, self.listener.step.record(self.outcome.number))
        except RecordingError as error:
            self._give_up(str(error))
            return
        self.outcome.steps += 1
        self.outcome.recorded += 1
        self.listener.begin_step()

    def _step_recorded(self) -> None:
        try:
            if self._on_step is not None:
                self._on_step(self.outcome.recorded)
        finally:
            if self.outcome.recorded == self.options.steps:
                self._end_after_last_step()
            elif self.outcome.recorded == MOST_STEPS:
                self.stop_recording(f"the recording was full: it has at most {MOST_STEPS:,} steps")

    def _end_after_last_step(self) -> None:
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
            self.listener.leave_forward()
            self.listener.machine.recording = False
            self.source.stop()
        self.stop_recording(why)

    def _end_recording(self, failure: BaseException | None) -> None:
        self.listener.leave_forward()
        self.listener.machine.recording = False
        raw, taken, step = self.source.stop(), self.listener.device.take(), None
        if ended_with(failure, taken[1], self.listener.forward_ns):
            step = self._unfinished_step()
        self.models.note()  # as at the start of every forward
        if failure is None or step is not None:
            if failure is None and self.source.kind is SourceKind.SIMULATED:
                self.log.misses.guarded(self._warn_of_modules)()
            states = self._hooks.optimizers.note_idle(self.optimizers)
            inputs = self.writer.inputs_left(raw) if self.writer is not None else set()
            trains = next(iter(self.optimizers), None) is not None
            untrained = [root for root in self.models.roots() if trains and not self.optimizers.holding(root)]
            blocks = self.source.blocks()
            self.listener.holders.note_rest(self.models, states, blocks, inputs, untrained, failure)
        steps = [] if failure is not None else self._steps_of_inference()
        try:
            self._write(raw, taken, steps[0] if steps else step)
            if steps and self.writer is not None:
                self.writer.file.add_steps(steps[1:])
        except RecordingError as error:  # as in _give_up: the script goes on
            self.outcome.stopped_by = str(error)

    def _steps_of_inference(self) -> list[StepRecord]:
        """The outermost forwards as steps, if no backward has run, which a note says; else none.

        A script with an optimizer that ran a model with gradients on has ended before it trained, and one with child
        processes may train there.
        """
        outcome = self.outcome
        trains = outcome.backwards or outcome.children or (outcome.optimizer and self.log.in_graph)
        if outcome.step_on is not StepOn.FOUND or trains or outcome.recorded or not outcome.model:
            return []
        steps = self.listener.take_forwards(min(self.options.steps or MOST_STEPS, MOST_STEPS))
        if steps:
            outcome.step_on, outcome.steps, outcome.recorded = StepOn.FORWARD, len(steps), len(steps)
            self._notes.add(_INFERENCE)
        return steps

    def _warn_of_modules(self) -> None:
        """Warn of trained modules that never ran: on a device without data the script may have passed them over."""
        idle, trained = self.models.never_ran(self.optimizers)
        if idle:
            self._notes.add(warning(_NEVER_RAN.format(idle=len(idle), trained=trained, name=idle[0])))

    def _unfinished_step(self) -> StepRecord:
        """The step in which memory ran out, or the setup; logs the optimizers' state and the update that is running."""
        self.models.add_registered()
        for optimizer in self.optimizers:
            self._hooks.optimizers.note_kept(optimizer)
        self.log.misses.guarded(self._hooks.optimizers.note_waiting)(self.optimizers)
        if self.log.phase == Phase.OPTIMIZER:
            self.listener.update.end()
        self.outcome.unfinished = self.outcome.number
        return self.listener.step.record(self.outcome.number, finished=False)

    def _write(self, raw: RawEvents, taken: Taken, step: StepRecord | None) -> None:
        assert self.writer is not None
        self.writer.write(raw, taken, step, last=not self.recording)
        self.listener.casts.forget_dead()
