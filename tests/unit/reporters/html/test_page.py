"""The page as a file: what is in it, what its policy allows, how it is written, and what becomes of odd recordings."""

import base64
import gzip
import hashlib
import html
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.build import AMP, FP32, RUN, small_run
from support.build import write as save
from support.page_reader import exact, page_data, reduced, scripts

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.cli.report import report
from ampmem.errors import NothingRecorded, UsageError
from ampmem.events import Recording
from ampmem.recording.bounds import NAME
from ampmem.reporters.html import plotlyjs, progress, write
from ampmem.reporters.html.notebook import html_of, summary_card
from ampmem.reporters.html.page import PLOTLY_CONFIG
from ampmem.reporters.html.safety import FOLDER
from ampmem.units import format_bytes

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\u2028\x1b[2J"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return save(tmp_path / "run.ampmem", small_run().recording())


def written(folder: Path, *recordings: Path) -> str:
    page = folder / "out.html"
    write(recordings, page, force=True)
    return page.read_text(encoding="utf-8")


def packed_plotly(page: str) -> str:
    found = re.search(r'<script type="text/plain" id="plotly-packed">(.*?)</script>', page, flags=re.DOTALL)
    return gzip.decompress(base64.b64decode(found[1])).decode()


def digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def test_the_policy_allows_exactly_the_script_of_the_page_and_plotly(tmp_path: Path, recording: Path) -> None:
    page = written(tmp_path, recording)
    assert len(scripts(page)) == 1
    assert packed_plotly(page) == plotlyjs.source()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    policy = dict(part.strip().split(" ", 1) for part in html.unescape(found[1]).split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": f"{digest(scripts(page)[0])} {digest(plotlyjs.source())}",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_what_can_be_read_comes_before_all_that_the_browser_has_to_work_through(
    tmp_path: Path, recording: Path
) -> None:
    page = written(tmp_path, recording)
    end = page.index("</main>")
    assert page.index("<script") > end
    assert "<link" not in page
    assert end < 60_000 < len(page)


def test_nothing_is_uploaded_or_fetched(tmp_path: Path, recording: Path) -> None:
    page = written(tmp_path, recording)
    assert page_data(page)["config"] == PLOTLY_CONFIG
    assert PLOTLY_CONFIG["showSendToCloud"] is False
    assert PLOTLY_CONFIG["plotlyServerURL"] == ""
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""\b(?:src|href|action|data)\s*=\s*["'](?!#|data:)""", markup)
    assert not re.search(r"url\((?!['\"]?data:)|@import|\son\w+\s*=", markup)


def test_a_page_holds_the_events_and_the_numbers(tmp_path: Path, recording: Path) -> None:
    data = page_data(written(tmp_path, recording))
    (run,) = data["runs"]
    timeline = analyse(ampmem.load(recording)).timeline
    summary = summarize(ampmem.load(recording))
    assert run["summary"] == json.loads(summary.to_json())
    assert (exact(run["events"]["stream"]["packed"]).live == timeline.live).all()
    assert run["events"]["stream"]["mode"] == "exact"
    assert (run["title"], run["label"]) == ("train.py --epochs 1", "amp")
    assert run["said"]["headlines"][0]["value"] == format_bytes(summary.peak.bytes)
    assert data["comparison"] is None
    assert data["ampmem"] == ampmem.__version__
    assert [category["key"] for category in data["categories"]] == list(map(str, summary.peak.categories))


def test_a_page_of_json_has_the_same_words_and_no_events(tmp_path: Path, recording: Path) -> None:
    summary = summarize(ampmem.load(recording))
    given = tmp_path / "summary.json"
    given.write_text(summary.to_json())
    (whole,) = page_data(written(tmp_path, recording))["runs"]
    page = written(tmp_path, given)
    (run,) = page_data(page)["runs"]
    assert run["summary"] == whole["summary"] == json.loads(summary.to_json())
    findings, others = run["said"].pop("findings"), whole["said"].pop("findings")
    assert run["said"] == whole["said"]
    assert findings == [{**each, "jump": ""} for each in others], "JSON does not say where a finding shows"
    assert (run["events"], run["title"], run["label"]) == (None, "summary.json", "amp")
    verdict = re.compile(r'<section id="verdict".*?</section>', re.DOTALL)
    assert verdict.findall(page) == verdict.findall(written(tmp_path, recording))


def test_several_recordings_are_compared(tmp_path: Path) -> None:
    run = small_run().recording()
    paths = [
        save(tmp_path / f"{precision.name}.ampmem", replace(run, precision=precision)) for precision in (FP32, AMP)
    ]
    page = written(tmp_path, *paths, paths[1])
    data = page_data(page)
    assert [run["label"] for run in data["runs"]] == data["comparison"]["labels"]
    assert data["comparison"]["labels"] == ["fp32", "amp amp.ampmem #2", "amp amp.ampmem #3"]
    assert data["comparison"]["baseline"] == 0
    # The three are the same run, so there is no way from one to another; the verdict says so.
    assert data["comparison"]["waterfalls"] == []
    assert re.findall(r'"quiet" colspan="3">(.*?)<', page) == ["the same as fp32", "the same as fp32"]
    assert [headline["label"] for headline in data["runs"][1]["said"]["headlines"]][2] == "Compared with fp32"
    assert "Compared with fp32" not in {headline["label"] for headline in data["runs"][0]["said"]["headlines"]}
    assert page.count("plotly-packed") == written(tmp_path, paths[0]).count("plotly-packed")
    assert len(page) < len(written(tmp_path, paths[0])) + 60_000


def test_hostile_texts_are_only_ever_texts(tmp_path: Path) -> None:
    run = small_run().recording(run=replace(RUN, script=HOSTILE, device_name=HOSTILE), notes=(HOSTILE,))
    hostile = replace(run, texts=tuple(text and f"{text} {HOSTILE} __proto__" for text in run.texts))
    path = save(tmp_path / "hostile.ampmem", hostile)
    harmless = written(tmp_path, save(tmp_path / "run.ampmem", small_run().recording()))
    page = written(tmp_path, path)
    assert page.count("</script>") == harmless.count("</script>")
    assert page.count("<img") == harmless.count("<img")
    assert not {"\u202e", "\u2028", "\x1b"} & set(page)
    (data,) = page_data(page)["runs"]
    assert data["title"].startswith(HOSTILE)
    assert any("__proto__" in text for text in exact(data["events"]["stream"]["packed"]).header["texts"])


def test_the_longest_names_do_not_make_the_page_large(tmp_path: Path, recording: Path) -> None:
    run = small_run().recording()
    texts = tuple(text and text + str(number) + "x" * (NAME - 100) for number, text in enumerate(run.texts))
    large = save(tmp_path / "large.ampmem", replace(run, texts=texts, notes=("n" * 1_000_000,)))
    assert len(written(tmp_path, large)) < len(written(tmp_path, recording)) + 40_000


def test_a_page_of_a_small_run_is_small(tmp_path: Path, recording: Path) -> None:
    assert len(written(tmp_path, recording).encode()) < 2_300_000


def test_what_does_not_fit_is_reduced_and_says_so(
    tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ampmem.reporters.html.write"], "STREAM_LIMIT", 100)
    (run,) = page_data(written(tmp_path, recording))["runs"]
    events = run["events"]
    assert events["stream"]["mode"] == "reduced"
    assert "too many for one page" in events["stream"]["note"]
    stream = reduced(events["stream"]["packed"])
    at = np.flatnonzero(stream.positions == events["peak"])
    assert stream.live[:, at].sum() == run["summary"]["peak"]["bytes"]


def test_a_page_is_not_replaced_without_force(tmp_path: Path, recording: Path) -> None:
    page = tmp_path / "out.html"
    page.write_text("mine")
    result = CliRunner().invoke(report, [str(recording), "-o", str(page)])
    assert isinstance(result.exception, UsageError)
    assert page.read_text() == "mine"
    result = CliRunner().invoke(report, [str(recording), "-o", str(page), "--force"])
    assert result.exit_code == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    # Nothing to show in it: it is not read.
    empty = save(tmp_path / "empty.ampmem", replace(small_run().recording(), steps=()))
    with pytest.raises(UsageError, match="directory"):
        write([empty], tmp_path)
    with pytest.raises(UsageError, match="at least one"):
        write([], tmp_path / "out.html")


def test_nothing_is_left_of_a_page_that_fails(tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = replace(small_run().recording(), steps=())
    empty = save(tmp_path / "empty.ampmem", damaged)
    with pytest.raises(NothingRecorded, match=r"empty\.ampmem: nothing to show"):
        write([recording, empty], tmp_path / "out.html")

    def fail(*_: object) -> None:
        raise OSError("no space")

    before = set(tmp_path.iterdir())
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UsageError, match="no space"):
        write([recording], tmp_path / "out.html")
    assert set(tmp_path.iterdir()) == before


def test_the_page_is_made_where_torch_cannot_be_imported(tmp_path: Path, recording: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from ampmem.cli.main import main; main()"
    command = [sys.executable, "-c", code, "report", str(recording), str(recording), "-o", "out.html"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    written = f"ampmem: wrote out.html, {format_bytes((tmp_path / 'out.html').stat().st_size)}\n"
    assert (result.returncode, result.stderr) == (0, written)
    assert len(page_data((tmp_path / "out.html").read_text(encoding="utf-8"))["runs"]) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.PageProgress() as shown:
        shown.say("reading a.ampmem")
        shown._begin()
        shown.say("writing \x1b[2J")
    assert terminal.getvalue().endswith("\r\x1b[Kampmem: reading a.ampmem\r\x1b[Kampmem: writing ?[2J\r\x1b[K")


def test_no_progress_of_quick_work_or_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, patience in ((Terminal(), 60.0), (io.StringIO(), 0.0)):
        monkeypatch.setattr(progress, "PATIENCE_S", patience)
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.PageProgress() as shown:
            shown.say("reading a.ampmem")
        assert stream.getvalue() == ""


def notebook(recording: Recording) -> str:
    return html_of(summary_card(summarize(recording)))


def test_a_notebook_shows_the_breakdown_and_the_findings() -> None:
    run = small_run().recording()
    shown, summary = notebook(run), summarize(run)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", shown)
    assert format_bytes(summary.steps[-1].peak.bytes) in cells
    assert len(cells) % 8 == 0
    assert "Cast copies" in shown
    for finding in summary.findings:
        assert finding.message in html.unescape(shown)
    assert not re.search(r"<script|<style|\son\w+=|src=|url\(", shown)


def test_a_notebook_shows_hostile_texts_as_texts() -> None:
    shown = notebook(small_run().recording(run=replace(RUN, device_name=HOSTILE)))
    assert "<img" not in shown
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;\\u202e\\u2028\\u001b" in shown


def test_the_public_summary_is_one_that_a_notebook_shows(recording: Path) -> None:
    summary = summarize(small_run().recording())
    public = ampmem.profile(output=recording).summary()
    assert public == summary
    assert public._repr_mimebundle_()["text/html"] == html_of(summary_card(summary))


def test_the_style_is_whole() -> None:
    """A block that is not closed swallows the rules after it, without a word from the browser."""
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    depth = 0
    for line in style.splitlines():
        # What is inside of a block is indented, and nothing else is.
        assert line in ("", "}") or line.startswith("  ") == (depth > 0), line
        depth += line.count("{") - line.count("}")
    assert depth == 0
