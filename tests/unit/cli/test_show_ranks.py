"""``ampmem show`` of the files of several ranks."""

import json
import os
from pathlib import Path

import jsonschema
import pytest
from support.build import AMP, FP32, precision_run, write
from support.command_line import ampmem_here, transcript
from support.golden_sections import Golden
from support.jobs import rank_recording

import ampmem
from ampmem.analysis.ranks.ranks import ranks_schema
from ampmem.errors import UsageError
from ampmem.events import PrecisionRecord
from ampmem.recording import make_claim, rank_file
from ampmem.recording.rank_files import lock_of_claim


def written(folder: Path, *, precision: PrecisionRecord = FP32, job: str = "train", count: int = 3) -> list[str]:
    """A file for each rank, of which the last needs most."""
    return [
        write(
            rank_file(folder / job, rank, count),
            rank_recording(rank, count, precision=precision, activations=800 + 100 * (rank == count - 1)),
        ).name
        for rank in range(count)
    ]


def test_what_is_printed_of_the_ranks_of_a_job(tmp_path: Path, golden: Golden) -> None:
    files = written(tmp_path)
    golden(transcript(tmp_path, ["show", *files], ["show", "--check", *files]))
    golden(
        transcript(tmp_path, ["show", *files, *written(tmp_path, precision=AMP, job="train.amp")]), "in two precisions"
    )
    (tmp_path / files[1]).write_bytes(b"torn")
    golden(transcript(tmp_path, ["show", *files]), "with a damaged one")
    (tmp_path / files[2]).unlink()
    golden(transcript(tmp_path, ["show", files[0]], ["show", "--ranks", files[0]]), "one alone")


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
    files = [*written(tmp_path), *written(tmp_path, precision=AMP, job="train.amp")]
    _, said, _ = ampmem_here(tmp_path, "show", "--ranks", "--json", *files)
    assert [job["job"]["arm"]["name"] for job in json.loads(said)] == ["fp32", "amp"]


def test_what_is_no_job_is_refused(tmp_path: Path, golden: Golden) -> None:
    files, again = written(tmp_path), written(tmp_path, job="again")
    write(tmp_path / "alone.ampmem", precision_run(FP32))
    wrong = [*files, "alone.ampmem"], ["--ranks", "alone.ampmem"], [*files, again[1]]
    golden(transcript(tmp_path, *(["show", *arguments] for arguments in wrong)))


def test_in_python(tmp_path: Path) -> None:
    fp32 = [tmp_path / name for name in written(tmp_path)]
    amp = [tmp_path / name for name in written(tmp_path, precision=AMP, job="train.amp")]
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


def test_the_claim_of_a_killed_rank_is_named_and_not_called_damaged(tmp_path: Path, golden: Golden) -> None:
    files = written(tmp_path)
    claim = tmp_path / files[0]
    claim.unlink()
    assert make_claim(claim, "a job")
    golden(transcript(tmp_path, ["show", files[0]]), "while it is held")
    lock = lock_of_claim(claim)
    assert lock is not None
    os.close(lock)
    golden(transcript(tmp_path, ["show", files[0]], ["show", *files], ["show", "--check", *files]))
    code, _, _ = ampmem_here(tmp_path, "report", *files, "-o", "page.html")
    assert code == 0 and "only the placeholder of a rank" in (tmp_path / "page.html").read_text()
    (missing,) = ampmem.ranks(*(tmp_path / name for name in files)).missing
    assert missing.rank == 0 and missing.detail is not None and "placeholder" in missing.detail


def test_the_claim_of_a_killed_rank_is_no_file_beside_the_others(tmp_path: Path) -> None:
    files = written(tmp_path)
    (tmp_path / files[0]).unlink()
    make_claim(tmp_path / files[0], "a job")
    _, said, _ = ampmem_here(tmp_path, "show", *files[1:])
    assert "rank 0 has no file" in said
