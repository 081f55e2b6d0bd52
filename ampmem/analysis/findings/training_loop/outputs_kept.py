"""What the script keeps alive of a forward whose backward is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
_SOMETHING = "variables of the script"
_OR_SCHEDULE = ", or the schedule of its pipeline"
_CHANGE_OF_PIPELINE = "what the script holds (outputs, losses): del it after the update; what the schedule holds stays"
_NAMED = 3
"""So many variables are named."""
_LIBRARIES = "/site-packages/"


def check(run: TrainingRun) -> Finding | None:
    """Results of forward that are alive at the last step's peak though no backward needs them.

    Those of the step before, as ``logits`` and ``loss`` are until they are assigned again; those of the step itself
    when the peak comes after its last backward; and when it comes in backward, those that autograd did not save and
    that outlive the backward. Told from :meth:`TrainingRun.notable` on, and of what an op was seen to return; not where
    the sums are wrong, since then what seems alive may be dead, nor where torch.func kept what is not known.
    """
    if not run.peaks or run.analysis.conservation.breach is not None or FUNCTIONAL in run.recording.notes:
        return None
    if run.at_failure and run.analysis.failed_request is not None and not run.analysis.failed_request.ended_the_run:
        return None  # the last step, which is looked at, is a later one
    position = run.peak if run.at_failure else run.peaks[-1]
    kept = _left_over(run, position) & run.analysis.lifetimes.alive_at(position)
    size = run.bytes_of(kept)
    if not run.notable(size):
        return None
    variables, held = _variables(run, kept, position)
    shown = variables[:_NAMED]
    dropped = _held_by(run, held, shown)
    names = [each.in_words(each.file.replace("\\", "/").rpartition("/")[2]) for each in shown]
    if names and (len(variables) > _NAMED or size - run.bytes_of(dropped) >= NOTABLE_BYTES):
        names.append("others")
    return Finding(
        code="outputs-kept",
        severity="advice",
        section=Section.ALLOCATIONS,
        message=f"{format_bytes(size)} of a forward's results are alive at {run.instant}, and backward does not "
        f"need them: they are held by {_listed(names) or _SOMETHING}{_OR_SCHEDULE if run.pipelined else ''}.",
        bytes=size,
        change=_CHANGE_OF_PIPELINE if run.pipelined else _change(shown),
        evidence=(
            *(f"{format_bytes(each.bytes)}: held by {each.in_words(each.file)}" for each in shown),
            *run.largest(kept),
        ),
        off_peak=_off_peak(run, position, kept & ~dropped if shown else np.zeros_like(kept)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    """A variable of the script that holds ``bytes``, and where it got its value; line 0 where that is not known."""

    name: str
    file: str
    line: int
    function: str
    bytes: int
    place: str
    """All of that, as the recording has it."""

    def in_words(self, file: str) -> str:
        """What it is and where it got its value; ``file`` is what to call its file."""
        where = f"{file}:{self.line}" if self.line else file
        if self.function.startswith("<"):
            return f"the variable `{self.name}` of {where}"
        return f"the local `{self.name}` of {where} (in {self.function})"

    @property
    def dropped(self) -> str:
        """What the script deletes to let go of it; empty for an item of a list, and in the code of a library."""
        if "[" in self.name or _LIBRARIES in self.file.replace("\\", "/"):
            return ""
        root, _, _ = self.name.partition(".")
        return self.name if root == "self" else root


def _variables(run: TrainingRun, kept: Mask, position: int) -> tuple[list[_Variable], list[tuple[str, str, int]]]:
    """The variables that hold the allocations in ``kept`` at ``position``, the largest first.

    And each with every allocation that it holds: its name, its place, the allocation. Of each allocation those count
    that were seen when the script was last looked at before.
    """
    facts = run.analysis.facts
    until = run.analysis.timeline.time_ns[position - 1] if position else 0
    mine = (facts.fact == Fact.VARIABLE) & (facts.time_ns <= until) & kept[facts.allocation]
    last = np.zeros(len(kept), dtype=np.int64)
    np.maximum.at(last, facts.allocation[mine], facts.time_ns[mine])
    rows = np.flatnonzero(mine & (facts.time_ns == last[facts.allocation]))
    pairs = np.unique(np.stack([facts.name[rows], facts.module[rows], facts.allocation[rows]]), axis=1)
    held = [(run.text(name), run.text(place), allocation) for name, place, allocation in pairs.T.tolist()]
    sizes: dict[tuple[str, str], int] = {}
    for name, place, allocation in held:
        sizes[name, place] = sizes.get((name, place), 0) + int(run.analysis.lifetimes.bytes[allocation])
    found = [_variable(name, place, size) for (name, place), size in sizes.items() if size >= NOTABLE_BYTES]
    return sorted(found, key=lambda each: (-each.bytes, each.name, each.line)), held


def _held_by(run: TrainingRun, held: Sequence[tuple[str, str, int]], shown: Sequence[_Variable]) -> Mask:
    """The allocations that no other variable holds than those that are ``shown``."""
    names = {(each.name, each.place) for each in shown}
    mine = np.zeros(len(run.analysis.lifetimes), dtype=np.bool_)
    mine[[allocation for _, _, allocation in held]] = True
    mine[[allocation for name, place, allocation in held if (name, place) not in names]] = False
    return mine


def _variable(name: str, place: str, size: int) -> _Variable:
    where, _, function = place.rpartition(" ")
    file, _, line = where.rpartition(":")
    return _Variable(
        name=name,
        file=file,
        line=int(line) if line.isdigit() else 0,
        function=function.rpartition("<locals>.")[2],
        bytes=size,
        place=place,
    )


def _change(variables: Sequence[_Variable]) -> str:
    if not variables:
        return _CHANGE
    dropped = list(dict.fromkeys(each.dropped for each in variables))
    what = f"del {', '.join(dropped)}"
    if "" in dropped:
        dropped = [f"`{each.name}`" for each in variables]
        what = f"let go of {_listed(dropped)}"
    return f"{what} after the loss, if nothing reads {'it' if len(dropped) == 1 else 'them'} later"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _off_peak(run: TrainingRun, position: int, stays: Mask) -> int | None:
    """Without what is left over at each event of the last step that it is left over at, but for what ``stays``."""
    lifetimes, marks = run.analysis.lifetimes, run.marks[-1]
    since = np.zeros(len(lifetimes), dtype=np.int64)
    if marks.after_forward is not None:  # until then the script uses its own results
        since[lifetimes.step == run.steps[-1].index] = run.analysis.timeline.position(marks.after_forward) + 1
    return run.off_peak(lifetimes.bytes * (_left_over(run, position) & ~stays), since, place=len(run.steps) - 1)


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
