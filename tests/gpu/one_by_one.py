"""A plugin of pytest's for machines that may go away: each test's outcome is written down at once.

    python -m pytest -p one_by_one --seconds-per-test 60 tests/gpu

with the file for the rows in ``AMPMEM_GPU_RESULTS``. Tests that the file has already are left out, so that the same
command goes on where the last one was cut off; one that was running then counts as one that died. A test that takes
longer than ``--seconds-per-test`` fails. If that does not end it, since it waits inside of CUDA, the process ends 20
seconds later, and so it does when a failed test has left the device unusable (exit code 3): the next process has
another context.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import pytest
import results
from results import DIED, FAILED, PASSED, SKIPPED, STARTED, Row

GRACE = 20
UNUSABLE = 3
"""The exit code after which the tests that are left need a fresh process."""
_OUTCOMES = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED}


class TooLong(Exception):
    """A test took longer than it may."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long a test may take."""
    parser.addoption("--seconds-per-test", type=int, default=60)


def pytest_configure(config: pytest.Config) -> None:
    """With a file for the rows, they are written."""
    if path := os.environ.get(results.FILE):
        config.pluginmanager.register(_Journal(Path(path), config.getoption("--seconds-per-test")))


class _Journal:
    """Writes the rows, and watches the clock."""

    def __init__(self, path: Path, seconds: int) -> None:
        self._path = path
        self._seconds = seconds
        self._outcome: dict[str, Row] = {}
        self._stderr: TextIO = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")  # pytest will capture the other

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has been run."""
        done = {row.name for row in results.read(self._path)}
        for row in results.read(self._path):
            if row.outcome == STARTED:
                results.append(self._path, Row(name=row.name, outcome=DIED, detail="its process ended while it ran"))
        left_out = [item for item in items if item.nodeid in done]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A row that says that it runs, and two alarms."""
        results.append(self._path, Row(name=item.nodeid, outcome=STARTED))

        def late(signum: int, frame: FrameType | None) -> None:
            raise TooLong(f"the test took more than {self._seconds} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(self._seconds)
        faulthandler.dump_traceback_later(self._seconds + GRACE, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first of set-up, call and clean-up that did not pass decides."""
        before = self._outcome.get(report.nodeid)
        seconds = report.duration + (0.0 if before is None else before.seconds)
        outcome = _OUTCOMES[report.outcome]
        if before is not None and before.outcome != PASSED and outcome == PASSED:
            outcome = before.outcome
        detail = _line(report) or ("" if before is None else before.detail)
        row = Row(name=report.nodeid, outcome=outcome, seconds=round(seconds, 2), detail=detail)
        self._outcome[report.nodeid] = row
        if report.when == "teardown":
            results.append(self._path, row)
            if outcome == FAILED and _unusable():
                pytest.exit("the device cannot be used any more", returncode=UNUSABLE)


def _line(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped, in a line."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(getattr(crash, "message", report.longrepr))
    return " ".join(text.split())[:300]


def _unusable() -> bool:
    """Whether an error of the device has made its context useless: every call fails from then on."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
