"""A state machine of steps and phases, driven by what the hooks report: pure, without torch.

The driver of :class:`StepMachine` calls a method for each event and carries out each action that it yields before it
asks for the next: the end of a step may end the recording, and the rest of the event depends on that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from itertools import combinations
from typing import NamedTuple, Protocol, TypeAlias

from ampmem.events import Phase
from ampmem.recorder.marker import Marker
from ampmem.vocabulary import OF_INFERENCE, Mark, StepOn

PATIENCE = 8
"""Updates of one optimizer in a step after which optimizers without an update are considered idle.

A GAN may train its critic several times per generator update (five times, as published most often); an optimizer that a
script makes and never steps must not keep a step open forever.
"""
MOST_LOOKS = 16
"""Maximum number of searches of the script's variables per step: multi-task scripts run many backwards."""
MOST_LOOKS_AT_EVALUATIONS = 64
"""Maximum number of such searches in the evaluations of a step: the growth of what they keep shows much earlier."""
WITHOUT_OPTIMIZER = (
    "the script has no torch.optim optimizer: a step ends with each backward (--step-on can name another end)"
)
FORWARD_UNSEEN = (
    "no module ran before the first backward or update: if a compiled function runs the model, its modules and the "
    "autocast inside it are not seen"
)
"""The note of a first step whose forward was not seen."""


class Do(Enum):
    """Actions for the session."""

    PAUSE = auto()
    """Read the device's events so far, if there are many: the script is between two phases."""
    BEGIN = auto()
    """Begin the recording: an evaluation starts."""
    END = auto()
    """End the recording: the evaluation is over."""
    BEGIN_STEP = auto()
    """Begin the first step; each later one begins where the one before ends."""
    SEE_MODEL = auto()
    """Note the parameters of the model that is about to run."""
    LOOK = auto()
    """Note which variables of the script hold memory."""
    LOOK_INSIDE = auto()
    """Note it, and what the objects in the variables hold: an evaluation may keep its results there."""
    OBSERVE = auto()
    """Start observing the ops of forward."""
    OBSERVE_AGAIN = auto()
    """Start observing the ops of a forward that backward recomputes."""
    LEAVE_OPS = auto()
    """Stop observing ops."""
    LEAVE = auto()
    """Deactivate all that belongs to forward alone: the dispatch mode, and ampmem's autocast."""
    END_FORWARD = auto()
    """End the outermost forward."""
    KEEP_RECOMPUTED = auto()
    """Note the tensors made by the recomputed forward."""
    NOTE_HOLDERS = auto()
    """Note the holders of all memory at the end of a step without backward."""
    BEGIN_BACKWARD = auto()
    """Begin backward: the engine is about to run."""
    END_BACKWARD = auto()
    """End backward: the engine has returned."""
    NOTE_INPUTS = auto()
    """Note the gradients of inputs."""
    END_UPDATE = auto()
    """End the update of an optimizer."""


class Enter(NamedTuple):
    """The script enters ``phase``."""

    phase: Phase


class SetMark(NamedTuple):
    """The script reaches ``mark`` of its step."""

    mark: Mark


class EndStep(NamedTuple):
    """A step ends: now, or earlier, at ``ended_ns``."""

    ended_ns: int | None


class Say(NamedTuple):
    """Put ``message`` into the recording's notes."""

    message: str


Actions: TypeAlias = Iterator[Do | Enter | SetMark | EndStep | Say]


class Trained(Protocol):
    """What the step machine asks about the script's optimizers, which are their ``id`` here."""

    def trains(self, optimizer: int) -> bool:
        """Whether any parameter of ``optimizer`` requires a gradient now: GANs freeze one model to train the other."""

    def has_gradients(self, optimizer: int) -> bool:
        """Whether any parameter of ``optimizer`` has a gradient now."""


