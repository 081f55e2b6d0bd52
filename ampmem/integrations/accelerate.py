"""For training loops under accelerate: :func:`record`, and a tracker for loops that cannot be changed."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ampmem.errors import UsageError
from ampmem.integrations.loggers import Logger, logger_of, loggers_of
from ampmem.integrations.training import few_steps_of_loop, going_on, wanted_of

try:
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise UsageError("the package accelerate is not installed: pip install accelerate") from error


@contextmanager
def record(
    accelerator: Any,
    *,
    folder: str | Path | None = None,
    skip: int = 2,
    steps: int = 3,
    first_step: int = 0,
    page: bool = True,
    stacks: bool = True,
    device: str = "auto",
    watch: bool = False,
    every: int = 500,
    keep: int = 3,
) -> Iterator[None]:
    """Record a few steps of the loop in the ``with`` block, and give the accelerator's trackers the results.

    Like :func:`ampmem.log_to`, with all trackers that ``accelerator.init_trackers`` has begun. By default the files go
    to the accelerator's ``logging_dir``, else its ``project_dir``, else the current directory.

    Raises:
        UsageError: on entering, when an argument is invalid.
    """
    wanted = wanted_of(
        skip=skip, steps=steps, page=page, stacks=stacks, device=device, watch=watch, every=every, keep=keep
    )
    if folder is None:
        folder = accelerator.logging_dir or accelerator.project_dir or "."
    loggers = [_logger_of(tracker) for tracker in accelerator.trackers if not isinstance(tracker, AmpmemTracker)]
    with few_steps_of_loop(wanted, Path(folder), first_step, loggers):
        yield


def _logger_of(tracker: Any) -> Logger:
    """The logger for a tracker; for wandb its run itself, as wandb's tracker passes on steps that are over by then."""
    return logger_of(tracker.tracker if tracker.name == "wandb" else tracker)


class AmpmemTracker(GeneralTracker):  # type: ignore[misc]
    """Records a few steps between ``accelerator.init_trackers`` and ``accelerator.end_training``.

    A tracker gets neither the model nor the steps, and knows no other tracker: ampmem finds the steps by itself, and
    the results go to ``log_to``, as for :func:`ampmem.log_to`. Values that the loop logs go to the other trackers.
    accelerate begins trackers on the main process only: with several ranks only that one is recorded.

    Raises:
        UsageError: ``log_to`` has something that is not a logger, or an argument is invalid.
    """

    name = "ampmem"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self,
        folder: str | Path = ".",
        *,
        skip: int = 2,
        steps: int = 3,
        first_step: int = 0,
        page: bool = True,
        stacks: bool = True,
        device: str = "auto",
        log_to: Any = (),
        watch: bool = False,
        every: int = 500,
        keep: int = 3,
    ) -> None:
        super().__init__()
        self._wanted = wanted_of(
            skip=skip, steps=steps, page=page, stacks=stacks, device=device, watch=watch, every=every, keep=keep
        )
        self._folder, self._first_step = Path(folder), first_step
        self._loggers = loggers_of(log_to)
        self._block = ExitStack()

    @property
    def tracker(self) -> None:
        """No run of a service: this tracker has none."""
        return None

    def start(self) -> None:
        """Begin recording; ``accelerator.init_trackers`` calls it."""
        with going_on():
            self._block.enter_context(few_steps_of_loop(self._wanted, self._folder, self._first_step, self._loggers))
            atexit.register(self._at_exit)  # registered after the recording's own, so that it runs before it

    def finish(self) -> None:
        """End recording; ``accelerator.end_training`` calls it."""
        atexit.unregister(self._at_exit)
        with going_on():
            self._block.close()

    def _at_exit(self) -> None:
        """End the recording of a training that failed, which never calls :meth:`finish`."""
        error = sys.last_value if isinstance(getattr(sys, "last_value", None), BaseException) else None
        with going_on():
            self._block.__exit__(None if error is None else type(error), error, None)
