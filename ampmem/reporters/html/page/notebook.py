"""A summary as a small table for notebooks: no script, no style sheet, nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass

from ampmem.analysis.answer import verdict_of_one
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.html.data import CellRow
from ampmem.reporters.html.page.template import filled
from ampmem.reporters.html.palette import FILLS, label
from ampmem.reporters.html.safety import MAX_PROSE, visible
from ampmem.reporters.html.views.run import breakdown_view
from ampmem.reporters.text.answer import wording
from ampmem.reporters.text.describe import describe_arm, describe_optimizers, parameters_in_short
from ampmem.reporters.text.plain_text import ABSENT, per_parameter
from ampmem.units import format_bytes
from ampmem.vocabulary import AUTOCAST_ARMS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of the table; ``colour`` is empty for a sum."""

    label: str
    colour: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """A finding in words."""

    severity: str
    message: str
    change: str


def render(summary: Summary) -> str:
    """The verdict, the last step's breakdown and the findings, as HTML that stands inside another page."""
    step = summary.last_step
    facts = (
        parameters_in_short(summary),
        describe_optimizers(summary) or "no optimizer",
        f"{summary.device.name} ({summary.device.type})",
        f"precision {describe_arm(summary)}",
    )
    breakdown = breakdown_view(step, casts=summary.arm.name in AUTOCAST_ARMS)
    return filled(
        "notebook.html",
        verdict=visible(wording(verdict_of_one(summary)).text, MAX_PROSE),
        facts=[visible(fact) for fact in facts],
        step=step.index,
        phase=step.peak.phase,
        columns=breakdown.columns,
        rows=[_row(row, summary.parameters.known_count) for row in breakdown.rows],
        findings=[
            _Finding(
                severity=finding.severity,
                message=visible(finding.message, MAX_PROSE),
                change=visible(finding.change, MAX_PROSE),
            )
            for finding in summary.findings
        ],
    )


def _row(row: CellRow, parameters: int) -> _Row:
    cells: list[str] = []
    for size in row.cells:
        cells += [ABSENT, ABSENT] if size is None else [format_bytes(size), per_parameter(size, parameters)]
    known = row.key in FILLS
    return _Row(
        label=label(Category(row.key)) if known else row.key.replace("_", " ").capitalize(),
        colour=FILLS[Category(row.key)].light if known else "",
        cells=tuple(cells),
    )
