"""A run against its budgets and against a baseline, as typed values and as JSON (``ampmem.check/1``).

The dataclasses have the names and the order of the JSON. ``None`` is what is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from ampmem.analysis.budgets.baseline import require_comparable, runs_on
from ampmem.analysis.budgets.budget import ALLOCATED, DEVICE, NONE_ALLOWED, PEAK, RESERVED, Allowance, Budget
from ampmem.analysis.budgets.grown import Grown, grown
from ampmem.analysis.budgets.measures import OF_SUMMARY, NotMeasured, before_of, least_of, measured, of_summary
from ampmem.analysis.budgets.run import Run
from ampmem.analysis.difference.changes import GroupChange
from ampmem.analysis.difference.conditions import Condition, conditions_of
from ampmem.analysis.difference.groups import Group, Moment
from ampmem.analysis.difference.side import Side
from ampmem.analysis.json.jsonable import Json, Name, OneOf, Signed, text_of
from ampmem.analysis.json.schema import schema_of
from ampmem.analysis.summary import PLACES, PeakPlace
from ampmem.output import Shown
from ampmem.recording import rank_of
from ampmem.units import format_peak
from ampmem.version import __version__

SCHEMA = "ampmem.check/1"

TRIALS_NOT_JUDGED = (
    "budgets are held against what there is without the trials of torch.backends.cudnn.benchmark, which take nothing "
    "but memory that is free"
)
"""The note of a run with such trials."""


PEAK_IS = "the peak is that of the whole run, "
"""How the note begins of a run whose peak is outside of the recorded steps."""


class Limit(StrEnum):
    """Where a limit comes from."""

    BUDGET = "budget"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a limit is held against. ``before`` is what the baseline has; ``after`` what the run has.

    ``kept`` is false where there is more than the limit, where that is not known, for which ``unknown`` is the reason,
    and where the run cannot be judged: more may have come than was seen. Of ``growth`` bytes are for each step, and may
    be negative. ``least`` is there where ``after`` is the most that is assumed of a simulated device: there is so much
    at least.
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
        """Whether there is more than the limit."""
        return self.after is not None and self.after > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A limit that is not kept, and what grew: the changes that are more bytes than before, largest first.

    ``moved`` are changes that are more at this instant, and most of which the run before held, too, at another one:
    they say what the instant is made of, and nothing of what grew. ``shrank`` is what all other changes come to, below
    0. Where nothing grew, or there is nothing to compare with, ``held`` has the groups of what there is, largest first.
    ``least`` is as in :class:`Judged`.
    ``instant`` says when that is looked at; ``moment_before`` and ``moment_after`` more closely where they differ.
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
    """Whether what grew is told by lines of the script; of a summary's JSON it is by category and module."""
    held: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the run is compared with. ``grouped`` is false for the JSON of a summary, which has no stacks."""

    label: str
    allow: str
    grouped: bool
    conditions: tuple[Condition, ...]
    """In what the two differ beside their code, which may explain a difference."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckResult(Shown):
    """Whether a run keeps its budgets, and has not grown since its baseline.

    ``problems`` are why it could not be judged: then it is not ``ok``, whatever its budgets say.
    """

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    label: str
    rank: int
    world_size: int
    ok: bool
    problems: tuple[str, ...]
    baseline: Baseline | None
    judged: tuple[Judged, ...]
    """Every budget and, with a baseline, every size that is compared."""
    broken: tuple[Broken, ...]
    """The peak first, then those that are most over their limit."""
    notes: tuple[str, ...]
    """The recorder's remarks on the run."""

    def _in_short(self) -> str:
        said = "not judged" if self.problems else f"{len(self.judged)} limits, {len(self.broken)} broken"
        return f"{self.label}, {'ok' if self.ok else 'not ok'}, {said}"

    @property
    def shrunk(self) -> tuple[Judged, ...]:
        """What is less than in the baseline."""
        return tuple(
            each
            for each in self.judged
            if each.limit_of is Limit.BASELINE
            and each.before is not None
            and each.after is not None
            and each.after < each.before
        )

    def to_json(self) -> str:
        """The result as JSON text, as :func:`check_schema` describes it."""
        return text_of(self)


def check_schema() -> dict[str, Json]:
    """The JSON Schema of :meth:`CheckResult.to_json`."""
    return schema_of(
        CheckResult,
        title="ampmem check, version 1",
        description="What `ampmem check --json` prints. Sizes are bytes; null is what is not known.",
    )


