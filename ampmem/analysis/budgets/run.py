"""A run as budgets are held against it: its summary, what was alive when, and whether it can be judged at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.difference.groups import Group, groups_at, groups_of
from ampmem.analysis.difference.reading import is_json, path_given, read_side, side_given
from ampmem.analysis.difference.side import Side
from ampmem.analysis.soundness import wrong_sums
from ampmem.analysis.summary import Summary, require_training, summary_of
from ampmem.events import Recording
from ampmem.recording import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What is alive at the end of two steps, ``steps`` apart: the first with an update, and the last."""

    first: int
    last: int
    steps: int
    before: tuple[Group, ...]
    after: tuple[Group, ...]

    @property
    def bytes(self) -> int:
        """Bytes more at the last of these ends than at the first; below 0 where there are fewer."""
        return _total(self.after) - _total(self.before)

    @property
    def per_step(self) -> int:
        """The same for each step between; what is not even is rounded up."""
        return -(-self.bytes // self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that budgets are held against.

    ``allocated`` is the most bytes that the allocator's blocks took in any recorded step, ``growth`` what stays from
    step to step; ``None`` where that is not known, as of a summary's JSON. ``problems`` are why it cannot be judged.
    """

    side: Side
    allocated: int | None = None
    growth: Growth | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """The recorder's remarks."""

    @property
    def summary(self) -> Summary:
        """What it comes to."""
        return self.side.summary


def run_of(recording: Recording, label: str) -> Run:
    """``recording``, which is called ``label``.

    Raises :class:`~ampmem.errors.NothingRecorded` and :class:`~ampmem.errors.RecordingError` as
    :func:`~ampmem.analysis.summary.summarize` does.
    """
    require_training(recording)
    analysis = analyse(recording)
    summary = summary_of(analysis)
    return Run(
        side=Side(label=label, summary=summary, groups=groups_of(analysis), arguments=recording.run.arguments),
        allocated=_allocated(analysis),
        growth=_growth(analysis),
        problems=(*_problems(summary), *_ending(recording, summary)),
        notes=recording.remarks,
    )


def run_of_side(side: Side) -> Run:
    """A run of which there is no more than ``side``."""
    return Run(side=side, problems=tuple(_problems(side.summary)))


def run_given(given: object, label: str) -> Run:
    """A run from a recording, a summary, or a file that holds one; what is in no file is called ``label``.

    Raises :class:`~ampmem.errors.UsageError` for anything else, and what :func:`run_of` and :func:`read_run` raise.
    """
    if isinstance(given, Recording):
        return run_of(given, label)
    side = side_given(given, label) if isinstance(given, Summary) else None
    return read_run(path_given(given)) if side is None else run_of_side(side)


def read_run(path: Path, label: str | None = None) -> Run:
    """The recording, or the JSON of a summary, at ``path``.

    Raises :class:`~ampmem.errors.UsageError` where there is no file, and what :func:`run_of` raises.
    """
    name = label or path.name
    return run_of_side(replace(read_side(path), label=name)) if is_json(path) else run_of(read(path), name)


def _allocated(analysis: Analysis) -> int:
    layers, timeline = analysis.layers, analysis.timeline
    series = timeline.total if layers is None else layers.allocated
    spans = [map(timeline.position, (step.start_ns, step.end_ns)) for step in analysis.recording.steps]
    return max(int(series[first : last + 1].max()) for first, last in spans)


def _growth(analysis: Analysis) -> Growth | None:
    """``None`` where fewer than two steps have ended from the first update on."""
    ended = [step for step in analysis.recording.steps if step.finished]
    # What an optimizer keeps comes with its first update: a scaler may have skipped some before.
    while ended and ended[0].skipped_update:
        ended.pop(0)
    if len(ended) < 2:
        return None
    ends = [analysis.timeline.position(step.end_ns) for step in (ended[0], ended[-1])]
    before, after = (groups_at(analysis, position) for position in ends)
    first, last = ended[0].index, ended[-1].index
    return Growth(first=first, last=last, steps=last - first, before=before, after=after)


def _problems(summary: Summary) -> Iterator[str]:
    yield from wrong_sums(summary)
    unfinished = next((step.index for step in summary.steps if not step.finished), None)
    oom = summary.out_of_memory
    if oom is not None:
        went_on = "" if oom.ended_the_run else ", and the script went on"
        yield f"memory ran out in {oom.where}{went_on}: what the run would have needed is not known"
    elif unfinished is not None:
        yield f"memory ran out in step {unfinished}: what the run would have needed is not known"


def _ending(recording: Recording, summary: Summary) -> Iterator[str]:
    if recording.ended is False:
        yield "the recording was not ended: its process was killed, and what it would have needed is not known"
    # Of a run that ran out of memory that is said already.
    said = summary.ended_by is not None or not all(step.finished for step in recording.steps)
    if recording.run.failure is not None and not said:
        yield f"{recording.run.failure.note}; what it would have needed is not known"


def _total(groups: tuple[Group, ...]) -> int:
    return sum(group.bytes for group in groups)
