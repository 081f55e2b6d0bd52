"""One recording as text: the answer first, then the details asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampmem.analysis.answer import verdict_of_one
from ampmem.analysis.findings.base import told_elsewhere
from ampmem.analysis.summary import PeakPlace, Step, Summary
from ampmem.names import RAN_ON_PREDICTED
from ampmem.reporters.base import EVERYTHING, NOTHING, Detail, Report
from ampmem.reporters.text.answer import place_of, why_it_does_not_fit, wording, wording_lines
from ampmem.reporters.text.estimate import other_notes, prediction_headline, render_prediction
from ampmem.reporters.text.layout import PLAIN, Layout
from ampmem.reporters.text.memory import (
    render_activations,
    render_casts,
    render_held,
    render_largest,
    render_marks,
    render_modules,
    render_peak,
)
from ampmem.reporters.text.out_of_memory import render_out_of_memory
from ampmem.reporters.text.plain_text import wrapped
from ampmem.reporters.text.run import (
    render_foot,
    render_labelled,
    render_next,
    render_run,
    render_steps,
    render_warnings,
)
from ampmem.reporters.text.static_model import render_static_model
from ampmem.vocabulary import AUTOCAST_PRECISIONS


def render_reports(
    reports: Sequence[Report], *, details: frozenset[Detail] = NOTHING, all_steps: bool = False, layout: Layout = PLAIN
) -> str:
    """The tables of each report, with a line between them; ``all_steps`` shows the marks of every step."""
    return f"\n\n{separator(layout)}\n\n".join(
        render(
            each.summary,
            each.notes,
            title=each.title,
            file=each.file,
            details=details,
            all_steps=all_steps,
            layout=layout,
        )
        for each in reports
    )


def separator(layout: Layout) -> str:
    """The line between two recordings."""
    return "=" * layout.width


def render(
    summary: Summary,
    notes: Sequence[str],
    *,
    title: str = "",
    file: str = "",
    details: frozenset[Detail] = NOTHING,
    all_steps: bool = False,
    layout: Layout = PLAIN,
) -> str:
    """One summary as text: a first screen, the steps and the run, then ``details``.

    ``title`` is the script, ``file`` the recording's file; ``notes`` are the recorder's notes.
    """
    sections = [
        _answer(summary, layout),
        render_warnings(summary, notes, layout=layout),
        render_out_of_memory(summary, layout),
        render_peak(summary, layout),
        _findings(summary, details, layout),
        render_steps(summary, notes, layout),
        render_run(summary, title, layout),
        render_prediction(
            None if summary.ended_by else summary.prediction,
            summary.device.name,
            layout,
            ran_on=RAN_ON_PREDICTED in summary.notes,
        ),
        *_details(summary, details, all_steps, layout),
        render_foot(summary, other_notes(summary.prediction, notes), layout, judged=Detail.STATIC_MODEL in details),
        render_next([file] if file else [], layout, more=details != EVERYTHING),
    ]
    return "\n\n".join(section for section in sections if section)


def _answer(summary: Summary, layout: Layout) -> str:
    """The verdict, and whether a simulated run fits."""
    lines, ended = wording_lines(wording(verdict_of_one(summary)), layout), summary.ended_by
    if summary.prediction is not None:
        failure, place = ("", place_of(summary.whole)) if ended is None else (why_it_does_not_fit(ended), "")
        said = prediction_headline(summary.prediction, summary.device.name, failure=failure, place=place)
        whole = "The whole run: " if RAN_ON_PREDICTED in summary.notes else ""
        lines += wrapped(f"{whole}{said}", layout.width, indent="")
    return "\n".join(lines)


def _findings(summary: Summary, details: frozenset[Detail], layout: Layout) -> str:
    """The findings; changes are shown once, with the failed request, unless the evidence is asked for."""
    title = "findings"
    if summary.ended_by is None and summary.whole.where is not PeakPlace.STEP:
        title += " of the recorded steps, which lack the run's peak"
    evidence = Detail.EVIDENCE in details
    shown = summary.findings if evidence else told_elsewhere(summary.out_of_memory, summary.findings)
    return render_labelled([(finding, ()) for finding in shown], layout, evidence=evidence, title=title)


def _details(summary: Summary, details: frozenset[Detail], all_steps: bool, layout: Layout) -> Iterator[str]:
    """The details asked for; a detail that has nothing on this run is empty."""
    if Detail.MARKS in details or all_steps:
        casts = summary.precision.name in AUTOCAST_PRECISIONS
        for step in summary.steps if all_steps else _shown_steps(summary):
            yield render_marks(step, summary.parameters.known_count, layout, casts=casts)
        yield render_held(summary, layout)
    yield from (shown(summary, layout) for detail, shown in _DETAILS.items() if detail in details)


_DETAILS = {
    Detail.STATIC_MODEL: render_static_model,
    Detail.ACTIVATIONS: render_activations,
    Detail.CASTS: render_casts,
    Detail.MODULES: render_modules,
    Detail.LARGEST: render_largest,
}
"""The details that are about the whole run, in the order of display."""


def _shown_steps(summary: Summary) -> Iterator[Step]:
    """The last step that ended, and the step in which memory ran out if more is known of it than its live bytes."""
    last, oom = summary.steps[-1], summary.out_of_memory
    if summary.last_step.finished:
        yield summary.last_step
    if not last.finished and (last.marks.after_forward or oom is None or last.peak.categories != oom.alive):
        yield last
