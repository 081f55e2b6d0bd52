"""Which step of a job is compared: the same of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampmem.analysis.comparison.compare import of_full_batches
from ampmem.analysis.summary import Step, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """Of each rank the step that is compared, ``None`` where it did not end that.

    ``index`` is the step's, ``None`` where the ranks have none in common; then it is the last that each ended.
    ``later`` says that some rank ended one after it.
    """

    index: int | None
    steps: tuple[Step | None, ...]
    later: bool


def compared_step(summaries: Sequence[Summary | None], index: int | None = None) -> ComparedStep:
    """The step in which any rank needed the most, or that of ``index``; the last such, as of a recording alone.

    Of the steps that more than half of the ranks ended that ended any: in what a few did alone there is nothing to
    compare.
    """
    ended = _ended(summaries)
    chosen = _largest([steps for steps in ended if steps]) if index is None else index
    if chosen is None:
        last = tuple(steps[max(steps)] if steps else None for steps in ended)
        return ComparedStep(index=None, steps=last, later=False)
    return ComparedStep(
        index=chosen,
        steps=tuple(steps.get(chosen) for steps in ended),
        later=any(number > chosen for steps in ended for number in steps),
    )


def step_of_precisions(summaries: Sequence[Summary | None]) -> int | None:
    """The step in which several precisions are compared, as of recordings side by side: the last that is alike.

    That is the last whose update was done in more than half of the ranks that ended any, of those with a full batch
    where a DataLoader made it. ``None`` where there is none.
    """
    ended = [steps for steps in _ended(summaries) if steps]
    done = [number for number, those in _by_step(ended).items() if not any(step.skipped_update for step in those)]
    return max(of_full_batches(done, ended)) if done else None


def _ended(summaries: Sequence[Summary | None]) -> list[dict[int, Step]]:
    """The steps that each has ended, by their index."""
    return [{} if item is None else {step.index: step for step in item.steps if step.finished} for item in summaries]


def _by_step(ended: Sequence[Mapping[int, Step]]) -> dict[int, list[Step]]:
    """The steps that more than half of the ranks have, by index, in order."""
    indices = sorted({number for steps in ended for number in steps})
    having = {number: [steps[number] for steps in ended if number in steps] for number in indices}
    return {number: those for number, those in having.items() if 2 * len(those) > len(ended)}


def _largest(ended: Sequence[Mapping[int, Step]]) -> int | None:
    most = {number: max(step.peak.said for step in those) for number, those in _by_step(ended).items()}
    return max(most, key=lambda number: (most[number], number)) if most else None
