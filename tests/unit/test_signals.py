"""The gates in front of the script's signal handlers, on code that is ampmem's by the name of its file."""

import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest

from ampmem.own_code import RECORDING_CODE
from ampmem.patching import unseen
from ampmem.signals import SIGNALS, is_ours, let_in


class Timeout(Exception):
    """What the handler raises."""


def handle(number: int, frame: FrameType | None) -> None:
    raise Timeout(number, frame.f_code.co_name if frame is not None else "")


@pytest.fixture(autouse=True)
def held() -> Iterator[None]:
    before = [(number, signal.signal(number, handle)) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    undo = SIGNALS.hold()
    yield
    undo()
    assert signal.getsignal(signal.SIGUSR1) is handle
    for number, handler in before:
        signal.signal(number, handler)


def ours(function: Callable[..., Any]) -> Any:
    """``function`` as one of ampmem's recorder."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_filename=f"{RECORDING_CODE[0]}some.py")
    return function


@ours
def sends(number: int = signal.SIGUSR1, *_: object) -> str:
    """Where a fault is kept from the script."""
    try:
        signal.raise_signal(number)
        return "went on"
    except Exception:
        return "swallowed"


def test_a_handler_waits_for_the_end_of_ampmems_code_and_is_told_where_the_script_was() -> None:
    def script() -> None:
        said.append(sends())

    said: list[str] = []
    with pytest.raises(Timeout) as raised:
        script()
    assert raised.value.args == (signal.SIGUSR1, "script")
    assert not SIGNALS.waiting()
    assert said in ([], ["went on"])


def test_in_the_callback_of_a_weak_reference() -> None:
    class Kept:
        pass

    kept = Kept()
    callback = weakref.ref(kept, ours(lambda _: sends()))
    with pytest.raises(Timeout):
        del kept
        assert callback() is None


def test_in_a_finalizer() -> None:
    class Kept:
        @ours
        def __del__(self) -> None:
            sends()

    kept = [Kept()]
    with pytest.raises(Timeout):
        kept.clear()
        kept.append(Kept())


def test_what_is_called_by_ampmems_code_waits_too_but_for_what_it_passes_calls_on_to() -> None:
    def script() -> str:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Timeout:
            return "at once"
        return "later"

    asks = ours(lambda look: look())
    passes_on = unseen(ours(lambda original: original()))
    assert passes_on(script) == "at once"
    said = []
    with pytest.raises(Timeout):
        said.append(asks(script))
        said.append("not reached")
    assert "at once" not in said


def test_where_ampmem_cleans_up_after_a_handler_it_comes_out() -> None:
    @ours
    def start() -> None:
        try:
            sends()
            said.append("went on")
        except Timeout:
            said.append("cleaned up")
            raise

    said: list[str] = []
    outer = ours(lambda: let_in(start)())
    with pytest.raises(Timeout):
        outer()
    assert said[-1] == "cleaned up"


def test_entered_it_asks_once_at_the_end() -> None:
    @ours
    def long() -> None:
        with SIGNALS:
            with SIGNALS:
                sends(signal.SIGUSR2)
            sends(signal.SIGUSR2)
            assert SIGNALS.waiting()

    with pytest.raises(Timeout) as raised:
        long()
        raise AssertionError("not reached")
    assert raised.value.args[0] == signal.SIGUSR2


def test_what_ends_while_it_is_entered_puts_the_handlers_back_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    ask = SIGNALS._soon
    monkeypatch.setattr(SIGNALS, "_soon", lambda: (asked.append(None), ask()))
    monkeypatch.setattr(SIGNALS, "_users", 0)  # those of the fixture
    undo = SIGNALS.hold()
    with SIGNALS:
        undo()
        assert asked == []
        assert type(_signal.getsignal(signal.SIGUSR1)) is not type(handle)
    assert _signal.getsignal(signal.SIGUSR1) is handle
    monkeypatch.setattr(SIGNALS, "_users", 1)


def test_each_handler_runs_whatever_the_one_before_has_raised() -> None:
    @ours
    def both() -> None:
        sends(signal.SIGUSR1)
        sends(signal.SIGUSR2)

    first = []
    with pytest.raises(Timeout) as second:
        try:
            both()
            raise AssertionError("not reached")
        except Timeout as error:
            number = error.args[0]
            first += [number]
        len(first)
    assert sorted([number, second.value.args[0]]) == [signal.SIGUSR1, signal.SIGUSR2]


def test_the_scripts_descriptor_gets_the_number_once() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing)
    try:
        with pytest.raises(Timeout):
            sends()
            raise AssertionError("not reached")
        assert os.read(reading, 100) == bytes([signal.SIGUSR1])
    finally:
        assert signal.set_wakeup_fd(before) == writing
        os.close(reading)
        os.close(writing)


def test_the_scripts_descriptor_gets_the_number_of_a_signal_that_arrives_while_another_waits() -> None:
    @ours
    def sends_two() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)

    reading, writing = os.pipe2(os.O_NONBLOCK)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # as asyncio's, which looks at its descriptor alone
    before = signal.set_wakeup_fd(writing)
    try:
        sends_two()
        (lambda: None)()  # Python looks for signals where a function starts
        assert os.read(reading, 100) == bytes([signal.SIGUSR1, signal.SIGUSR2])
    finally:
        assert signal.set_wakeup_fd(before) == writing
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, handle)
        os.close(reading)
        os.close(writing)


def test_in_a_forked_child_nothing_waits_that_the_parent_was_sent() -> None:
    @ours
    def forks() -> None:
        with SIGNALS:
            signal.raise_signal(signal.SIGUSR1)
            told.append(SIGNALS.waiting())
            child = os.fork()
            if child == 0:
                os._exit(SIGNALS.waiting())
            told.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)

    def script() -> None:
        forks()
        raise AssertionError("not reached")

    import ampmem.recorder.process  # noqa: F401  # which is told of forks

    told: list[bool] = []
    with pytest.raises(Timeout):
        script()
    assert told == [True, False]


def test_under_a_debugger_a_handler_runs_at_once_and_the_end_comes() -> None:
    """Python 3.11 would ask again for ever: a traced function starts anew until there is nothing more to run."""

    @ours
    def ampmem_ends() -> str:
        end()
        return sends()

    end = SIGNALS.hold()
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        assert ampmem_ends() == "swallowed"
    finally:
        sys.settrace(before)
    assert not SIGNALS.waiting()


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is handle
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    assert signal.signal(signal.SIGUSR2, handle) == signal.SIG_IGN


def frame(file: str, name: str, outer: Any = None) -> Any:
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name=name), f_back=outer)


def test_the_callbacks_of_weak_sets_are_taken_for_ampmems() -> None:
    script = frame("train.py", "<module>")
    for kind in (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
        file = kind.__init__.__code__.co_filename
        assert is_ours(frame(file, "_remove", script)) or is_ours(frame(file, "remove", script))
        assert not is_ours(frame(file, "__len__", script))
    assert not is_ours(script)
    assert not is_ours(None)
