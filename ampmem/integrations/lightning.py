"""A callback for Lightning's Trainer, imported as ``lightning`` or as ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ampmem.errors import UsageError
from ampmem.integrations.loggers import LoggedRow, keep_in_wandb
from ampmem.integrations.training import FewStepsCallback, going_on

_HOSTS = ("lightning.pytorch", "pytorch_lightning")


def _callbacks() -> tuple[type, ...]:
    """``Callback`` of each Lightning that the program has imported; if it has none, of the first installed one."""
    imported = [sys.modules[name] for name in _HOSTS if hasattr(sys.modules.get(name), "Callback")]
    if imported:
        return tuple(host.Callback for host in imported)
    for name in _HOSTS:
        try:
            return (import_module(name).Callback,)
        except ImportError:
            continue
    raise UsageError("the package lightning is not installed: pip install lightning")


class AmpmemCallback(FewStepsCallback, *_callbacks()):  # type: ignore[misc]
    """Records a few steps of each ``trainer.fit()``, and gives the Trainer's loggers the results.

    The recording and the page go to the folder of the Trainer's first logger, or to ``default_root_dir``. ``skip``
    steps pass first, then ``steps`` are recorded; ``log_to`` are loggers besides the Trainer's own, as for
    :func:`ampmem.log_to`.

    ``page``, ``stacks``, ``device``, ``watch``, ``every`` and ``keep`` are those of :func:`ampmem.log_to`.

    Raises:
        UsageError: ``log_to`` has something that is not a logger, or ``skip``, ``steps`` or ``device`` is invalid.
    """

    def _start_over(self) -> None:
        super()._start_over()
        self._number = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer = trainer
        folder = trainer.log_dir or trainer.default_root_dir  # log_dir broadcasts: all ranks must ask for it
        self.few_steps.training_begins(Path(folder), trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._number = trainer.global_step
        self.few_steps.step_begins(trainer.global_step, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning numbers a step's own values by the updates before the step.
        self.few_steps.step_ends(trainer.global_step, self._number)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._over()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._over(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._over()

    def _over(self, error: BaseException | None = None) -> None:
        self.few_steps.training_ends(error)
        self.trainer = None

    def _log_to_host(self, rows: Sequence[LoggedRow]) -> None:
        for logger in () if self.trainer is None else self.trainer.loggers:
            with going_on():
                for row in rows:
                    logger.log_metrics(dict(row.values), step=row.step)

    def _keep_with_host(self, page: Path) -> None:
        for logger in () if self.trainer is None else self.trainer.loggers:
            with going_on():
                _keep(logger, page)


def _keep(logger: Any, page: Path) -> None:
    """Store the page with the run, if the logger takes files."""
    kind = type(logger).__name__
    if kind == "WandbLogger":
        keep_in_wandb(logger.experiment, page)
    elif kind == "MLFlowLogger":
        logger.experiment.log_artifact(logger.run_id, str(page))
