"""The static models of several recordings side by side: the rule of thumb, what was measured, why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.comparison import Entry
from ampmem.analysis.static_model.verdict import TOTAL, StaticComponent
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.common.layout import PLAIN, Layout, number, side_by_side, words
from ampmem.reporters.text.common.plain_text import ABSENT, per_parameter, shorten, wrapped
from ampmem.reporters.text.common.words import AT_MARK, signed
from ampmem.reporters.text.static_model import in_words, judgement, not_explained, tensors_of
from ampmem.vocabulary import Mark

_CAPTION = "static memory in bytes per parameter: what the rule of thumb says, and what was measured"
_EXPLAINED = "the rule of thumb plus the named differences equals what was measured in each, to the byte"
_SHOWN = (Mark.AFTER_FORWARD, Mark.AFTER_BACKWARD)
_LABEL = 12
_NAME = 60


def render_static_models(entries: Sequence[Entry], layout: Layout = PLAIN) -> str:
    """Bytes per parameter at the end of forward and after backward, then the reasons; empty without a verdict."""
    known = [(entry.label, entry.summary) for entry in entries if entry.summary is not None]
    lost = [(label, summary) for label, summary in known if summary.static_recipe and not summary.static_model]
    judged = [(label, summary) for label, summary in known if summary.static_model and summary.parameters.known_count]
    lines = [layout.strong(line) for line in wrapped(_CAPTION, layout.width)] if judged else []
    for label, summary in judged:
        if summary.static_recipe is not None:
            lines += wrapped(f"{shorten(label, 40)}: {in_words(summary.static_recipe)}", layout.width)
    for label, summary in lost:
        lines += wrapped(f"{shorten(label, 40)}: {judgement(summary)}", layout.width)
    if not judged:
        return "\n".join(lines)
    tables = [text for mark in _SHOWN for text in _tables(mark, judged, layout)]
    return "\n\n".join(["\n".join(lines), *tables, _reasons(judged, layout)])


def _tables(mark: Mark, judged: Sequence[tuple[str, Summary]], layout: Layout) -> list[str]:
    found = [{row.component: row for row in summary.static_model if row.mark == mark} for _, summary in judged]
    components = list(dict.fromkeys(name for rows in found for name in rows))
    shown = [name for name in components if any(_counts(rows.get(name)) for rows in found)]
    if not shown:
        return []
    first = words(AT_MARK[mark].replace("at the end of", "end of"))
    groups = [
        [number(f"{shorten(label, _LABEL)}\nrule"), number("\nmeasured", of=shorten(label, _LABEL))]
        for label, _ in judged
    ]
    cells = [
        [_cells(rows.get(name), summary) for name in shown] for rows, (_, summary) in zip(found, judged, strict=True)
    ]
    return side_by_side(first, shown, groups, cells, layout, strong=(TOTAL,))


def _counts(row: StaticComponent | None) -> bool:
    return row is not None and bool(row.model_bytes or row.measured_bytes)


def _cells(row: StaticComponent | None, summary: Summary) -> list[str]:
    if row is None:
        return [ABSENT, ABSENT]
    count = summary.parameters.known_count
    return [per_parameter(row.model_bytes, count), per_parameter(row.measured_bytes, count)]


def _reasons(judged: Sequence[tuple[str, Summary]], layout: Layout) -> str:
    """Each reason once, with the bytes in each recording that has it."""
    reasons: dict[str, dict[int, list[str]]] = {}
    broken: list[str] = []
    for label, summary in judged:
        for row in summary.static_model:
            if row.mark not in _SHOWN or row.component == TOTAL:
                continue
            for term in row.terms:
                of = tensors_of(term, min(_NAME, layout.width - 4))
                reason = f"{row.component} {AT_MARK[row.mark]}: {term.why}" + (f" ({of})" if of else "")
                reasons.setdefault(reason, {}).setdefault(term.bytes, []).append(shorten(label, _LABEL))
            if not row.explained:
                broken.append(f"{row.component} {AT_MARK[row.mark]} ({label}): {not_explained(row)}")
    lines = [layout.strong("why they differ")]
    for reason, sizes in reasons.items():
        amounts = ", ".join(f"{signed(size)} ({', '.join(labels)})" for size, labels in sizes.items())
        lines += wrapped(f"{reason}: {amounts}", layout.width)
    problems = [f"{label}: {summary.static_problem}" for label, summary in judged if summary.static_problem]
    faults = "; ".join([*problems, *broken])
    verdict = f"the model does not hold: {faults}" if faults else _EXPLAINED
    return "\n".join([*lines, *wrapped(verdict, layout.width)])
