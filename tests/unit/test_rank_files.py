"""The names of the ranks' files."""

from pathlib import Path

import pytest

from ampmem.recording import RankFile, rank_file, rank_of, without_journals


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("train.ampmem", "train.rank3-of-8.ampmem"),
        ("runs/train.2.ampmem", "runs/train.2.rank3-of-8.ampmem"),
        ("/a b/run", "/a b/run.rank3-of-8.ampmem"),
        ("run.rank1-of-2.ampmem", "run.rank1-of-2.rank3-of-8.ampmem"),
    ],
)
def test_a_rank_has_a_file_of_its_own(job: str, name: str) -> None:
    assert rank_file(Path(job), 3, 8) == Path(name)
    assert rank_of(Path(name)) == RankFile(job=Path(job).with_suffix(".ampmem"), rank=3, world_size=8)


@pytest.mark.parametrize(
    "name",
    [
        "train.ampmem",
        "train.rank3-of-8",
        "train.rank8-of-8.ampmem",
        "train.rank0-of-0.ampmem",
        "train.rank-1-of-8.ampmem",
        "train.rank٣-of-8.ampmem",
        ".rank0-of-2.ampmem",
        "train.rank0-of-2.ampmem-journal",
    ],
)
def test_another_name_is_none_of_a_rank(name: str) -> None:
    assert rank_of(Path(name)) is None


def test_journals_of_files_that_are_given_are_left_out() -> None:
    files = [Path("a.ampmem"), Path("a.ampmem-journal"), Path("b/c.ampmem-journal"), Path("./b/d.ampmem")]
    assert without_journals(files) == [files[0], files[2], files[3]]
