"""What a launcher tells a process."""

import os

import pytest

from ampmem.recorder.ranks.environment import launched

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/1/error.json",
}


def test_a_process_of_torchrun() -> None:
    found = launched(TORCHRUN)
    assert (found.place.rank, found.place.world_size, found.place.local_rank) == (5, 8, 1)
    assert found.here == range(4, 8)


def test_processes_of_one_start_have_one_job_and_those_of_another_have_not() -> None:
    other_rank = {"RANK": "4", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/0/e"}
    other_start = {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_1/1/error.json"}
    job, same, restarted, without = (
        found.place.job
        for environ in (
            TORCHRUN,
            TORCHRUN | other_rank,
            TORCHRUN | other_start,
            TORCHRUN | {"TORCHELASTIC_ERROR_FILE": ""},
        )
        if (found := launched(environ)) is not None
    )
    assert job == same != ""
    assert len({job, restarted, without}) == 3


@pytest.mark.parametrize(
    ("step", "other"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}),
        ({"PMIX_NAMESPACE": "prterun-a-1@1"}, {"PMIX_NAMESPACE": "prterun-a-2@1"}),
    ],
)
def test_a_scheduler_names_the_job_of_ranks_that_have_a_shell_each(
    monkeypatch: pytest.MonkeyPatch, step: dict[str, str], other: dict[str, str]
) -> None:
    jobs = []
    ranks = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_ERROR_FILE"}
    for parent, given in ((1, step), (os.getpid(), step), (1, other), (1, {}), (os.getpid(), {})):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        jobs.append(launched(ranks | given).place.job)
    assert jobs[0] == jobs[1]
    assert len(set(jobs)) == 4


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "first", "WORLD_SIZE": "2"},
    ],
)
def test_what_is_no_rank_of_several(environ: dict[str, str]) -> None:
    assert launched(environ) is None


@pytest.mark.parametrize("odd", [{"LOCAL_RANK": "4"}, {"LOCAL_RANK": ""}, {"RANK": "0"}, {"LOCAL_WORLD_SIZE": "16"}])
def test_where_its_neighbours_are_not_known_a_rank_is_for_itself(odd: dict[str, str]) -> None:
    environ = TORCHRUN | odd
    found = launched(environ)
    assert found.here == range(int(environ["RANK"]), int(environ["RANK"]) + 1)
    assert found.place.job == ""
