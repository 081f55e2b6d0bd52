"""The static model against a run, as a table: what is told, what was measured, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.activations import LOW_PRECISION, savings
from ampmem.analysis.static_model.terms import Term, TermKind
from ampmem.analysis.static_model.verdict import TOTAL, StaticComponent, StaticRecipe
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.plain_text import ABSENT, WIDTH, per_parameter, shorten, table, wrapped
from ampmem.reporters.text.words import AT_MARK, signed, trimmed
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import STEP_MARKS

ACTIVATIONS = 10
"""Groups of activations that are shown."""

_WHY_WIDTH = 42
_NAME_WIDTH = 38
"""A name is on one line there, with the indent before it and what stands right before and after it."""


def render_static_model(summary: Summary) -> str:
    """One table per mark; a mark that is like the one before is not repeated. Empty without a verdict."""
    recipe = summary.static_recipe
    if recipe is None:
        return ""
    size = f"{trimmed(recipe.bytes_per_param)} bytes per parameter"
    if recipe.peak_bytes_per_param != recipe.bytes_per_param:
        size += f", {trimmed(recipe.peak_bytes_per_param)} while the casts live"
    head = f"static memory: {in_words(recipe)}: {size}"
    parts = ["\n".join(wrapped(head))]
    if not summary.static_model:
        return "\n".join([*parts, *wrapped(judgement(summary))])
    before: list[StaticComponent] = []
    for mark in STEP_MARKS:
        words = AT_MARK[mark]
        rows = [component for component in summary.static_model if component.mark == mark]
        if rows and _content(rows) == _content(before):
            parts.append(f"{words}: the same")
        elif rows:
            parts.append(_mark(words, rows, summary.parameters.count))
        before = rows
    return "\n\n".join([*parts, "\n".join(wrapped(judgement(summary)))])


def in_words(recipe: StaticRecipe) -> str:
    """The recipe, with what its optimizers are; inference has none."""
    return ", with ".join(filter(None, (recipe.title, " and ".join(recipe.optimizer))))


def _content(rows: Sequence[StaticComponent]) -> list[tuple[str, int, int, tuple[Term, ...]]]:
    return [(row.component, row.model_bytes, row.measured_bytes, row.terms) for row in rows]


def _mark(words: str, rows: Sequence[StaticComponent], parameters: int) -> str:
    cells = [
        [
            row.component,
            format_bytes(row.model_bytes),
            per_parameter(row.model_bytes, parameters),
            format_bytes(row.measured_bytes),
            per_parameter(row.measured_bytes, parameters),
            _why(row),
        ]
        for row in rows
        if row.model_bytes or row.measured_bytes
    ]
    headers = [words.replace("at the end of", "end of"), "told", "B/\nparam", "measured", "B/\nparam", "why"]
    return table(cells, headers, ["left", "right", "right", "right", "right", "left"])


def _why(row: StaticComponent) -> str:
    broken = [] if row.explained else [not_explained(row).replace("not explained", "NOT EXPLAINED")]
    if row.component == TOTAL:
        texts = broken or ["the sum of the above"]
        texts += [_term(row, term) for term in row.terms if term.kind is TermKind.ROUNDING]
    else:
        texts = [_term(row, term) for term in row.terms] or ([] if broken else ["as told"])
        texts += broken
    return "\n".join(line for text in texts for line in wrapped(text, width=_WHY_WIDTH))


def _term(row: StaticComponent, term: Term) -> str:
    told = f"; {share(abs(term.bytes), row.model_bytes)} of told" if row.model_bytes else ""
    of = tensors_of(term, _NAME_WIDTH)
    return f"{signed(term.bytes)} {term.why}" + (f" ({of}{told})" if of else "")


def tensors_of(term: Term, width: int) -> str:
    """How many tensors a term is about, and the names of the largest: ``h.0.weight, h.1.weight and 10 more``.

    Each name has at most ``width`` characters.
    """
    more = term.tensors - len(term.names)
    if not term.names:
        return f"{format_count(more)} tensors" if more > 1 else ""
    return ", ".join(shorten(name, width) for name in term.names) + (
        f" and {format_count(more)} more" if more > 0 else ""
    )


def not_explained(row: StaticComponent) -> str:
    """What of a component nothing explains, in words."""
    if row.residual_bytes:
        return f"{signed(row.residual_bytes)} not explained"
    return "not explained: more in some tensors and as much less in others"


def judgement(summary: Summary) -> str:
    """Whether the static model holds, in a sentence."""
    if not summary.static_model:
        return f"no verdict: {summary.static_problem}"
    broken = [row for row in summary.static_model if not row.explained and row.component != TOTAL]
    if not broken and summary.static_problem is None:
        return "the model holds: every byte between told and measured has a name, residual 0 B"
    reasons = [] if summary.static_problem is None else [summary.static_problem]
    if broken:
        reasons.append("; ".join(f"{row.component} {AT_MARK[row.mark]}: {not_explained(row)}" for row in broken))
    return f"the model does not hold: {'; '.join(reasons)}"


def render_activations(summary: Summary) -> str:
    """What the activations at the end of forward are and in which type; empty unless the run is under autocast.

    Where no forward came to its end before memory ran out, they are those of then.
    """
    groups, pairs = summary.activations, savings(summary.activations)
    total = sum(group.bytes for group in groups)
    if summary.arm.dtype is None or not total:
        return ""
    low = sum(group.bytes for group in groups if group.dtype in LOW_PRECISION)
    rows = [
        [
            shorten(each.saved_for or ABSENT, 28),
            shorten(each.made_by or ABSENT, 28),
            each.dtype or "?",
            format_count(each.tensors),
            format_bytes(each.bytes),
            share(each.bytes, total),
        ]
        for each in pairs[:ACTIVATIONS]
    ]
    headers = ["saved for", "made by", "type", "tensors", "bytes", "share"]
    text = table(rows, headers, ["left"] * 3 + ["right"] * 3)
    left_out = len(pairs) - len(rows)
    more = f"\n… and {format_count(left_out)} smaller group{'s' if left_out > 1 else ''}" if left_out else ""
    when = "at the end of forward" if summary.last_step.marks.after_forward else "when memory ran out"
    caption = f"activations {when}, {format_bytes(total)}: {share(low, total)} are in low precision"
    return f"{shorten(caption, WIDTH)}\n\n{text}{more}"


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; something is never 0 %, not everything never 100 %."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 1:
        return "<1 %"
    if 99 < percent < 100:
        return ">99 %"
    return f"{percent:.0f} %"
