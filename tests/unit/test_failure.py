"""Why a script failed, as data and in words."""

import pytest

from ampmem.failure import FailureKind, failure_of


class Outer:
    class Inner(Exception):
        pass


@pytest.mark.parametrize(
    ("error", "line", "traceback_line"),
    [
        (ValueError("mine\nand more"), "ValueError: mine", "ValueError: mine"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (Outer.Inner("deep"), "Inner: deep", f"{__name__}.Outer.Inner: deep"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_what_a_script_raised(error: BaseException, line: str, traceback_line: str) -> None:
    failure = failure_of(error)
    assert failure.kind is FailureKind.RAISED
    assert (failure.line, failure.traceback_line) == (line, traceback_line)


@pytest.mark.parametrize(("code", "line"), [(3, "it exited with 3"), ("told so", "it exited with 'told so'")])
def test_what_a_script_exited_with(code: object, line: str) -> None:
    failure = failure_of(SystemExit(code))
    assert (failure.kind, failure.line) == (FailureKind.EXITED, line)
