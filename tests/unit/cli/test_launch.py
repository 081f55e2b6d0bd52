"""How a child's end is told, and what it says meanwhile."""

from pathlib import Path

import pytest

from ampmem.cli.processes.children import ChildEnd
from ampmem.cli.processes.messages import Inbox, Parent, Person, StepEnded
from ampmem.failure import FailureKind, FailureRecord, failure_of

BOOM = failure_of(RuntimeError("boom\nand more"))
EXITED = failure_of(SystemExit(3))
REFUSED = FailureRecord(kind=FailureKind.REFUSED, message="no model was seen: x")
OUT_OF_MEMORY = FailureRecord(kind=FailureKind.RAISED, error="torch.OutOfMemoryError", message="CUDA out of memory")


@pytest.mark.parametrize(
    ("code", "said", "failure"),
    [
        (0, None, None),
        (-9, BOOM, "killed by SIGKILL"),
        (-64 - 1, None, "killed by signal 65"),
        (3, EXITED, "exit code 3"),
        (1, failure_of(SystemExit("told so")), "exit code 1"),
        (1, BOOM, "RuntimeError: boom"),
        (1, OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory"),
        (1, failure_of(MemoryError()), "MemoryError"),
        (1, REFUSED, "no model was seen: x"),
        (2, None, "exit code 2"),
        (1, None, "exit code 1"),
    ],
)
def test_a_childs_end_in_one_line(code: int, said: FailureRecord | None, failure: str | None) -> None:
    assert ChildEnd(code=code, said=said, tail=()).failure == failure


def test_what_a_child_says_is_read_as_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.touch()
    child = Parent(file)
    with Inbox(file) as inbox:
        assert list(inbox.steps()) == []
        child.step(StepEnded(done=1, wanted=3))
        assert list(inbox.steps()) == [StepEnded(done=1, wanted=3)]
        child.say("for people only")
        child.step(StepEnded(done=2, wanted=3))
        child.failed(BOOM)
        assert list(inbox.steps()) == [StepEnded(done=2, wanted=3)]
        assert inbox.failure == BOOM
        assert list(inbox.steps()) == []


def test_a_message_that_is_half_there_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.touch()
    Parent(file).failed(REFUSED)
    whole = file.read_bytes()
    file.write_bytes(whole[:20])
    with Inbox(file) as inbox:
        assert list(inbox.steps()) == [] and inbox.failure is None
        with file.open("ab") as stream:
            stream.write(whole[20:])
        assert list(inbox.steps()) == []
        assert inbox.failure == REFUSED


def test_a_parent_that_is_gone_disturbs_nothing(tmp_path: Path) -> None:
    Parent(tmp_path / "gone").step(StepEnded(done=1, wanted=3))
    assert list(tmp_path.iterdir()) == []


def test_a_person_reads_lines_and_needs_no_steps_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    person = Person()
    person.say("recording")
    person.step(StepEnded(done=1, wanted=3))
    person.failed(BOOM)
    assert capsys.readouterr().err == "ampmem: recording\n"
