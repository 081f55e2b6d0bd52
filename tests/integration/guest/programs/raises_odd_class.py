"""An exception whose class hides its name, and whose causes and traceback are properties that raise."""

from __future__ import annotations

from _training import train_alone


class Odd(Exception):
    @property
    def __cause__(self) -> None:  # type: ignore[override]
        raise RuntimeError("no cause")

    @property
    def __context__(self) -> None:  # type: ignore[override]
        raise RuntimeError("no context")

    def with_traceback(self, trace: object) -> Odd:
        raise RuntimeError("no traceback")


Odd.__module__ = 3  # type: ignore[assignment]
train_alone(1)
raise Odd("odd")
