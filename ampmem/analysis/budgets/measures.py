"""How many bytes of what a budget limits there are in a run."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.budgets.budget import ALLOCATED, COPIES, DEVICE, GROWTH, PEAK, RESERVED, Budget, nearest
from ampmem.analysis.budgets.run import Run
from ampmem.analysis.difference.side import Side
from ampmem.analysis.modules import ModuleMemory
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import PRECISION_COPIES, Category
from ampmem.vocabulary import SourceKind

OF_SUMMARY: tuple[str, ...] = (PEAK, *map(str, Category), COPIES)
"""What every summary has, and what a run is compared by."""


_MEANT = 3


class NotMeasured(ValueError):
    """That is not known of the run: the message says why."""


def measured(run: Run, budget: Budget) -> int:
    """Bytes of what ``budget`` limits; of growth for each step. Raises :class:`NotMeasured`."""
    summary, key = run.summary, budget.key
    if key == PEAK:
        return summary.whole.at_most
    if key in OF_SUMMARY:
        return of_summary(summary, key)
    if budget.module is not None:
        return _of_module(summary, *budget.module)
    if key == GROWTH:
        return _growth(run)
    if key == ALLOCATED:
        return _allocated(run)
    reserved = _reserved(summary)
    return reserved if key == RESERVED else _device(summary, reserved)


def least_of(run: Run, budget: Budget) -> int | None:
    """The least of what :func:`measured` gives the most of; ``None`` where nothing is assumed of it."""
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
    """Bytes of a key in :data:`OF_SUMMARY`; of both copies together the most of each.

    The peak is that of the whole run, without what is assumed of a simulated device: code does not change that.
    """
    if key == PEAK:
        return summary.whole.bytes
    if key == COPIES:
        return sum(summary.most[category] for category in PRECISION_COPIES)
    return summary.most[Category(key)]


def before_of(summary: Summary, budget: Budget) -> int | None:
    """The same of a baseline, as far as its summary knows it."""
    try:
        return measured(Run(side=Side(label="", summary=summary, groups=None)), budget)
    except NotMeasured:
        return None


def module_of(summary: Summary, name: str) -> ModuleMemory | None:
    """The module called ``name``; ``None`` where the run has none."""
    return next((module for module in summary.modules if module.name == name), None)


def _of_module(summary: Summary, name: str, key: str) -> int:
    module = module_of(summary, name)
    if module is None:
        raise NotMeasured(f"no module {name!r} was seen{_meant(name, [each.name for each in summary.modules])}")
    return int(getattr(module, key))


def _meant(name: str, names: Sequence[str]) -> str:
    """Those of ``names`` that end with ``name``: where there are several models theirs come first in each."""
    ends = [each for each in names if each.endswith(f".{name}")]
    if not ends:
        return nearest(name, names)
    return f"; did you mean {' or '.join(map(repr, ends[:_MEANT]))}?"


def _growth(run: Run) -> int:
    if run.growth is not None:
        return run.growth.per_step
    if run.side.groups is None:
        raise NotMeasured("a summary's JSON does not say what is alive at the ends of steps; give the recording")
    raise NotMeasured("it takes two steps with an update or more; record more of them with --steps")


def _allocated(run: Run) -> int:
    summary = run.summary
    if run.allocated is not None:
        return max(run.allocated, summary.whole.at_most)
    raise NotMeasured("a summary's JSON does not say it of every event; give the recording")


def _reserved(summary: Summary) -> int:
    """Of a simulated device with the most that is assumed for what is not known."""
    found = [step.peak_reserved for step in summary.steps if step.peak_reserved is not None]
    if not found:
        cpu = summary.source is SourceKind.CPU
        why = (
            "the CPU's allocator reserves nothing; record on a GPU, or with --device sim" if cpu else "it is not known"
        )
        raise NotMeasured(why)
    return max(*found, 0 if summary.prediction is None else summary.prediction.most_reserved)


def _device(summary: Summary, reserved: int) -> int:
    """What is reserved, and the most that was outside of the allocator."""
    prediction = summary.prediction
    if prediction is not None:
        return prediction.most_total
    if summary.allocator.outside is None:
        raise NotMeasured("what is outside of the allocator is not known")
    return reserved + summary.allocator.outside
