"""What the page says is what ``ampmem show`` says."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support.build import AMP, FP32, RUN, Story, small_run
from support.golden_texts import encoder
from support.page_reader import unpacked

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.comparison import Comparison, compare, distinct, entry_of
from ampmem.analysis.findings import Finding
from ampmem.analysis.findings.base import Section
from ampmem.analysis.jsonable import plain
from ampmem.analysis.summary import Allocator, Summary, summary_of
from ampmem.analysis.timeline.categories import CATEGORIES, PRECISION_COPIES
from ampmem.events import Phase, PrecisionRecord, Recording
from ampmem.failure import FailureKind, FailureRecord
from ampmem.names import NO_TIMES
from ampmem.reporters.base import EVERYTHING, Detail
from ampmem.reporters.html import page
from ampmem.reporters.html.comparison import compared_runs, difference_headline
from ampmem.reporters.html.run import RunEvents, Said, run_view, said_of
from ampmem.reporters.html.safety import FOLDER
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.memory import breakdown_rows
from ampmem.reporters.text.static_model import render_static_model
from ampmem.reporters.text.table import render
from ampmem.vocabulary import SourceKind

LIMIT = 8_000_000


def analysed(recording: Recording) -> tuple[Analysis, Summary]:
    analysis = analyse(recording)
    return analysis, summary_of(analysis)


def said_in(recording: Recording) -> Said:
    _, summary = analysed(recording)
    return said_of(summary, summary.findings)


def events_of(recording: Recording) -> RunEvents:
    analysis, summary = analysed(recording)
    return run_view(entry_of(recording, summary=summary), summary, analysis, LIMIT).events


def fp32_run() -> Recording:
    return small_run().recording(precision=FP32)


def with_larger_activations() -> Recording:
    """The small run under autocast, with 1,700 bytes where the other has 1,000."""
    run = small_run().recording()
    sizes = np.where(run.events.bytes == 1000, 1700, run.events.bytes)
    return replace(run, events=replace(run.events, bytes=sizes))


def compared(*recordings: Recording) -> Comparison:
    return compare(distinct([entry_of(recording) for recording in recordings], ["a", "b", "c"][: len(recordings)]))


def test_the_numbers_are_those_of_the_summary() -> None:
    recording, (analysis, summary) = small_run().recording(), analysed(small_run().recording())
    view = run_view(entry_of(recording, summary=summary), summary, analysis, LIMIT)
    assert unpacked(view.packed)["summary"] == json.loads(summary.to_json())
    assert view.events is not None and view.events.peak is not None
    assert analysis.timeline.breakdown(view.events.peak) == summary.peak.categories
    said = said_in(recording)
    assert said.parameters == summary.parameters.count
    whole = said.activations.whole
    assert whole.full + whole.low + whole.other == sum(group.bytes for group in summary.activations)


def test_steps_are_positions_of_the_analysis() -> None:
    analysis, summary = analysed(small_run().recording())
    events, said = events_of(small_run().recording()), said_in(small_run().recording())
    total = analysis.timeline.total
    for step, words, told in zip(events.steps, said.steps, summary.steps, strict=True):
        assert step.first <= step.peak <= step.last
        assert told.peak.bytes == total[step.peak] == total[step.first : step.last + 1].max()
        assert words.update == "done"
    assert analysis.timeline.breakdown(events.activations) == summary.steps[-1].marks.after_forward


def test_times_that_only_order_the_events_are_told_apart() -> None:
    story = small_run()
    assert events_of(story.recording()).timed
    assert not events_of(story.recording(notes=("a note", NO_TIMES))).timed
    simulated = replace(RUN, source=SourceKind.SIMULATED)  # it takes what this machine needs to simulate it
    assert not events_of(story.recording(run=simulated)).timed


@pytest.mark.parametrize(
    ("source", "precision", "told"),
    [
        (SourceKind.SNAPSHOT, PrecisionRecord(name="as-is", dtype=None, cache=None, scaler=False), False),
        (SourceKind.SNAPSHOT, AMP, True),
        (SourceKind.CPU, FP32, True),
    ],
)
def test_there_are_no_zero_copies_where_casts_cannot_be_told(
    source: SourceKind, precision: PrecisionRecord, told: bool
) -> None:
    recording = one_step().recording(precision=precision, run=replace(RUN, source=source))
    _, summary = analysed(recording)
    assert ("Precision copies" in [headline.label for headline in said_of(summary, ()).headlines]) == told
    # Nothing is cast outside of autocast.
    assert ("precision_copies" in render(summary, (), details=frozenset({Detail.MARKS}))) == (precision == AMP)


@pytest.mark.parametrize(
    ("precisions", "opens"),
    [
        (("fp32", "amp", "amp-nocache"), 1),
        (("fp32", "amp-nocache"), 1),
        (("amp-nocache", "amp"), 1),
        (("fp32", "as-is"), 0),
        ((), 0),
    ],
)
def test_the_page_opens_on_the_run_in_mixed_precision(precisions: tuple[str, ...], opens: int) -> None:
    assert page.opens_on(precisions) == opens


def test_the_breakdown_has_the_rows_of_the_table() -> None:
    _, summary = analysed(small_run().recording())
    step = summary.steps[-1]
    columns = [step.marks.after_forward, step.marks.after_backward, step.marks.after_optimizer, step.peak.categories]
    rows = dict(breakdown_rows(step, casts=True))
    shown = render(summary, (), details=frozenset({Detail.MARKS})).split("at its marks", 1)[-1]
    for key, cells in rows.items():
        names = {"precision_copies": PRECISION_COPIES, "total": CATEGORIES}.get(key)
        for cell, live in zip(cells, columns, strict=True):
            assert cell == (
                sum(live[name] for name in names) if names else live[next(c for c in CATEGORIES if c == key)]
            )
        assert re.search(rf"^(└ )?{key} ", shown, flags=re.MULTILINE)
    assert list(rows)[-1] == "total"
    assert list(rows).index("cast_copies") == list(rows).index("precision_copies") + 1


def test_phase_runs_are_those_of_the_events() -> None:
    recording = small_run().recording()
    runs = events_of(recording).phase_runs
    spelled = []
    for (start, name), (end, _) in zip(runs, [*runs[1:], (len(recording.events), "")], strict=True):
        spelled += [name] * (end - start)
    assert spelled == [Phase(code).name.lower() for code in recording.events.phase.tolist()]


def test_too_many_phase_runs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampmem.reporters.html.run.MAX_PHASE_RUNS", 3)
    assert events_of(small_run().recording()).phase_runs == ()


def test_the_static_model_speaks_as_the_table_does() -> None:
    _, summary = analysed(small_run().recording())
    words = said_in(small_run().recording()).static_model
    shown = " ".join(render_static_model(summary).split())
    assert words.head in shown
    assert words.verdict in shown


def test_a_model_that_does_not_hold_says_where() -> None:
    _, summary = analysed(small_run().recording())
    first = summary.static_model[0]
    first = replace(first, residual_bytes=-7, explained=False, holds=False)
    broken = replace(summary, static_model=(first, *summary.static_model[1:]))
    view = said_of(broken, ()).static_model
    assert view.verdict.startswith("the model does not hold: parameters at the end of forward: -7 B not explained")
    assert view.verdict.split(";")[0] in " ".join(render_static_model(broken).split())


def test_the_ledger_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_in(small_run().recording())
    assert (len(said.copies), said.copies_left_out) == (1, 0)
    monkeypatch.setattr("ampmem.reporters.html.run.MAX_PARAMETERS", 0)
    said = said_in(small_run().recording())
    assert (said.copies, said.copies_left_out) == ((), 1)


def test_the_copies_of_equal_layers_are_one_row() -> None:
    recording = encoder()
    summary = summary_of(analyse(recording))
    (row,) = said_of(summary, ()).copies
    assert row.name == "encoder.layers.*.self_attention.in_projection.weight (12)"
    assert (row.copies, row.bytes) == (24, summary.casts.bytes)
    assert len(summary.casts.by_parameter) == 12, "the JSON has each"


def test_headlines_are_at_most_five_and_begin_with_the_peak() -> None:
    _, summary = analysed(small_run().recording())
    alone = said_of(summary, ()).headlines
    assert [headline.label for headline in alone] == [
        "Peak",
        "Bytes per parameter",
        "Activations",
        "Precision copies",
        "Residual",
    ]
    assert alone[0].bytes == summary.peak.bytes
    allocator = Allocator(
        requested=1, rounding=1, allocated=2, cached=3, reserved=5, outside=None, outside_process=None
    )
    against = difference_headline(compared(fp32_run(), small_run().recording()), 1)
    known = said_of(replace(summary, allocator=allocator), (), against).headlines
    assert [headline.label for headline in known] == [
        "Peak",
        "Reserved",
        "Cached",
        "Bytes per parameter",
        "Compared with fp32",
    ]


def test_a_finding_leads_to_the_section_that_shows_it() -> None:
    _, summary = analysed(small_run().recording())
    found = [
        Finding(code="a", severity="info", section=section, message="m", bytes=None, change="c", evidence=("e",))
        for section in (Section.CASTS, Section.STEPS)
    ]
    assert [view.jump for view in said_of(summary, found).findings] == ["casts", "steps"]


def test_a_card_begins_with_a_capital() -> None:
    _, summary = analysed(small_run().recording())
    found = Finding(
        code="a", severity="info", section=Section.STEPS, message="it is", bytes=None, change="c", evidence=()
    )
    assert said_of(summary, (found,)).findings[0].message == "It is"


def test_every_section_that_a_finding_can_name_is_on_the_page() -> None:
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    for section in Section:
        assert f'id="{section}"' in template or f'part("{section}"' in template


def test_a_comparison_reads_as_the_table_does() -> None:
    comparison = compared(fp32_run(), with_larger_activations())
    view, shown = compared_runs(comparison), render_comparison(comparison, details=EVERYTHING)
    assert (view.baseline, view.labels) == (0, ("fp32", "amp"))
    assert view.steps == tuple(column.step for column in comparison.columns)
    assert view.waterfalls == ((1, "after_forward"),)  # the verdict has the way from peak to peak
    figures = {name: cells for name, *cells in view.figures}
    assert list(figures) == ["Peak vs fp32", "Activations after forward, vs fp32"]
    for text in (*figures["Activations after forward, vs fp32"], *view.loss_differences[1:]):
        assert text in shown
    assert all(text in shown for row in view.losses for text in row)


def test_the_compared_steps_are_in_the_page_as_they_are_in_the_json_of_the_runs() -> None:
    comparison = compared(fp32_run(), with_larger_activations())
    steps = plain(compared_runs(comparison).steps)
    assert isinstance(steps, list)
    for step, entry in zip(steps, comparison.entries, strict=True):
        assert step == json.loads(entry.summary.to_json())["steps"][-1]


def test_without_a_baseline_there_is_no_waterfall() -> None:
    view = compared_runs(compared(small_run().recording(), small_run().recording()))
    assert view.baseline is None
    assert view.labels == ("amp a", "amp b")
    assert (view.waterfalls, view.loss_differences) == ((), ())
    assert not [row for row in view.figures if "against" in row[0]]
    assert difference_headline(compared(small_run().recording(), small_run().recording()), 0) is None


def test_recordings_of_two_scripts_have_no_difference() -> None:
    other = with_larger_activations()
    comparison = compared(fp32_run(), replace(other, run=replace(other.run, script="other.py")))
    view = compared_runs(comparison)
    assert len(view.remarks) == 1
    assert (view.baseline, view.waterfalls, view.figures) == (None, (), ())
    assert difference_headline(comparison, 1) is None


def test_a_failure_is_told_once() -> None:
    failure = FailureRecord(kind=FailureKind.RAISED, error="ValueError", message="no")
    run = replace(RUN, failure=failure)
    recording = small_run().recording(run=run, notes=(failure.note, "another note"))
    _, summary = analysed(recording)
    entry = entry_of(recording, summary=summary)
    assert entry == entry_of(recording)
    view = compared_runs(compared(fp32_run(), recording))
    assert view.failures == ("amp failed: ValueError: no",)


def test_losses_that_are_no_number_are_words() -> None:
    recording = fp32_run()
    steps = tuple(replace(step, loss=float("nan")) for step in recording.steps)
    view = compared_runs(compared(recording, replace(small_run().recording(), steps=steps)))
    assert view.losses[0][2] == "nan"
    assert view.loss_differences == ("vs fp32, up to", "0 %", "not finite")


def one_step(events: bool = True) -> Story:
    """The least that is a step of training."""
    story = Story()
    story.begin(0)
    if events:
        story.parameter(0x1000, "weight", 0)
    story.end(Phase.BACKWARD, loss=None)
    return story


def test_a_run_of_one_step_and_one_event() -> None:
    story = one_step(events=False)
    story.parameter(0x1000, "weight", 25)
    events = events_of(story.recording())
    assert events.stream.events == 1
    assert len(events.steps) == 1
    assert (events.peak, events.instant) == (None, None)
    assert said_in(story.recording()).steps[0].loss == "-"


def test_a_run_without_a_byte_has_no_peak() -> None:
    said = said_in(one_step().recording())
    assert events_of(one_step().recording()).peak is None
    assert (said.copies, said.parameters) == ((), 0)
    assert "Bytes per parameter" not in [headline.label for headline in said.headlines]
    assert not [fact for fact in said.facts if "parameters" in fact]


def test_what_was_not_measured_of_a_step_is_not_said() -> None:
    recording = small_run().recording()
    assert [(step.update, step.took != "") for step in said_in(recording).steps] == [("done", True)] * 2
    without_times = said_in(replace(recording, notes=(NO_TIMES,)))
    assert [step.took for step in without_times.steps] == ["", ""]
    simulated = said_in(replace(recording, run=replace(recording.run, source=SourceKind.SIMULATED)))
    assert [step.took for step in simulated.steps] == ["", ""], "they are this machine's"
    assert [step.update for step in said_in(one_step().recording()).steps] == [""]


def test_a_run_without_an_event() -> None:
    recording = small_run().recording()
    events, facts = recording.events, recording.facts
    nothing = replace(
        recording,
        events=replace(events, **{name: getattr(events, name)[:0] for name in events.names()}),
        facts=replace(facts, **{name: getattr(facts, name)[:0] for name in facts.names()}),
    )
    view = events_of(nothing)
    assert (view.stream.events, view.phase_runs, view.peak) == (0, (), None)
