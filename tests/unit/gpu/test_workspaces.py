"""What an op takes beside its results, from a trace; and the file that goes on where it ended."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import children
import pytest
import torch
import workspaces
from measured.grid import Job, jobs
from results import FAILED, NO_TIME, PASSED
from support.ready_python import ready_python
from workspaces import Memory, Table, memory_of

MACHINE: dict[str, workspaces.Fact] = {"gpu": "a GPU"}


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def test_what_comes_and_goes_during_an_op_is_temporary_and_what_stays_is_kept() -> None:
    trace = [
        entry("free_requested", 99, 1 << 20),  # of something that was there before
        entry("segment_alloc", 0, 1 << 30),
        entry("alloc", 1, 600),  # the result
        entry("alloc", 2, 50),  # cuBLAS's workspace
        entry("alloc", 3, 1000),
        entry("free_requested", 3, 1000),
        entry("free_completed", 3, 1000),
        entry("alloc", 3, 400),
        entry("free_requested", 3, 400),
    ]
    assert memory_of(trace, 600) == Memory(outputs=600, kept=50, temporary=1000, allocs=(600, 50, 1000, 400))


def test_a_result_that_comes_after_the_scratch_hides_it() -> None:
    trace = [entry("alloc", 1, 100), entry("free_requested", 1, 100), entry("alloc", 2, 600)]
    assert memory_of(trace, 600).temporary == 0
    assert memory_of(trace, 600).allocs == (100, 600)


def some(count: int = 2) -> list[Job]:
    return jobs()[:count]


def fake(job: Job, how: object) -> dict[str, Any]:
    return job.row() | {"temporary": 1, "kept": 0, "error": None}


def test_the_file_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "w.json", []
    monkeypatch.setattr(workspaces, "measure", fake)
    (row,) = workspaces.run(Table(path, MACHINE), some(1), workspaces.traced, sys.maxsize, said.append)
    assert (row.outcome, len(said)) == (PASSED, 1)
    again = Table(path, MACHINE)
    workspaces.run(again, some(2), workspaces.traced, sys.maxsize, said.append)
    assert len(said) == 2
    data = json.loads(path.read_text())
    assert (data["schema"], data["machine"], len(data["rows"])) == (workspaces.SCHEMA, MACHINE, 2)
    other = Table(tmp_path / "new.json", MACHINE, path)
    assert other.has(some(1)[0])
    with pytest.raises(ValueError, match="another machine"):
        Table(path, {"gpu": "another GPU"})


def test_what_there_is_no_time_for_and_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(job: Job) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    table = Table(tmp_path / "w.json", MACHINE)
    assert [row.outcome for row in workspaces.run(table, some(1), workspaces.traced, 0, print)] == [NO_TIME]
    monkeypatch.setattr(workspaces, "prepared", refused)
    (row,) = workspaces.run(table, some(1), workspaces.traced, sys.maxsize, print)
    assert row.outcome == FAILED
    assert table.rows[0]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate"


def test_the_grid_has_every_pass_type_and_layout_once() -> None:
    every = jobs()
    assert len({json.dumps(job.row()) for job in every}) == len(every)
    convolutions = [job for job in every if job.kind == "convolution"]
    assert {(job.call, job.dtype, job.benchmark, job["channels_last"]) for job in convolutions} == {
        (call, dtype, benchmark, layout)
        for call in ("forward", "backward-data", "backward-weight")
        for dtype in ("fp32", "tf32", "fp16", "bf16")
        for benchmark in (False, True)
        for layout in (0, 1)
    }
    assert all(job["channels"] % job["groups"] == 0 and job["out"] % job["groups"] == 0 for job in convolutions)
    first = [job.benchmark for job in every]
    assert first == sorted(first)  # what takes long comes last


@pytest.mark.slow
def test_it_runs_on_a_simulated_device(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    command = [ready_python(), workspaces.__file__, "--device", "sim", "--most", "1", "--quiet", "--out", str(path)]
    done = subprocess.run(command, env=children.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["error"] for row in rows} == {None}
    first = next(row for row in rows if row["kind"] == "product")
    assert first["outputs"] == first["shape"]["m"] * first["shape"]["n"] * 4
    assert first["kept"] == 32 << 20  # the workspace of cuBLAS on an H200
    stem = next(row for row in rows if row["kind"] == "convolution" and row["pass"] == "backward-weight")
    assert stem["outputs"] == 64 * 3 * 7 * 7 * 4
