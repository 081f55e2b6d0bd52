"""What a session has seen of a script so far, and whether there is something to show."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.errors import ModelElsewhere, NothingRecorded
from ampmem.failure import FailureRecord
from ampmem.recorder.marker import FORMS, Marker
from ampmem.vocabulary import StepOn

IN_PLACE = (
    "{model} was compiled in place (model.compile()), and ampmem does not see the forward of such a model; use model "
    "= torch.compile(model) instead"
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Counts and facts that say whether a recording can be shown, or why not."""

    skip: int
    """Number of steps to skip before the recording begins."""
    step_on: StepOn | Marker = StepOn.FOUND
    """The event or function that ends a step."""
    model: bool = False
    """Whether a model with parameters has run."""
    backwards: int = 0
    children: int = 0
    """Number of child processes that the script started, without those that load data."""
    optimizer: bool = False
    """Whether the script has, or had, a ``torch.optim`` optimizer."""
    returned: bool = False
    """Whether the function named by ``--step-on`` has returned."""
    elsewhere: str | None = None
    """The place of another function of that name that has run."""
    other_thread: str | None = None
    """The class of a model that ran forward on a thread that is not recorded."""
    in_place: str | None = None
    """The class of a model that ``model.compile()`` compiled in place."""
    steps: int = 0
    """Number of steps that have ended, including skipped ones."""
    first_step: int = 0
    """The number of the first step."""
    recorded: int = 0
    """Number of steps in the recording."""
    unfinished: int | None = None
    """Index of the step in which memory ran out, if that ended the recording."""
    stopped_by: str | None = None
    """Why the recording ended before the script, if it did."""
    failure: FailureRecord | None = None
    """Why the script failed, if it did while it was recorded."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the script while it was recorded."""
        return self.failure is not None and self.failure.interrupted

    @property
    def number(self) -> int:
        """The number of the running step."""
        return self.first_step + self.steps

    def check(self, elsewhere: str | None, unseen: str = "", nothing: str | None = None) -> None:
        """Raise :class:`NothingRecorded` if there is nothing to show.

        ``elsewhere`` says where the model was, ``unseen`` which errors hid something, ``nothing`` why no memory of the
        device was recorded.
        """
        missing = self.missing()
        if missing is not None:
            raise NothingRecorded(missing + unseen)
        if elsewhere is not None and self.unfinished is None:
            raise ModelElsewhere(elsewhere)
        if nothing is not None and self.unfinished is None:
            raise NothingRecorded(nothing)

    def missing(self) -> str | None:
        """Why there is nothing to show; ``None`` if there is something."""
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
            f"{why.partition(':')[0]} in the script's own process: it started {many}, and child processes are not "
            "recorded; if the training runs there, call the training function without multiprocessing, or spawn "
            "ranks, which are recorded once they call init_process_group"
        )

    def _why_nothing(self) -> str | None:
        if self.step_on is StepOn.EVALUATION and not self.recorded:
            return "no evaluation was seen: no model that is trained ran in eval mode, or with gradients off"
        if self.steps < self.skip or (0 < self.steps == self.skip and not self.model):
            made = "1 step" if self.steps == 1 else f"{self.steps} steps"
            return f"no step was recorded: the script made {made} and --skip is {self.skip}; use a smaller --skip"
        if not self.model and self.other_thread is not None:
            return (
                f"no model was seen on the recorded thread: {self.other_thread} ran forward on another thread. ampmem "
                "records the thread on which it starts: use ampmem.profile() in the thread that trains"
            )
        if not self.model and self.in_place is not None:
            return f"no model was seen: {IN_PLACE.format(model=self.in_place)}"
        if not self.model:
            return "no model was seen: ampmem follows torch.nn.Module forwards, and none with parameters ran"
        if self.backwards == 0 and self.step_on in (StepOn.FOUND, StepOn.OPTIMIZER, StepOn.BACKWARD):
            return (
                "no backward was seen: there is no training step to show; does the script train? To record inference, "
                "use --step-on forward (step_on='forward' in Python)"
            )
        if self.recorded == 0:
            return f"no step ended: {self._without_end()}"
        return None

    def _without_end(self) -> str:
        if self.step_on is StepOn.FORWARD:
            return "a forward started, but none returned"
        if isinstance(self.step_on, Marker):
            return f"{self.step_on.text} returned before any model had run"
        if self.step_on is StepOn.OPTIMIZER or self.optimizer:
            return (
                "no torch.optim optimizer made an update; if the script updates parameters by other means, use "
                "--step-on backward, or name the function that makes a step: --step-on FILE.py:FUNCTION"
            )
        return (
            "no backward ended after a model had run forward; name the function that makes a step: --step-on "
            "FILE.py:FUNCTION"
        )

    def _never_returned(self, marker: Marker) -> str:
        there = f"; a function with that name returned in {self.elsewhere}" if self.elsewhere else ""
        return (
            f"no step ended: --step-on {marker.text} names a function that never returned{there}. Name a function "
            f"that the script calls once per step: --step-on takes {FORMS}"
        )
