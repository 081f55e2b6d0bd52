"""The static models of several recordings side by side: told, measured, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.compare import Entry
from ampmem.analysis.static_model.verdict import TOTAL, StaticComponent
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.plain_text import ABSENT, chunks, per_parameter, shorten, table, wrapped
from ampmem.reporters.text.static_model import in_words, judgement, not_explained, tensors_of
from ampmem.reporters.text.words import AT_MARK, signed
from ampmem.vocabulary import Mark

_SHOWN = (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD)
_LABEL = 12
_NAME = 60


def render_static_models(entries: Sequence[Entry]) -> str:
    """Bytes per parameter at the end of forward and after backward, then the reasons; empty without a verdict."""
    judged = [(entry.label, entry.summary) for entry in entries if entry.summary is not None]
    lost = [(label, summary) for label, summary in judged if summary.static_recipe and not summary.static_model]
    judged = [(label, summary) for label, summary in judged if summary.static_model]
    unjudged = [line for label, summary in lost for line in wrapped(f"{shorten(label, 40)}: {judgement(summary)}")]
    if not judged:
        return "\n".join(unjudged)
    lines = ["static memory, in bytes per parameter: what the model tells, and what was measured"]
    for label, summary in judged:
        recipe = summary.static_recipe
        if recipe is not None:
            lines += wrapped(f"{shorten(label, 40)}: {in_words(recipe)}")
    tables = [_table(mark, [judged[i] for i in chunk]) for mark in _SHOWN for chunk in chunks(len(judged))]
    return "\n\n".join(["\n".join([*lines, *unjudged]), *filter(None, tables), _reasons(judged)])


def _table(mark: Mark, judged: Sequence[tuple[str, Summary]]) -> str:
    found = [{row.component: row for row in summary.static_model if row.mark == mark} for _, summary in judged]
    components = list(dict.fromkeys(name for rows in found for name in rows))
    shown = [name for name in components if any(_counts(rows.get(name)) for rows in found)]
    if not shown:
        return ""
    cells = [
        [
            name,
            *(
                cell
                for rows, (_, summary) in zip(found, judged, strict=True)
                for cell in _cells(rows.get(name), summary)
            ),
        ]
        for name in shown
    ]
    headers = [AT_MARK[mark].replace("at the end of", "end of")]
    for label, _ in judged:
        headers += [f"{shorten(label, _LABEL)}\ntold", "\nmeasured"]
    return table(cells, headers, ["left"] + ["right"] * (2 * len(judged)))


def _counts(row: StaticComponent | None) -> bool:
    return row is not None and bool(row.model_bytes or row.measured_bytes)


def _cells(row: StaticComponent | None, summary: Summary) -> list[str]:
    if row is None:
        return [ABSENT, ABSENT]
    count = summary.parameters.count
    return [per_parameter(row.model_bytes, count), per_parameter(row.measured_bytes, count)]


def _reasons(judged: Sequence[tuple[str, Summary]]) -> str:
    """Each reason once, with the bytes in each recording that has it."""
    reasons: dict[str, dict[int, list[str]]] = {}
    broken: list[str] = []
    for label, summary in judged:
        for row in summary.static_model:
            if row.mark not in _SHOWN or row.component == TOTAL:
                continue
            for term in row.terms:
                of = tensors_of(term, _NAME)
                reason = f"{row.component} {AT_MARK[row.mark]}: {term.why}" + (f" ({of})" if of else "")
                reasons.setdefault(reason, {}).setdefault(term.bytes, []).append(shorten(label, _LABEL))
            if not row.explained:
                broken.append(f"{row.component} {AT_MARK[row.mark]} ({label}): {not_explained(row)}")
    lines = ["why they differ"]
    for reason, sizes in reasons.items():
        amounts = ", ".join(f"{signed(size)} ({', '.join(labels)})" for size, labels in sizes.items())
        lines += wrapped(f"{reason}: {amounts}")
    problems = [f"{label}: {summary.static_problem}" for label, summary in judged if summary.static_problem]
    if broken or problems:
        verdict = f"the model does not hold: {'; '.join([*problems, *broken])}"
    else:
        verdict = "every byte has a name: residual 0 B in each"
    return "\n".join([*lines, *wrapped(verdict)])
