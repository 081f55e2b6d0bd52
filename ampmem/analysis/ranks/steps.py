"""Which step of a job is compared: the same of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.compare import of_full_batches
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
    """The last step whose update was done in more than half of the ranks that ended any, or that of ``index``.

    Of those with a full batch where a DataLoader made it. A rank that died early so hides no later step of the others.
    """
    ended = [{} if item is None else {step.index: step for step in item.steps if step.finished} for item in summaries]
    chosen = _chosen([steps for steps in ended if steps]) if index is None else index
    if chosen is None:
        last = tuple(steps[max(steps)] if steps else None for steps in ended)
        return ComparedStep(index=None, steps=last, later=False)
    return ComparedStep(
        index=chosen,
        steps=tuple(steps.get(chosen) for steps in ended),
        later=any(number > chosen for steps in ended for number in steps),
    )


def _chosen(ended: Sequence[dict[int, Step]]) -> int | None:
    indices = {number for steps in ended for number in steps}
    having = {number: [steps for steps in ended if number in steps] for number in indices}
    done = [
        number
        for number, those in having.items()
        if 2 * len(those) > len(ended) and not any(steps[number].skipped_update for steps in those)
    ]
    return max(of_full_batches(done, ended)) if done else None
