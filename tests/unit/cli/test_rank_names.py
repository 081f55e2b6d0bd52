"""The ranks of a job find one name without asking each other, and take no other's file."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from support.build import RUN, small_run, write

from ampmem.cli.processes.plan import beside, claim_rank, names_in, place_rank, ranks_left, tell_name
from ampmem.errors import UsageError
from ampmem.events import PlaceRecord
from ampmem.recorder.ranks.environment import Launched
from ampmem.recording import remove_claim


def rank(number: int, *, job: str = "a", here: range | None = None, world_size: int = 3) -> Launched:
    place = PlaceRecord(rank=number, world_size=world_size, job=job)
    return Launched(place=place, here=range(world_size) if here is None else here)


@pytest.fixture
def job(tmp_path: Path) -> Callable[[int], Path]:
    return lambda number: tmp_path / (f"train.{number}.ampmem" if number > 1 else "train.ampmem")


def record(path: Path, number: int, job: str) -> None:
    """What a rank does with its claim."""
    run = replace(RUN, rank=number, world_size=3, job=job)
    path.unlink(missing_ok=True)
    write(path, replace(small_run().recording(), run=run))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_take_one_number_in_any_order(order: tuple[int, ...], job: Callable[[int], Path], tmp_path: Path) -> None:
    (tmp_path / "train.rank1-of-3.ampmem").write_text("somebody's")
    found = {number: claim_rank(job, rank(number)) for number in order}
    assert found == {number: (tmp_path / f"train.2.rank{number}-of-3.ampmem", 2) for number in order}
    assert (tmp_path / "train.rank1-of-3.ampmem").read_text() == "somebody's"


def test_a_rank_knows_its_job_by_what_the_first_has_recorded(job: Callable[[int], Path], tmp_path: Path) -> None:
    first, _ = claim_rank(job, rank(0))
    record(first, 0, "a")
    assert claim_rank(job, rank(2)) == (tmp_path / "train.rank2-of-3.ampmem", 1)


def test_jobs_at_one_time_take_different_numbers(job: Callable[[int], Path]) -> None:
    numbers = [claim_rank(job, rank(number, job=name))[1] for number, name in ((1, "a"), (0, "b"), (0, "a"), (1, "b"))]
    assert numbers == [1, 2, 1, 2]


def test_a_second_recording_of_one_job_takes_the_next_number(job: Callable[[int], Path]) -> None:
    for number in range(2):
        record(claim_rank(job, rank(number))[0], number, "a")
    assert [claim_rank(job, rank(number))[1] for number in (1, 0)] == [2, 2]


def test_ranks_of_another_machine_are_not_looked_at(job: Callable[[int], Path]) -> None:
    claim_rank(job, rank(0, here=range(2)))
    assert claim_rank(job, rank(2, here=range(2, 3), job=""))[1] == 1
    assert claim_rank(job, rank(2, here=range(2, 3), job=""))[1] == 2


def test_a_name_that_was_given_is_not_replaced(job: Callable[[int], Path], tmp_path: Path) -> None:
    (tmp_path / "train.rank1-of-3.ampmem").touch()
    for number in range(3):
        with pytest.raises(
            UsageError, match=r"rank1-of-3\.ampmem exists already; give another name with -o, or --force"
        ):
            place_rank(job, rank(number), numbered=False, force=False)
    name, said = place_rank(job, rank(1), numbered=False, force=True)
    assert said == f"recording to {name}"


def test_what_was_taken_and_not_begun_is_removed_and_nothing_else(job: Callable[[int], Path], tmp_path: Path) -> None:
    taken, _ = claim_rank(job, rank(0))
    claim_rank(job, rank(1))
    record(tmp_path / "train.rank1-of-3.ampmem", 1, "a")
    other = tmp_path / "notes.txt"
    other.write_text("the recording")
    for path in (taken, tmp_path / "train.rank1-of-3.ampmem", other):
        remove_claim(path)
    assert [path.exists() for path in (taken, tmp_path / "train.rank1-of-3.ampmem", other)] == [False, True, True]


def test_only_ranks_that_have_recorded_are_said_to_be_there(job: Callable[[int], Path], tmp_path: Path) -> None:
    paths = [claim_rank(job, rank(number))[0] for number in range(3)]
    record(paths[0], 0, "a")
    record(paths[1], 1, "of an earlier run")
    assert beside(paths[0], rank(0)) == ""
    record(paths[1], 1, "a")
    assert beside(paths[0], rank(0)) == f"; the files of 2 of 3 ranks: ampmem show {tmp_path}/train.rank*-of-3.ampmem"
    record(paths[2], 2, "a")
    assert beside(paths[0], rank(0)) == f"; the files of all ranks: ampmem show {tmp_path}/train.rank*-of-3.ampmem"
    assert beside(paths[0], rank(0, job="", here=range(1))) == ""


def test_what_is_left_is_said_in_order(
    job: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "told"
    for number in (2, 0, 1):
        path, _ = claim_rank(job, rank(number))
        tell_name(told, path)
        if number != 1:
            record(path, number, "a")
    assert ranks_left(names_in(told)) == [
        "train.rank1-of-3.ampmem is missing: that rank left no recording",
        "2 of 3 ranks: ampmem show train.rank*-of-3.ampmem",
    ]
    assert names_in(tmp_path / "nothing") == []
