"""A run to check against budgets: its sizes, whether it can be judged, and whether it can be a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.budgets.budget import ALLOCATED, COPIES, DEVICE, GROWTH, PEAK, RESERVED, Budget, module_in
from ampmem.analysis.difference.difference import bytes_of, conditions_of, difference
from ampmem.analysis.difference.sides import (
    Group,
    Side,
    groups_at,
    groups_of,
    is_json,
    path_given,
    read_side,
    side_given,
)
from ampmem.analysis.jsonable import NotOfThisKind, parsed
from ampmem.analysis.soundness import wrong_sums
from ampmem.analysis.summary import SCHEMA, Summary, require_training, summary_of
from ampmem.analysis.timeline.categories import PRECISION_COPIES, Category
from ampmem.errors import UsageError
from ampmem.events import Recording
from ampmem.names import nearest
from ampmem.recording import is_recording, read
from ampmem.vocabulary import SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGrowth:
    """The bytes alive at the end of two steps, ``steps`` apart: the first step with an update, and the last step."""

    first: int
    last: int
    steps: int
    before: tuple[Group, ...]
    after: tuple[Group, ...]

    @property
    def bytes(self) -> int:
        """The bytes alive at the end of the last step minus those at the end of the first; may be negative."""
        return bytes_of(self.after) - bytes_of(self.before)

    @property
    def per_step(self) -> int:
        """The growth per step in bytes, rounded up."""
        return -(-self.bytes // self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """A run that is checked against budgets.

    ``allocated`` is the peak of the allocator's blocks over the recorded steps in bytes, ``growth`` the memory that
    stays from step to step; ``None`` if unknown, as from a summary's JSON. ``problems`` say why the run cannot be
    judged.
    """

    side: Side
    allocated: int | None = None
    growth: StepGrowth | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """The recorder's notes."""

    @property
    def summary(self) -> Summary:
        """The summary of the run."""
        return self.side.summary


def run_of(recording: Recording, label: str) -> JudgedRun:
    """``recording`` as a run to check; ``label`` is its name in messages.

    Raises :class:`~ampmem.errors.NothingRecorded` and :class:`~ampmem.errors.RecordingError` as
    :func:`~ampmem.analysis.summary.summarize` does.
    """
    require_training(recording)
    analysis = analyse(recording)
    summary = summary_of(analysis)
    return JudgedRun(
        side=Side(label=label, summary=summary, groups=groups_of(analysis), arguments=recording.run.arguments),
        allocated=int(analysis.sizes[analysis.peak]),
        growth=_growth(analysis),
        problems=(*_problems(summary), *_ending(recording, summary)),
        notes=recording.remarks,
    )


def run_of_side(side: Side) -> JudgedRun:
    """The run of ``side``, which has a summary only."""
    return JudgedRun(side=side, problems=tuple(_problems(side.summary)))


def run_given(given: object, label: str) -> JudgedRun:
    """The run in a recording, a summary, or a file with one of them; ``label`` names a run that is not in a file.

    Raises :class:`~ampmem.errors.UsageError` for anything else, and what :func:`run_of` and :func:`read_run` raise.
    """
    if isinstance(given, Recording):
        return run_of(given, label)
    return run_of_side(side_given(given, label)) if isinstance(given, Summary) else read_run(path_given(given))


def read_run(path: Path, label: str | None = None) -> JudgedRun:
    """The run in the file ``path``: a recording, or the JSON of a summary.

    Raises :class:`~ampmem.errors.UsageError` where there is no file, and what :func:`run_of` raises.
    """
    name = label or path.name
    return run_of_side(replace(read_side(path), label=name)) if is_json(path) else run_of(read(path), name)


def _growth(analysis: Analysis) -> StepGrowth | None:
    """The growth from step to step; ``None`` if fewer than two steps ended from the first update on."""
    ended = [step for step in analysis.recording.steps if step.finished]
    # Optimizer state comes with the first update, which is not always the first step's: a scaler may skip some.
    while ended and ended[0].skipped_update:
        ended.pop(0)
    if len(ended) < 2:
        return None
    ends = [analysis.timeline.position(step.end_ns) for step in (ended[0], ended[-1])]
    before, after = (groups_at(analysis, position) for position in ends)
    first, last = ended[0].index, ended[-1].index
    return StepGrowth(first=first, last=last, steps=last - first, before=before, after=after)


