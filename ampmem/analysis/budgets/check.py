"""A run checked against its budgets and a baseline, as typed values and as JSON (``ampmem.check/1``).

The dataclasses have the names and the order of the JSON. ``None`` means unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

from ampmem.analysis.budgets.budget import (
    ALLOCATED,
    COPIES,
    DEVICE,
    GROWTH,
    NONE_ALLOWED,
    OF_MODULE,
    PEAK,
    RESERVED,
    Allowance,
    Budget,
    module_in,
)
from ampmem.analysis.budgets.run import (
    OF_SUMMARY,
    JudgedRun,
    NotMeasured,
    before_of,
    least_of,
    measured,
    of_summary,
    require_comparable,
    runs_on,
)
from ampmem.analysis.difference.difference import (
    Condition,
    GroupChange,
    Histories,
    changes_between,
    changes_of,
    conditions_of,
    difference,
    renames_between,
)
from ampmem.analysis.difference.matching import RenamedNames, match
from ampmem.analysis.difference.sides import Group, Moment, Side, groups_among
from ampmem.analysis.jsonable import Json, JsonDocument, Name, OneOf, Signed, like, schema_of_printed
from ampmem.analysis.modules import ROOT, in_module
from ampmem.analysis.summary import PLACES, PeakPlace
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES, Category
from ampmem.names import CUDNN_TRIALS
from ampmem.output import Shown
from ampmem.recording import rank_of
from ampmem.units import format_bytes, format_peak
from ampmem.version import __version__

AT_PEAK = "at the peak"
_AFTER_FORWARD, _AFTER_BACKWARD = "at the end of the last forward", "after the last backward"
_BESIDE = {
    PEAK: "rounding",
    ALLOCATED: "rounding",
    RESERVED: "rounding and cached memory",
    DEVICE: "rounding, cached memory and what is outside of the allocator",
}
"""Memory at the peak besides the tensors, which no group names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownGroups:
    """The changes behind a broken limit, the largest growth first, and ``held``, the live groups, largest first.

    ``moved`` are changes that are larger at this instant, but most of which the baseline held too, at another instant.
    ``moments`` are the two instants, before and after, where they are different ones of a step.
    """

    instant: str
    changes: tuple[GroupChange, ...] = ()
    moved: tuple[GroupChange, ...] = ()
    moments: tuple[Moment | None, Moment | None] | None = None
    held: tuple[Group, ...] = ()
    grouped: bool = True


def grown(run: JudgedRun, baseline: Side | None, key: str) -> GrownGroups:
    """The changes that explain why the memory that ``key`` limits grew; for ``growth`` those from step to step."""
    if key == GROWTH:
        return _from_step_to_step(run)
    of_module = module_in(key)
    if of_module is not None:
        return _in_a_module(run, baseline, *of_module)
    categories: tuple[Category, ...] = (Category(key),) if key in tuple(Category) else ()
    categories = PRECISION_COPIES if key == COPIES else categories
    instant = AT_PEAK
    if categories:
        one = len(categories) == 1 and not categories[0].endswith("s")
        instant = f"when {' and '.join(categories)} {'is' if one else 'are'} largest"
    elif run.summary.whole.where is not PeakPlace.STEP:
        instant += " of the recorded steps (not the peak of the run),"
    if key in _BESIDE and (key != PEAK or run.summary.peak.allocated is not None):
        instant += f" of tensors alone, without {_BESIDE[key]}{_assumed(run)}"
    held = _largest_groups(run.side, categories)
    if baseline is None:
        return GrownGroups(instant=instant, held=held)
    grouped = baseline.groups is not None and run.side.groups is not None
    if not grouped:
        if not categories:
            instant = "at the largest size of each category"
        sums = _of_summaries(baseline, run.side, categories)
        return GrownGroups(instant=instant, changes=_ordered(sums), grouped=False, held=held)
    found = [difference(baseline, run.side, category=category) for category in categories or (None,)]
    histories = Histories(baseline, run.side)
    every = _ordered(change for each in found for change in each.changes)
    explaining = [each.grown < 0 or histories.explain(each) for each in every]
    changes, moved = tuple(compress(every, explaining)), tuple(compress(every, (not is_so for is_so in explaining)))
    # The instants, if they are not the same in both runs.
    moments = found[0].moment_before, found[0].moment_after
    elsewhere = moments if len(found) == 1 and found[0].elsewhere else None
    return GrownGroups(instant=instant, changes=changes, moved=moved, moments=elsewhere, held=held)


