"""What grew of that which a limit is about; without a baseline, what is the largest of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampmem.analysis.budgets.budget import ALLOCATED, COPIES, DEVICE, GROWTH, OF_MODULE, PEAK, RESERVED, module_in
from ampmem.analysis.budgets.run import Run
from ampmem.analysis.difference.changes import GroupChange, changes_between, changes_of, of_category
from ampmem.analysis.difference.difference import Difference, difference, renames_between
from ampmem.analysis.difference.groups import Group, Moment, groups_in_module
from ampmem.analysis.difference.matching import match
from ampmem.analysis.difference.mosts import Histories
from ampmem.analysis.difference.renames import Names, Renamed
from ampmem.analysis.difference.side import Side
from ampmem.analysis.modules import ROOT
from ampmem.analysis.summary import PeakPlace
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Category
from ampmem.names import CUDNN_TRIALS
from ampmem.units import format_bytes

AT_PEAK = "at the peak"
_AFTER_FORWARD, _AFTER_BACKWARD = "at the end of the last forward", "after the last backward"
_BESIDE = {
    PEAK: "rounding",
    ALLOCATED: "rounding",
    RESERVED: "rounding and cached memory",
    DEVICE: "rounding, cached memory and what is outside of the allocator",
}
"""What there is beside the tensors at the peak, which is not told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The changes, those that grew most first, and the groups of what there is, largest first.

    ``moved`` are changes that are more at the instant, and most of which the run before held, too, at another one.
    ``moments`` are the two instants, before and after, where they are not the same one of a step.
    """

    instant: str
    changes: tuple[GroupChange, ...] = ()
    moved: tuple[GroupChange, ...] = ()
    moments: tuple[Moment, Moment] | None = None
    held: tuple[Group, ...] = ()
    grouped: bool = True


def grown(run: Run, baseline: Side | None, key: str) -> Grown:
    """What grew of that which ``key`` limits, from ``baseline`` to ``run``; of growth, from step to step of the run."""
    if key == GROWTH:
        return _from_step_to_step(run)
    of_module = module_in(key)
    if of_module is not None:
        return _in_a_module(run, baseline, *of_module)
    categories = _what(key)
    instant = AT_PEAK if not categories else _where_largest(categories)
    if not categories and run.summary.whole.where is not PeakPlace.STEP:
        instant += " of the recorded steps, which is not the run's,"
    if key in _BESIDE and (key != PEAK or run.summary.peak.allocated is not None):
        instant += f" of tensors alone, without {_BESIDE[key]}{_assumed(run)}"
    held = _held(run.side, categories)
    if baseline is None:
        return Grown(instant=instant, held=held)
    grouped = baseline.groups is not None and run.side.groups is not None
    if not grouped:
        if not categories:
            instant = "with the most of each category, whenever that was"
        sums = _of_summaries(baseline, run.side, categories)
        return Grown(instant=instant, changes=_ordered(sums), grouped=False, held=held)
    found = [difference(baseline, run.side, category=category) for category in categories or (None,)]
    histories = Histories(baseline, run.side)
    changes: list[GroupChange] = []
    moved: list[GroupChange] = []
    for change in (change for each in found for change in each.changes):
        told = change.grown < 0 or histories.mosts(change).explain(change)
        (changes if told else moved).append(change)
    return Grown(instant=instant, changes=_ordered(changes), moved=_ordered(moved), moments=_moments(found), held=held)


def _assumed(run: Run) -> str:
    """What a simulated device's bytes are with, and no tensor has."""
    prediction = run.summary.prediction
    bounds = {} if prediction is None or prediction.highest is None else prediction.highest.bounds
    return "".join(
        f", and without what is assumed for {what}, up to {format_bytes(size)} at once"
        for what, size in bounds.items()
        if what != CUDNN_TRIALS
    )


def _moments(found: Sequence[Difference]) -> tuple[Moment, Moment] | None:
    """Of one difference, where its instants are not the same one."""
    if len(found) != 1 or not found[0].elsewhere:
        return None
    before, after = found[0].moment_before, found[0].moment_after
    return None if before is None or after is None else (before, after)