def _problems(summary: Summary) -> Iterator[str]:
    yield from wrong_sums(summary)
    oom = summary.out_of_memory
    failed = [f"step {step.index}" for step in summary.steps if not step.finished][:1]
    if oom is not None:
        failed = [f"{oom.where}{'' if oom.ended_the_run else ', and the script went on'}"]
    yield from (f"memory ran out in {where}: how much the run would have needed is not known" for where in failed)


def _ending(recording: Recording, summary: Summary) -> Iterator[str]:
    if recording.ended is False:
        yield "the recording has no end: its process was killed, and how much it would have needed is not known"
    # A run that ran out of memory says so already.
    said = summary.ended_by is not None or not all(step.finished for step in recording.steps)
    if recording.run.failure is not None and not said:
        yield f"{recording.run.failure.note}; how much it would have needed is not known"


# The bytes of what a budget limits.

OF_SUMMARY: tuple[str, ...] = (PEAK, *map(str, Category), COPIES)
"""The keys that every summary has, and by which a run is compared with its baseline."""


_MEANT = 3


class NotMeasured(ValueError):
    """The size that a budget limits is not known for the run; the message says why."""


def measured(run: JudgedRun, budget: Budget) -> int:
    """The bytes that ``budget`` limits, an upper bound on a simulated GPU; for ``growth`` per step.

    Raises :class:`NotMeasured` if the run does not have them.
    """
    summary, key = run.summary, budget.key
    if key == PEAK:
        return summary.whole.at_most
    if key in OF_SUMMARY:
        return of_summary(summary, key)
    if (of_module := module_in(key)) is not None:
        return _of_module(summary, *of_module)
    if key == GROWTH and run.growth is not None:
        return run.growth.per_step
    if key == GROWTH and run.side.groups is None:
        raise NotMeasured("a summary's JSON does not have what is alive at the end of each step; give the recording")
    if key == GROWTH:
        raise NotMeasured("it needs at least two steps with an update; record more with --steps")
    if key == ALLOCATED and run.allocated is None:
        raise NotMeasured("a summary's JSON does not have the allocated bytes of each event; give the recording")
    if key == ALLOCATED:
        return max(run.allocated or 0, summary.whole.at_most)
    reserved = _reserved(summary)
    return reserved if key == RESERVED else _device(summary, reserved)


def least_of(run: JudgedRun, budget: Budget) -> int | None:
    """The lower bound of :func:`measured` in bytes; ``None`` if nothing was assumed."""
    prediction = run.summary.prediction
    if prediction is None or prediction.highest is None:
        return None
    least = {
        PEAK: run.summary.whole.bytes,
        ALLOCATED: prediction.at_peak_allocated.allocated,
        RESERVED: prediction.least_reserved,
        DEVICE: prediction.least_total,
    }
    return least.get(budget.key)


def of_summary(summary: Summary, key: str) -> int:
    """The bytes of a key in :data:`OF_SUMMARY`; for ``precision_copies`` the sum of the most of each kind.

    The peak is that of the whole run, without the assumptions about a simulated device, which code does not change.
    """
    if key == PEAK:
        return summary.whole.bytes
    if key == COPIES:
        return sum(summary.most[category] for category in PRECISION_COPIES)
    return summary.most[Category(key)]


def before_of(summary: Summary, budget: Budget) -> int | None:
    """The bytes in a baseline that ``budget`` limits; ``None`` if the baseline's summary does not have them."""
    try:
        return measured(JudgedRun(side=Side(label="", summary=summary, groups=None)), budget)
    except NotMeasured:
        return None


def _of_module(summary: Summary, name: str, key: str) -> int:
    modules = {module.name: module for module in summary.modules}
    if name in modules:
        return int(getattr(modules[name], key))
    # With several models, names begin with the model's.
    ends = [each for each in modules if each.endswith(f".{name}")]
    meant = f"; did you mean {' or '.join(map(repr, ends[:_MEANT]))}?" if ends else nearest(name, modules)
    raise NotMeasured(f"no module {name!r} was seen{meant}")


