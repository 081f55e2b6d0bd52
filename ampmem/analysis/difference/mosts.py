"""The most that what changed held at any instant of the steps: has it grown, or is it only there at another instant?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.difference.changes import GroupChange, Run
from ampmem.analysis.difference.difference import renames_between
from ampmem.analysis.difference.groups import Group, makers_of
from ampmem.analysis.difference.matching import Kin
from ampmem.analysis.difference.side import Side
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """The most bytes that the same code held at once in the recorded steps, and the most that it made in one step."""

    held: int
    made: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mosts:
    """Of what changed, in two runs."""

    before: Most
    after: Most

    def explain(self, change: GroupChange) -> bool:
        """Whether ``change`` is more because its code needs more; else most of it was there before, at other instants.

        Code that makes more is told so, whatever it holds at once: it may be a new line of the same function.
        """
        more = max(self.after.held - self.before.held, self.after.made - self.before.made)
        return 2 * more > change.grown


class Histories:
    """Of changes between two runs whose allocations are known."""

    def __init__(self, before: Side, after: Side) -> None:
        """Raises ``ValueError`` for a side of which no more than a summary is known."""
        if before.groups is None or after.groups is None:
            raise ValueError("a summary does not know single allocations")
        self._old, self._new = _History(before.groups.analysis), _History(after.groups.analysis)
        self._kin = Kin(self._old.makers, self._new.makers, renames_between(before, after))

    def mosts(self, change: GroupChange) -> Mosts:
        """By the surest likeness of which both runs have something; of what is new there is nothing before."""
        found = Mosts(before=_NOTHING, after=Most(held=change.after, made=change.after))
        for old, new in self._kin.of(_maker(change), gone=change.lines_of is Run.BEFORE):
            if new:
                found = Mosts(before=self._old.most(old), after=self._new.most(new))
            if found.before.held:
                return found
        return found


_NOTHING = Most(held=0, made=0)


class _History:
    """All that a run allocated, by what made it."""

    def __init__(self, analysis: Analysis) -> None:
        self.makers, maker = makers_of(analysis)
        self._lifetimes = analysis.lifetimes
        self._rows = np.argsort(maker, kind="stable")
        self._starts = np.searchsorted(maker[self._rows], np.arange(len(self.makers) + 1))
        position = analysis.timeline.position
        self._spans = [(position(step.start_ns), position(step.end_ns)) for step in analysis.recording.steps]

    def most(self, makers: Sequence[int]) -> Most:
        """Of all ``makers`` together."""
        if not makers:
            return _NOTHING
        mine = np.concatenate([self._rows[self._starts[maker] : self._starts[maker + 1]] for maker in makers])
        sizes, born, died = self._lifetimes.bytes[mine], self._lifetimes.born[mine], self._lifetimes.died[mine]
        freed = died != ALIVE
        # Of all instants only those at which one of them comes or goes: no event is of two.
        at = np.concatenate((born, died[freed])) + 1
        order = np.argsort(at)
        at, held = at[order], np.cumsum(np.concatenate((sizes, -sizes[freed]))[order])
        return Most(
            held=max(_largest(at, held, first, last) for first, last in self._spans),
            made=max(int(sizes[(born >= first) & (born < last)].sum()) for first, last in self._spans),
        )


def _largest(at: Column, held: Column, first: int, last: int) -> int:
    """The largest of ``held``, which holds from each position of ``at`` on, from ``first`` to ``last``."""
    begin, end = np.searchsorted(at, [first, last], side="right")
    return max(int(held[begin - 1]) if begin else 0, int(held[begin:end].max(initial=0)))


def _maker(change: GroupChange) -> Group:
    return Group(
        category=change.category,
        module=change.module,
        name=change.name,
        op=change.op,
        stack=change.stack,
        dtype=None,
        shape=None,
        bytes=0,
        count=0,
    )
