"""Libraries ask whether a tensor is fake, to see whether they are traced: a tensor on the simulated device is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, ModuleType
from typing import Any

from ampmem.own_code import OWN_FOLDERS, is_torch
from ampmem.patching import added
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.general import FAKE_TENSOR_MODULES, FakeTensor


class _Kind(type(FakeTensor)):  # type: ignore[misc]
    """What makes ``isinstance`` say no to tensors that are only simulated."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeTensor) and not isinstance(instance.fake_mode, SimulatedMode)


class _Traced(FakeTensor, metaclass=_Kind):
    """``FakeTensor`` as a library finds it: those of somebody who traces it."""


class _Module(ModuleType):
    """A module of torch that gives torch, and us, the class itself."""

    @property
    def FakeTensor(self) -> Any:
        """By who asks: with the plain class, a library leaves out what depends on values, as if it were exported."""
        asking: FrameType = sys._getframe(1)
        file = asking.f_code.co_filename
        return FakeTensor if is_torch(file) or file.startswith(OWN_FOLDERS) else _Traced


def install() -> Callable[[], None]:
    """Let libraries see what they would see on a GPU; returns what undoes it."""
    with ExitStack() as undo:
        for module in FAKE_TENSOR_MODULES:
            undo.callback(added(module.__name__, "FakeTensor", _changed(module)))
        return undo.pop_all().close


def _changed(module: ModuleType) -> Callable[[], None]:
    former = module.__class__
    module.__class__ = _Module

    def put_back() -> None:
        module.__class__ = former

    return put_back