def _reserved(summary: Summary) -> int:
    """The peak of reserved bytes; for a simulated device the upper bound."""
    found = [step.peak_reserved for step in summary.steps if step.peak_reserved is not None]
    if not found and summary.source is SourceKind.CPU:
        raise NotMeasured("the CPU's allocator reserves nothing; record on a GPU, or with --device sim")
    if not found:
        raise NotMeasured("the reserved memory is not known")
    return max(*found, 0 if summary.prediction is None else summary.prediction.most_reserved)


def _device(summary: Summary, reserved: int) -> int:
    """The peak of the device's memory: reserved bytes plus the most that was outside of the allocator."""
    prediction = summary.prediction
    if prediction is not None:
        return prediction.most_total
    if summary.allocator.outside is None:
        raise NotMeasured("the memory outside of the allocator is not known")
    return reserved + summary.allocator.outside


# The baseline of a run: whether the two can be compared, and whether they are equal.

_NO_NAME = "a CUDA device"
"""The name that a recording has for a GPU whose name is unknown."""
_ANY_VERSION = f"{SCHEMA.rpartition('/')[0]}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOn:
    """The device of a run. ``name`` is empty if unknown, and for CPUs, which are all treated alike."""

    source: SourceKind
    name: str = ""

    def __str__(self) -> str:
        if self.source is SourceKind.CPU:
            return "the CPU"
        if self.source is SourceKind.SIMULATED:
            return f"a simulated {self.name or 'GPU'}"
        return f"the GPU {self.name}" if self.name else "a GPU"

    def is_comparable(self, other: RunsOn) -> bool:
        """Whether both devices are the same, as far as they are known."""
        return self.source is other.source and (self.name == other.name or not self.name or not other.name)


def runs_on(summary: Summary) -> RunsOn:
    """The device of the run. A snapshot is from a GPU and does not name it."""
    if summary.source is SourceKind.CPU:
        return RunsOn(source=SourceKind.CPU)
    if summary.source is SourceKind.SNAPSHOT:
        return RunsOn(source=SourceKind.CUDA)
    return RunsOn(source=summary.source, name="" if summary.device.name == _NO_NAME else summary.device.name)


def require_comparable(before: Side, device: RunsOn, label: str) -> None:
    """Raise :class:`UsageError` if ``before`` is from another device than ``device``, that of the run ``label``."""
    found = runs_on(before.summary)
    if not found.is_comparable(device):
        raise UsageError(
            f"the baseline {before.label} was recorded on {found}, and {label} on {device}: devices allocate "
            "differently, whatever the code is; make a baseline on the same device"
        )


def is_same(before: Side, after: Side) -> bool:
    """Whether ``after`` would be the same baseline as ``before``: equal sizes, groups and conditions.

    A summary and a recording are never the same baseline.
    """
    sizes = [[of_summary(side.summary, key) for key in OF_SUMMARY] for side in (before, after)]
    return sizes[0] == sizes[1] and not conditions_of(before, after) and not difference(before, after).changes


def require_replaceable(path: Path) -> None:
    """Raise :class:`UsageError` if the file at ``path`` is not a baseline, and so may not be replaced by one.

    A recording or a summary of any version may be replaced, and so may an empty file.
    """
    if not path.is_file() or not path.stat().st_size or is_recording(path) or (is_json(path) and _is_summary(path)):
        return
    raise UsageError(
        f"{path} is neither an ampmem recording nor an ampmem summary, so the baseline does not replace it; give "
        "another name, or remove it first"
    )


def _is_summary(path: Path) -> bool:
    try:
        value = parsed(path.read_text(encoding="utf-8-sig"))
    except (NotOfThisKind, UnicodeDecodeError, OSError):
        return False
    found = value[0] if isinstance(value, list) and value else value
    return isinstance(found, dict) and str(found.get("schema", "")).startswith(_ANY_VERSION)
