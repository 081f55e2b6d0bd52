"""How far several runs have got: one line that changes on a terminal, plain lines elsewhere, and no made-up time."""

from io import StringIO

import pytest

from ampmem.cli.processes.children import ProgressLine, TimeLeft


class Screen(StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def show(stream: StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    with pytest.raises(KeyboardInterrupt), ProgressLine() as progress:
        progress.now("1 of 2: starting")
        progress.stay("1 of 2: failed", ", about 9 s left", tail=["why\tit\x1b did", "twice"])
        progress.now("2 of 2: starting\x07")
        raise KeyboardInterrupt
    return stream.getvalue()


def test_a_terminal_has_one_line_that_changes_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clear, stays = "\r\x1b[K", "1 of 2: failed\n    why     it? did\n    twice\n"
    assert show(Screen(), monkeypatch) == f"{clear}1 of 2: starting{clear}{stays}{clear}2 of 2: starting?{clear}"


def test_elsewhere_there_are_lines_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(StringIO(), monkeypatch) == "1 of 2: failed, about 9 s left\n    why     it? did\n    twice\n"


def test_a_line_that_changes_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with ProgressLine() as progress:
        progress.now("x" * 100)
    (line,) = filter(None, screen.getvalue().split("\r\x1b[K"))
    assert len(line) == 39


def test_what_is_left_goes_by_the_runs_before() -> None:
    now = [100.0]
    course = TimeLeft(3, clock=lambda: now[0])
    assert (course.begin(), course.left()) == ("1 of 3", "")
    now[0] += 60
    assert course.left() == ""  # of the first run nobody knows how long it takes
    course.end()
    assert (course.left(), course.begin()) == (", about 2 min left", "2 of 3")
    now[0] += 50
    assert course.left() == ", about 70 s left"
    now[0] += 50  # longer than the one before
    assert course.left() == ", about 60 s left"
    course.end()
    assert (course.left(), course.begin()) == (", about 80 s left", "3 of 3")
    now[0] += 79.5
    assert course.left() == ""  # not 0 s
    now[0] += 100
    assert course.left() == ""
    course.end()
    assert course.left() == ""
