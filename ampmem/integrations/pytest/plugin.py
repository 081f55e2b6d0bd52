"""The pytest plugin. pytest loads it in every run, so it imports the rest of ampmem only for tests about memory.

A test is recorded while it is called, innermost, and judged when its report is made: its own failure, skip and expected
failure come first. The result travels with the report, also from xdist's workers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ampmem.integrations.pytest.judging import Baselines, BlockRow, Judgement, Recorder
    from ampmem.integrations.pytest.limits import Limits

FIXTURE = "ampmem"
MARK = "ampmem"
MARK_LINE = (
    "ampmem(*, peak='2 GiB', growth='0 B', ..., budgets={}, steps=2, device='sim', gpu='h100', step_on=None, "
    "assume=()): limits for the memory of the test's training: at the peak, for the growth per step, for a category, "
    "or for any budget of ampmem check; and how the test is recorded"
)
_ON_REPORT = "ampmem"
"""The attribute of a report with the result of each block, as values that xdist can send."""

_limits: pytest.StashKey[Limits] = pytest.StashKey()
_wrong: pytest.StashKey[str] = pytest.StashKey()
_recorder: pytest.StashKey[Recorder] = pytest.StashKey()
_over: pytest.StashKey[bool] = pytest.StashKey()
_failed: pytest.StashKey[bool] = pytest.StashKey()
_baselines: pytest.StashKey[Baselines | None] = pytest.StashKey()
_rows: pytest.StashKey[list[BlockRow]] = pytest.StashKey()
_reports: pytest.StashKey[_Reports] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options."""
    group = parser.getgroup("ampmem", "memory of training (ampmem)")
    group.addoption(
        "--ampmem", action="store_true", help="list the memory of each memory test, its limit and its largest category"
    )
    group.addoption(
        "--ampmem-baseline",
        metavar="DIR",
        help="fail tests that need more memory than the summary in DIR; one file per test",
    )
    group.addoption("--ampmem-update", action="store_true", help="write new summaries, without comparing")
    group.addoption(
        "--ampmem-allow",
        metavar="SIZE",
        help="how much more memory than the baseline is allowed: 1%%, or 10MiB (default: nothing)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and check the options."""
    config.addinivalue_line("markers", MARK_LINE)
    reports = config.stash[_reports] = _Reports()
    config.pluginmanager.register(reports, "ampmem-reports")
    folder, update = config.getoption("--ampmem-baseline"), config.getoption("--ampmem-update")
    allow = config.getoption("--ampmem-allow")
    if update and folder is None:
        raise pytest.UsageError("--ampmem-update needs --ampmem-baseline DIR, where it writes")
    if allow is not None and folder is None:
        raise pytest.UsageError("--ampmem-allow needs --ampmem-baseline DIR")
    config.stash[_baselines] = None
    if folder is not None:
        config.stash[_baselines] = _open(Path(folder), allow or "0%", update=update)


def _open(folder: Path, allow: str, *, update: bool) -> Baselines:
    from ampmem.errors import UsageError
    from ampmem.integrations.pytest.judging import Baselines

    try:
        return Baselines(folder.absolute(), named=folder, allow=allow, update=update)
    except UsageError as error:
        raise pytest.UsageError(str(error).replace("--allow:", "--ampmem-allow:")) from None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Read the marks of the collected tests."""
    for item in session.items:
        if isinstance(item, pytest.Function):
            marks = [*item.iter_markers(MARK)]
            try:
                if marks:
                    _read_marks(item, marks)
            except pytest.UsageError as error:
                if not hasattr(item.config, "workerinput"):
                    raise
                item.stash[_wrong] = str(error)  # xdist would only replace a worker that ends here


def _read_marks(item: pytest.Function, marks: list[pytest.Mark]) -> None:
    from ampmem.errors import UsageError
    from ampmem.integrations.pytest.limits import limits_of

    try:
        item.stash[_limits] = limits_of(marks)
    except UsageError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None


@pytest.fixture(name=FIXTURE)
def _recorder_of(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Records a block of the test: ``with ampmem.profile(model) as prof: ...``, then ``prof.summary()``."""
    from ampmem.integrations.pytest.judging import Recorder
    from ampmem.integrations.pytest.limits import NO_LIMITS

    recorder = request.node.stash[_recorder] = Recorder(request.node.stash.get(_limits, NO_LIMITS))
    yield recorder
    left_open = recorder.leave_open()
    if left_open and _failed not in request.node.stash:  # a failure's traceback holds the test's objects
        pytest.fail(left_open, pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test with invalid marks."""
    if _wrong in item.stash:
        pytest.fail(item.stash[_wrong], pytrace=False)


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_call")
def pytest_note_the_end(item: pytest.Item) -> Generator[None, object, object]:
    """Note the end of a test: reports of its subtests, which are made while it runs, are not the test's."""
    item.stash[_over] = False
    try:
        return (yield)
    finally:
        item.stash[_over] = True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Record a marked test as a whole, unless it records blocks itself."""
    if _limits not in item.stash or FIXTURE in getattr(item, "fixturenames", ()):
        return (yield)
    from ampmem.errors import UsageError
    from ampmem.integrations.pytest.judging import Recorder

    recorder = item.stash[_recorder] = Recorder(item.stash[_limits])
    block, why = None, ""
    try:
        block = recorder.whole_test()
    except UsageError as error:
        why = str(error)
    if block is None:  # outside of the handler, as pytest would also show the handled error
        pytest.fail(f"the test was not recorded: {why}", pytrace=False)
    with block:
        return (yield)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Judge a test that has passed so far, before pytest makes the report, which then has the failure."""
    if call.when != "call" or _recorder not in item.stash or not item.stash.get(_over, True):
        return
    if call.excinfo is None:
        try:
            found = _judgements(item)
            item.stash[_rows] = [each.row for each in found]
            failures = [each.failure for each in found if each.failure]
            if failures:
                pytest.fail("\n\n".join(failures), pytrace=False)
        except (pytest.fail.Exception, Exception):  # a bug of ampmem's must end this test only, not the whole run
            call.excinfo = pytest.ExceptionInfo.from_current()
    else:
        from unittest import SkipTest

        item.stash[_failed] = True
        if not call.excinfo.errisinstance((pytest.skip.Exception, SkipTest)):
            # The test's own failure comes first: ampmem's findings and problems must not replace it.
            with suppress(Exception):
                item.stash[_rows] = [each.row for each in _judgements(item, failed=True)]
    item.stash[_recorder].forget()
    del item.stash[_recorder]


def _judgements(item: pytest.Item, *, failed: bool = False) -> list[Judgement]:
    """The judgements of the blocks. If the test ``failed``, it may have needed less, so baselines are not written."""
    from ampmem.integrations.pytest.judging import judge_blocks

    baselines, width = None if failed else item.config.stash[_baselines], _width(item.config)
    return judge_blocks(item.nodeid, str(item.path), item.stash[_recorder], baselines, width, failed=failed)


def _width(config: pytest.Config) -> int:
    return config.get_terminal_writer().fullwidth


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_makereport")
def pytest_say_what_it_took(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send the results with the report."""
    report = yield
    if call.when == "call" and _rows in item.stash:
        setattr(report, _ON_REPORT, item.stash[_rows])
        del item.stash[_rows]
    return report


class _Reports:
    """Collects the results in the reports of this process and of xdist's workers: by test, those of its last run."""

    def __init__(self) -> None:
        self.rows: dict[str, list[BlockRow]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the results of a report."""
        rows = getattr(report, _ON_REPORT, None)
        if rows is not None:
            self.rows[report.nodeid] = rows


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, and a line about the baselines."""
    rows = [row for rows in config.stash[_reports].rows.values() for row in rows]
    wanted, baselines = config.getoption("--ampmem"), config.stash[_baselines]
    if not (wanted or baselines):
        return
    from ampmem.integrations.pytest.judging import lines

    terminalreporter.write_sep("=", "memory")
    for line in lines(rows, baselines, _width(config), all_tests=wanted):
        terminalreporter.write_line(line)