class Rounds:
    """Counts the updates of a step, and decides for which optimizers it waits. An optimizer is its ``id`` here.

    A step waits for an optimizer without an update if its model ran in the step, as a GAN's generator runs while its
    discriminator is trained. It does not wait for an optimizer that shares a model with one that has updated: backward
    reached both, so both could have updated before the next forward. Nor does it wait if both have updated before, but
    never in one step: they alternate between steps. The same holds if both update several times in a row, unless the
    script freezes the models in turn: then the first optimizer's turn shows where a step begins.
    """

    def __init__(self) -> None:
        self.updates: dict[int, int] = {}
        """Number of updates in this step, by optimizer, in the order of their first update."""
        self._names: dict[int, str] = {}
        self._living: set[int] = set()
        self._inside: set[int] = set()
        """Optimizers that step inside another's step: a step does not wait for them."""
        self._ran: set[frozenset[int]] = set()
        """For each model that ran in this step, the optimizers that hold parameters of it."""
        self._ever: set[int] = set()
        self._resumes: set[int] = set()
        self._idle: set[int] = set()
        self._together: set[frozenset[int]] = set()
        """Pairs of optimizers that have updated in one step."""
        self._row: tuple[int, int] = (0, 0)
        """The optimizer that updated last, and its number of updates in a row."""
        self._rows: dict[int, int] = {}
        """The largest number of updates in a row of each optimizer."""
        self._dead = 0
        """A key that stands for the optimizer freed last: negative, unlike any ``id``."""

    @property
    def any(self) -> bool:
        """Whether the script has, or had, an optimizer."""
        return bool(self._names)

    @property
    def several(self) -> bool:
        """Whether the script has more than one optimizer."""
        return len(self.living) > 1

    @property
    def beside(self) -> set[int]:
        """Optimizers whose models ran in this step, without an update so far."""
        return set().union(*self._ran) - self.updates.keys()

    @property
    def living(self) -> set[int]:
        """The optimizers that steps may wait for."""
        return self._living - self._inside

    @property
    def first(self) -> int | None:
        """The living optimizer that updated first in this step; ``None`` if there is none, or patience is over."""
        waits = max(self.updates.values(), default=0) < PATIENCE
        return next((key for key in self.updates if key in self._living), None) if waits else None

    @property
    def rows(self) -> bool:
        """Whether any optimizer has updated several times in a row."""
        return max(self._rows.values(), default=0) > 1

    @property
    def begun(self) -> bool:
        """Whether a model has run in this step, and an update was made."""
        return bool(self._ran and self.updates)

    def made(self, optimizer: int, name: str, *, trains: bool = True) -> None:
        """Note that ``optimizer``, of the class ``name``, was made, and whether it ``trains`` any parameter then."""
        self._names[optimizer] = name
        self._living.add(optimizer)
        if trains:
            self._resumes.add(optimizer)

    def step_inside(self, optimizer: int) -> None:
        """Note that ``optimizer`` steps inside another's step."""
        if optimizer not in self._inside:
            self._inside.add(optimizer)
            self._leave_out(optimizer)

    def ran(self, optimizers: frozenset[int]) -> None:
        """Note the forward of a model of which ``optimizers`` hold parameters."""
        self._ran.add(optimizers - self._inside)

    def update(self, optimizer: int) -> None:
        """Note that ``optimizer`` made an update, or had it skipped."""
        self._names.setdefault(optimizer, "an optimizer")
        last, row = self._row
        self._row = (optimizer, row + 1 if last == optimizer else 1)
        self._rows[optimizer] = max(self._rows.get(optimizer, 0), self._row[1])
        self._idle.discard(optimizer)
        self._ever.add(optimizer)
        self._resumes.add(optimizer)
        self.updates[optimizer] = self.updates.get(optimizer, 0) + 1

    def due(self, *, ever: bool = False, turns: bool = False) -> set[int]:
        """The optimizers for which the step waits; with ``ever`` only those that have updated before.

        ``turns`` says that the script freezes models in turn.
        """
        if max(self.updates.values(), default=0) >= PATIENCE:
            return set()
        # At the script's end only those that have trained: one that was never used is nothing to wait for.
        beside = self.beside & self._ever if ever else self.beside
        return {optimizer for optimizer in beside if self._is_due(optimizer, turns)}

    def resumes(self, optimizer: int) -> bool:
        """Whether ``optimizer`` has trained a parameter, so that it may do so again although all are frozen now."""
        return optimizer in self._resumes

    def end(self) -> str | None:
        """End the step; returns a note if it had several updates."""
        message = self._put_together()
        if max(self.updates.values(), default=0) >= PATIENCE:
            self._idle |= self.beside
        self._together |= set(map(frozenset, combinations(self.updates, 2)))
        self.updates, self._ran = {}, set()
        return message

    def died(self, optimizer: int) -> None:
        """Note that ``optimizer`` was freed; its updates of this step stay. Its ``id`` may be reused.

        It may be freed before the step is known to have ended, for example if it was local to a function.
        """
        # Python gives the id of a freed optimizer to a new one; a negative key is nobody's id.
        self._dead -= 1
        self._names[self._dead] = self._names.get(optimizer, "an optimizer")
        if optimizer in self.updates:
            self.updates[self._dead] = self.updates[optimizer]
            self._ran = {each | {self._dead} if optimizer in each else each for each in self._ran}
        self._living.discard(optimizer)
        self._inside.discard(optimizer)
        self._leave_out(optimizer)

    def _leave_out(self, optimizer: int) -> None:
        for group in (self._ever, self._resumes, self._idle):
            group.discard(optimizer)
        for counts in (self.updates, self._rows):
            counts.pop(optimizer, None)
        self._ran = {each - {optimizer} for each in self._ran}
        self._together = {pair for pair in self._together if optimizer not in pair}

    def _is_due(self, optimizer: int, turns: bool) -> bool:
        if optimizer in self._idle or any(optimizer in each and each & self.updates.keys() for each in self._ran):
            return False
        return optimizer not in self._ever or any(
            self._update_together(optimizer, other, turns) for other in self.updates
        )

    def _update_together(self, one: int, other: int, turns: bool) -> bool:
        in_rows = not turns and self._rows.get(one, 0) > 1 and self._rows.get(other, 0) > 1
        return frozenset((one, other)) in self._together and not in_rows

    def _put_together(self) -> str | None:
        optimizers, total = len(self.updates), sum(self.updates.values())
        if total <= 1:
            return None
        parts = list(self._counted())
        if optimizers > 1:
            return f"the updates of several optimizers are combined into one step: {', '.join(parts)}"
        waited = [self._names.get(key, "an optimizer") for key in self.beside]
        if total < PATIENCE or not waited:
            return f"several updates of one optimizer are combined into one step: {parts[0]}"
        return (
            f"several updates are combined into one step ({parts[0]}), because ampmem waited for an update of "
            f"{' and '.join(waited)}, whose model ran, too; later steps do not wait for it"
        )

    def _counted(self) -> Iterator[str]:
        """Texts for the optimizers that updated in this step and how often; equal ones are counted together."""
        alike = Counter((self._names[key], count) for key, count in self.updates.items())
        said: set[str] = set()
        for (name, count), optimizers in alike.items():
            other = name in said
            said.add(name)
            if optimizers > 1:
                yield f"{name} {_times(count)} each ({optimizers} {'other ' if other else ''}optimizers)"
            else:
                yield f"{'another ' if other else ''}{name} {_times(count)}"


