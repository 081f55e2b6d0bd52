"""The section of a run that ran out of memory, in a browser."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.failures import OUT_OF_MEMORY, late_zero_grad
from support.pages import Open, Written, written
from support.story import long_run

from ampmem.allocator.oom import pack_segments
from ampmem.analysis.findings.base import remedies
from ampmem.analysis.summary import summary_of
from ampmem.events import OomRecord, Phase, Recording
from ampmem.units import format_bytes, format_count
from ampmem.vocabulary import SourceKind

pytestmark = pytest.mark.browser

HEADING = "Out of memory in forward of step 2: the run ended here"


def failed_run() -> Recording:
    """Three steps, of which the last ends where its backward would begin."""
    recording = long_run(steps=3, precision="fp32")
    phases = recording.phases
    when = int(phases.time_ns[(phases.phase == Phase.BACKWARD) & (phases.step == 2)][0]) - 1
    oom = OomRecord(
        time_ns=when,
        step=2,
        device=0,
        stream=0,
        pool="0,0",
        asked=700_000,
        segment=2_097_152,
        total=1 << 30,
        free=1000,
        op="aten::mm",
        module="layers.39.linear",
        stack="train.py:20 main\nmodel.py:7 Net.forward<script>",
        segments=pack_segments(()),
    )
    last = replace(recording.steps[-1], finished=False, loss=None)
    run = replace(recording.run, source=SourceKind.CUDA, device_type="cuda")
    return replace(recording, run=run, steps=(*recording.steps[:-1], last), ooms=(oom,))


@pytest.fixture(scope="module")
def failed_page(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(tmp_path_factory.mktemp("failed"), failed_run())


def test_the_section_has_the_numbers_and_leads_to_the_instant(open_page: Open, failed_page: Written) -> None:
    page = open_page(failed_page.path)
    section = page.get_by_role("region", name=HEADING)
    assert section.is_visible()
    analysis = failed_page.analyses[0]
    at = analysis.timeline.position(analysis.recording.ooms[0].time_ns)
    live = analysis.timeline.breakdown(at)
    text = section.inner_text()
    assert "a block of 683.6 KiB in a new segment of 2.0 MiB" in text
    assert "aten::mm in layers.39.linear" in text
    assert "model.py:7 Net.forward<script>" in text
    bars = section.locator(".bars tr")
    assert bars.count() == sum(size > 0 for size in live.values()) + 1
    assert bars.last.inner_text().split("\t")[-2:] == [format_bytes(sum(live.values())), ""]
    assert page.get_by_role("navigation").get_by_role("link", name="Out of memory").is_visible()
    layout = page.evaluate("document.getElementById('chart').layout")
    assert [note["text"] for note in layout["annotations"]][-1] == "out of memory"
    assert [note["x"] for note in layout["annotations"]][-1] == at
    section.get_by_role("button", name="Show this instant in the charts").press("Enter")
    assert page.locator("#readout-title").inner_text() == "At the pinned event"
    assert f"event {format_count(at)} · step 2 · forward" in page.locator("#readout-where").inner_text()
    assert page.locator("#readout-exact").inner_text() == format_count(sum(live.values()))
    assert page.evaluate("document.activeElement.id") == "timeline-title"
    assert "out of memory" in page.locator("#steps-body").inner_text()


def test_heading_tiles_bar_and_timeline_are_of_the_failure(look: Open, failed_page: Written) -> None:
    page = look(failed_page.path)
    summary = summary_of(failed_page.analyses[0])
    oom = summary.ended_by
    assert oom is not None
    alive = format_bytes(sum(oom.alive.values()))
    assert alive != format_bytes(summary.peak.bytes), "the peak was another instant"
    assert page.locator("#verdict-title").inner_text() == f"Out of memory at {alive}."
    assert page.locator("#verdict h2").first.inner_text() == "At the failure in forward of step 2, at mm"
    bar = page.locator("#verdict .bars tr").first.inner_text()
    assert alive in bar and "out of memory" in bar
    tiles = page.locator("#headlines .headline").evaluate_all("all => all.map((each) => each.innerText.split('\\n'))")
    assert [tile[:2] for tile in tiles] == [
        ["At the failure", alive],
        ["Missing", format_bytes(oom.lacking)],
        ["Reserved", "0 B"],
        ["Free on the device", "1000 B"],
        ["Still to come", format_bytes(oom.to_come.gradients + (oom.to_come.optimizer_state or 0))],  # type: ignore[union-attr]
    ]
    assert page.locator("#peak").is_hidden()
    assert page.locator("#modules-title").inner_text() == "Live at the failure, by module"
    assert page.locator("#stacks-title").text_content() == "Live at the failure, by Python stack"
    assert alive in page.locator("#allocations-note").inner_text()
    assert page.locator("#allocations-note").inner_text().endswith("alive at the failure")
    assert page.locator("#alive option").first.inner_text() == "Alive at the failure"
    layout = page.evaluate("document.getElementById('chart').layout")
    (size,) = [each for each in layout["shapes"] if each.get("line", {}).get("dash") == "dash"]
    assert (size["y0"], size["y1"]) == (1 << 30, 1 << 30)
    (block,) = [each for each in layout["shapes"] if each["type"] == "rect"]
    assert (block["y0"], block["y1"]) == ((1 << 30) - 1000, (1 << 30) - 1000 + 2_097_152)
    assert layout["yaxis"]["range"][1] > block["y1"]
    texts = [note["text"] for note in layout["annotations"]]
    assert "1.0 GiB in total" in texts
    assert "a block of 683.6 KiB in a new segment of 2.0 MiB: 2.0 MiB missing" in texts


def test_the_largest_tensors_and_what_to_run_next(look: Open, failed_page: Written) -> None:
    section = look(failed_page.path).locator("#out-of-memory")
    oom = summary_of(failed_page.analyses[0]).ended_by
    assert oom is not None
    first = section.locator(".scroll tbody tr").first.locator("td").all_inner_texts()
    assert first[0] == format_bytes(oom.largest[0].bytes)
    assert section.locator("pre").all_inner_texts() == list(oom.next_commands)
    assert "ampmem profile --device sim --gpu rtx4060 train.py --epochs 1" in oom.next_commands
    assert "name the argument for the batch size" in section.inner_text()


def test_it_fits_every_width_and_paper(look: Open, failed_page: Written) -> None:
    page = look(failed_page.path)
    for width in (390, 900, 1440):
        page.set_viewport_size({"width": width, "height": 1000})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.emulate_media(media="print")
    assert page.locator("#out-of-memory").is_visible()
    assert page.locator("#out-of-memory button.screen").is_hidden()
    page.emulate_media(media="screen")


def test_what_to_change_is_one_list_with_bytes(open_page: Open, tmp_path: Path) -> None:
    shown = written(tmp_path, late_zero_grad())
    page = open_page(shown.path)
    summary = summary_of(shown.analysis)
    assert summary.out_of_memory is not None
    expected = remedies(summary.out_of_memory, summary.findings)
    items = page.locator("#out-of-memory .remedies > li")
    assert [item.locator("b").inner_text() for item in items.all()] == [
        "" if each.bytes is None else f"\N{MINUS SIGN}{format_bytes(each.bytes)}" for each in expected
    ]
    known = sum(each.bytes is not None for each in expected)
    assert page.locator("#out-of-memory .remedies").first.locator("> li").count() == known
    assert [item.locator("p").first.inner_text() for item in items.all()] == [each.change for each in expected]
    assert len(expected) >= 2
    assert expected[0].finding is not None
    assert items.first.get_attribute("data-code") == expected[0].finding.code
    cards = page.locator("#findings article").evaluate_all("all => all.map((card) => card.dataset.code)")
    assert "out-of-memory" not in cards
    assert not {each.finding.code for each in expected if each.finding} & set(cards)
    items.first.get_by_role("button", name="Show where").click()
    assert page.evaluate("document.activeElement.id") == "timeline-title"


def test_what_ran_out_after_the_recorded_steps_is_not_in_the_charts(open_page: Open, tmp_path: Path) -> None:
    failed = failed_run()
    whole = replace(failed.steps[-1], finished=True)
    later = replace(failed.ooms[0], time_ns=whole.end_ns + 1, later=())
    ended = replace(failed.run, failure=OUT_OF_MEMORY)
    recording = replace(failed, run=ended, steps=(*failed.steps[:-1], whole), ooms=(later,))
    page = open_page(written(tmp_path, recording).path)
    section = page.locator("#out-of-memory")
    assert "Out of memory in the run after the recorded steps: the run ended here" in section.inner_text()
    assert section.get_by_role("button", name="Show this instant in the charts").count() == 0
    assert page.locator("#modules-title").inner_text() == "Live at the peak, by module"
    assert page.locator("#peak").is_visible()


def test_a_run_that_had_enough_has_no_such_section(look: Open, long_page: Written) -> None:
    page = look(long_page.path)
    assert page.locator("#out-of-memory").is_hidden()
    assert page.get_by_role("navigation").get_by_role("link", name="Out of memory").count() == 0
    assert "out of memory" not in page.evaluate(
        "document.getElementById('chart').layout.annotations.map((a) => a.text)"
    )
