"""What the script keeps alive of a forward whose backward is done."""

from __future__ import annotations

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import ALIVE, Mask
from ampmem.analysis.timeline.marks import Instants
from ampmem.events import NO_STEP, Fact, Phase
from ampmem.units import format_bytes

_CHANGE = "del whatever holds them (outputs, loss) after backward; keep numbers with loss.item()"
_OR_SCHEDULE = ", or the schedule of its pipeline,"
_CHANGE_OF_PIPELINE = "what the script holds (outputs, losses): del it after the update; what the schedule holds stays"


def check(run: TrainingRun) -> Finding | None:
    """Results of forward that are alive at the last step's peak though no backward needs them any more.

    Those of the step before, as ``logits`` and ``loss`` are until they are assigned again, and when the peak comes
    after the step's last backward also its own. Told from :meth:`TrainingRun.notable` on, and of what an op was seen to
    return; not where the recording's sums are wrong, since then what seems alive may be dead.
    """
    if not run.peaks or run.analysis.conservation.breach is not None:
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
        message=f"{format_bytes(size)} of a forward whose backward is done are still alive at the peak: "
        f"something in the script{_OR_SCHEDULE if run.pipelined else ''} holds them.",
        bytes=size,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _CHANGE,
        evidence=run.largest(kept),
        off_peak=size,
    )


def _left_over(run: TrainingRun, position: int) -> Mask:
    """What forward made and backward is done with when the last step has reached ``position``."""
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    made = (lifetimes.phase == Phase.FORWARD) & (lifetimes.step >= 0) & (run.with_fact(Fact.OUTPUT) > 0)
    made &= classes.of(Category.ACTIVATIONS) | classes.of(Category.TEMPORARIES)
    step = run.steps[-1]
    # What never dies is a leak, which is a finding of its own; the newest may just not have died yet.
    earlier = (lifetimes.step == step.index - 1) & (lifetimes.died != ALIVE) & ~_used_again(run)
    over = lifetimes.step == (step.index if _after_backward(run, run.marks[-1], position) else NO_STEP)
    left: Mask = made & (earlier | over)
    return left


def _used_again(run: TrainingRun) -> Mask:
    """What autograd saved anew in the last step, such as a state that is carried from step to step."""
    again: Mask = run.with_fact(Fact.SAVED, after_ns=run.steps[-1].start_ns) > 0
    return again


def _after_backward(run: TrainingRun, marks: Instants, position: int) -> bool:
    """Whether ``position`` is past the last step's last backward."""
    if marks.after_backward is None:
        return False
    return position >= run.analysis.timeline.position(marks.after_backward)
