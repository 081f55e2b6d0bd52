"""The static model as text: the rule of thumb, the measured bytes, and the reasons for the difference."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.static_model.explain import Term, TermKind
from ampmem.analysis.static_model.verdict import TOTAL, StaticComponent, StaticRecipe
from ampmem.analysis.summary import Summary
from ampmem.names import layers, layers_named
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.plain_text import AT_MARK, share, shorten, signed, size_cells, trimmed, wrapped
from ampmem.units import format_count
from ampmem.vocabulary import STEP_MARKS

_NAME_WIDTH = 38
"""The width of a name on one line, after the indent and the words around it."""
_HOLDS = "the rule of thumb plus the named differences equals what was measured, to the byte"


def render_static_model(summary: Summary, layout: Layout = PLAIN) -> str:
    """One table per mark; a mark equal to the one before is not repeated. Without a verdict, the reason."""
    recipe = summary.static_recipe
    if recipe is None:
        return "\n".join(wrapped(no_recipe(summary), layout.width)) if summary.static_unknown else ""
    judged = "\n".join(wrapped(judgement(summary), layout.width))
    parts = [layout.heading(f"static memory, rule of thumb for {rule_in_words(recipe, summary)}")]
    if not summary.static_model:
        return "\n".join([*parts, judged])
    before: list[StaticComponent] = []
    for mark in STEP_MARKS:
        when = AT_MARK[mark]
        rows = [component for component in summary.static_model if component.mark == mark]
        if rows and _content(rows) == _content(before):
            parts.append(f"{when}: the same")
        elif rows:
            parts.append(_mark(when, rows, summary.parameters.known_count, layout))
        before = rows
    return "\n\n".join([*parts, judged])


def rule_in_words(recipe: StaticRecipe, summary: Summary) -> str:
    """The recipe that the run is compared with, its bytes per parameter, and this rank's share of the parameters."""
    parameters = summary.parameters
    words = f"{recipe_in_words(recipe)}: {trimmed(recipe.bytes_per_param)} bytes per parameter"
    if recipe.peak_bytes_per_param != recipe.bytes_per_param:
        words += f", {trimmed(recipe.peak_bytes_per_param)} while the casts live"
    if parameters.global_count is None:
        return words
    here, everywhere = format_count(parameters.count), format_count(parameters.global_count)
    return f"{words}; this rank has {here} of {everywhere} parameters"


def no_recipe(summary: Summary) -> str:
    """Why no rule of thumb is compared with a run that is not known well enough, in one line."""
    *others, last = summary.static_unknown
    what = f"{', '.join(others)} and {last} are" if others else f"{last} {'are' if last == 'parameters' else 'is'}"
    return f"static memory: no rule of thumb, as {what} not known"


def recipe_in_words(recipe: StaticRecipe) -> str:
    """The recipe with its optimizers in words; inference has no optimizer."""
    return ", with ".join(filter(None, (recipe.title, " and ".join(recipe.optimizer))))


def _content(rows: Sequence[StaticComponent]) -> list[tuple[str, int, int, tuple[Term, ...]]]:
    return [(row.component, row.model_bytes, row.measured_bytes, row.terms) for row in rows]


def _mark(when: str, rows: Sequence[StaticComponent], parameters: int, layout: Layout) -> str:
    """The rule's and the measured bytes by component, then why they differ."""
    columns = [words(when.replace("at the end of", "end of"))]
    for head in ("rule of\nthumb", "measured"):
        columns += [number(head), *([number("B/\nparam", rank=1, of=head)] if parameters else [])]
    cells = [
        [row.component, *size_cells(row.model_bytes, parameters), *size_cells(row.measured_bytes, parameters)]
        for row in rows
        if row.model_bytes or row.measured_bytes
    ]
    text = table(columns, cells, layout, strong=(TOTAL,))
    return "\n".join([text, *(line for row in rows for line in _why(row, layout))])


def _why(row: StaticComponent, layout: Layout) -> list[str]:
    """The terms that explain a component's difference, and the unexplained rest; of the total only its own terms."""
    lines = []
    for term in (term for term in row.terms if row.component != TOTAL or term.kind is TermKind.ROUNDING):
        rule = f"; {share(abs(term.bytes), row.model_bytes)} of the rule" if row.model_bytes else ""
        of = tensors_in_words(term, min(_NAME_WIDTH, layout.width - 4))
        tensors = f" ({of}{rule})" if of else ""
        lines += wrapped(f"{row.component}: {signed(term.bytes)} {term.why}{tensors}", layout.width)
    if not row.explained:
        left_over = f" {signed(row.residual_bytes)}" if row.residual_bytes else f": {_CANCELLED}"
        first, *others = wrapped(f"{row.component}: {_BROKEN}{left_over}", layout.width)
        lines += [first.replace(_BROKEN, layout.alarm(_BROKEN), 1), *others]
    return lines


_BROKEN = "NOT EXPLAINED"
_CANCELLED = "more in some tensors and as much less in others"


def tensors_in_words(term: Term, width: int) -> str:
    """The number of a term's tensors, and the names of the largest: ``wte.weight, h.*.weight (2) and 10 more``.

    Each name has at most ``width`` characters.
    """
    more = term.tensors - len(term.names)
    if not term.names:
        return f"{format_count(more)} tensors" if more > 1 else ""
    groups = layers(term.names, what=lambda name: (name,), sizes=lambda _: ())
    return ", ".join(shorten(layers_named(group), width) for group in groups) + (
        f" and {format_count(more)} more" if more > 0 else ""
    )


def not_explained(row: StaticComponent) -> str:
    """The unexplained rest of a component, in words."""
    return f"{signed(row.residual_bytes)} not explained" if row.residual_bytes else f"not explained: {_CANCELLED}"


def judgement(summary: Summary) -> str:
    """Whether the static model holds, in a sentence."""
    if not summary.static_model:
        return f"no verdict: {summary.static_problem}"
    broken = [row for row in summary.static_model if not row.explained and row.component != TOTAL]
    if not broken and summary.static_problem is None:
        return _HOLDS
    reasons = [] if summary.static_problem is None else [summary.static_problem]
    if broken:
        reasons.append("; ".join(f"{row.component} {AT_MARK[row.mark]}: {not_explained(row)}" for row in broken))
    return f"the model does not hold: {'; '.join(reasons)}"
