"""The limits and options in a test's marks; read at collection, so separate from recording and judging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampmem.analysis.budgets.budget import GROWTH, KEYS, MODULES, Budget, budgets_of
from ampmem.errors import UsageError
from ampmem.names import nearest

if TYPE_CHECKING:
    import pytest

LEAST_STEPS = 2
"""The least number of steps over which something can grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits in the marks of a test. ``steps`` is the least number of steps; at least two for a limit of growth."""

    budgets: tuple[Budget, ...] = ()
    steps: int = 0
    how: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of :func:`ampmem.profile` that the marks give."""


NO_LIMITS = Limits()


def limits_of(marks: Sequence[pytest.Mark]) -> Limits:
    """The limits in ``marks``, the nearest mark first: of two limits for the same bytes the nearer counts.

    Raises :class:`UsageError` for invalid arguments, and for marks that ask for different recordings.
    """
    budgets: dict[str, Budget] = {}
    steps: int = 0
    how: dict[str, Any] = {}
    for mark in marks:
        try:
            read = _read(*mark.args, **mark.kwargs)
        except UsageError as error:
            raise UsageError(f"ampmem: {error}") from None
        if any(budget.key == GROWTH and budget.key not in budgets for budget in read.budgets):
            steps = read.steps
        for budget in read.budgets:
            budgets.setdefault(budget.key, budget)
        how = _together(how, read.how)
    _check(how)
    return Limits(budgets=tuple(budgets.values()), steps=steps, how=how)


def _read(
    *positional: object,
    budgets: Mapping[str, str | int] | None = None,
    steps: int | None = None,
    device: str | None = None,
    gpu: str | None = None,
    step_on: str | None = None,
    assume: Sequence[str] = (),
    **limits: str | int,
) -> Limits:
    if positional:
        raise UsageError(f"give {positional[0]!r} a name, such as peak={positional[0]!r}")
    # The argument `device` is what to record, so the budget of that name must be in `budgets`.
    for key in limits:
        if key not in KEYS:
            meant = nearest(key, (*KEYS, *_OPTIONS))
            raise UsageError(
                f"unknown limit {key!r}{meant}; limits of modules are given as "
                f"budgets={{'{MODULES}.encoder.activations': '2 GiB'}}"
            )
    found = (*budgets_of(limits), *budgets_of({} if budgets is None else budgets))
    if GROWTH not in (budget.key for budget in found):
        if steps is not None:
            raise UsageError("steps= is the number of steps over which growth is measured: give growth=, too")
    elif steps is None:
        steps = LEAST_STEPS
    elif not isinstance(steps, int) or steps < LEAST_STEPS:
        raise UsageError(f"steps={steps!r}: growth needs at least {LEAST_STEPS} steps")
    texts = (assume,) if isinstance(assume, str) else tuple(assume)
    how = {"device": device, "gpu": gpu, "assume": texts, "step_on": step_on}
    return Limits(budgets=found, steps=steps or 0, how={name: value for name, value in how.items() if value})


_OPTIONS = ("budgets", "steps", "device", "gpu", "step_on", "assume")
"""The arguments of the mark besides limits."""


def _together(nearer: Mapping[str, Any], farther: Mapping[str, Any]) -> dict[str, Any]:
    """Both marks' options together. Raises :class:`UsageError` if they differ, as a test is recorded once."""
    how = dict(nearer)
    for key, value in farther.items():
        if how.setdefault(key, value) != value:
            raise UsageError(
                f"ampmem: {key}={value!r}, but another mark has {key}={how[key]!r}; a test is recorded only once"
            )
    return how


def _check(how: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for invalid options: a test that waits long for its turn must not fail only then."""
    from ampmem.recorder.options import asked_in_python

    try:
        asked_in_python(**how)
    except UsageError as error:
        raise UsageError(f"ampmem: {error}") from None