def _assumed(run: JudgedRun) -> str:
    """The memory that a simulation only assumes: ``, and without what is assumed for cuDNN, up to 1.0 GiB``."""
    prediction = run.summary.prediction
    bounds = {} if prediction is None or prediction.highest is None else prediction.highest.bounds
    return "".join(
        f", and without what is assumed for {what}, up to {format_bytes(size)} at once"
        for what, size in bounds.items()
        if what != CUDNN_TRIALS
    )


def _of_summaries(before: Side, after: Side, categories: Sequence[Category]) -> Iterator[GroupChange]:
    """The changes by module and category between two summaries; at the peak, the largest size of each category."""
    for category in categories:
        yield from _by_module(before, after, category)
    for category in () if categories else CATEGORIES:
        old, new = before.summary.most[category], after.summary.most[category]
        if old != new:
            yield GroupChange(category=category, before=old, after=new)


def _in_a_module(run: JudgedRun, baseline: Side | None, module: str, key: str) -> GrownGroups:
    """The changes in a module, at the instant at which the module is measured."""
    category, after = Category(key), run.side.groups
    instant = _AFTER_BACKWARD if category is Category.GRADIENTS else _AFTER_FORWARD
    held: tuple[Group, ...] = ()
    if after is not None:
        held = _largest_first(groups_among(after.analysis, in_module(after.analysis, category, module)))
    if baseline is None:
        return GrownGroups(instant=instant, held=held)
    if baseline.groups is None or after is None:
        by_module = _by_module(baseline, run.side, category, module)
        return GrownGroups(instant=instant, changes=_ordered(by_module), grouped=False, held=held)
    renamed, earlier = renames_between(baseline, run.side), baseline.groups.analysis
    names = RenamedNames(renamed)
    old_names = (each.name for each in baseline.summary.modules if names.of(each.name) == module)
    before = groups_among(earlier, in_module(earlier, category, next(old_names, module)))
    return GrownGroups(instant=instant, changes=_ordered(changes_of(match(before, held, renamed))), held=held)


def _from_step_to_step(run: JudgedRun) -> GrownGroups:
    growth = run.growth
    assert growth is not None
    return GrownGroups(
        instant=f"from the end of step {growth.first} to the end of step {growth.last}",
        changes=_ordered(changes_between(growth.before, growth.after)),
    )


def _largest_groups(side: Side, categories: Sequence[Category]) -> tuple[Group, ...]:
    if side.groups is None:
        return ()
    most = [each for category in categories for each in side.groups.most[category]]
    return _largest_first(most if categories else side.groups.peak)


