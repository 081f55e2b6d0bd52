"""How far a script has got while it was recorded, and whether that is enough to show."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.errors import ModelElsewhere, NothingRecorded
from ampmem.failure import FailureRecord
from ampmem.recorder.marker import FORMS, Marker
from ampmem.vocabulary import StepOn

IN_PLACE = (
    "{model} was compiled in its place (model.compile()), and the forward of such a model is not seen; write "
    "model = torch.compile(model)"
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a session has seen so far."""

    skip: int
    """How many steps are to pass before the recording begins."""
    step_on: StepOn | Marker = StepOn.FOUND
    """What ends a step."""
    model: bool = False
    """Whether a model with parameters has run."""
    backwards: int = 0
    evaluations: int = 0
    """Outermost forwards of a model with gradients off."""
    children: int = 0
    """Child processes that the script has started, but for those that load data."""
    optimizer: bool = False
    """Whether there is, or was, a ``torch.optim`` optimizer."""
    returned: bool = False
    """Whether the function has returned whose returns end steps."""
    elsewhere: str | None = None
    """Where another function of that name has run."""
    other_thread: str | None = None
    """The class of a model that ran forward on another thread than the recorded one."""
    in_place: str | None = None
    """The class of a model that ``model.compile()`` compiled in its place."""
    steps: int = 0
    """Steps that have ended, those that were skipped too."""
    first_step: int = 0
    """The number that the first of them has."""
    recorded: int = 0
    """Those of them that are in the recording."""
    unfinished: int | None = None
    """Index of the step in which memory ran out, when the recording ended with that."""
    stopped_by: str | None = None
    """Why the recording ended before the script did, when it did."""
    failure: FailureRecord | None = None
    """Why the script failed, if it did and the recording had not ended by then."""

    @property
    def number(self) -> int:
        """The number of the step that has not ended yet."""
        return self.first_step + self.steps

    def count_evaluation(self) -> None:
        """A model runs with gradients off."""
        self.evaluations += 1

    def check(self, elsewhere: str | None, unseen: str = "", nothing: str | None = None) -> None:
        """Raise :class:`NothingRecorded` when there is nothing to show.

        ``elsewhere`` says where the model was, ``unseen`` what could not be looked at, ``nothing`` why there is no
        memory of the recorded device.
        """
        missing = self.missing()
        if missing is not None:
            raise NothingRecorded(missing + unseen)
        if elsewhere is not None and self.unfinished is None:
            raise ModelElsewhere(elsewhere)
        if nothing is not None and self.unfinished is None:
            raise NothingRecorded(nothing)

    def missing(self) -> str | None:
        """Why there is nothing to show; ``None`` when there is something."""
        if self.unfinished is not None:
            return None
        if self.stopped_by and self.recorded == 0:
            return f"no step was recorded: {self.stopped_by}"
        if isinstance(self.step_on, Marker) and not self.returned:
            return self._never_returned(self.step_on)
        why = self._why_nothing()
        if why is None or self.children == 0:
            return why
        many = "a child process" if self.children == 1 else f"{self.children} child processes"
        return (
            f"{why.partition(':')[0]} in the script's own process: it started {many}, and what happens there is not "
            "recorded; if it trains there, have it call the function that trains without multiprocessing, or spawn "
            "ranks, which are recorded once they call init_process_group"
        )

    def _why_nothing(self) -> str | None:
        if self.steps < self.skip or (0 < self.steps == self.skip and not self.model):
            made = "1 step" if self.steps == 1 else f"{self.steps} steps"
            return f"no step was recorded: the script made {made} and --skip is {self.skip}; skip fewer"
        if not self.model and self.other_thread is not None:
            return (
                f"no model was seen on the recorded thread: {self.other_thread} ran forward on another one. ampmem "
                "records the thread on which it starts: use ampmem.profile() in the thread that trains"
            )
        if not self.model and self.in_place is not None:
            return f"no model was seen: {IN_PLACE.format(model=self.in_place)}"
        if not self.model:
            return "no model was seen: ampmem follows torch.nn.Module forwards, and none with parameters ran"
        if self.backwards == 0 and self.step_on in (StepOn.FOUND, StepOn.OPTIMIZER, StepOn.BACKWARD):
            return f"no backward was seen: {self._without_backward()}"
        if self.recorded == 0:
            return f"no step ended: {self._without_end()}"
        return None

    def _without_backward(self) -> str:
        instead = "to record inference, say --step-on forward (step_on='forward' in Python)"
        if self.evaluations:
            times = "once" if self.evaluations == 1 else f"{self.evaluations} times"
            return f"a model ran {times}, with gradients off; {instead}"
        return f"there is no training step to show; does the script train? {instead[0].upper()}{instead[1:]}"

    def _without_end(self) -> str:
        if self.step_on is StepOn.FORWARD:
            return "a forward began and none returned"
        if isinstance(self.step_on, Marker):
            return f"{self.step_on.text} returned before any model had run"
        if self.step_on is StepOn.OPTIMIZER or self.optimizer:
            return (
                "no torch.optim optimizer made an update; where the script updates by other means, say --step-on "
                "backward, or name the function that makes a step: --step-on FILE.py:FUNCTION"
            )
        return "no backward ended after a model had run forward; name the function that makes a step: --step-on"

    def _never_returned(self, marker: Marker) -> str:
        there = f"; one of that name returned in {self.elsewhere}" if self.elsewhere else ""
        return (
            f"no step ended: --step-on {marker.text} names a function that never returned{there}. "
            f"Name one that the script calls once for each step: --step-on takes {FORMS}"
        )
