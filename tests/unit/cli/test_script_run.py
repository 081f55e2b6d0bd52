"""The recording is closed whatever happens between its start and its end, and the script's ending is kept."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import extract_tb
from types import FunctionType
from typing import cast

import click
import pytest

from ampmem.cli.processes.end_messages import why_not_stopped
from ampmem.cli.processes.messages import StepEnded
from ampmem.cli.processes.script_run import ScriptEnd, run_script, usage_error
from ampmem.errors import UsageError
from ampmem.failure import FailureRecord
from ampmem.recorder.script import StopScript, find_script, own_traceback, script_alone, standard_input, stops_in
from ampmem.recorder.session import Session
from ampmem.recorder.steering.stopping import Stopper
from ampmem.simulator.where import NotSimulated

PLACES = ("start", "say", "audience failed", "failed", "close")


class Boom(Exception):
    """A fault of ampmem's own."""


class Recorder:
    """A session and an audience that fail in one ``place``."""

    def __init__(self, place: str, error: BaseException) -> None:
        self.calls: list[str] = []
        self._place, self._error = place, error
        self.audience = self

    def _at(self, place: str) -> None:
        self.calls.append(place)
        if place == self._place:
            raise self._error

    def start(self) -> None:
        self._at("start")

    def close(self, failure: BaseException | None) -> None:
        self.closed_with = failure
        self._at("close")

    def forked(self) -> bool:
        return False

    def say(self, message: str) -> None:
        self._at("say")

    def show(self, text: str) -> None:
        raise AssertionError

    def step(self, ended: StepEnded) -> None:
        raise AssertionError

    def failed(self, failure: FailureRecord) -> None:
        self._at("failed" if "audience failed" in self.calls else "audience failed")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("argv", "path", "orig_argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


def run(folder: Path, source: str, recorder: Recorder) -> ScriptEnd:
    script = folder / "script.py"
    script.write_text(source)
    return run_script(find_script(str(script)), (), cast(Session, recorder), Stopper(), recorder, "recording")


@pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt(), SystemExit(9), UsageError("no")], ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_a_script_that_fails_does_so_whatever_ampmem_meets(tmp_path: Path, place: str, error: BaseException) -> None:
    recorder = Recorder(place, error)
    if place in ("start", "say"):
        with pytest.raises(type(error)):
            run(tmp_path, "raise ValueError('mine')", recorder)
        assert recorder.calls == [*PLACES[: PLACES.index(place) + 1], "close"]
        return
    ended = run(tmp_path, "raise ValueError('mine')", recorder)
    assert repr(ended.failure) == "ValueError('mine')"
    assert ended.trouble is error
    assert recorder.calls[-1] == "close" and recorder.closed_with is ended.failure


def test_a_script_that_ends_well_has_no_failure_whatever_ampmem_meets(tmp_path: Path) -> None:
    recorder = Recorder("close", Boom())
    ended = run(tmp_path, "raise SystemExit", recorder)
    assert ended.failure is None and isinstance(ended.trouble, Boom)


def test_nothing_happens_to_a_run_without_trouble(tmp_path: Path) -> None:
    recorder = Recorder("nowhere", Boom())
    assert run(tmp_path, "pass", recorder) == ScriptEnd(failure=None)
    assert recorder.calls == ["start", "say", "close"]


@pytest.mark.parametrize("code", ["None", "0", "False"])
def test_what_python_ends_well_with(tmp_path: Path, code: str) -> None:
    assert run(tmp_path, f"import sys; sys.exit({code})", Recorder("nowhere", Boom())).failure is None


@pytest.mark.parametrize("code", ["1", "''", "0.0", "True", "'0'", "[]"])
def test_what_python_does_not_end_well_with(tmp_path: Path, code: str) -> None:
    ended = run(tmp_path, f"import sys; sys.exit({code})", Recorder("nowhere", Boom()))
    assert isinstance(ended.failure, SystemExit)


def _lost() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(("synchronize", "stops"), [(_lost, False), (lambda: None, True)], ids=["failed", "well"])
def test_a_script_whose_device_has_failed_is_not_stopped(
    synchronize: Callable[[], None], stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own next call raises the error, which a stop would hide."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    stopper = Stopper()
    stopped = False
    try:
        stopper.stop()
    except StopScript:
        stopped = True
    assert (stopped, stopper.device_failed) == (stops, not stops)
    assert ("because its device has failed" in why_not_stopped(Path("r.ampmem"), stopper)) is not stops
    stopper.ended(None)


def test_errors_that_are_linked_in_a_circle_are_followed_once() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    assert own_traceback(first) is None
    assert stops_in(first) == 0


def test_a_stop_of_the_simulation_is_told_without_torchs_frames() -> None:
    inner, outer = {}, {}
    exec(compile("def op(why):\n    raise why", "/x/site-packages/torch/nn/module.py", "exec"), inner)
    exec(compile("def main(why):\n    op(why)", "/x/train.py", "exec"), outer)
    outer["op"] = inner["op"]
    stopped, before = NotSimulated("train.py:2: why; what to do"), KeyError()
    try:
        try:
            raise before
        except KeyError:
            outer["main"](stopped)
    except NotSimulated:
        pass
    trace = script_alone(stopped)
    files = [Path(frame.filename).name for frame in extract_tb(trace)]
    assert files == ["test_script_run.py", "train.py"]
    assert stopped.__traceback__ is trace and stopped.__context__ is None


def _exits_while_it_handles(error: Exception) -> None:
    try:
        raise error
    except type(error):
        sys.exit(2)


def _refused_by_click() -> None:
    click.Command("x").main(["--steps"])


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (_refused_by_click, "No such option '--steps'."),
        (lambda: ArgumentParser(prog="x").parse_args(["--steps", "5"]), "unrecognized arguments: --steps 5"),
        (lambda: _exits_while_it_handles(ValueError("No such option: --steps")), "No such option: --steps"),
        (lambda: sys.exit(2), ""),
        (lambda: sys.exit(3), ""),
        (lambda: sys.exit("--steps"), ""),
    ],
    ids=["click", "argparse", "an error that is handled", "without a reason", "another exit code", "a message"],
)
def test_why_a_command_line_was_refused_is_read_from_its_exit(end: Callable[[], object], reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        end()
    assert usage_error(ended.value) == reason


def test_what_is_not_an_exit_has_no_reason() -> None:
    assert usage_error(None) == usage_error(ValueError("--steps")) == ""


def test_a_standard_input_that_is_closed_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    standard_input.cache_clear()
    with pytest.raises(UsageError, match=r"^standard input is closed, so no script can be read from it$"):
        find_script("-")


def test_an_instruction_of_no_line_stays_one() -> None:
    """A signal may come there: Python 3.11's own traceback has ``None`` for its line then."""
    bare = FunctionType(_raising.__code__.replace(co_linetable=b""), {})
    with pytest.raises(ValueError, match=r"^$") as caught:
        bare()
    trace = caught.value.__traceback__
    assert trace is not None and trace.tb_next is not None
    line = trace.tb_next.tb_lineno
    own = own_traceback(caught.value)
    assert own is not None and own.tb_next is not None and own.tb_next.tb_lineno == line


def _raising() -> None:
    raise ValueError
