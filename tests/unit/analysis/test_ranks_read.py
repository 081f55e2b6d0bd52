"""Recordings of many ranks are read in several processes, to the same end."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.build import FP32, precision_run, write
from support.jobs import rank_recording

from ampmem.analysis.ranks import jobs
from ampmem.analysis.ranks.jobs import ranks_beside, read_runs
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.recording import rank_file


def written(folder: Path, count: int) -> list[Path]:
    """A file for each of so many ranks, under a name that no shell would like."""
    job = folder / "a job\n\u00e4.ampmem"
    return [write(rank_file(job, rank, count), rank_recording(rank, count)) for rank in range(count)]


def test_it_is_the_same_in_one_process_and_in_three(tmp_path: Path) -> None:
    paths = written(tmp_path, 5)
    alone, together = read_runs(paths, processes=1), read_runs(paths, processes=3)
    assert [run.rank for run in together] == [0, 1, 2, 3, 4]
    assert [run.summary for run in together] == [run.summary for run in alone]
    assert [run.path for run in together] == paths


def test_there_may_be_more_processes_than_files_and_no_file(tmp_path: Path) -> None:
    assert [run.rank for run in read_runs(written(tmp_path, 2), processes=8)] == [0, 1]
    assert read_runs([]) == []


def test_what_cannot_be_summed_up_says_so_from_another_process_too(tmp_path: Path) -> None:
    paths = written(tmp_path, 3)
    paths[1].write_bytes(b"no database")
    write_empty = rank_recording(2, 3)
    paths[2].unlink()
    write(paths[2], replace(write_empty, steps=()))
    whole, damaged, empty = read_runs(paths, processes=3)
    assert whole.problem is None
    assert isinstance(damaged.problem, RecordingError) and damaged.rank == 1 and damaged.summary is None
    assert isinstance(empty.problem, NothingRecorded) and empty.rank == 2


@pytest.mark.parametrize("processes", [1, 3])
def test_a_file_that_is_not_there_is_an_error_whoever_reads_it(tmp_path: Path, processes: int) -> None:
    paths = written(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(UsageError, match="does not exist"):
        read_runs(paths, processes=processes)


def test_what_cannot_be_read_and_does_not_say_whose_it_is_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "other.ampmem"
    path.write_bytes(b"no database")
    with pytest.raises(RecordingError):
        read_runs([path])


def test_what_a_process_leaves_unread_is_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_START", "raise SystemExit(3)")
    assert [run.rank for run in read_runs(written(tmp_path, 4), processes=2)] == [0, 1, 2, 3]


def test_the_other_ranks_are_found_by_their_names(tmp_path: Path) -> None:
    paths = written(tmp_path, 4)
    write(tmp_path / "else.rank1-of-4.ampmem", rank_recording(1, 4))
    paths[2].unlink()
    assert ranks_beside(read_runs(paths[:1])) == {1: paths[1], 3: paths[3]}
    assert ranks_beside(read_runs([write(tmp_path / "alone.ampmem", precision_run(FP32))])) == {}