def _largest_first(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def _by_module(before: Side, after: Side, category: Category, wanted: str = "") -> Iterator[GroupChange]:
    """The changes of ``category`` by module, from two summaries; only those inside the module ``wanted``, if given.

    A summary has the modules' bytes at one instant and the category's most at another. If bytes outside of all modules
    changed too, the two cannot be separated, and the category is one change.
    """
    old, new = _own(before, category), _own(after, category)
    if not wanted and old[""] != new[""]:
        yield GroupChange(category=category, before=before.summary.most[category], after=after.summary.most[category])
        return
    for name in {**old, **new}:
        inside = not wanted or (bool(name) if wanted == ROOT else f"{name}.".startswith(f"{wanted}."))
        change = GroupChange(category=category, module=name or None, before=old.get(name, 0), after=new.get(name, 0))
        if change.grown and inside:
            yield change


def _own(side: Side, category: Category) -> Mapping[str, int]:
    """The bytes of each module without its submodules; under the empty name the category's bytes in no module."""
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


SCHEMA = "ampmem.check/1"

TRIALS_NOT_JUDGED = (
    "budgets do not count the trials of torch.backends.cudnn.benchmark, which only take memory that is free"
)
"""The note of a run in which cuDNN's benchmark trials may fill the device."""


PEAK_IS = "the peak of the whole run is "
"""The beginning of the note of a run whose peak is outside of the recorded steps."""


class Limit(StrEnum):
    """The source of a limit."""

    BUDGET = "budget"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A limit and the size that it is compared with: ``before`` is the baseline's, ``after`` the run's.

    ``kept`` is false if the size is above the limit, if it is unknown (``unknown`` says why), and if the run cannot be
    judged, as it may have needed more than was seen. Sizes are in bytes; ``growth`` is per step and may be negative.
    ``least`` is the lower bound where ``after`` is the upper bound of a simulated device.
    """

    key: Name
    limit_of: Limit
    limit: int
    before: int | None
    after: Signed | None
    kept: bool
    unknown: str | None = None
    least: int | None = None

    @property
    def over(self) -> bool:
        """Whether the size is above the limit."""
        return self.after is not None and self.after > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A broken limit, and the groups that grew, the largest changes first.

    ``moved`` are changes that are larger at this instant, but most of which the baseline held too, at another instant:
    they do not explain growth. ``shrank`` is the sum of all other changes, below 0. If nothing grew, or without a
    baseline, ``held`` has the groups that are alive, largest first. ``least`` is as in :class:`Judged`. ``instant`` is
    the instant that is compared; ``moment_before`` and ``moment_after`` are the exact ones where they differ.
    """

    key: Name
    limit_of: Limit
    limit: int
    before: Signed | None
    after: Signed
    least: int | None
    instant: str
    moment_before: Moment | None
    moment_after: Moment | None
    grew: tuple[GroupChange, ...]
    moved: tuple[GroupChange, ...]
    shrank: Signed
    grouped: bool
    """Whether growth is attributed to lines of the script; a summary's JSON has categories and modules only."""
    held: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The baseline of a run. ``grouped`` is false for the JSON of a summary, which has no stacks."""

    label: str
    allow: str
    grouped: bool
    conditions: tuple[Condition, ...]
    """Differences between the two runs besides their code, which may explain a difference in memory."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckResult(JsonDocument, Shown):
    """Whether a run keeps its budgets, and has not grown since its baseline.

    ``problems`` say why the run could not be judged: then the result is not ``ok``, whatever the budgets say.
    """

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    label: str
    """The run's name in messages."""
    rank: int
    world_size: int
    ok: bool
    """Whether the run could be judged and keeps all limits."""
    problems: tuple[str, ...]
    baseline: Baseline | None
    """The baseline; null without one."""
    judged: tuple[Judged, ...]
    """All budgets and, with a baseline, all sizes that are compared."""
    broken: tuple[Broken, ...]
    """The limits that are not kept: the peak first, then those most over their limit."""
    notes: tuple[str, ...]
    """The recorder's notes on the run."""

    def _in_short(self) -> str:
        said = "not judged" if self.problems else f"{len(self.judged)} limits, {len(self.broken)} broken"
        return f"{self.label}, {'ok' if self.ok else 'not ok'}, {said}"

    @property
    def shrunk(self) -> tuple[Judged, ...]:
        """The sizes that are smaller than the baseline's."""
        compared = (each for each in self.judged if each.limit_of is Limit.BASELINE)
        return tuple(each for each in compared if each.before and each.after is not None and each.after < each.before)


def check_schema() -> dict[str, Json]:
    """The JSON Schema of a :class:`CheckResult`."""
    return schema_of_printed(CheckResult, SCHEMA, "ampmem check")


def check_run(
    run: JudgedRun,
    budgets: Sequence[Budget],
    baseline: Side | None = None,
    allow: Allowance = NONE_ALLOWED,
    *,
    mistaken: Sequence[str] = (),
) -> CheckResult:
    """Check ``run`` against ``budgets`` and, with the allowance ``allow``, against ``baseline``.

    ``mistaken`` names the tables of budgets that belong to no script: they become problems of the result. Raises
    :class:`~ampmem.errors.UsageError` for a baseline of another device.
    """
    if baseline is not None:
        require_comparable(baseline, runs_on(run.summary), run.side.label)
    judged = [*_budgets(run, budgets, baseline), *_compared(run, baseline, allow)]
    unknown = tuple(f"{each.key}: {each.unknown}" for each in judged if each.unknown is not None)
    broken = tuple(_broken(each, grown(run, baseline, each.key)) for each in judged if each.over)
    if run.problems:
        judged = [replace(each, kept=False) for each in judged]
    problems = (*run.problems, *unknown, *mistaken)
    return like(
        CheckResult,
        run.summary,
        schema=SCHEMA,
        ampmem=__version__,
        label=run.side.label,
        ok=not broken and not problems,
        problems=problems,
        baseline=None if baseline is None else _baseline(run, baseline, allow),
        judged=tuple(judged),
        broken=tuple(sorted(broken, key=lambda each: (each.key != PEAK, each.limit - each.after))),
        notes=(*run.notes, *_trials(run, budgets), *_place(run, judged)),
    )


def not_judged(label: str, why: str) -> CheckResult:
    """The result for a run that could not be summed up; ``why`` is the reason."""
    named = rank_of(Path(label))
    rank, ranks = (0, 1) if named is None else (named.rank, named.world_size)
    nothing: dict[str, Any] = {"baseline": None, "judged": (), "broken": (), "notes": ()}
    found = {"label": label, "rank": rank, "world_size": ranks, "problems": (why,), **nothing}
    return CheckResult(schema=SCHEMA, ampmem=__version__, ok=False, **found)


def _budgets(run: JudgedRun, budgets: Sequence[Budget], baseline: Side | None) -> Iterator[Judged]:
    for budget in budgets:
        before = None if baseline is None else before_of(baseline.summary, budget)
        judged = like(Judged, budget, limit_of=Limit.BUDGET, before=before, after=None, kept=False)
        try:
            after, least = measured(run, budget), least_of(run, budget)
        except NotMeasured as error:
            yield replace(judged, unknown=str(error))
        else:
            below = least if least is not None and least < after else None
            yield replace(judged, after=after, kept=after <= budget.limit, least=below)


def _trials(run: JudgedRun, budgets: Sequence[Budget]) -> Iterator[str]:
    prediction = run.summary.prediction
    limited = any(budget.key in (ALLOCATED, RESERVED, DEVICE) for budget in budgets)
    if limited and prediction is not None and prediction.filled is not None:
        yield TRIALS_NOT_JUDGED


def _place(run: JudgedRun, judged: Sequence[Judged]) -> Iterator[str]:
    whole = run.summary.whole
    if whole.where is not PeakPlace.STEP and any(each.key == PEAK for each in judged):
        yield (
            f"{PEAK_IS}{format_peak(whole.bytes)}, {PLACES[whole.where]}; the peak of the recorded steps is "
            f"{format_peak(run.summary.peak.said)}, and categories and growth are those of these steps"
        )


def _compared(run: JudgedRun, baseline: Side | None, allow: Allowance) -> Iterator[Judged]:
    if baseline is None:
        return
    for key in OF_SUMMARY:
        before, after = of_summary(baseline.summary, key), of_summary(run.summary, key)
        limit = allow.limit(before, baseline.summary.whole.bytes)
        yield Judged(key=key, limit_of=Limit.BASELINE, limit=limit, before=before, after=after, kept=after <= limit)


def _broken(judged: Judged, found: GrownGroups) -> Broken:
    grew, (before, after) = tuple(each for each in found.changes if each.grown > 0), found.moments or (None, None)
    return like(
        Broken,
        judged,
        instant=found.instant,
        moment_before=before,
        moment_after=after,
        moved=found.moved,
        grew=grew,
        shrank=sum(change.grown for change in found.changes if change.grown < 0),
        grouped=found.grouped,
        held=() if found.moved or grew else found.held,
    )


def _baseline(run: JudgedRun, baseline: Side, allow: Allowance) -> Baseline:
    return Baseline(
        label=baseline.label,
        allow=allow.text or "nothing",
        grouped=baseline.groups is not None and run.side.groups is not None,
        conditions=conditions_of(baseline, run.side),
    )
