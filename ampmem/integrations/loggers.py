"""Experiment loggers of all kinds behind one interface, and a recording as the numbers that they take.

The kind of a logger is recognised by its methods: none of their packages is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampmem.analysis.static_model.verdict import TOTAL
from ampmem.analysis.summary import Step, Summary
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.errors import UsageError
from ampmem.recording.watched import Row
from ampmem.vocabulary import Mark

PEAK = f"ampmem/peak/{TOTAL}"
REQUESTED = "ampmem/peak/requested"
"""The requested part of the peak, which is the sum of the categories, if the peak includes the rounding of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRow:
    """The values of one of the training's steps, which its loggers count as ``step``.

    Sizes are whole bytes, or bytes per parameter if the name says so.
    """

    step: int
    values: Mapping[str, float]


def rows(summary: Summary, numbers: Mapping[int, int]) -> tuple[LoggedRow, ...]:
    """A row for each step of the training; ``numbers`` has the training's step by the index of the recorded step.

    If several recorded steps are one step of the training, the one with the largest peak counts. The last row also has
    the values of the whole run. A recording whose sums are wrong gives no rows.
    """
    if summary.conservation.breach is not None:
        return ()
    largest: dict[int, Step] = {}
    for step in summary.steps:
        number = numbers.get(step.index)
        if step.finished and number is not None:
            largest[number] = max(step, largest.get(number, step), key=lambda each: each.peak.said)
    found = [
        LoggedRow(step=number, values=_of_step(step, largest.values())) for number, step in sorted(largest.items())
    ]
    if found:
        most = {f"ampmem/most/{category}": size for category, size in summary.most.items() if size}
        found[-1] = replace(found[-1], values={**found[-1].values, **most, **_static_model(summary)})
    return tuple(found)


def seen_row(row: Row) -> LoggedRow:
    """The values of a step of a watched run."""
    values: dict[str, float] = {
        "ampmem/watch/peak": row.peak,
        "ampmem/watch/allocated": row.alive,
        "ampmem/watch/host": row.host,
    }
    if row.reserved:
        values["ampmem/watch/reserved"] = row.reserved
    return LoggedRow(step=row.step, values=values)


def largest_row(found: Sequence[LoggedRow]) -> LoggedRow:
    """One row for all of ``found`` (at least one): the row with the largest peak, and the values of the whole run."""
    top = max(found, key=lambda row: row.values.get(PEAK, 0))
    return replace(top, values={**found[-1].values, **top.values})


def _of_step(step: Step, steps: Collection[Step]) -> dict[str, float]:
    """The values of ``step``, with zeros for categories of other ``steps``: loggers draw no lines across gaps."""
    there = [category for category in CATEGORIES if any(each.peak.categories[category] for each in steps)]
    values: dict[str, float] = {PEAK: step.peak.said}
    if step.peak.allocated is not None:
        values[REQUESTED] = step.peak.bytes
    values |= {f"ampmem/peak/{category}": step.peak.categories[category] for category in there}
    if step.peak_reserved is not None:
        values["ampmem/reserved"] = step.peak_reserved
    return values


def _static_model(summary: Summary) -> dict[str, float]:
    """The values after backward, if all of the static model holds."""
    parts = [part for part in summary.static_model if part.mark == Mark.AFTER_BACKWARD]
    total = next((part for part in parts if part.component == TOTAL), None)
    recipe = summary.static_recipe
    if recipe is None or total is None or summary.static_problem or not all(part.holds for part in parts):
        return {}
    return {
        "ampmem/static/total": total.measured_bytes,
        "ampmem/static/bytes_per_parameter": total.measured_bytes_per_param,
        "ampmem/static/rule_bytes_per_parameter": recipe.bytes_per_param,
    }


STEP = "ampmem/step"
"""The key of a row's step, for a logger that counts steps by itself."""


class Logger:
    """Hands values on to a ``writer``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Log each row at its step."""
        raise NotImplementedError

    def keep(self, file: Path) -> None:
        """Store ``file`` with the run, if the writer has a place for files."""
        _log_artifact(self._writer, file)


