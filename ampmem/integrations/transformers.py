"""A callback for the Trainer of transformers."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampmem.errors import UsageError
from ampmem.integrations.loggers import LoggedRow, keep_in_wandb
from ampmem.integrations.training import FewStepsCallback, going_on
from ampmem.patching import Undo, patch

try:
    from transformers import Trainer, TrainerCallback
    from transformers.integrations import get_reporting_integration_callbacks
except ImportError as error:
    raise UsageError("the package transformers is not installed: pip install transformers accelerate") from error


class AmpmemCallback(FewStepsCallback, TrainerCallback):  # type: ignore[misc]
    """Records a few steps of each ``trainer.train()``, and gives the Trainer's loggers the results.

    The recording and the page go to ``output_dir``. ``skip`` steps pass first, then ``steps`` are recorded; ``log_to``
    are loggers besides the Trainer's own, as for :func:`ampmem.log_to`.

    ``page``, ``stacks``, ``device``, ``watch``, ``every`` and ``keep`` are those of :func:`ampmem.log_to`.

    Raises:
        UsageError: ``log_to`` has something that is not a logger, or ``skip``, ``steps`` or ``device`` is invalid.
    """

    def _start_over(self) -> None:
        super()._start_over()
        self._said: tuple[Any, Any, Any] | None = None
        _watched.add(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.few_steps.training_begins(Path(args.output_dir), state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.few_steps.step_begins(state.global_step, state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._said = (args, state, control)
        self.few_steps.step_ends(state.global_step, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._said = (args, state, control)
        self.few_steps.training_ends()

    def training_is_of(self, trainer: Any) -> None:
        """Note that ``trainer`` is about to train."""
        self.trainer = trainer

    def training_left(self, error: BaseException | None) -> None:
        """Note that ``trainer.train()`` is left, with ``error`` if it failed."""
        self.few_steps.training_ends(error)
        self.trainer = self._said = None

    def _log_to_host(self, rows: Sequence[LoggedRow]) -> None:
        if self.trainer is None or self._said is None:
            return
        args, state, control = self._said
        kinds = tuple(get_reporting_integration_callbacks(args.report_to))
        for reporter in self.trainer.callback_handler.callbacks:
            if isinstance(reporter, kinds):
                for row in rows:
                    with going_on():
                        now = replace(state, global_step=row.step)
                        reporter.on_log(args, now, control, logs=dict(row.values), model=self.trainer.model)

    def _keep_with_host(self, page: Path) -> None:
        if self._said is not None:
            _keep(self._said[0].report_to, page)


def _keep(report_to: list[str], page: Path) -> None:
    """Store the page with the open runs."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    with going_on():
        if "wandb" in report_to and wandb is not None and wandb.run is not None:
            keep_in_wandb(wandb.run, page)
    with going_on():
        if "mlflow" in report_to and mlflow is not None and mlflow.active_run() is not None:
            mlflow.log_artifact(str(page))


class _Watched:
    """Counts the living callbacks; while there is one, ``Trainer.train`` is patched to report its Trainer and its end.

    A ``TrainerCallback`` is not called when a training fails, and does not get the Trainer.
    """

    def __init__(self) -> None:
        self._alive = 0
        self._undo: Undo | None = None

    def add(self, callback: AmpmemCallback) -> None:
        self._alive += 1
        # Weakly, so that callbacks can die; when Python ends there is nothing left to put back.
        weakref.finalize(callback, self._gone).atexit = False
        if self._undo is None:
            self._undo = patch(Trainer, "train", _watching)

    def _gone(self) -> None:
        self._alive -= 1
        undo = self._undo
        if self._alive == 0 and undo is not None:
            self._undo = None
            undo()


_watched = _Watched()


def _watching(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def watched(trainer: Any, *arguments: Any, **options: Any) -> Any:
        ours = [each for each in trainer.callback_handler.callbacks if isinstance(each, AmpmemCallback)]
        for callback in ours:
            callback.training_is_of(trainer)
        failure: BaseException | None = None
        try:
            return train(trainer, *arguments, **options)
        except BaseException as error:
            failure = error
            raise
        finally:
            for callback in ours:
                callback.training_left(failure)
            # Its traceback refers to this frame: the cycle would keep what the training held alive.
            del failure

    return watched
