"""How values show themselves: a line of their own wherever they are printed, tables where a notebook asks for them."""

import html
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.build import AMP, FP32, RUN, gpu_run, precision_run, small_run
from support.build import write as save
from support.jobs import rank_recording

import ampmem
from ampmem import output as shown
from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.errors import UsageError
from ampmem.reporters.text.table import render
from ampmem.units import format_bytes

ELEMENTS = {"div", "table", "caption", "thead", "tbody", "tr", "th", "td", "span", "b"}
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def test_a_recording_says_what_was_run_on_what_and_how_much_of_it_there_is() -> None:
    recording = small_run().recording()
    events = f"{len(recording.events):,} events"
    assert (
        repr(recording)
        == f"<Recording: {RUN.script}, cpu, {RUN.device_name}, {_precision(recording)}, 2 steps, {events}>"
    )
    assert repr(recording.events) == f"<EventColumns: {len(recording.events)} rows>"
    assert repr(recording) in repr(analyse(recording))


def _precision(recording: ampmem.Recording) -> str:
    return " ".join(filter(None, (recording.precision.name, recording.precision.dtype)))


def test_a_summary_says_its_peak() -> None:
    summary = summarize(small_run().recording())
    peak = f"peak {format_bytes(summary.peak.bytes)} in {summary.peak.phase}"
    assert repr(summary).endswith(f"2 steps, {peak} of step {summary.peak.step}>")
    assert repr(summary.steps[summary.peak.step]) == f"<Step: step {summary.peak.step}, {peak}>"


def test_a_comparison_says_the_peak_of_each() -> None:
    one, other = precision_run(FP32), precision_run(AMP)
    comparison = ampmem.compare(one, other)
    for entry, recording in zip(comparison.entries, (one, other), strict=True):
        assert f"{entry.label} {format_bytes(summarize(recording).peak.bytes)}" in repr(comparison)
    assert repr(comparison.entries[0]).startswith("<Entry: fp32, peak ")


def test_every_line_is_short_and_harmless_whatever_the_names() -> None:
    recording = small_run().recording(run=replace(RUN, device_name=HOSTILE * 100, script=HOSTILE))
    for value in (recording, summarize(recording), ampmem.compare(recording), analyse(recording)):
        assert len(repr(value)) < 700
        assert repr(value).isprintable()
        assert str(value) == repr(value)


def test_a_value_that_contradicts_itself_still_has_a_line() -> None:
    broken = replace(summarize(small_run().recording()), peak=None)  # type: ignore[arg-type]
    assert repr(broken) == "<Summary>"
    assert broken._repr_mimebundle_()["text/plain"].startswith("<Summary>\n")


def test_values_are_equal_and_pickled_as_before() -> None:
    summary = summarize(gpu_run().recording())
    assert pickle.loads(pickle.dumps(summary)) == summary
    assert type(pickle.loads(pickle.dumps(summary))) is ampmem.Summary


def test_a_profile_says_how_far_it_has_got(tmp_path: Path) -> None:
    prof = ampmem.profile()
    assert repr(prof) == "<Profile: not started>"
    assert prof._repr_mimebundle_() == {"text/plain": "<Profile: not started>"} == {"text/plain": str(prof)}
    with pytest.raises(UsageError):
        prof.step()
    there = ampmem.profile(output=save(tmp_path / "a.ampmem", small_run().recording()))
    assert repr(there).startswith(f"<Profile: the recording {tmp_path / 'a.ampmem'}, ")
    assert there._repr_mimebundle_() == ampmem.load(tmp_path / "a.ampmem")._repr_mimebundle_()
    recording = small_run().recording()
    assert str(there) == render(summarize(recording), recording.remarks, title="train.py --epochs 1")


def test_tables_are_text_and_html_of_the_same() -> None:
    recording = small_run().recording()
    for value in (recording, summarize(recording), ampmem.compare(recording, precision_run(AMP))):
        bundle = value._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "text/html"}
        total = format_bytes(summarize(recording).peak.bytes)
        assert total in bundle["text/plain"]
        assert f">{total}</td>" in bundle["text/html"]


def test_the_ranks_of_a_job_are_a_table_too() -> None:
    ranks = ampmem.ranks(rank_recording(0, 2), rank_recording(1, 2, activations=1600))
    bundle = ranks._repr_mimebundle_()
    assert repr(ranks).startswith(f"<Ranks: {len(ranks.ranks)} of {ranks.job.world_size} ranks, ")
    first = re.findall(r">(rank \d+)</th>", bundle["text/html"])[0]
    assert first == f"rank {ranks.worst.rank}"


def test_a_recording_without_a_step_says_why_it_has_no_tables() -> None:
    recording = replace(small_run().recording(), steps=())
    bundle = recording._repr_mimebundle_()
    assert "nothing to show: no step ended" in bundle["text/plain"]
    assert "nothing to show: no step ended" in bundle["text/html"]


def test_tables_show_hostile_names_as_text_and_load_nothing() -> None:
    recording = small_run().recording(run=replace(RUN, device_name=HOSTILE, script=HOSTILE))
    for value in (recording, summarize(recording), ampmem.compare(recording)):
        text = value._repr_mimebundle_()["text/html"]
        elements = re.findall(r"<[^>]*>", text)
        assert {element.split()[0].strip("</>") for element in elements} <= ELEMENTS
        assert not any(re.search(r"\s(on\w+|src|href)=|url\(", element) for element in elements)


def test_every_element_of_a_table_has_all_of_its_style() -> None:
    """Nothing of the host's holds: its rules lose against what an element says of itself as important."""
    text = summarize(small_run().recording())._repr_mimebundle_()["text/html"]
    elements = re.findall(r"<[a-z]\w*[^>]*>", text)
    assert len(elements) > 50
    for element in elements:
        assert 'style="all: initial !important; ' in element
        style = html.unescape(re.findall(r'style="([^"]*)"', element)[0])
        assert all(part.strip().endswith("!important") for part in style.split(";") if part.strip())


def test_without_tables_the_line_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_tables", [])
    summary = summarize(small_run().recording())
    assert summary._repr_mimebundle_() == {"text/plain": repr(summary)}


def test_what_a_kernel_was_started_with_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/ipykernel_launcher.py", "-f", "/x/kernel.json"])
    from ampmem import block

    assert block.command_line() == ["a notebook"]


def test_a_difference_and_a_check_are_tables_too() -> None:
    before, after = rank_recording(0, 1), rank_recording(0, 1, activations=1600)
    found = ampmem.diff(before, after)
    assert repr(found).startswith(f"<Difference: peak {format_bytes(found.before)} in ")
    assert f">{format_bytes(found.grown)}</td>" in found._repr_mimebundle_()["text/html"].replace("+", "")
    assert f"+{format_bytes(found.grown)}" in found._repr_mimebundle_()["text/plain"]
    result = ampmem.check(after, budgets={"peak": "1 KiB"})
    assert "not ok, 1 limits, 1 broken" in repr(result)
    assert ">broken</td>" in result._repr_mimebundle_()["text/html"]
    assert "over its budget of 1.0 KiB" in result._repr_mimebundle_()["text/plain"]
