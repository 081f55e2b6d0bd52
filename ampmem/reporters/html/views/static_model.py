"""The static model against a run, for the page."""

from __future__ import annotations

from ampmem.analysis.static_model.verdict import StaticRecipe
from ampmem.analysis.summary import Summary
from ampmem.reporters.html.data import ComponentView, MarkComponents, StaticModelView
from ampmem.reporters.text.common.words import IN_SHORT, trimmed
from ampmem.reporters.text.static_model import in_words, judgement, per_rank
from ampmem.vocabulary import STEP_MARKS, Mark


def static_model_view(summary: Summary) -> StaticModelView | None:
    """What is told, what was measured and why they differ, at each mark; ``None`` without a verdict."""
    if summary.static_recipe is None:
        return None
    marks = tuple(MarkComponents(name=IN_SHORT[mark], rows=_rows(summary, mark)) for mark in STEP_MARKS)
    return StaticModelView(
        head=_head(summary.static_recipe) + per_rank(summary),
        verdict=judgement(summary),
        holds=bool(summary.static_model) and all(row.holds for row in summary.static_model),
        marks=tuple(mark for mark in marks if mark.rows),
    )


def _rows(summary: Summary, mark: Mark) -> tuple[ComponentView, ...]:
    return tuple(
        ComponentView(
            component=row.component,
            model=row.model_bytes,
            measured=row.measured_bytes,
            terms=row.terms,
            residual=row.residual_bytes,
            explained=row.explained,
            holds=row.holds,
        )
        for row in summary.static_model
        if row.mark == mark and (row.model_bytes or row.measured_bytes)
    )


def _head(recipe: StaticRecipe) -> str:
    size = f"{trimmed(recipe.bytes_per_param)} bytes per parameter"
    if recipe.peak_bytes_per_param != recipe.bytes_per_param:
        size += f", {trimmed(recipe.peak_bytes_per_param)} while the casts live"
    return f"{in_words(recipe)}: {size}"
