"""What the script keeps alive of a forward whose backward is done."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import NOTABLE_BYTES, Finding, Section, TrainingRun
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.analysis.timeline.marks import Instants
from ampmem.events import Fact, Phase
from ampmem.names import FUNCTIONAL
from ampmem.units import format_bytes

_CHANGE = (
    "del the variable (outputs, logits) as soon as the loss is there, if nothing reads it later; "
    "of losses keep numbers, loss.item()"
)
_OR_SCHEDULE = ", or the schedule of its pipeline,"
_CHANGE_OF_PIPELINE = "what the script holds (outputs, losses): del it after the update; what the schedule holds stays"


def check(run: TrainingRun) -> Finding | None:
    """Results of forward that are alive at the last step's peak though no backward needs them.

    Those of the step before, as ``logits`` and ``loss`` are until they are assigned again; those of the step itself
    when the peak comes after its last backward; and when it comes in backward, those that autograd did not save and
    that outlive the backward. Told from :meth:`TrainingRun.notable` on, and of what an op was seen to return; not where
    the sums are wrong, since then what seems alive may be dead, nor where torch.func kept what is not known.
    """
    if not run.peaks or run.analysis.conservation.breach is not None or FUNCTIONAL in run.recording.notes:
        return None
    position = run.peaks[-1]
    kept = _left_over(run, position) & run.analysis.lifetimes.alive_at(position)
    size = run.bytes_of(kept)
    if not run.notable(size):
        return None
    return Finding(
        code="outputs-kept",
        severity="advice",
        section=Section.ALLOCATIONS,
        message=f"{format_bytes(size)} of a forward's results are alive at the peak, and backward does not need them: "
        f"variables of the script{_OR_SCHEDULE if run.pipelined else ''} hold them.",
        bytes=size,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _CHANGE,
        evidence=run.largest(kept),
        off_peak=_off_peak(run, position),
    )


def _off_peak(run: TrainingRun, position: int) -> int | None:
    """Without what is left over at each event of the last step that it is left over at."""
    lifetimes, marks = run.analysis.lifetimes, run.marks[-1]
    since = np.zeros(len(lifetimes), dtype=np.int64)
    if marks.after_forward is not None:  # until then the script uses its own results
        since[lifetimes.step == run.steps[-1].index] = run.analysis.timeline.position(marks.after_forward)
    return run.off_peak(lifetimes.bytes * _left_over(run, position), since, place=len(run.steps) - 1)


def _left_over(run: TrainingRun, position: int) -> Mask:
    """What forward made and backward is done with when the last step has reached ``position``."""
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    made = (lifetimes.phase == Phase.FORWARD) & (lifetimes.step >= 0) & (run.with_fact(Fact.OUTPUT) > 0)
    made &= classes.of(Category.ACTIVATIONS) | classes.of(Category.TEMPORARIES)
    step = run.steps[-1]
    # What never dies is a leak, which is a finding of its own; the newest may just not have died yet.
    earlier = (lifetimes.step == step.index - 1) & (lifetimes.died != ALIVE) & ~_used_again(run)
    own = lifetimes.step == step.index
    if not _after_backward(run, run.marks[-1], position):
        own &= _unused_in_backward(run, position)
    left: Mask = made & (earlier | own)
    return left


def _unused_in_backward(run: TrainingRun, position: int) -> Mask:
    """What autograd did not save, and what is still there when the last step's backward has ended.

    None of it before that backward starts: until then the script may be about to use what it has.
    """
    marks, lifetimes = run.marks[-1], run.analysis.lifetimes
    if marks.after_forward is None or marks.after_backward is None:
        return np.zeros(len(lifetimes), dtype=np.bool_)
    unused: Mask = ~run.ever_kept_by_autograd
    unused &= lifetimes.alive_at(run.analysis.timeline.position(marks.after_backward))
    unused &= lifetimes.bytes >= NOTABLE_BYTES  # a loss that backward was called on is no variable of the script's
    return unused & (position > run.analysis.timeline.position(marks.after_forward))


def _used_again(run: TrainingRun) -> Mask:
    """What autograd saved anew in the last step, such as a state that is carried from step to step."""
    again: Mask = run.with_fact(Fact.SAVED, after_ns=run.steps[-1].start_ns) > 0
    return again


def _after_backward(run: TrainingRun, marks: Instants, position: int) -> bool:
    """Whether ``position`` is past the last step's last backward."""
    if marks.after_backward is None:
        return False
    return position >= run.analysis.timeline.position(marks.after_backward)
