"""What is said first of the ranks of a job, and of which nothing is proven."""

from dataclasses import replace

import numpy as np
import pytest
from support.build import AMP, Story
from support.failures import ended
from support.golden_sections import Golden
from support.jobs import pipeline, rank_recording, run_of, runs_of, with_missing

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
    story = Story(weight=100, name="layers.0.weight")
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


def test_of_what_does_not_add_up_there_is_no_verdict(golden: Golden) -> None:
    recording = rank_recording(1, 3)
    events = replace(recording.events, allocated=recording.events.allocated + np.int64(4096))
    runs = [*runs_of(3)[::2], run_of(replace(recording, events=events))]
    golden(render_ranks(merge(runs)))
    amp = [run_of(rank_recording(rank, 3, precision=AMP), "amp") for rank in range(3)]
    golden(render_jobs(merge_all([*runs, *amp])), "in two precisions")


def killed(run: RankRun) -> RankRun:
    """``run``, as it is read where nobody got to end the file."""
    entry = replace(run.entry, notes=(*run.entry.notes, NOT_ENDED))
    return replace(run, ended=False, notes=(*run.notes, NOT_ENDED), entry=entry)


def test_worst_ranks_with_other_parameters_are_no_verdict_on_precision(golden: Golden) -> None:
    amp = [
        run_of(
            rank_recording(rank, 8, precision=AMP, activations=200 + 400 * (rank // 2), weights=200 + 10 * (rank // 2))
        )
        for rank in range(8)
    ]
    golden(render_jobs(merge_all([*pipeline(), *amp])))


def test_notes_that_differ_in_figures_alone_are_said_once(golden: Golden) -> None:
    recordings = [rank_recording(rank, 3) for rank in range(3)]
    notes = [f"{rank + 1}.5 MiB were freed by other threads" for rank in range(3)]
    golden(
        render_ranks(
            merge([run_of(replace(each, notes=(note,))) for each, note in zip(recordings, notes, strict=True)])
        )
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


def test_ranks_of_two_launches_have_no_verdict_and_a_warning_first(golden: Golden) -> None:
    recordings = [rank_recording(rank, 3, activations=800 + 100 * rank) for rank in range(3)]
    runs = [run_of(replace(each, run=replace(each.run, job="ab"[each.run.rank == 2]))) for each in recordings]
    golden(render_ranks(merge(runs)))


def test_each_machine_of_a_job_has_a_launcher_of_its_own() -> None:
    recordings = [rank_recording(rank, 4) for rank in range(4)]
    runs = [
        run_of(replace(each, run=replace(each.run, job="ab"[rank // 2], local_rank=rank % 2)))
        for rank, each in enumerate(recordings)
    ]
    assert merge(runs).launches == () and list(doubts(merge(runs))) == []


def test_all_else_is_never_more_than_what_is_named() -> None:
    nothing = dict.fromkeys(CATEGORIES, 0)
    parts = {**dict.fromkeys(CATEGORIES, 1000), Category.COMMUNICATION: 0}
    assert "all else" not in made_of(parts, sum(parts.values()))
    large = {Category.OPTIMIZER_STATE: 320, Category.TEMPORARIES: 210, Category.PARAMETERS: 160}
    more = {Category.GRADIENTS: 100, Category.ACTIVATIONS: 90, Category.COMMUNICATION: 80}
    small = {Category.INPUTS: 25, Category.OTHER: 15}
    assert made_of(nothing | large | more | small, 1000) == (
        "32 % optimizer state, 21 % temporaries, 16 % parameters, 10 % gradients, 9 % activations, "
        "8 % communication, 4 % all else"
    )


def test_where_no_place_differs_there_is_no_column_of_places() -> None:
    one = [MeshAxis(name="dp", size=2, coordinate=0)]
    alike = [run_of(rank_recording(rank, 2, mesh=one, activations=800 + 100 * rank)) for rank in range(2)]
    assert "mesh" not in render_ranks(merge(alike))
    assert "mesh" in render_ranks(merge(pipeline()))


def test_what_is_next_can_be_copied_and_is_aligned(golden: Golden) -> None:
    runs = [run_of(rank_recording(rank, 2, activations=800 + 100 * rank), "my run") for rank in range(2)]
    golden(render_ranks(merge(runs), files=[str(run.path) for run in runs]))


def test_a_small_category_never_displaces_a_large_one() -> None:
    """It alone differs between the ranks; where there is no room for all, it is the one that is summed up."""
    merged = merge(runs_of(3, each={rank: {"copies": 4 * rank} for rank in (1, 2)}))
    caption = "each rank at its own peak of step 1, in KiB\n\n"
    lines = render_ranks(merged, layout=Layout(width=60)).partition(caption)[2].splitlines()
    assert lines[0].split() == ["rank", "peak", "parameters", "activations", "all", "else"]
    assert lines[2].split() == ["0", "1,568.0", "256.0", "800.0", "512.0"]
    wide = render_ranks(merged, layout=Layout(width=100)).partition(caption)[2].splitlines()
    assert "cast" in wide[0] and "all else" not in wide[1]


def loading() -> list[RankRun]:
    """Two ranks whose peaks are while they load data."""
    story = Story(weight=1000, name="layers.0.weight", begins=Phase.DATA)
    story.scratch(0x2000, 5000)
    story.enter(Phase.FORWARD)
    story.enter(Phase.BACKWARD)
    story.end(Phase.OPTIMIZER)
    recording = story.recording()
    return [run_of(replace(recording, run=replace(recording.run, rank=rank, world_size=2))) for rank in range(2)]


def ranks(*steps: int) -> list[RankRun]:
    """As many ranks, which recorded so many steps each."""
    return [run_of(rank_recording(rank, len(steps), steps=many)) for rank, many in enumerate(steps)]


def failed() -> list[RankRun]:
    recording = rank_recording(1, 2)
    failure = FailureRecord(kind=FailureKind.RAISED, message="the data ran out", error="ValueError")
    return [run_of(rank_recording(0, 2)), run_of(replace(recording, run=replace(recording.run, failure=failure)))]


def simulated() -> list[RankRun]:
    """Ranks that were simulated alone, and do not miss the others."""
    recordings = [rank_recording(rank, 64) for rank in (0, 63)]
    return [run_of(replace(item, run=replace(item.run, source=SourceKind.SIMULATED))) for item in recordings]


JOBS = {
    "equal": lambda: runs_of(8),
    "both equal": lambda: runs_of(2),
    "the worst beside the median": lambda: runs_of(8, each={3: {"activations": 1000}}),
    "the median as bad as the worst": lambda: runs_of(8, each={3: {"activations": 600}}),
    "twice as much": lambda: runs_of(2, each={1: {"activations": 8000}}),
    "a small difference": lambda: runs_of(2, each={1: {"activations": 804}}),
    "more of one and less of another": lambda: runs_of(2, each={1: {"activations": 1101, "weights": 156}}),
    "out of memory": lambda: [run_of(rank_recording(0, 2)), out_of_memory(1, 2)],
    "while loading data": loading,
    "missing": with_missing,
    "killed in the last step": lambda: [run_of(rank_recording(0, 2)), killed(run_of(rank_recording(1, 2)))],
    "killed before the others": lambda: [killed(run) if run.rank == 1 else run for run in ranks(2, 1, 2)],
    "failed": failed,
    "behind": lambda: ranks(3, 2),
    "simulated alone": simulated,
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_said_first_of_a_job(name: str, golden: Golden) -> None:
    merged = merge(JOBS[name]())
    golden("\n".join((said(merged), *absences(merged), *doubts(merged))))