def logger_of(writer: Any) -> Logger:
    """The logger for ``writer``.

    A writer is TensorBoard's ``SummaryWriter``, a run of wandb or ``wandb`` itself, ``mlflow``, or any other object
    with ``add_scalar``, ``log_metrics``, ``log_metric`` or ``log``. Raises :class:`UsageError` for anything else.
    """
    if _has(writer, "add_scalar"):
        return _Scalars(writer)
    if _has(writer, "log") and _has(writer, "define_metric"):
        return _Wandb(writer)
    if _has(writer, "log_metrics"):
        return _Mlflow(writer) if _has(writer, "active_run") else _Metrics(writer)
    if _has(writer, "log_metric"):
        if "run_id" in _parameters(writer.log_metric):
            raise UsageError("an MlflowClient does not belong to a run: give the module mlflow, and start a run")
        return _SingleMetrics(writer)
    if _has(writer, "log"):
        return _Values(writer)
    raise UsageError(
        f"an object of type {type(writer).__name__} is not a logger: it has none of add_scalar, log_metrics, "
        "log_metric and log. Give a SummaryWriter, a run of wandb, mlflow, or an object with one of these"
    )


def loggers_of(writers: Any) -> list[Logger]:
    """The loggers for ``writers``: one writer, or several in a tuple or a list.

    Raises :class:`UsageError` if one of them is not a logger.
    """
    return [logger_of(writer) for writer in (writers if isinstance(writers, tuple | list) else (writers,))]


class _Scalars(Logger):
    """TensorBoard's ``SummaryWriter``, and objects with the same method. It stores numbers in single precision."""

    def log(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step)
        if _has(self._writer, "flush"):
            self._writer.flush()

    def keep(self, file: Path) -> None:
        """Nothing: TensorBoard has no place for files."""


class _Wandb(Logger):
    """A run of wandb, or the module.

    A run counts its own steps and takes no values for a step that is over. The count is left to the script: only the
    row of the largest peak is logged, with what the script logs next.
    """

    def log(self, rows: Sequence[LoggedRow]) -> None:
        if rows:
            row = largest_row(rows)
            self._writer.log({**row.values, STEP: row.step}, commit=False)

    def keep(self, file: Path) -> None:
        keep_in_wandb(self._writer, file)


class _Metrics(Logger):
    """Loggers that take several metrics and their step at once."""

    def log(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            self._writer.log_metrics(dict(row.values), step=row.step)


class _Mlflow(_Metrics):
    """``mlflow``, which would begin a run of its own if the script has none open, and leave it open.

    Raises :class:`UsageError` if no run is open.
    """

    def log(self, rows: Sequence[LoggedRow]) -> None:
        if self._writer.active_run() is None:
            raise UsageError("nothing is logged to mlflow, because no run is open: start one with mlflow.start_run()")
        super().log(rows)


class _SingleMetrics(Logger):
    """Loggers that take one metric at a time."""

    def log(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._writer.log_metric(name, value, step=row.step)


class _Values(Logger):
    """Loggers whose ``log`` takes several values, and their step if it has a parameter for it."""

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._takes_step = "step" in _parameters(writer.log)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            if self._takes_step:
                self._writer.log(dict(row.values), step=row.step)
            else:
                self._writer.log({**row.values, STEP: row.step})


def keep_in_wandb(run: Any, file: Path) -> None:
    """Store ``file`` among the files of ``run``."""
    run.save(str(file), base_path=str(file.parent), policy="now")


def _log_artifact(writer: Any, file: Path) -> None:
    """Store ``file`` with ``writer.log_artifact``, if that needs only a path, as MLflow's does, and not wandb's."""
    if not _has(writer, "log_artifact"):
        return
    needed = [
        parameter
        for parameter in _parameters(writer.log_artifact).values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) == 1 and needed[0].name in ("local_path", "path", "file", "filename", "artifact_path"):
        # MLflow reads all of a run then, and fails at a metric that the Trainer's thread has half written.
        if _has(writer, "flush_async_logging"):
            writer.flush_async_logging()
        writer.log_artifact(str(file))


def _has(writer: Any, name: str) -> bool:
    return callable(getattr(writer, name, None))


def _parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a method written in C has no signature
        return {}
