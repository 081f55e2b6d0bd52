"""The HTML page, tested as the data it is drawn from and as the text it is made of."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from build import RUN, small_run
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summary_of
from ampmem.cli.report import report
from ampmem.errors import UsageError
from ampmem.events import Columns, Phase, Recording
from ampmem.recording import Batch, Description, RecordingWriter
from ampmem.reporters.base import Report
from ampmem.reporters.html.page import PLOTLY_CONFIG, Headline, Section, Table, element_id, render
from ampmem.reporters.html.palette import FILLS
from ampmem.reporters.html.reduce import extreme_instants
from ampmem.reporters.html.safety import MAX_TEXT, escaped, json_for_script, visible
from ampmem.reporters.html.sections import MARKS, section_of
from ampmem.reporters.html.timeline_view import MAX_PHASES, TimelineView, timeline_view

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J\ud800"

totals = st.lists(st.integers(0, 2**50), min_size=1, max_size=400).map(lambda values: np.array(values, dtype=np.int64))


def view_of(*columns: list[int], phases: list[Phase] | None = None, max_points: int = 1500) -> TimelineView:
    """A view of what ``columns`` say after each event, with nothing before the first and the highest marked."""
    live = dict(zip(FILLS, (np.array([0, *column], dtype=np.int64) for column in columns), strict=False))
    phase = np.array(phases or [Phase.FORWARD] * len(columns[0]), dtype=np.int64)
    highest = int(np.sum(list(live.values()), axis=0).argmax())
    view = timeline_view(element_id(0), live, phase, highest, max_points=max_points)
    assert view is not None
    return view


def section(**changes: object) -> Section:
    values: dict[str, object] = {
        "title": "train.py",
        "facts": (),
        "notes": (),
        "headlines": (),
        "timeline": None,
        "tables": (),
    }
    return Section(**values | changes)  # type: ignore[arg-type]


def scripts(page: str) -> list[str]:
    """The inline scripts that a browser would run."""
    return re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)


def page_data(page: str) -> dict[str, object]:
    blocks = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, flags=re.DOTALL)
    assert len(blocks) == 1
    return json.loads(blocks[0])


@given(totals, st.integers(5, 500), st.data())
def test_reduction_keeps_the_extremes_the_ends_and_the_mark(
    total: np.ndarray, max_points: int, data: st.DataObject
) -> None:
    always = data.draw(st.integers(0, len(total) - 1))
    instants = extreme_instants(total, always, max_points)
    assert always in instants
    assert len(instants) <= max_points
    assert (np.diff(instants) > 0).all()
    assert instants[0] == 0
    assert instants[-1] == len(total) - 1
    assert total[instants].max() == total.max()
    assert total[instants].min() == total.min()
    assert total.argmax() in instants


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 3), min_size=1, max_size=300), st.integers(5, 60))
def test_the_drawn_stack_is_exact_and_has_the_peak(rows: list[tuple[int, ...]], max_points: int) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    view = view_of(*columns, max_points=max_points)
    drawn = [sum(series.bytes[at] for series in view.series) for at in range(len(view.instants))]
    assert drawn == [sum(rows[instant - 1]) if instant else 0 for instant in view.instants]
    assert view.peak.bytes == max(map(sum, rows))
    assert drawn[view.instants.index(view.peak.instant)] == view.peak.bytes


def test_few_events_are_all_drawn() -> None:
    assert view_of([1, 5, 3]).instants == [0, 1, 2, 3]


def test_a_category_that_is_never_there_is_not_drawn() -> None:
    assert [series.category for series in view_of([0, 0], [0, 7]).series] == ["gradients"]


def test_no_event_gives_no_chart() -> None:
    nothing = np.array([], dtype=np.int64)
    assert timeline_view(element_id(0), {"parameters": np.zeros(1, dtype=np.int64)}, nothing, 0) is None


def test_phases_are_runs_of_events() -> None:
    view = view_of([1] * 5, phases=[Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OPTIMIZER])
    spans = [(span.name, span.start, span.end) for span in view.phases]
    assert spans == [("forward", 0, 2), ("backward", 2, 3), ("optimizer", 3, 5)]


def test_a_strip_of_too_many_phases_is_left_out() -> None:
    phases = [Phase.FORWARD, Phase.BACKWARD] * MAX_PHASES
    assert view_of([1] * len(phases), phases=phases).phases == []


def test_nothing_is_uploaded_or_fetched() -> None:
    page = render([section(timeline=view_of([1, 2]))])
    assert page_data(page)["config"] == PLOTLY_CONFIG
    assert PLOTLY_CONFIG["showSendToCloud"] is False
    assert PLOTLY_CONFIG["plotlyServerURL"] == ""
    assert "default-src 'none'" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?:", markup)


def test_the_policy_allows_exactly_the_scripts_of_the_page() -> None:
    page = render([section(timeline=view_of([1, 2]))])
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts(page)]
    assert len(digests) == 2
    allowed = re.search(r"script-src ([^;]*);", page)
    assert allowed is not None
    assert allowed[1].split() == [f"'sha256-{digest}'" for digest in digests]


def test_plotly_is_in_the_page_once_for_many_recordings() -> None:
    page = render([section(timeline=view_of([1])), section(timeline=view_of([2]))])
    assert len(scripts(page)) == 2
    assert len(page_data(page)["timelines"]) == 2  # type: ignore[arg-type]


def test_hostile_text_is_only_ever_text() -> None:
    table = Table(title=HOSTILE, columns=(HOSTILE, "n"), rows=((HOSTILE, "1"),), numeric=frozenset({1}), swatch=0)
    headline = Headline(label=HOSTILE, value=HOSTILE, detail=HOSTILE)
    page = render([section(title=HOSTILE, facts=(HOSTILE,), notes=(HOSTILE,), headlines=(headline,), tables=(table,))])
    assert "<img" not in page.split("<script", 1)[0]
    assert HOSTILE[:20] not in page
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;\\u202e\\u001b[2J\\ud800") == 10
    page.encode()


@given(st.text(max_size=50))
def test_json_in_a_script_element_is_data_only(text: str) -> None:
    block = json_for_script({text: [text]})
    assert not set("<>&") & set(block)
    assert block.isascii()
    assert json.loads(block) == {text: [text]}


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_for_script([float("nan")])


@given(st.text(max_size=2 * MAX_TEXT))
def test_shown_text_is_bounded_and_has_no_invisible_character(text: str) -> None:
    shown = visible(text)
    assert not {"Cc", "Cf", "Cs"} & {unicodedata.category(character) for character in shown}
    assert len(shown) <= MAX_TEXT * len("\\U00000000")
    assert not set("<>\"'") & set(escaped(text))


def test_every_colour_is_a_colour() -> None:
    for fill in FILLS.values():
        assert re.fullmatch(r"#[0-9a-f]{6}", fill.light)
        assert re.fullmatch(r"#[0-9a-f]{6}", fill.dark)


def saved(recording: Recording, path: Path) -> Path:
    """``recording`` as a file."""
    writer = RecordingWriter(path, recording.run)
    events, facts, phases = recording.events, recording.facts, recording.phases
    for number, step in enumerate((None, *recording.steps)):
        texts = recording.texts[1:] if number == 0 else ()
        writer.append(Batch(texts=texts, events=events, facts=facts, phases=phases, step=step))
        events, facts, phases = (_nothing(type(columns)) for columns in (events, facts, phases))
    writer.describe(
        Description(
            arm=recording.arm, parameters=recording.parameters, optimizers=recording.optimizers, notes=recording.notes
        )
    )
    writer.close()
    return path


def _nothing(kind: type[Columns]) -> Columns:
    return kind(**dict.fromkeys(kind.names(), np.zeros(0, dtype=np.int64)))


def small_section() -> Section:
    analysis = analyse(small_run().recording(notes=("a note",)))
    return section_of(0, Report(title="train.py", summary=summary_of(analysis), notes=("a note",)), analysis)


def test_a_section_has_the_numbers_of_the_summary() -> None:
    summary = summary_of(analyse(small_run().recording()))
    view = small_section().timeline
    assert view is not None
    at = view.instants.index(view.peak.instant)
    assert {series.category: series.bytes[at] for series in view.series if series.bytes[at]} == {
        category: size for category, size in summary.peak.categories.items() if size
    }
    assert view.peak.bytes == summary.peak.bytes


def test_the_tables_of_a_section() -> None:
    titles = [table.title.split()[0] for table in small_section().tables]
    assert titles == ["Steps", "Breakdown", "Modules,", "Largest"]
    for table in small_section().tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
    breakdown = small_section().tables[1]
    assert len(breakdown.columns) == 1 + 2 * len(MARKS)
    rows = [row[0] for row in breakdown.rows]
    assert rows[:5] == ["parameters", "gradients", "optimizer_state", "precision_copies", "cast_copies"]
    assert rows[-1] == "total"


def test_every_table_of_a_hostile_recording_is_escaped(tmp_path: Path) -> None:
    hostile = HOSTILE.replace("\ud800", "")
    recording = small_run().recording(run=replace(RUN, script=hostile, device_name=hostile), notes=(hostile,))
    texts = tuple(text and f"{text} {hostile}" for text in recording.texts)
    path = saved(replace(recording, texts=texts), tmp_path / "hostile.ampmem")
    result = CliRunner().invoke(report, [str(path), "-o", str(tmp_path / "out.html")])
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert hostile[:20] not in page
    assert "<img" not in page.split("<script", 1)[0]
    assert page.count("&lt;/script&gt;") > 5


def test_a_page_is_not_replaced_without_force(tmp_path: Path) -> None:
    path = saved(small_run().recording(), tmp_path / "run.ampmem")
    page = tmp_path / "out.html"
    page.write_text("mine")
    result = CliRunner().invoke(report, [str(path), "-o", str(page)])
    assert isinstance(result.exception, UsageError)
    assert page.read_text() == "mine"
    result = CliRunner().invoke(report, [str(path), "-o", str(page), "--force"])
    assert result.exit_code == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_page_is_made_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    path = saved(small_run().recording(), tmp_path / "run.ampmem")
    code = "import sys; sys.modules['torch'] = None; from ampmem.cli.main import main; main()"
    command = [sys.executable, "-c", code, "report", str(path), str(path), "-o", "out.html"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert [view["element"] for view in page_data(page)["timelines"]] == ["timeline-0", "timeline-1"]  # type: ignore[attr-defined]