class StepMachine:
    """The script's state. ``trained`` answers for which optimizers a step waits; ``step_on`` says what ends a step."""

    def __init__(self, step_on: StepOn | Marker, trained: Trained) -> None:
        self._step_on = step_on
        self.infers = step_on in OF_INFERENCE
        """Whether steps have neither a backward nor an update."""
        self._trained = trained
        self.rounds = Rounds()
        self.recording = False
        """Whether allocator events are being recorded now; set by the session."""
        self.phase = Phase.SETUP
        self.begun = False
        """Whether the first recorded step has begun."""
        self.manual = False
        """Whether the user calls the step method; updates then do not end steps."""
        self.in_engine = False
        """Whether the autograd engine is running."""
        self._inside_forward = False
        """Whether the engine was started inside a forward."""
        self._trains = False
        """Whether a backward has run."""
        self._ended_ns: int | None = None
        """Time of the last possible end of the step; the next forward shows whether it was the end."""
        self._before_evaluation, self._observed_before = Phase.SETUP, False
        """State before an evaluation: the phase, and whether forward was observed."""
        self._model_ran = False
        """Whether a model ran since the last batch: a module without parameters may then get the model's output."""
        self._in_model = False
        """Whether a model runs."""
        self._due = False
        """Whether the step ends with the running backward."""
        self._looked_back = False
        """Whether the step had its search of variables before its first forward with gradients."""
        self._forward_unseen = False
        """Whether the first step began without a forward; an update may still call a closure that has one."""
        self._looks = self._looks_at_evaluations = 0
        self._batches = 0
        """Number of steps of inference so far."""
        self._batch_over = False
        """Whether the forward of a step of inference has returned, and the step goes on."""
        self._in_evaluation = False
        """Whether the forward that runs unrecorded is one of an evaluation."""

    # Called by the session about the recording.

    def step_began(self) -> None:
        """A step begins: the first, or the next after one was written."""
        self.begun, self.phase = True, Phase.BETWEEN
        self._model_ran = self._due = self._looked_back = False
        self._looks = self._looks_at_evaluations = 0

    def forget(self) -> None:
        """Stop in a forked child, where nothing belongs to the recording."""
        self.recording = self.in_engine = self._inside_forward = False
        self._ended_ns = None

    # Forward. ``observed``: its ops are being observed; ``grad``: gradients are on.

    def forward_started(
        self, optimizers: frozenset[int] | None, *, grad: bool, observed: bool, recomputing: bool, trains: bool = False
    ) -> Actions:
        """An outermost module is about to run; ``recomputing`` if backward recomputes a forward.

        ``optimizers`` hold parameters of it; ``None`` if it is not part of a step, or no step waits. If it ``trains``,
        an evaluation before it is over.
        """
        if recomputing:
            yield Do.OBSERVE_AGAIN
            return
        yield from self._settle()
        if not self.recording:  # the step that has just ended was the last
            return
        if trains and self._step_on is StepOn.EVALUATION:
            yield Do.END
            return
        if optimizers is not None:
            self.rounds.ran(optimizers)
        if self._trains and grad and not self._looked_back:
            self._looked_back = True
            yield from self._look()
        elif (self.infers or not grad) and self._looks_at_evaluations < MOST_LOOKS_AT_EVALUATIONS:
            self._looks_at_evaluations += 1
            yield Do.LOOK_INSIDE
        yield from self._begin_forward(grad=grad, observed=observed)
        yield Do.OBSERVE

    def _begin_forward(self, *, grad: bool, observed: bool) -> Actions:
        yield Do.PAUSE
        evaluates = self._evaluates(grad=grad)
        if not (self.begun or evaluates):
            yield Do.BEGIN_STEP
        self._model_ran, self._in_model, self._forward_unseen = True, True, False
        yield Do.SEE_MODEL
        if evaluates:
            self._before_evaluation, self._observed_before = self.phase, observed
        yield from self._enter(Phase.EVALUATION if evaluates else Phase.FORWARD)

    def _evaluates(self, *, grad: bool) -> bool:
        """Whether a forward that starts now is an evaluation: inference steps, too, have no gradients."""
        if grad or self.infers:
            return False
        return self._trains or not isinstance(self._step_on, Marker)

    def forward_ended(self, *, raised: bool, grad: bool, stepping: bool) -> Actions:
        """The outermost module has returned, or ``raised``; ``stepping`` inside an optimizer's ``step``."""
        self._in_model = False
        if self.phase is Phase.BACKWARD:
            yield Do.KEEP_RECOMPUTED
            yield Do.LEAVE_OPS
            return
        if self.phase is Phase.EVALUATION:
            before = self._before_evaluation
            if before is not Phase.FORWARD or not self._observed_before:  # else the step's own forward goes on
                yield Do.END_FORWARD
            yield from self._enter(before)
            return
        yield Do.END_FORWARD
        self._batch_over = self.infers and self.recording and not (self.manual or raised)
        if self._batch_over and self._step_on is StepOn.EVALUATION:
            # What is computed from the outputs, such as a loss, belongs to the batch; its forward has ended here.
            yield from self._enter(Phase.BETWEEN)
            yield from self._enter(Phase.FORWARD)
            return
        if not grad:
            yield from self._rest(stepping=stepping)
        yield from self._end_batch()

    def _end_batch(self) -> Actions:
        """End the step of inference whose forward has returned, if any."""
        if not self._batch_over:
            return
        yield Do.LEAVE
        self._batches += 1
        # The search takes as long as many small batches, and batches of an evaluation leave the same behind.
        if self._step_on is StepOn.FORWARD or self._batches.bit_count() == 1:
            yield Do.NOTE_HOLDERS
        yield from self._finish()

    def skimmed(self, optimizers: frozenset[int] | None, *, evaluates: bool = False) -> Actions:
        """An outermost module is about to run, not recorded; ``optimizers`` as in :meth:`forward_started`.

        It is a forward of an evaluation if it ``evaluates``.
        """
        yield from self._settle()
        if not self.recording and optimizers is not None:
            self.rounds.ran(optimizers)
        self._in_evaluation = evaluates
        if evaluates and self._step_on is StepOn.EVALUATION:
            yield Do.BEGIN

    def skimmed_over(self) -> Actions:
        """The outermost module has returned while nothing is recorded."""
        if self.infers and not self.recording and (self._in_evaluation or self._step_on is StepOn.FORWARD):
            yield from self._finish()

    # Backward.

    def backward_started(self, *, in_forward: bool) -> Actions:
        """The autograd engine is about to run; ``in_forward`` inside an outermost module that is observed."""
        if not self.recording:
            return
        self.in_engine, self._inside_forward = True, in_forward
        yield from self._begin_unseen()
        yield from self._say_unseen()
        yield Do.LEAVE
        yield from self._look()
        self._trains = True
        yield Do.BEGIN_BACKWARD
        yield from self._enter(Phase.BACKWARD)
        yield SetMark(Mark.AFTER_FORWARD)

    def backward_ended(
        self, ended_ns: int, *, raised: bool, differentiable: bool, grad: bool, observed: bool, stepping: bool
    ) -> Actions:
        """The autograd engine has returned, or ``raised``; ``differentiable`` if it made a graph (``create_graph``)."""
        yield Do.END_BACKWARD
        if self.recording:
            self.in_engine = False
            yield Do.NOTE_INPUTS
            yield from self._rest(stepping=stepping)
            yield SetMark(Mark.AFTER_BACKWARD)
        inside_forward, self._inside_forward = self._inside_forward, False
        if inside_forward:  # torch.func.grad, or a model that computes forces
            yield from self._begin_forward(grad=grad, observed=observed)
            yield Do.OBSERVE
        elif differentiable and self.recording and self.begun and not stepping:
            yield from self._enter(Phase.FORWARD)  # a gradient penalty: what follows is part of the loss
            yield Do.OBSERVE
        elif not (self.manual or raised):
            yield from self._after_backward(ended_ns)

    def _after_backward(self, ended_ns: int) -> Actions:
        if self._due:
            self._due = False
            yield from self._after_update(ended_ns)
        elif self.recording and not self.begun:
            return
        elif self._step_on is StepOn.BACKWARD:
            yield from self._finish()
        elif self._step_on is StepOn.FOUND and not self.rounds.any:
            if self.recording:
                self._ended_ns = ended_ns  # the script may end the step itself, by prof.step()
            else:
                yield from self._finish()

    # Updates.

    def update_started(self) -> Actions:
        """An optimizer is about to update, or a GradScaler for it."""
        if self.recording:
            yield from self._begin_unseen()
            yield Do.LEAVE_OPS
            yield from self._look()
            yield from self._enter(Phase.OPTIMIZER)

    def updated(self, optimizer: int, ended_ns: int, *, in_backward: bool) -> Actions:
        """The outermost ``step`` of ``optimizer`` has returned, or was skipped."""
        self.rounds.update(optimizer)
        yield from self._say_unseen()
        if self.recording and self.phase is Phase.OPTIMIZER:
            yield Do.END_UPDATE
            yield from self._enter(Phase.BACKWARD if in_backward else Phase.BETWEEN)
            yield SetMark(Mark.AFTER_OPTIMIZER)
        if self.manual or self._step_on not in (StepOn.FOUND, StepOn.OPTIMIZER):
            return
        if in_backward:
            self._due = True  # the optimizer steps inside backward: the step ends with backward
        else:
            yield from self._after_update(ended_ns)

    def _after_update(self, ended_ns: int) -> Actions:
        if self._step_on is StepOn.OPTIMIZER or self._over():
            yield from self._finish()
        else:
            self._ended_ns = ended_ns

    def _over(self) -> bool:
        """Whether the last update certainly ends the step; if only possibly, :meth:`_settled` decides later."""
        if not self.rounds.several:
            return True
        if self._frozen():  # the next forward shows whose turn it is
            return False
        return self._settled() and not any(map(self._trained.has_gradients, self.rounds.beside))

    def _settled(self, *, script_over: bool = False) -> bool:
        """Whether the last update has ended the step, given that a forward comes next or the script is over."""
        frozen, rounds = self._frozen(), self.rounds
        if not script_over and rounds.first in frozen:
            others = rounds.living - frozen
            if others - rounds.updates.keys() or (others and rounds.rows):
                return False  # it is another's turn, as of a GAN's critic while the generator is frozen
        due = rounds.due(ever=script_over, turns=bool(frozen))
        return rounds.begun and not any(
            rounds.resumes(key) if key in frozen else self._trained.trains(key) for key in due
        )

    def _frozen(self) -> set[int]:
        """The optimizers of which no parameter requires a gradient now."""
        return {key for key in self.rounds.living if not self._trained.trains(key)}

    # Data, and ends of steps that the user sets.

    def data_started(self, *, transform: bool = False) -> Actions:
        """A DataLoader is about to make a batch: this step's, or the next one's before backward.

        With ``transform`` a module that is not part of a model is about to run: on the batch, unless a model has run
        since the batch was made.
        """
        if transform and self._model_ran:
            return
        if self.phase is Phase.FORWARD and not self._in_model:
            yield from self._enter(Phase.DATA)
            return
        self._model_ran = False
        if self.phase in (Phase.SETUP, Phase.BETWEEN):
            yield from self._enter(Phase.DATA)

    def data_ended(self, before: Phase) -> Actions:
        """The batch is made or transformed, or the DataLoader is exhausted; ``before`` is the phase to go back to."""
        if self.recording and self.phase is Phase.DATA:
            yield from self._enter(before)

    def manual_step(self) -> Actions:
        """End the step here; from now on only this method ends steps."""
        self.manual = True
        yield from self._finish()

    def function_returned(self) -> Actions:
        """The function named by ``--step-on`` has returned."""
        if self.manual or (self.recording and not self.begun):
            return
        if self.recording and not self._trains:  # inference
            yield Do.NOTE_HOLDERS
        yield from self._finish()

    def script_over(self) -> Actions:
        """End the step that is still undecided, if any: the script has ended."""
        yield from self._settle(script_over=True)

    # Shared parts.

    def _begin_unseen(self) -> Actions:
        """Begin the first step if its forward was not seen: a compiled function calls no module."""
        if not self.begun and self.rounds.any:
            self._forward_unseen = True
            yield Do.BEGIN_STEP
            yield Do.SEE_MODEL

    def _say_unseen(self) -> Actions:
        unseen, self._forward_unseen = self._forward_unseen, False
        if unseen:
            yield Say(FORWARD_UNSEEN)

    def _enter(self, phase: Phase) -> Actions:
        yield Enter(phase)
        self.phase = phase

    def _rest(self, *, stepping: bool) -> Actions:
        yield from self._enter(Phase.BETWEEN)
        if stepping:  # in a closure; right after BACKWARD this row would read as an update inside that backward
            yield from self._enter(Phase.OPTIMIZER)

    def _look(self) -> Actions:
        self._looks += 1
        if self._looks <= MOST_LOOKS:
            yield Do.LOOK

    def _settle(self, *, script_over: bool = False) -> Actions:
        """Decide whether the step has ended already: a forward begins, or the script is over."""
        yield from self._end_batch()
        ended_ns, self._ended_ns = self._ended_ns, None
        if ended_ns is None or self.manual:
            return
        if not self.rounds.any:
            yield Say(WITHOUT_OPTIMIZER)
        elif not self._settled(script_over=script_over):
            return
        yield from self._finish(ended_ns)

    def _finish(self, ended_ns: int | None = None) -> Actions:
        self._ended_ns, self._batch_over = None, False
        together = self.rounds.end()
        if together is not None and self._step_on is StepOn.FOUND and not self.manual:
            yield Say(together)
        yield EndStep(ended_ns)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
