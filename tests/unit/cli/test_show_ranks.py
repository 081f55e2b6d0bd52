"""``ampmem show`` of the files of several ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
from build import ARM, FP32, arm_run, write
from command_line import ampmem_here, refused
from jobs import rank_recording

import ampmem
from ampmem.analysis.ranks.ranks import ranks_schema
from ampmem.errors import UsageError
from ampmem.events import ArmRecord
from ampmem.recording import make_claim, rank_file
from ampmem.recording.rank_files import lock_of_claim


def written(folder: Path, *, arm: ArmRecord = FP32, job: str = "train", count: int = 3) -> list[str]:
    """A file for each rank, of which the last needs most."""
    return [
        write(
            rank_file(folder / job, rank, count),
            rank_recording(rank, count, arm=arm, activations=800 + 100 * (rank == count - 1)),
        ).name
        for rank in range(count)
    ]


def test_ranks_are_merged(tmp_path: Path) -> None:
    code, said, _ = ampmem_here(tmp_path, "show", *written(tmp_path))
    assert code == 0
    assert said.startswith("Rank 2 of 3 is the worst, with 1.6 MiB at the peak, in backward of step 1, 6 % above")
    assert "ampmem report train.rank*-of-3.ampmem" in said
    assert "=====" not in said


def test_each_has_its_own_tables_after_that(tmp_path: Path) -> None:
    _, said, _ = ampmem_here(tmp_path, "show", "--each", *written(tmp_path))
    assert said.count("=" * 100) == 3
    assert "rank        0 of 3" in said and "rank        2 of 3" in said


@pytest.mark.parametrize("detail", ["--modules", "--marks", "--all"])
def test_details_are_those_of_the_worst_rank(tmp_path: Path, detail: str) -> None:
    _, said, _ = ampmem_here(tmp_path, "show", detail, *written(tmp_path))
    assert said.count("=" * 100) == 1
    assert "rank        2 of 3" in said and "rank        0 of 3" not in said


def test_json_stays_an_array_of_summaries(tmp_path: Path) -> None:
    _, said, _ = ampmem_here(tmp_path, "show", "--json", *written(tmp_path))
    found = json.loads(said)
    assert [(each["schema"], each["rank"]) for each in found] == [("ampmem.summary/1", n) for n in range(3)]
    _, said, _ = ampmem_here(tmp_path, "show", "--schema")
    jsonschema.Draft202012Validator.check_schema(json.loads(said))
    published = jsonschema.Draft202012Validator(json.loads(said))
    assert published.is_valid(found) and published.is_valid(found[0])
    assert not any(map(published.is_valid, ([], [found[0]], [found[0], {}], {})))


def test_the_merged_view_as_json(tmp_path: Path) -> None:
    files = written(tmp_path)
    _, said, _ = ampmem_here(tmp_path, "show", "--ranks", "--json", *files)
    found = json.loads(said)
    jsonschema.Draft202012Validator(ranks_schema()).validate(found)
    assert (found["schema"], found["worst"]["rank"], found["ranks"][2]["file"]) == ("ampmem.ranks/1", 2, files[2])
    _, said, _ = ampmem_here(tmp_path, "show", "--ranks-schema")
    published = jsonschema.Draft202012Validator(json.loads(said))
    assert published.is_valid(found) and published.is_valid([found, found]) and not published.is_valid([found, {}])


def test_several_precisions_are_compared_by_their_worst_ranks(tmp_path: Path) -> None:
    files = [*written(tmp_path), *written(tmp_path, arm=ARM, job="train.amp")]
    _, said, _ = ampmem_here(tmp_path, "show", *files)
    assert said.startswith("On the worst rank of each precision, mixed precision")
    assert "the peak of each rank" in said
    _, said, _ = ampmem_here(tmp_path, "show", "--ranks", "--json", *files)
    assert [job["job"]["arm"]["name"] for job in json.loads(said)] == ["fp32", "amp"]


def test_one_rank_alone_names_the_others(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / files[2]).unlink()
    _, said, _ = ampmem_here(tmp_path, "show", files[0])
    assert said.startswith("The peak is 1.5 MiB")
    assert "note: this is rank 0 of 3, and the file of 1 of the 2 others is next to it: train.rank*-of-3.ampmem" in said
    _, said, _ = ampmem_here(tmp_path, "show", "--ranks", files[0])
    assert said.startswith("Only rank 0 of 3 can be shown")
    assert "rank 1 was not given, although its file is there: train.rank1-of-3.ampmem" in said
    assert "rank 2 has no file" in said


def test_a_damaged_rank_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / files[1]).write_bytes(b"torn")
    code, said, _ = ampmem_here(tmp_path, "show", *files)
    assert code == 0
    assert "rank 1 is left out: train.rank1-of-3.ampmem is not an ampmem recording" in said


def test_check_has_a_line_for_each(tmp_path: Path) -> None:
    _, said, _ = ampmem_here(tmp_path, "show", "--check", *written(tmp_path))
    assert [line.partition(":")[0] for line in said.splitlines()] == [f"train.rank{n}-of-3.ampmem" for n in range(3)]


def test_what_is_no_job_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path)
    write(tmp_path / "alone.ampmem", arm_run(FP32))
    assert "alone.ampmem is a recording of a single process" in refused(tmp_path, "show", *files, "alone.ampmem")
    assert "a single process" in refused(tmp_path, "show", "--ranks", "alone.ampmem")
    again = written(tmp_path, job="again")
    assert "is given twice" in refused(tmp_path, "show", *files, again[1])


def test_in_python(tmp_path: Path) -> None:
    fp32 = [tmp_path / name for name in written(tmp_path)]
    amp = [tmp_path / name for name in written(tmp_path, arm=ARM, job="train.amp")]
    assert ampmem.ranks(*fp32).worst.rank == 2  # type: ignore[union-attr]
    assert ampmem.ranks(*map(ampmem.load, fp32)).job.world_size == 3
    assert [entry.label for entry in ampmem.compare(*fp32, *amp).entries] == ["fp32 rank 2", "amp rank 2"]
    with pytest.raises(UsageError, match="several precisions"):
        ampmem.ranks(*fp32, *amp)
    with pytest.raises(UsageError, match="nothing to merge"):
        ampmem.ranks()


def test_the_journal_that_a_killed_rank_left_is_none_of_the_files(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / f"{files[1]}-journal").write_bytes(b"")
    given = [*files, f"{files[1]}-journal"]
    for options in ([], ["--check"], ["--ranks"], ["--json"]):
        code, said, _ = ampmem_here(tmp_path, "show", *options, *given)
        assert code == 0 and "journal" not in said
    assert len(ampmem.ranks(*(tmp_path / name for name in given)).ranks) == 3
    ampmem.compare(*(tmp_path / name for name in given))


CLAIM_LEFT = (
    "train.rank0-of-3.ampmem is only the placeholder of a rank that was killed before it recorded anything; remove "
    "the file, or let the next run replace it"
)


def test_the_claim_of_a_killed_rank_is_named_and_not_called_damaged(tmp_path: Path) -> None:
    files = written(tmp_path)
    claim = tmp_path / files[0]
    claim.unlink()
    assert make_claim(claim, "a job")
    _, _, said = ampmem_here(tmp_path, "show", files[0])
    assert said == f"ampmem: {files[0]} is being written, and nothing is recorded in it yet; try again\n"
    lock = lock_of_claim(claim)
    assert lock is not None
    os.close(lock)
    _, _, said = ampmem_here(tmp_path, "show", files[0])
    assert said == f"ampmem: {CLAIM_LEFT}\n"
    code, said, _ = ampmem_here(tmp_path, "show", *files)
    assert code == 0 and f"rank 0 is left out: {CLAIM_LEFT}" in " ".join(said.split())
    code, said, _ = ampmem_here(tmp_path, "show", "--check", *files)
    assert code == 1 and said.splitlines()[0] == CLAIM_LEFT
    code, _, _ = ampmem_here(tmp_path, "report", *files, "-o", "page.html")
    assert code == 0 and "only the placeholder of a rank" in (tmp_path / "page.html").read_text()
    (missing,) = ampmem.ranks(*(tmp_path / name for name in files)).missing
    assert missing.rank == 0 and missing.detail is not None and missing.detail.endswith(CLAIM_LEFT)


def test_the_claim_of_a_killed_rank_is_no_file_beside_the_others(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / files[0]).unlink()
    make_claim(tmp_path / files[0], "a job")
    _, said, _ = ampmem_here(tmp_path, "show", *files[1:])
    assert "rank 0 has no file" in said
