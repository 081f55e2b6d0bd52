"""Two runs of changed code: what each group of allocations held in one and holds in the other (``ampmem.diff/1``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ampmem.analysis.difference.changes import GroupChange as GroupChange
from ampmem.analysis.difference.changes import changes_between as changes_between
from ampmem.analysis.difference.changes import changes_of, largest_first, of_category
from ampmem.analysis.difference.conditions import Condition, conditions_of
from ampmem.analysis.difference.groups import Moment
from ampmem.analysis.difference.matching import match
from ampmem.analysis.difference.renames import Names, Renamed, renames
from ampmem.analysis.difference.side import Side as Side
from ampmem.analysis.json.jsonable import Json, OneOf, Signed, text_of
from ampmem.analysis.json.schema import schema_of
from ampmem.analysis.summary import PLACES, PeakPlace
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.output import Shown
from ampmem.units import format_peak

SCHEMA = "ampmem.diff/1"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Shown):
    """Where the memory of two runs differs, at the peak of each, or where one category is largest in each."""

    schema: Annotated[str, OneOf((SCHEMA,))]
    label_before: str
    label_after: str
    category: Category | None
    """What is compared, at the instant at which it is largest; null for all at the peak."""
    before: int
    """Bytes requested at that instant: of the peak without the rounding of blocks."""
    after: int
    moment_before: Moment | None
    """When that is; null where it is not known."""
    moment_after: Moment | None
    categories_before: Breakdown
    """Bytes of each category at the peak."""
    categories_after: Breakdown
    conditions: tuple[Condition, ...]
    """In what the runs differ beside their code."""
    doubts: tuple[str, ...]
    """What speaks against trusting the numbers of either; empty where nothing does."""
    without_groups: tuple[str, ...]
    """Labels of what is a summary alone, without groups: then the changes are of whole categories."""
    changes: tuple[GroupChange, ...]
    """All that grew or shrank, the largest change first; they add up to the difference."""
    renamed: tuple[Renamed, ...]
    """Modules that are compared though their names differ."""
    residual: Signed
    """Bytes of the difference that are in no change: 0 where nothing is wrong."""
    allocated_before: int | None = None
    """The peak as the allocator counts it, with the rounding of blocks; null where the run has no such allocator, and
    where one category is compared."""
    allocated_after: int | None = None
    elsewhere_in_run: tuple[str, ...] = ()
    """The peak of a run that has it outside of the recorded steps, which are compared: a sentence for each such run."""

    @property
    def peaks(self) -> tuple[int, int]:
        """What is called the two peaks, before and after: allocated where that is known, else requested."""
        before, after = self.allocated_before, self.allocated_after
        return self.before if before is None else before, self.after if after is None else after

    @property
    def grown(self) -> int:
        """Bytes of the peak after less those before."""
        before, after = self.peaks
        return after - before

    @property
    def rounding(self) -> int:
        """What of :attr:`grown` is rounding of blocks, which is in no change."""
        return self.grown - (self.after - self.before)

    @property
    def elsewhere(self) -> bool:
        """Whether the two instants are not the same one of a step, as far as that is known."""
        old, new = self.moment_before, self.moment_after
        if old is None or new is None:
            return False
        before = old.phase, old.op, Names(self.renamed).of(old.module)
        return before != (new.phase, new.op, new.module)

    def to_json(self) -> str:
        """The difference as JSON text, as :func:`difference_schema` describes it."""
        return text_of(self)

    def _in_short(self) -> str:
        what, count = self.category or "peak", len(self.changes)
        before, after = map(format_peak, self.peaks)
        sizes = f"{before} in {self.label_before}, {after} in {self.label_after}"
        return f"{what} {sizes}, {count} change{'' if count == 1 else 's'}"


def difference_schema() -> dict[str, Json]:
    """The JSON Schema of :meth:`Difference.to_json`."""
    return schema_of(
        Difference,
        title="ampmem diff, version 1",
        description="What `ampmem diff --json` prints. Sizes are bytes; null is what is not known.",
    )


def difference(before: Side, after: Side, *, category: Category | None = None) -> Difference:
    """What changed from ``before`` to ``after``; of one ``category``, at the instant at which that is largest."""
    renamed = renames_between(before, after)
    old, new = before.held(category), after.held(category)
    if old is None or new is None:
        changes = _of_categories(before, after, category)
    else:
        changes = changes_of(match(old, new, renamed))
    grown = after.total(category) - before.total(category)
    allocated = [None if category is not None else side.summary.peak.allocated for side in (before, after)]
    return Difference(
        schema=SCHEMA,
        label_before=before.label,
        label_after=after.label,
        category=category,
        before=before.total(category),
        after=after.total(category),
        moment_before=before.moment(category),
        moment_after=after.moment(category),
        categories_before=before.summary.peak.categories,
        categories_after=after.summary.peak.categories,
        conditions=conditions_of(before, after),
        doubts=tuple(doubt for side in (before, after) for doubt in side.doubts()),
        without_groups=tuple(side.label for side in (before, after) if side.groups is None),
        changes=changes,
        renamed=renamed,
        residual=grown - sum(change.grown for change in changes),
        allocated_before=allocated[0],
        allocated_after=allocated[1],
        elsewhere_in_run=() if category is not None else tuple(map(_outside, filter(_is_outside, (before, after)))),
    )


def _is_outside(side: Side) -> bool:
    return side.summary.whole.where is not PeakPlace.STEP


def _outside(side: Side) -> str:
    whole = side.summary.whole
    return f"the peak of the whole run of {side.label} is {format_peak(whole.bytes)}, {PLACES[whole.where]}"


def renames_between(before: Side, after: Side) -> tuple[Renamed, ...]:
    """The modules that have another name in ``after``, as far as groups are known."""
    # The parameters are all alive at the peak, whatever is compared.
    return () if before.groups is None or after.groups is None else renames(before.groups.peak, after.groups.peak)


def _of_categories(before: Side, after: Side, category: Category | None) -> tuple[GroupChange, ...]:
    if category is not None:
        sizes = {category: (before.total(category), after.total(category))}
    else:
        old, new = before.summary.peak.categories, after.summary.peak.categories
        sizes = {each: (old[each], new[each]) for each in CATEGORIES}
    return largest_first(of_category(each, *pair) for each, pair in sizes.items() if pair[0] != pair[1])