def _of_summaries(before: Side, after: Side, categories: Sequence[Category]) -> Iterator[GroupChange]:
    """By module what is known of ``categories``; at the peak every category's most, as two peaks are two instants."""
    for category in categories:
        yield from _by_module(before, after, category)
    for category in () if categories else CATEGORIES:
        old, new = before.summary.most[category], after.summary.most[category]
        if old != new:
            yield of_category(category, old, new)


def _where_largest(categories: Sequence[Category]) -> str:
    one = len(categories) == 1 and not (categories[0].endswith("s"))
    return f"where {' and '.join(categories)} {'is' if one else 'are'} largest"


def _what(key: str) -> tuple[Category, ...]:
    """The categories that ``key`` is about, none for all."""
    if key == COPIES:
        return PRECISION_COPIES
    return (Category(key),) if key in tuple(Category) else ()


def _in_a_module(run: Run, baseline: Side | None, module: str, key: str) -> Grown:
    """At the instant at which the module is measured."""
    category, after = Category(key), run.side.groups
    instant = _AFTER_BACKWARD if category is Category.GRADIENTS else _AFTER_FORWARD
    held = () if after is None else _largest_first(groups_in_module(after.analysis, category, module))
    if baseline is None:
        return Grown(instant=instant, held=held)
    if baseline.groups is None or after is None:
        by_module = _by_module(baseline, run.side, category, module)
        return Grown(instant=instant, changes=_ordered(by_module), grouped=False, held=held)
    renamed = renames_between(baseline, run.side)
    before = groups_in_module(baseline.groups.analysis, category, _before(renamed, module, baseline))
    return Grown(instant=instant, changes=_ordered(changes_of(match(before, held, renamed))), held=held)


def _before(renamed: Sequence[Renamed], module: str, baseline: Side) -> str:
    """What ``module`` is called in ``baseline``."""
    names = Names(renamed)
    found = [each.name for each in baseline.summary.modules if names.of(each.name) == module]
    return found[0] if found else module


def _from_step_to_step(run: Run) -> Grown:
    growth = run.growth
    assert growth is not None
    return Grown(
        instant=f"from the end of step {growth.first} to that of step {growth.last}",
        changes=_ordered(changes_between(growth.before, growth.after)),
    )


def _held(side: Side, categories: Sequence[Category]) -> tuple[Group, ...]:
    if side.groups is None:
        return ()
    groups = (
        [each for category in categories for each in side.groups.most[category]] if categories else side.groups.peak
    )
    return _largest_first(groups)


def _largest_first(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def _in_module(wanted: str, name: str) -> bool:
    """Whether a module of that ``name`` is the module ``wanted``, or in it; all are in none."""
    return not wanted or (bool(name) if wanted == ROOT else f"{name}.".startswith(f"{wanted}."))


def _by_module(before: Side, after: Side, category: Category, wanted: str = "") -> Iterator[GroupChange]:
    """By module what a summary knows of ``category``.

    What is in no module is known only together with what is there at another instant than the modules': where that
    has changed, too, there is no telling which of the two it is, and the category is one.
    """
    old, new = _own(before, category), _own(after, category)
    if not wanted and old[""] != new[""]:
        yield of_category(category, before.summary.most[category], after.summary.most[category])
        return
    for name in {**old, **new}:
        if old.get(name, 0) != new.get(name, 0) and _in_module(wanted, name):
            yield replace(of_category(category, old.get(name, 0), new.get(name, 0)), module=name or None)


def _own(side: Side, category: Category) -> Mapping[str, int]:
    """The bytes of each module without those of the modules in it, and under the empty name the rest of the most."""
    most = side.summary.most[category]
    if category not in OF_MODULE:
        return {"": most}
    whole = {module.name: int(getattr(module, category)) for module in side.summary.modules}
    own = dict(whole)
    for name in whole.keys() - {ROOT}:
        own[name.rpartition(".")[0] or ROOT] -= whole[name]
    return {**own, "": most - sum(own.values())}


def _ordered(changes: Iterable[GroupChange]) -> tuple[GroupChange, ...]:
    return tuple(sorted(changes, key=lambda change: -change.grown))
