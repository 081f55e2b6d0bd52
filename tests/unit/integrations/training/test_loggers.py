"""Loggers of all kinds: which one an object is, and what it is given."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampmem.errors import UsageError
from ampmem.integrations.loggers import PEAK, LoggedRow, logger_of, loggers_of
from ampmem.integrations.training import WorkingLoggers

ROWS = (LoggedRow(step=3, values={PEAK: 10, "x": 1}), LoggedRow(step=4, values={PEAK: 20, "x": 2}))


class Calls(list[Any]):
    """Notes what it is called with."""

    def note(self, *arguments: Any, **named: Any) -> None:
        self.append((*arguments, *named.items()))


def test_a_summary_writer_gets_each_value_at_its_step() -> None:
    calls = Calls()
    logger_of(SimpleNamespace(add_scalar=calls.note)).log(ROWS)
    assert calls == [(PEAK, 10, 3), ("x", 1, 3), (PEAK, 20, 4), ("x", 2, 4)]


def test_a_run_of_wandb_gets_the_largest_with_what_the_script_logs_next() -> None:
    calls = Calls()
    run = SimpleNamespace(log=calls.note, define_metric=calls.note)
    logger_of(run).log(ROWS)
    logger_of(run).log(())
    assert calls == [({PEAK: 20, "x": 2, "ampmem/step": 4}, ("commit", False))]


def test_mlflow_gets_a_row_at_once() -> None:
    calls = Calls()
    logger_of(SimpleNamespace(log_metrics=calls.note, log_metric=calls.note)).log(ROWS)
    assert calls == [({PEAK: 10, "x": 1}, ("step", 3)), ({PEAK: 20, "x": 2}, ("step", 4))]


def test_mlflow_begins_no_run_of_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calls, run = Calls(), list[str]()
    mlflow = SimpleNamespace(log_metrics=calls.note, log_artifact=calls.note, active_run=lambda: run or None)
    page = tmp_path / "page.html"

    def hand_on() -> None:
        working = WorkingLoggers([logger_of(mlflow)])
        working.log(ROWS)
        working.keep(page)

    hand_on()
    assert calls == []
    said = "ampmem: nothing is logged to mlflow, because no run is open: start one with mlflow.start_run()\n"
    assert capfd.readouterr().err == said
    run.append("open")
    hand_on()
    assert [call[1] for call in calls[:2]] == [("step", 3), ("step", 4)]


def test_one_metric_at_a_time() -> None:
    calls = Calls()

    def log_metric(key: str, value: float, step: int) -> None:
        calls.append((key, value, step))

    logger_of(SimpleNamespace(log_metric=log_metric)).log(ROWS[:1])
    assert calls == [(PEAK, 10, 3), ("x", 1, 3)]


def test_log_gets_the_step_where_it_takes_one_and_as_a_value_where_not() -> None:
    calls = Calls()

    def with_step(values: object, step: int) -> None:
        calls.append((values, step))

    def without(values: object) -> None:
        calls.append(values)

    logger_of(SimpleNamespace(log=with_step)).log(ROWS[:1])
    logger_of(SimpleNamespace(log=without)).log(ROWS[:1])
    assert calls == [({PEAK: 10, "x": 1}, 3), {PEAK: 10, "x": 1, "ampmem/step": 3}]


def test_what_is_no_logger_is_refused_with_what_would_be_one() -> None:
    with pytest.raises(UsageError, match="type dict is not a logger: it has none of add_scalar, log_metrics"):
        logger_of({})


def test_a_client_of_mlflow_is_refused_with_what_to_give() -> None:
    def log_metric(run_id: str, key: str, value: float) -> None:
        raise AssertionError

    with pytest.raises(UsageError, match="give the module mlflow"):
        logger_of(SimpleNamespace(log_metric=log_metric))


def test_a_file_goes_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    calls = Calls()

    def log_artifact(local_path: str, artifact_path: str | None = None) -> None:
        calls.append(local_path)

    def named(artifact: object, name: str) -> None:
        raise AssertionError("an object of the logger's own is wanted")

    page = tmp_path / "page.html"
    logger_of(SimpleNamespace(log_metrics=calls.note, log_artifact=log_artifact)).keep(page)
    logger_of(SimpleNamespace(log_metrics=calls.note, log_artifact=named)).keep(page)
    logger_of(SimpleNamespace(add_scalar=calls.note)).keep(page)
    assert calls == [str(page)]


def test_what_a_thread_still_writes_is_written_before_a_file_is_stored(tmp_path: Path) -> None:
    calls = Calls()

    def log_artifact(local_path: str) -> None:
        calls.append("stored")

    def flush() -> None:
        calls.append("written")

    logger_of(SimpleNamespace(log_metrics=calls.note, log_artifact=log_artifact, flush_async_logging=flush)).keep(
        tmp_path
    )
    assert calls == ["written", "stored"]


def test_one_logger_may_stand_by_itself() -> None:
    calls = Calls()
    (logger,) = loggers_of(SimpleNamespace(add_scalar=calls.note))
    logger.log(ROWS[:1])
    assert calls == [(PEAK, 10, 3), ("x", 1, 3)]
    with pytest.raises(UsageError, match="type int is not a logger"):
        loggers_of(3)