def check(
    run: Run,
    budgets: Sequence[Budget],
    baseline: Side | None = None,
    allow: Allowance = NONE_ALLOWED,
    *,
    mistaken: Sequence[str] = (),
) -> CheckResult:
    """Hold ``run`` against ``budgets``, and against ``baseline``, of which it may have ``allow`` more.

    ``mistaken`` says which tables of budgets are of no script: these are problems of the result. Raises
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
    return CheckResult(
        schema=SCHEMA,
        ampmem=__version__,
        label=run.side.label,
        rank=run.summary.rank,
        world_size=run.summary.world_size,
        ok=not broken and not problems,
        problems=problems,
        baseline=None if baseline is None else _baseline(run, baseline, allow),
        judged=tuple(judged),
        broken=tuple(sorted(broken, key=_order)),
        notes=(*run.notes, *_trials(run, budgets), *_place(run, judged)),
    )


def not_judged(label: str, why: str) -> CheckResult:
    """Of a run that could not even be summed up."""
    named = rank_of(Path(label))
    return CheckResult(
        schema=SCHEMA,
        ampmem=__version__,
        label=label,
        rank=0 if named is None else named.rank,
        world_size=1 if named is None else named.world_size,
        ok=False,
        problems=(why,),
        baseline=None,
        judged=(),
        broken=(),
        notes=(),
    )


def _budgets(run: Run, budgets: Sequence[Budget], baseline: Side | None) -> Iterator[Judged]:
    for budget in budgets:
        before = None if baseline is None else before_of(baseline.summary, budget)
        try:
            after, unknown = measured(run, budget), None
        except NotMeasured as error:
            after, unknown = None, str(error)
        yield Judged(
            key=budget.key,
            limit_of=Limit.BUDGET,
            limit=budget.limit,
            before=before,
            after=after,
            kept=after is not None and after <= budget.limit,
            unknown=unknown,
            least=None if after is None else _below(least_of(run, budget), after),
        )


def _below(least: int | None, after: int) -> int | None:
    return least if least is not None and least < after else None


def _trials(run: Run, budgets: Sequence[Budget]) -> Iterator[str]:
    prediction = run.summary.prediction
    limited = any(budget.key in (ALLOCATED, RESERVED, DEVICE) for budget in budgets)
    if limited and prediction is not None and prediction.filled is not None:
        yield TRIALS_NOT_JUDGED


def _place(run: Run, judged: Sequence[Judged]) -> Iterator[str]:
    whole = run.summary.whole
    if whole.where is not PeakPlace.STEP and any(each.key == PEAK for each in judged):
        yield (
            f"{PEAK_IS}{format_peak(whole.bytes)} {PLACES[whole.where]}; that of the recorded steps is "
            f"{format_peak(run.summary.peak.said)}, and the categories and growth are of those steps"
        )


def _compared(run: Run, baseline: Side | None, allow: Allowance) -> Iterator[Judged]:
    if baseline is None:
        return
    for key in OF_SUMMARY:
        before, after = of_summary(baseline.summary, key), of_summary(run.summary, key)
        limit = allow.limit(before, baseline.summary.whole.bytes)
        yield Judged(key=key, limit_of=Limit.BASELINE, limit=limit, before=before, after=after, kept=after <= limit)


def _order(broken: Broken) -> tuple[bool, int]:
    return broken.key != PEAK, broken.limit - broken.after


def _broken(judged: Judged, found: Grown) -> Broken:
    assert judged.after is not None
    return Broken(
        key=judged.key,
        limit_of=judged.limit_of,
        limit=judged.limit,
        before=judged.before,
        after=judged.after,
        least=judged.least,
        instant=found.instant,
        moment_before=None if found.moments is None else found.moments[0],
        moment_after=None if found.moments is None else found.moments[1],
        moved=found.moved,
        grew=tuple(change for change in found.changes if change.grown > 0),
        shrank=sum(change.grown for change in found.changes if change.grown < 0),
        grouped=found.grouped,
        held=() if found.moved or any(change.grown > 0 for change in found.changes) else found.held,
    )


def _baseline(run: Run, baseline: Side, allow: Allowance) -> Baseline:
    return Baseline(
        label=baseline.label,
        allow=allow.text or "nothing",
        grouped=baseline.groups is not None and run.side.groups is not None,
        conditions=conditions_of(baseline, run.side),
    )
