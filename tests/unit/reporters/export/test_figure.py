"""The timeline as a plotly figure, read back with plotly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import plotly.io
import pytest
from support.build import RUN, small_run
from support.hostile.seeds import on_cpu, on_gpu

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.events import Recording
from ampmem.reporters.export import figure
from ampmem.reporters.export.figure import timeline_figure, write_figure
from ampmem.reporters.html.palette import label

MIB = 1 << 20


def analysis() -> Analysis:
    return analyse(small_run().recording())


@pytest.mark.parametrize("recording", [on_cpu, on_gpu])
def test_plotly_reads_every_category_at_every_event(tmp_path: Path, recording: Callable[[], Recording]) -> None:
    found = analyse(recording())
    write_figure(found, tmp_path / "run.json")
    areas = plotly.io.read_json(tmp_path / "run.json").data
    live = {label(category): found.timeline.series(category) for category in CATEGORIES}
    assert {area.name for area in areas} == {name for name, series in live.items() if series.any()}
    for area in areas:
        assert [round(value * MIB) for value in area.y] == live[area.name][list(area.x)].tolist()
    positions = areas[0].x
    sums = [round(sum(area.y[i] for area in areas) * MIB) for i in range(len(positions))]
    assert sums == found.timeline.total[list(positions)].tolist()


def test_of_a_long_recording_the_peaks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = analysis()
    monkeypatch.setattr(figure, "BUCKETS", 2)
    areas = timeline_figure(found).data
    assert len(areas[0].x) <= 4 + len(found.peaks)
    assert set(found.peaks) <= set(areas[0].x)


def test_no_text_of_the_script_is_in_it(tmp_path: Path) -> None:
    recording = small_run().recording(run=replace(RUN, script="<b>script</b>"))
    hostile = replace(recording, texts=tuple(text and f"<b>{text}</b>" for text in recording.texts))
    write_figure(analyse(hostile), tmp_path / "run.json")
    drawn = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    drawn["layout"].pop("template")
    assert "<b>" not in json.dumps(drawn)
