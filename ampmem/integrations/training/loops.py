"""For a training loop that is written by hand: :func:`log_to`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ampmem.api import Profile
from ampmem.events import Recording
from ampmem.integrations.training.few_steps import Recorded, Wanted, begin, finish, going_on
from ampmem.integrations.training.loggers import Logger, logger_of


@contextmanager
def log_to(
    *writers: Any,
    folder: str | Path = ".",
    skip: int = 2,
    steps: int = 3,
    first_step: int = 0,
    page: bool = True,
    stacks: bool = True,
    device: str = "auto",
) -> Iterator[None]:
    """Record a few steps of the training loop in the ``with`` block, and log what they came to when it ends.

    Whatever fails of that is said in one line on standard error, and the loop goes on.

    Args:
        writers: TensorBoard's ``SummaryWriter``, a run of wandb, ``mlflow``, or any object with ``add_scalar``,
            ``log_metrics``, ``log_metric`` or ``log``.
        folder: where the recording and the page go: ``memory-step2.ampmem`` and ``memory-step2.html``.
        skip: let this many steps pass first.
        steps: record this many.
        first_step: the number that the loop gives its first step.
        page: whether to write the page.
        stacks: record the Python stack of every op of the forward pass.
        device: whose memory to record: ``cuda``, ``cpu``, or ``auto`` for the GPU where torch sees one.

    Raises:
        UsageError: on entering, when a writer is none, or ``skip``, ``steps`` or ``device`` make no sense.
    """
    loggers = [logger_of(writer) for writer in writers]
    wanted = Wanted(skip=skip, steps=steps, page=page, stacks=stacks, device=device)
    with few_steps_of_loop(wanted, Path(folder), first_step, loggers):
        yield


@contextmanager
def few_steps_of_loop(wanted: Wanted, folder: Path, first_step: int, loggers: Sequence[Logger]) -> Iterator[None]:
    """Record the loop in the block, whose steps ampmem finds; they are counted from ``first_step``."""
    recorder: Profile | None = None
    with going_on():
        recorder = begin(wanted, folder, first_step, counted=True)
    try:
        yield
    except BaseException as error:
        _end(recorder, error, wanted, loggers)
        raise
    _end(recorder, None, wanted, loggers)


def _end(
    recorder: Profile | None,
    error: BaseException | None,
    wanted: Wanted,
    loggers: Sequence[Logger],
) -> None:
    def numbers(recording: Recording) -> dict[int, int]:
        return {step.index: step.index for step in recording.steps}

    with going_on():
        if recorder is not None:
            finish(recorder, error, wanted, numbers, lambda recorded: tell(loggers, recorded))


def tell(loggers: Sequence[Logger], recorded: Recorded) -> None:
    """Give ``loggers`` the rows and the page; what fails with one is no reason to leave out the next."""
    for logger in loggers:
        with going_on():
            logger.log(recorded.rows)
            if recorded.page is not None:
                logger.keep(recorded.page)
