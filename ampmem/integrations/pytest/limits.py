"""What the marks of a test say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ampmem.allocator.gpus import gpu_to_simulate
from ampmem.analysis.budgets.budget import GROWTH, PEAK, Budget, budget_of
from ampmem.errors import UsageError
from ampmem.recorder.marker import step_on_of
from ampmem.simulator.assumed import assumed_of
from ampmem.vocabulary import Device

if TYPE_CHECKING:
    import pytest

LEAST_STEPS = 2
"""From one step to the next is the least over which something can grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a test is to be recorded, as far as its marks say so; as :func:`ampmem.profile` takes it."""

    device: str | None = None
    gpu: str | None = None
    assume: tuple[str, ...] = ()
    step_on: str | None = None

    def given(self) -> dict[str, Any]:
        """What is said."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All that the marks of a test say. ``steps`` is how many it has to make."""

    budgets: tuple[Budget, ...] = ()
    steps: int = 0
    how: How = How()


NO_LIMITS = Limits()


def limits_of(marks: Sequence[pytest.Mark]) -> Limits:
    """What ``marks`` say, the nearest first: of two limits of the same bytes the nearer one holds.

    Raises :class:`UsageError` for arguments that cannot be meant, and for marks that ask for different recordings.
    """
    budgets: dict[str, Budget] = {}
    steps, said = 0, How()
    for mark in marks:
        try:
            budget, least, how = _READ[mark.name](*mark.args, **mark.kwargs)
        except TypeError as error:
            raise UsageError(str(error).lstrip("_")) from None
        except UsageError as error:
            raise UsageError(f"{mark.name}: {error}") from None
        if budget.key not in budgets:
            budgets[budget.key] = budget
            steps = max(steps, least)
        said = _together(said, how, mark.name)
    return Limits(budgets=tuple(budgets.values()), steps=steps, how=_checked(said, marks[0].name))


def _limit_memory(
    limit: str | int,
    *,
    device: str | None = None,
    gpu: str | None = None,
    category: str | None = None,
    step_on: str | None = None,
    assume: Sequence[str] = (),
) -> tuple[Budget, int, How]:
    budget = budget_of(PEAK if category is None else str(category), limit)
    if budget.key == GROWTH:
        raise UsageError("what grows is limited by the mark limit_growth")
    return budget, 0, _how(device, gpu, assume, step_on)


def _limit_growth(
    limit: str | int,
    *,
    steps: int = LEAST_STEPS,
    device: str | None = None,
    gpu: str | None = None,
    step_on: str | None = None,
    assume: Sequence[str] = (),
) -> tuple[Budget, int, How]:
    if not isinstance(steps, int) or steps < LEAST_STEPS:
        raise UsageError(f"steps={steps!r}: growth takes {LEAST_STEPS} steps or more")
    return budget_of(GROWTH, limit), steps, _how(device, gpu, assume, step_on)


_READ: dict[str, Callable[..., tuple[Budget, int, How]]] = {
    "limit_memory": _limit_memory,
    "limit_growth": _limit_growth,
}


def _how(device: str | None, gpu: str | None, assume: Sequence[str], step_on: str | None) -> How:
    texts = (assume,) if isinstance(assume, str) else tuple(assume)
    return How(device=device, gpu=gpu, assume=texts, step_on=step_on)


def _together(nearer: How, farther: How, name: str) -> How:
    """What both say. Raises :class:`UsageError` where they differ: a test is recorded once."""
    said = nearer.given()
    for key, value in farther.given().items():
        if said.setdefault(key, value) != value:
            raise UsageError(
                f"{name}: {key}={value!r}, and another mark says {key}={said[key]!r}; a test is recorded once"
            )
    return How(**said)


def _checked(how: How, name: str) -> How:
    """``how``, if it can be meant: a test that waits long for its turn is not to say so then."""
    try:
        device = Device(how.device or Device.AUTO)
    except ValueError:
        raise UsageError(
            f"{name}: there is no device {how.device!r} to record; there are {', '.join(Device)}"
        ) from None
    if how.gpu is not None and device not in (Device.AUTO, Device.SIMULATED):
        raise UsageError(
            f"{name}: gpu= simulates a GPU, and device={how.device!r} records a real device: leave one of them out"
        )
    if how.assume and how.gpu is None and device != Device.SIMULATED:
        raise UsageError(f"{name}: assume= is of a simulated GPU, so it needs device='sim' or gpu=")
    try:
        if how.gpu is not None or device == Device.SIMULATED:
            gpu_to_simulate(how.gpu)
            assumed_of(how.assume)
        step_on_of(how.step_on)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return how
