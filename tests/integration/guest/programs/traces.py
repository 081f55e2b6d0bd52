"""Follows its own lines and calls with ``sys.settrace``, ``sys.setprofile`` and an audit hook, as coverage does."""

import sys
import threading
from types import FrameType
from typing import Any

from _training import Training

lines: dict[int, int] = {}
calls: list[str] = []
opened: list[str] = []


def trace(frame: FrameType, event: str, _: Any) -> Any:
    """Of this file only, as tools do that know what is theirs."""
    if frame.f_code.co_filename != __file__:
        return None
    if event == "line":
        lines[frame.f_lineno] = lines.get(frame.f_lineno, 0) + 1
    return trace


def follow(frame: FrameType, event: str, _: Any) -> None:
    """The same, of calls."""
    if frame.f_code.co_filename == __file__ and event == "call":
        calls.append(frame.f_code.co_name)


def audit(event: str, arguments: tuple[object, ...]) -> None:
    """What this file opens."""
    if event == "open" and sys._getframe(1).f_code.co_filename == __file__:
        opened.append(str(arguments[0]).rpartition("/")[2])


def train() -> None:
    """Three steps."""
    for _ in range(3):
        training.step()
        with open(__file__) as file:  # noqa: PTH123
            file.readline()


sys.addaudithook(audit)
training = Training()
threading.settrace(trace)
threading.setprofile(follow)
sys.settrace(trace)
sys.setprofile(follow)
train()
print(sys.gettrace() is trace, sys.getprofile() is follow, threading.gettrace() is trace)
sys.settrace(None)
sys.setprofile(None)
print(sorted(lines.items()), calls, opened)
