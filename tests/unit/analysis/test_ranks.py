"""The ranks of a job merged: which is the worst, in what it differs, and which are missing."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from support.build import AMP
from support.jobs import KIB, jobs, pipeline, rank_recording, run_of, runs_of, with_missing

from ampmem.analysis.ranks.jobs import RankRun, are_ranks, jobs_of, script_of
from ampmem.analysis.ranks.merge import merge, merge_all
from ampmem.analysis.ranks.ranks import MOST_NAMED, Absence, Circumstance, Contrast, GroupKind, Part, ranks_schema
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.errors import RecordingError, UsageError
from ampmem.events import MeshAxis


def test_the_worst_rank_is_the_one_with_the_largest_peak_and_its_parts_add_up() -> None:
    merged = merge(runs_of(4, each={1: {"activations": 900}, 2: {"activations": 1000, "weights": 200}}))
    worst = merged.worst
    sizes = {rank.rank: rank.peak.bytes for rank in merged.ranks if rank.peak is not None}
    assert worst.rank == max(sizes, key=lambda rank: sizes[rank])
    for excess in (worst.over_median, worst.over_least):
        assert excess.bytes == sizes[worst.rank] - sizes[excess.rank]
        assert sum(part.bytes for part in excess.parts) == excess.bytes
        assert [part.bytes for part in excess.parts] == sorted((part.bytes for part in excess.parts), reverse=True)
    assert merged.imbalance == max(sizes.values()) / sorted(sizes.values())[1] - 1


def test_a_difference_lies_in_the_categories_that_differ_alone() -> None:
    worst = merge(runs_of(3, each={2: {"activations": 900, "weights": 250}})).worst
    assert worst is not None and worst.rank == 2
    assert worst.over_median.parts == (
        Part(category=Category.ACTIVATIONS, bytes=100 * KIB),
        Part(category=Category.PARAMETERS, bytes=-6 * KIB),
        Part(category=Category.GRADIENTS, bytes=-6 * KIB),
        Part(category=Category.OPTIMIZER_STATE, bytes=-6 * KIB),
    )
    assert worst.over_median.contrasts == (Contrast(what=Circumstance.PARAMETERS, worst="64000", other="65536"),)


def test_every_category_has_its_own_spread() -> None:
    merged = merge(runs_of(4, each={0: {"weights": 300}, 3: {"activations": 900}}))
    spreads = {each.category: each for each in merged.categories}
    assert [*spreads] == [category for category in CATEGORIES if category in spreads]
    activations, gradients = spreads[Category.ACTIVATIONS], spreads[Category.GRADIENTS]
    assert (activations.min, activations.median, activations.max) == (800 * KIB, 800 * KIB, 900 * KIB)
    assert (activations.spread, activations.worst) == (100 * KIB, 3)
    assert (gradients.spread, gradients.worst) == (44 * KIB, 0)


def test_equal_ranks_are_one_class_and_no_two_in_it_differ_by_more_than_it_says() -> None:
    each = {rank: {"activations": 800 + rank % 3} for rank in range(6)}
    merged = merge(runs_of(6, each=each))
    assert [alike.ranks for alike in merged.alike] == [(0, 1, 3, 4), (2, 5)]
    assert [alike.within for alike in merged.alike] == [KIB, 0]


def test_the_median_of_an_even_number_is_a_ranks_own() -> None:
    merged = merge(runs_of(4, each={rank: {"activations": 800 + 100 * rank} for rank in range(4)}))
    assert merged.worst is not None and merged.worst.over_median.rank == 1
    assert merged.peak is not None and merged.ranks[1].peak is not None
    assert merged.peak.median == merged.ranks[1].peak.bytes


def test_the_step_is_that_of_the_jobs_peak_as_the_worst_rank_alone_has_it() -> None:
    merged = merge([run_of(rank_recording(rank, 4, steps=1 if rank == 2 else 3)) for rank in range(4)])
    assert merged.step == 2
    assert merged.worst is not None and merged.worst.bytes == max(rank.largest.bytes for rank in merged.ranks)
    assert {rank.largest.step for rank in merged.compared} == {2}
    assert [rank.rank for rank in merged.compared] == [0, 1, 3]
    (missing,) = merged.missing
    assert (missing.rank, missing.why, missing.step, missing.detail) == (2, Absence.ENDED_EARLY, 0, None)


def test_of_two_ranks_both_must_have_ended_the_step() -> None:
    merged = merge([run_of(rank_recording(rank, 2, steps=3 - rank)) for rank in range(2)])
    assert (merged.step, merged.later_steps, merged.missing) == (1, True, ())


def test_who_is_missing_and_why(tmp_path: Path) -> None:
    merged = merge(with_missing(), beside={1: tmp_path / "train.rank1-of-5.ampmem"})
    found = {each.rank: each.why for each in merged.missing}
    assert found == {1: Absence.LIES_BESIDE, 2: Absence.ENDED_EARLY, 3: Absence.NOTHING_RECORDED}
    assert "it is empty" in (merged.missing[2].detail or "")
    assert {each.rank: each.why for each in merge(with_missing()).missing}[1] is Absence.NO_FILE


def test_a_job_of_a_billion_ranks_is_not_counted_out() -> None:
    merged = merge([run_of(rank_recording(0, 1 << 30))])
    assert len(merged.missing) == MOST_NAMED - 1


@pytest.mark.parametrize(("stages", "stage"), [((3,), 3), ((), 1), ((1, 3), 1)])
def test_the_stage_is_the_one_that_was_recorded_or_the_place_on_an_axis(stages: tuple[int, ...], stage: int) -> None:
    mesh = (MeshAxis(name="dp", size=4, coordinate=2), MeshAxis(name="pp", size=2, coordinate=1))
    (found,) = merge([run_of(replace(rank_recording(0, 1, mesh=mesh), stages=stages, stage_count=4))]).ranks
    assert found.stage == stage


def test_stages_and_axes_are_groups_with_their_own_worst_rank() -> None:
    merged = merge(pipeline())
    stages = [group for group in merged.groups if group.kind is GroupKind.STAGE]
    assert [group.ranks for group in stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    replicas = [group for group in merged.groups if group.kind is GroupKind.MESH]
    assert [(group.axis, group.coordinate, group.ranks) for group in replicas] == [
        ("dp", 0, (0, 2, 4, 6)),
        ("dp", 1, (1, 3, 5, 7)),
    ]
    assert [group.peak.worst for group in replicas] == [0, 1]
    assert all(sum(group.worst_categories.values()) == group.peak.max for group in merged.groups)


def test_the_json_is_what_its_schema_says() -> None:
    validator = jsonschema.Draft202012Validator(ranks_schema())
    for runs in jobs().values():
        for merged in merge_all(runs).jobs:
            validator.validate(json.loads(merged.to_json()))


def test_several_precisions_are_compared_by_the_worst_rank_of_each() -> None:
    found = merge_all(jobs()["ranks-precisions"])
    assert [job.job.precision.name for job in found.jobs] == ["fp32", "amp"]
    assert [entry.label for entry in found.comparison.entries] == ["fp32 rank 1", "amp rank 1"]
    assert (
        [job.step for job in found.jobs]
        == [1, 1]
        == [column.step and column.step.index for column in found.comparison.columns]
    )


def test_fp32_comes_first_however_the_files_are_ordered() -> None:
    found = merge_all(jobs()["ranks-precisions"][::-1])
    assert [(job.job.precision.name, [rank.rank for rank in job.ranks]) for job in found.jobs] == [
        ("fp32", [0, 1]),
        ("amp", [0, 1]),
    ]


def test_all_precisions_compare_the_same_step() -> None:
    long = [run_of(rank_recording(rank, 3, steps=3)) for rank in range(3)]
    short = [run_of(rank_recording(rank, 3, precision=AMP, steps=2), "amp") for rank in range(3)]
    found = merge_all([*long, *short])
    assert (
        [job.step for job in found.jobs]
        == [1, 1]
        == [column.step and column.step.index for column in found.comparison.columns]
    )


def test_recordings_of_one_rank_are_not_merged() -> None:
    one = run_of(rank_recording(0, 4))
    assert not are_ranks([one, run_of(rank_recording(0, 8))])
    assert not are_ranks([run_of(rank_recording(0, 1)), run_of(rank_recording(0, 1, precision=AMP))])
    assert are_ranks([one, run_of(rank_recording(3, 4))])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"script": "other.py"}, "the scripts differ: train.py in train.rank0-of-4.ampmem, other.py in"),
        ({"torch": "2.12.0"}, "the versions of torch differ"),
        ({"of": 8}, "the numbers of ranks differ: 4 in"),
    ],
)
def test_what_is_not_one_job_is_refused_in_one_line(other: dict[str, str | int], said: str) -> None:
    options: dict[str, object] = {"of": 4, **other}
    with pytest.raises(UsageError, match=said) as caught:
        jobs_of([run_of(rank_recording(0, 4)), run_of(rank_recording(1, **options))])  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script", ["train.py", "./train.py", "../jobs/train.py", "jobs/train.py"])
def test_a_rank_that_is_started_by_the_scripts_whole_path_is_of_the_job(script: str) -> None:
    whole = {"script": "/home/me/jobs/train.py", "arguments": ("--lr", "0.1")}
    first, second = (
        run_of(rank_recording(rank, 2, **given))  # type: ignore[arg-type]
        for rank, given in enumerate(({"script": script, "arguments": ("--lr", "0.1")}, whole))
    )
    assert [len(job) for job in jobs_of([first, second])] == [2]
    other = run_of(rank_recording(1, 2, script="/home/me/jobs/pretrain.py", arguments=("--lr", "0.1")))
    with pytest.raises(UsageError, match="the scripts differ"):
        jobs_of([first, other])


def test_a_rank_that_is_there_twice_is_refused_with_both_files() -> None:
    with pytest.raises(UsageError, match=r"rank 1 is given twice, in train.rank1-of-4.ampmem and in other.rank1-of-4"):
        jobs_of([run_of(rank_recording(rank, 4), job) for rank, job in ((0, "train"), (1, "train"), (1, "other"))])


def test_a_file_that_cannot_be_read_belongs_to_the_job_that_its_name_says() -> None:
    damaged = RankRun(path=Path("amp.rank1-of-2.ampmem"), rank=1, world_size=2, problem=RecordingError("damaged"))
    fp32 = [run_of(rank_recording(rank, 2), "fp32") for rank in range(2)]
    amp = run_of(rank_recording(0, 2, precision=AMP), "amp")
    assert [[run.path.name for run in job] for job in jobs_of([*fp32, amp, damaged])][1] == [
        "amp.rank0-of-2.ampmem",
        "amp.rank1-of-2.ampmem",
    ]
    with pytest.raises(RecordingError, match="damaged"):
        jobs_of([*fp32, amp, replace(damaged, path=Path("else.rank1-of-2.ampmem"))])


def test_what_tells_a_process_its_rank_is_no_part_of_the_script() -> None:
    arguments = ("--local-rank=3", "--lr", "0.1", "--node_rank", "1", "--rank-loss", "x")
    run = rank_recording(3, 4, arguments=arguments).run
    assert script_of(run) == "train.py --lr 0.1 --rank-loss x"
    assert script_of(replace(run, rank=0, world_size=1)) == f"train.py {' '.join(arguments)}"
