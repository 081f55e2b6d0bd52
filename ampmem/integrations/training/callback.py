"""What the callbacks of all Trainers have in common: what they are asked for, and that it survives pickling."""

from __future__ import annotations

from typing import Any

from ampmem.integrations.training.few_steps import FewSteps, Recorded, Wanted
from ampmem.integrations.training.loggers import loggers_of


class FewStepsCallback:
    """To be named before the host's own class of callbacks."""

    def __init__(
        self,
        *,
        skip: int = 2,
        steps: int = 3,
        page: bool = True,
        stacks: bool = True,
        device: str = "auto",
        log_to: Any = (),
    ) -> None:
        super().__init__()
        self.wanted = Wanted(skip=skip, steps=steps, page=page, stacks=stacks, device=device)
        self.other_loggers = loggers_of(log_to)
        self._start_over()

    def __getstate__(self) -> dict[str, Any]:
        """What was asked for: a recording stays in its process."""
        return {"wanted": self.wanted, "other_loggers": self.other_loggers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wanted, self.other_loggers = state["wanted"], state["other_loggers"]
        self._start_over()

    def _start_over(self) -> None:
        self.few_steps = FewSteps(self.wanted, self._publish)
        self.trainer: Any = None

    def _publish(self, recorded: Recorded) -> None:
        """Give the host's loggers what the steps came to."""
        raise NotImplementedError
