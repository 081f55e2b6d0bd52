"""What is said first of the ranks of a job, and of which nothing is proven."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from build import ARM, Story
from failures import ended
from jobs import pipeline, rank_recording, run_of, runs_of, with_missing

from ampmem.analysis.ranks.jobs import RankRun
from ampmem.analysis.ranks.merge import merge, merge_all
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.events import Fact, MeshAxis, Phase
from ampmem.failure import FailureKind, FailureRecord
from ampmem.names import NOT_ENDED
from ampmem.reporters.text.answer import made_of
from ampmem.reporters.text.layout import Layout, columns_of
from ampmem.reporters.text.ranks import absences, doubts, numbers, ranks_named, ranks_wording, render_jobs, render_ranks
from ampmem.vocabulary import SourceKind


def said(merged: Ranks) -> str:
    return ranks_wording(merged).text


def out_of_memory(rank: int, of: int) -> RankRun:
    """A rank whose second step asks in vain."""
    story = Story()
    story.parameter(0x1000, "layers.0.weight", 100)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.alloc(0x2000, 200 + 4000 * step)
        story.fact(Fact.OUTPUT, 0x2000, "aten::mm", "layers.0")
        if step == 0:
            story.enter(Phase.BACKWARD)
            story.free(0x2000)
            story.end(Phase.OPTIMIZER)
            story.enter(Phase.BETWEEN)
    story.now += 10
    recording = ended(story, story.now, (400, 4200), step=1)
    return run_of(replace(recording, run=replace(recording.run, rank=rank, world_size=of)))


def test_ranks_are_counted_in_runs() -> None:
    assert [numbers(ranks) for ranks in ((3,), (0, 1), (2, 0, 1), (0, 1, 2, 5, 7, 8))] == [
        "3",
        "0, 1",
        "0-2",
        "0-2, 5, 7, 8",
    ]
    assert (ranks_named((3,)), ranks_named((1, 2))) == ("rank 3", "ranks 1, 2")


def test_equal_ranks_need_the_same() -> None:
    assert said(merge(runs_of(8))).startswith("All 8 ranks need the same, 1.5 MiB at the peak, in backward of step 1: ")


def test_the_worst_is_held_against_the_median_rank() -> None:
    text = said(merge(runs_of(8, each={3: {"activations": 1000}})))
    assert text == (
        "Rank 3 of 8 is the worst, with 1.7 MiB at the peak, in backward of step 1, 13 % above the median rank (4): it "
        "has 200.0 KiB more in activations."
    )


def test_where_the_median_is_as_bad_the_least_is_what_differs() -> None:
    text = said(merge(runs_of(8, each={3: {"activations": 600}})))
    assert text.startswith("Ranks 0-2, 4-7 of 8 are the worst, with 1.5 MiB each at the peak")
    assert "15 % above rank 3, which needs the least: they have 200.0 KiB more in activations." in text


def test_the_peak_of_a_rank_is_what_its_allocator_has_handed_out() -> None:
    """As its own file has it; what of that is the rounding of blocks has a column, so that the row adds up."""
    runs = []
    for run, rounding in zip(runs_of(2), (0, 1 << 20), strict=True):
        assert run.entry is not None and run.entry.summary is not None
        summary = run.entry.summary
        steps = tuple(
            replace(step, peak=replace(step.peak, allocated=step.peak.bytes + rounding)) for step in summary.steps
        )
        top = replace(summary.peak, allocated=summary.peak.bytes + rounding)
        whole = replace(summary.whole, bytes=top.said, at_most=top.said)
        runs.append(
            replace(run, entry=replace(run.entry, summary=replace(summary, steps=steps, peak=top, whole=whole)))
        )
    merged = merge(runs)
    least, most = (rank.peak for rank in merged.ranks)
    assert least is not None and most is not None and merged.worst is not None
    assert (least.bytes, most.said) == (most.bytes, most.bytes + (1 << 20))
    assert (merged.worst.rank, merged.worst.bytes, merged.worst.over_least.bytes) == (1, most.said, 1 << 20)
    assert merged.ranks[1].whole.bytes == merged.ranks[1].largest.said == most.said
    assert said(merged) == (
        "Rank 1 of 2 is the worst, with 2.5 MiB at the peak, in backward of step 1, 65 % above rank 0: it has 1.0 MiB "
        "more in rounding."
    )
    head = next(line for line in render_ranks(merged).splitlines() if line.startswith("rank  "))
    assert head.split()[-1] == "rounding"


def test_a_small_difference_is_called_one() -> None:
    text = said(merge(runs_of(2, each={1: {"activations": 804}})))
    assert (
        text
        == "The ranks hardly differ at their peaks, in backward of step 1: 1.54 MiB on rank 1 and 1.53 MiB on rank 0."
    )


def test_what_one_has_more_of_and_another_makes_up_for_is_said_all_the_same() -> None:
    text = said(merge(runs_of(2, each={1: {"activations": 1101, "weights": 156}})))
    assert text.startswith("The ranks hardly differ")
    assert "But rank 1 has 301.0 KiB more in activations, 100.0 KiB less in parameters" in text


def test_out_of_memory_is_said_first() -> None:
    merged = merge([run_of(rank_recording(0, 2)), out_of_memory(1, 2)])
    assert said(merged).startswith("Rank 1 of 2 ran out of memory at 4.5 KiB. ")


def test_of_what_does_not_add_up_there_is_no_verdict() -> None:
    recording = rank_recording(1, 3)
    events = replace(recording.events, allocated=recording.events.allocated + np.int64(4096))
    runs = [*runs_of(3)[::2], run_of(replace(recording, events=events))]
    merged = merge(runs)
    assert said(merged).startswith("No verdict: the sums of rank 1 differ from the allocator's")
    text = render_ranks(merged)
    assert "WARNING" in text and "rank 1: the sums differ from the allocator's by up to 4.0 KiB" in text
    amp = [run_of(rank_recording(rank, 3, arm=ARM), "amp") for rank in range(3)]
    assert render_jobs(merge_all([*runs, *amp])).startswith("No verdict: the sums of rank 1 of fp32")


def test_who_is_missing_is_said_with_the_reason() -> None:
    assert list(absences(merge(with_missing()))) == [
        "rank 1 has no file",
        "rank 3 is left out: train.rank3-of-5.ampmem is not an ampmem recording, or it is damaged (it is empty)",
        "rank 2 is left out: it ended no step after step 0; its recording does not say why, it may have been killed",
    ]


def killed(run: RankRun) -> RankRun:
    """``run``, as it is read where nobody got to end the file."""
    assert run.entry is not None
    entry = replace(run.entry, notes=(*run.entry.notes, NOT_ENDED))
    return replace(run, ended=False, notes=(*run.notes, NOT_ENDED), entry=entry)


def test_a_rank_that_was_killed_is_named_first_though_all_ended_the_same_step() -> None:
    merged = merge([run_of(rank_recording(0, 2)), killed(run_of(rank_recording(1, 2)))])
    assert list(doubts(merged)) == [
        "rank 1 was killed, or its machine went away, in the step after step 1: its recording has no end"
    ]
    assert "WARNING  rank 1 was killed" in render_ranks(merged)


def test_a_rank_that_was_killed_before_the_others_got_on() -> None:
    merged = merge(
        [run_of(rank_recording(0, 3)), killed(run_of(rank_recording(1, 3, steps=1))), run_of(rank_recording(2, 3))]
    )
    assert list(absences(merged)) == ["rank 1 is left out: it ended no step after step 0, see the warning"]


def test_a_rank_that_failed_is_named() -> None:
    recording = rank_recording(1, 2)
    failure = FailureRecord(kind=FailureKind.RAISED, message="the data ran out", error="ValueError")
    failed = run_of(replace(recording, run=replace(recording.run, failure=failure)))
    assert list(absences(merge([run_of(rank_recording(0, 2)), failed]))) == [
        "rank 1 failed after step 1: ValueError: the data ran out"
    ]


def test_a_rank_behind_the_others_is_named() -> None:
    merged = merge([run_of(rank_recording(rank, 2, steps=3 - rank)) for rank in range(2)])
    assert list(absences(merged)) == ["rank 1 recorded no step after step 1; rank 0 went on to step 2"]


def test_ranks_that_are_simulated_alone_do_not_miss_the_others() -> None:
    recordings = [rank_recording(rank, 64) for rank in (0, 63)]
    simulated = [replace(item, run=replace(item.run, source=SourceKind.SIMULATED)) for item in recordings]
    assert list(absences(merge(list(map(run_of, simulated))))) == []


def test_worst_ranks_with_other_parameters_are_no_verdict_on_precision() -> None:
    fp32 = pipeline()
    amp = [
        run_of(rank_recording(rank, 8, arm=ARM, activations=200 + 400 * (rank // 2), weights=200 + 10 * (rank // 2)))
        for rank in range(8)
    ]
    text = render_jobs(merge_all([*fp32, *amp]))
    assert text.startswith("On the worst rank of each precision, peaks: fp32 rank 0 2.1 MiB, amp rank 6 2.0 MiB.")
    assert "the parameters differ" in text


def test_notes_that_differ_in_figures_alone_are_said_once() -> None:
    runs = [
        run_of(replace(rank_recording(rank, 3), notes=(f"{rank + 1}.5 MiB were freed by other threads",)))
        for rank in range(3)
    ]
    assert "note (ranks 0-2; the figures are those of rank 0): 1.5 MiB were freed by other threads" in render_ranks(
        merge(runs)
    )


@pytest.mark.parametrize("width", [60, 100, 160])
def test_many_ranks_that_differ_fit_a_terminal(width: int) -> None:
    mesh = [MeshAxis(name="dp\x1b[31m", size=64, coordinate=0)]
    runs = [run_of(rank_recording(rank, 64, activations=800 + 2 * rank, mesh=mesh)) for rank in range(64)]
    text = render_ranks(merge(runs), layout=Layout(width=width))
    assert all(columns_of(line) <= width for line in text.splitlines())
    assert len(text.splitlines()) < 80
    assert "48 more ranks, from 1.5 MiB to 1.6 MiB; --all shows each" in " ".join(text.split())
    assert "63 worst" in text and "\x1b" not in text


def test_two_ranks_are_both() -> None:
    assert said(merge(runs_of(2))).startswith("Both ranks need the same, 1.5 MiB at the peak")


def test_what_is_twice_as_much_and_more_is_said_in_times() -> None:
    text = said(merge(runs_of(2, each={1: {"activations": 8000}})))
    assert ", 5.6 times that of rank 0: it has 7.0 MiB more in activations" in text


def test_a_peak_while_loading_data() -> None:
    story = Story()
    story.parameter(0x1000, "layers.0.weight", 1000)
    story.begin(0, Phase.DATA)
    story.alloc(0x2000, 5000)
    story.free(0x2000)
    story.enter(Phase.FORWARD)
    story.enter(Phase.BACKWARD)
    story.end(Phase.OPTIMIZER)
    recording = story.recording()
    runs = [run_of(replace(recording, run=replace(recording.run, rank=rank, world_size=2))) for rank in range(2)]
    assert said(merge(runs)).startswith(
        "Both ranks need the same, 8.8 KiB at the peak, while loading data, in step 0: "
    )


def test_ranks_of_two_launches_have_no_verdict_and_a_warning_first() -> None:
    recordings = [rank_recording(rank, 3, activations=800 + 100 * rank) for rank in range(3)]
    runs = [run_of(replace(each, run=replace(each.run, job="ab"[each.run.rank == 2]))) for each in recordings]
    text = " ".join(render_ranks(merge(runs)).split())
    assert text.startswith("No verdict on one job: these are ranks of several launches, see the warning. ")
    assert "WARNING these are ranks of 2 launches of the script: ranks 0, 1; rank 2." in text
    assert "each rank at its own peak of step 1" in text


def test_each_machine_of_a_job_has_a_launcher_of_its_own() -> None:
    recordings = [rank_recording(rank, 4) for rank in range(4)]
    runs = [
        run_of(replace(each, run=replace(each.run, job="ab"[rank // 2], local_rank=rank % 2)))
        for rank, each in enumerate(recordings)
    ]
    assert merge(runs).launches == () and list(doubts(merge(runs))) == []


def test_all_else_is_never_more_than_what_is_named() -> None:
    parts = [(category, 1000) for category in CATEGORIES if category is not Category.COMMUNICATION]
    assert "all else" not in made_of(parts, 1000 * len(parts))
    large = [(Category.OPTIMIZER_STATE, 320), (Category.TEMPORARIES, 210), (Category.PARAMETERS, 160)]
    more = [(Category.GRADIENTS, 100), (Category.ACTIVATIONS, 90), (Category.COMMUNICATION, 80)]
    small = [(Category.INPUTS, 25), (Category.OTHER, 15)]
    assert made_of([*large, *more, *small], 1000) == (
        "32 % optimizer state, 21 % temporaries, 16 % parameters, 10 % gradients, 9 % activations, "
        "8 % communication, 4 % all else"
    )


def test_where_no_place_differs_there_is_no_column_of_places() -> None:
    one = [MeshAxis(name="dp", size=2, coordinate=0)]
    alike = [run_of(rank_recording(rank, 2, mesh=one, activations=800 + 100 * rank)) for rank in range(2)]
    assert "mesh" not in render_ranks(merge(alike))
    assert "mesh" in render_ranks(merge(pipeline()))


def test_what_is_next_can_be_copied_and_is_aligned() -> None:
    runs = [run_of(rank_recording(rank, 2, activations=800 + 100 * rank), "my run") for rank in range(2)]
    text = render_ranks(merge(runs), files=[str(run.path) for run in runs])
    assert text.splitlines()[-3:] == [
        "next: ampmem report 'my run'.rank*-of-2.ampmem      all of it as a page",
        "      ampmem show --all 'my run'.rank*-of-2.ampmem  every table",
        "      ampmem show 'my run.rank1-of-2.ampmem'        the worst rank by itself",
    ]


def test_a_small_category_never_displaces_a_large_one() -> None:
    """It alone differs between the ranks; where there is no room for all, it is the one that is summed up."""
    merged = merge(runs_of(3, each={rank: {"copies": 4 * rank} for rank in (1, 2)}))
    caption = "each rank at its own peak of step 1, in KiB\n\n"
    lines = render_ranks(merged, layout=Layout(width=60)).partition(caption)[2].splitlines()
    assert lines[0].split() == ["rank", "peak", "parameters", "activations", "all", "else"]
    assert lines[2].split() == ["0", "1,568.0", "256.0", "800.0", "512.0"]
    wide = render_ranks(merged, layout=Layout(width=100)).partition(caption)[2].splitlines()
    assert "cast" in wide[0] and "all else" not in wide[1]
