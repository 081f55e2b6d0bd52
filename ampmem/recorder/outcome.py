"""How far a script has got while it was recorded, and whether that is enough to show."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.failure import FailureRecord


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a session has seen so far."""

    skip: int
    """How many steps are to pass before the recording begins."""
    model: bool = False
    """Whether a model with parameters has run."""
    backwards: int = 0
    steps: int = 0
    """Steps that have ended, those that were skipped too."""
    recorded: int = 0
    """Those of them that are in the recording."""
    unfinished: int | None = None
    """Index of the step in which memory ran out, when the recording ended with that."""
    stopped_by: str | None = None
    """Why the recording ended before the script did, when it did."""
    failure: FailureRecord | None = None
    """Why the script failed, if it did and the recording had not ended by then."""

    def missing(self) -> str | None:
        """Why there is nothing to show; ``None`` when there is something."""
        if self.unfinished is not None:
            return None
        if self.stopped_by and self.recorded == 0:
            return f"no step was recorded: {self.stopped_by}"
        if self.steps < self.skip:
            return f"no step was recorded: the script made {self.steps} steps and --skip is {self.skip}; skip fewer"
        if not self.model:
            return "no model was seen: ampmem follows torch.nn.Module forwards, and none with parameters ran"
        if self.backwards == 0:
            return "no backward was seen: there is no training step to show; does the script train?"
        if self.recorded == 0:
            return (
                "no step ended: no torch.optim optimizer made an update; call prof.step() at the end of each "
                "iteration (with ampmem.profile() as prof) when the script updates by other means"
            )
        return None
