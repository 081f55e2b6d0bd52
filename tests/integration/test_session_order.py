"""In which order a session undoes what it put in place: at its end, after an error, in a forked child, from a thread.

The last hook that was put in place goes first: a patch over another must be gone before the other is restored. The
hooks on parameters, which are added while the script runs, go together: after the hooks of a recording, and before
those that the session has from its start. The source stops before any hook goes, and the file is closed at last.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampmem import patching
from ampmem.patching import Undo
from ampmem.recorder import session as session_module
from ampmem.recorder.options import Options
from ampmem.recorder.process import active
from ampmem.recorder.session import Session
from ampmem.recording import RecordingWriter
from ampmem.signals import SIGNALS
from ampmem.vocabulary import Device, Precision

STARTS, STOPS, DROPPED = "source starts", "source stops", "source dropped"
WRITTEN, CLOSED, RELEASED, SIGNALS_FREE = "written", "file closed", "session released", "signals free"
END = [SIGNALS_FREE, RELEASED, CLOSED]
GRADIENTS = "torch._tensor register_post_accumulate_grad_hook"
LAST_OF_RECORDING, FIRST_OF_OTHERS = "libc10 FLAGS_caffe2_report_cpu_memory_usage", "torch.utils swap_tensors"


class Diary(list[str]):
    """What happens, in order: ``+ place`` for a hook put in place, ``- place`` for one undone, and the words above."""

    def installed(self) -> list[str]:
        return [each[2:] for each in self if each.startswith("+ ")]

    def undone(self, since: int = 0) -> list[str]:
        return [each[2:] for each in self[since:] if each.startswith("- ")]

    def words(self) -> list[str]:
        return [each for each in self if not each.startswith(("+ ", "- "))]

    def check_undone(self, since: int) -> None:
        """Check that all that was in place at index ``since`` was undone in order."""
        gone = self.undone()[: -len(self.undone(since))]
        in_place = [each for each in self.installed() if each not in gone]
        undone = self.undone(since)
        assert len(undone) > 20
        gradients = [each for each in undone if each.startswith(GRADIENTS)]
        assert [each for each in undone if each not in gradients] == [
            each for each in reversed(in_place) if each not in gradients
        ]
        places = [each.rpartition(" ")[0] for each in undone]
        first = places.index(LAST_OF_RECORDING) + 1
        assert undone[first : first + len(gradients)] == gradients
        assert places[first + len(gradients)] == FIRST_OF_OTHERS


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Diary]:
    """Writes down what sessions put in place and undo, and what their file does."""
    diary = Diary()
    enter, hold, numbers = patching._enter, SIGNALS.hold, count()

    def entered(entry: Any, remove: Callable[[], object]) -> Undo:
        if entry.what.owner == "signal":  # ends when no code of ampmem's runs any more
            return enter(entry, remove)
        name = f"{entry.what.owner} {entry.what.name} {next(numbers)}"
        diary.append(f"+ {name}")
        return enter(entry, lambda: (diary.append(f"- {name}"), remove()))

    def held() -> Undo:
        undo = hold()
        return lambda: (diary.append(SIGNALS_FREE), undo())[1]

    monkeypatch.setattr(patching, "_enter", entered)
    monkeypatch.setattr(SIGNALS, "hold", held)
    for owner, name, word in (
        (RecordingWriter, "append", WRITTEN),
        (RecordingWriter, "close", CLOSED),
        (session_module, "release", RELEASED),
    ):
        monkeypatch.setattr(owner, name, noted(diary, word, getattr(owner, name)))
    yield diary
    assert active() is None


def noted(diary: Diary, word: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (diary.append(word), original(*args, **kwargs))[1]


def session_of(diary: Diary, path: Path, **options: Any) -> Session:
    """A session whose source notes its start and its ends, too."""
    session = Session(Options(path=path, script="train.py", device=Device.CPU, stacks=False, **options))
    for name, word in (("start", STARTS), ("stop", STOPS), ("abandon", DROPPED)):
        setattr(session.source, name, noted(diary, word, getattr(session.source, name)))
    return session


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("precision", "skip"), [(Precision.AS_IS, 0), (Precision.AMP, 1)])
def test_at_the_end_the_source_stops_first_and_the_last_hook_goes_first(
    diary: Diary, tmp_path: Path, precision: Precision, skip: int
) -> None:
    model, optimizer = make()
    session = session_of(diary, tmp_path / "run.ampmem", precision=precision, skip=skip)
    session.start()
    for _ in range(skip + 2):
        step(model, optimizer)
    session.close()
    diary.check_undone(diary.index(STOPS))
    assert set(diary.installed()) == set(diary.undone())
    assert diary.words() == [STARTS, WRITTEN, WRITTEN, STOPS, WRITTEN, *END]
    assert diary[-3:] == END


@pytest.mark.parametrize("failing", [1, 5, 20])
def test_an_error_in_an_install_undoes_the_hooks_before_it_in_reverse(
    diary: Diary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    session = session_of(diary, tmp_path / "run.ampmem")
    entered = patching._enter

    def refuse(entry: Any, remove: Callable[[], object]) -> Undo:
        undo = entered(entry, remove)
        if len(diary.installed()) == failing:
            undo()
            raise AttributeError("not in this torch")
        return undo

    monkeypatch.setattr(patching, "_enter", refuse)
    with pytest.raises(AttributeError, match="not in this torch"):
        session.start()
    assert len(diary.installed()) >= failing
    assert diary.undone() == diary.installed()[::-1]
    assert diary[-3:] == diary.words() == END


def test_a_source_that_does_not_start_leaves_no_hook_and_no_file(diary: Diary, tmp_path: Path) -> None:
    session = session_of(diary, tmp_path / "run.ampmem")

    def refuse(baseline: object) -> None:
        raise RuntimeError("the profiler does not start")

    session.source.start = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="does not start"):
        session.start()
    assert diary.undone() == diary.installed()[::-1]
    assert diary[-3:] == diary.words() == END
    assert list(tmp_path.iterdir()) == []


def test_the_scripts_own_error_ends_the_session_in_the_same_order(diary: Diary, tmp_path: Path) -> None:
    model, optimizer = make()
    session = session_of(diary, tmp_path / "run.ampmem")
    session.start()
    step(model, optimizer)
    session.close(ValueError("the script's own"))
    diary.check_undone(diary.index(STOPS))
    assert diary.words() == [STARTS, WRITTEN, STOPS, WRITTEN, *END]
    assert diary[-3:] == END


def test_a_forked_child_drops_the_source_and_undoes_the_hooks_but_leaves_the_file(diary: Diary, tmp_path: Path) -> None:
    model, optimizer = make()
    session = session_of(diary, tmp_path / "run.ampmem")
    session.start()
    step(model, optimizer)
    before = len(diary)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # the session was forgotten before this line
        os.write(write, json.dumps(diary).encode())
        os._exit(0 if active() is None and not session.recording else 1)
    os.close(write)
    with os.fdopen(read) as pipe:
        in_child = Diary(json.load(pipe))
    assert os.waitpid(child, 0)[1] == 0
    in_child.check_undone(before)
    assert in_child[before] == DROPPED
    assert in_child.words() == [STARTS, WRITTEN, DROPPED, SIGNALS_FREE, RELEASED]
    assert in_child[-2:] == [SIGNALS_FREE, RELEASED]
    assert len(diary) == before
    step(model, optimizer)  # the parent goes on
    session.close()
    assert session.outcome.recorded == 2


def test_another_thread_only_asks_for_the_end(diary: Diary, tmp_path: Path) -> None:
    model, optimizer = make()
    session = session_of(diary, tmp_path / "run.ampmem")
    session.start()
    step(model, optimizer)
    before = len(diary)
    thread = threading.Thread(target=session.close)
    thread.start()
    thread.join()
    assert len(diary) == before
    assert session.recording
    model(torch.ones(2, 8))  # the recorded thread runs a module: here the session ends
    assert not session.recording
    assert diary[before] == STOPS
    diary.check_undone(before)
    assert diary[-3:] == END


def test_a_recorded_thread_that_ends_ends_its_session(diary: Diary, tmp_path: Path) -> None:
    def run() -> None:
        model, optimizer = make()
        session_of(diary, tmp_path / "run.ampmem").start()
        step(model, optimizer)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert diary.words() == [STARTS, WRITTEN, STOPS, WRITTEN, *END]
    diary.check_undone(diary.index(STOPS))
    assert set(diary.installed()) == set(diary.undone())
