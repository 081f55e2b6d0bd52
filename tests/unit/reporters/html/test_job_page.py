"""The page of a job's ranks as a file: whose pages are in it, and what becomes of ranks that are not there."""

import html
import re
from pathlib import Path

import pytest
from support.build import small_run
from support.build import write as save
from support.jobs import rank_recording, runs_of
from support.page_reader import page_data

from ampmem.analysis.ranks.merge import merge
from ampmem.errors import UsageError
from ampmem.recording import rank_file
from ampmem.reporters.html import write
from ampmem.reporters.html.ranks import MAX_ROWS, rank_table
from ampmem.reporters.html.write import MOST_PAGES, ranks_shown


def saved(folder: Path, count: int) -> list[Path]:
    """The files of so many ranks, which differ in their activations."""
    return [
        save(rank_file(folder / "train.ampmem", rank, count), rank_recording(rank, count, activations=800 + 40 * rank))
        for rank in range(count)
    ]


def text_of(page: str) -> str:
    """What is on the page without scripts."""
    markup = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def test_of_few_ranks_each_has_its_page(tmp_path: Path) -> None:
    write(saved(tmp_path, 3), tmp_path / "page.html")
    data = page_data((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [run["label"] for run in data["runs"]] == ["rank 0", "rank 1", "rank 2"]
    assert data["opens"] == 2, "the worst"
    assert data["comparison"] is None


def test_of_many_ranks_the_worst_the_middle_and_the_least_have_theirs_then_the_largest() -> None:
    differing = merge(runs_of(20, each={rank: {"activations": 800 + 40 * rank} for rank in range(20)}))
    assert ranks_shown(differing, MOST_PAGES) == (19, 9, 0, 18, 17, 16, 15, 14)
    equal = merge(runs_of(20, each={7: {"activations": 900}}))
    assert ranks_shown(equal, MOST_PAGES) == (7, 10), "of those that are alike one is enough"


def test_very_many_ranks_that_differ_are_not_all_rows() -> None:
    count = MAX_ROWS + 10
    ranks = merge(runs_of(count, each={rank: {"activations": 800 + 40 * rank} for rank in range(count)}))
    rows = next(group.rows for group in rank_table(ranks, {}, whole=1 << 30).groups if group.title == "Ranks")
    assert [row.label for row in rows] == [*map(str, range(10, count)), "10 more"]
    assert rows[-1].note == "their peaks are between 1.5 MiB and 1.9 MiB"


def test_a_rank_that_cannot_be_read_is_missing(tmp_path: Path) -> None:
    files = saved(tmp_path, 3)
    files[0].write_bytes(files[0].read_bytes()[:5000])
    write(files[:2], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [run["label"] for run in page_data(page)["runs"]] == ["rank 1"]
    assert "Warning: Rank 0 is left out" in text_of(page)
    assert "Warning: Rank 2 was not given, although its file is there" in text_of(page)
    with pytest.raises(UsageError, match="scripts differ"):
        other = save(rank_file(tmp_path / "other.ampmem", 0, 3), rank_recording(0, 3, script="other.py"))
        write([files[1], other], tmp_path / "page.html", force=True)


def test_one_rank_alone_and_processes_alone_have_the_pages_that_they_had(tmp_path: Path) -> None:
    (file, *_) = saved(tmp_path, 2)
    write([file], tmp_path / "one.html")
    assert 'id="ranks"' not in (tmp_path / "one.html").read_text(encoding="utf-8")
    alone = [save(tmp_path / f"{name}.ampmem", small_run().recording()) for name in "ab"]
    write(alone, tmp_path / "two.html")
    page = (tmp_path / "two.html").read_text(encoding="utf-8")
    assert 'id="ranks"' not in page
    assert page_data(page)["comparison"] is not None
