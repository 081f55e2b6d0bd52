"""Stages of a pipeline under gloo: several forwards before a backward, and buffers that another rank sends to."""

from pathlib import Path

import pytest
from support import gloo
from support import pipeline_runs as runs

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.findings.copies import autocast_in_backward
from ampmem.analysis.summary import Summary, summarize
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.events import Phase, Recording

pytestmark = pytest.mark.slow
RANKS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recordings of every schedule, of both ranks."""
    made = tmp_path_factory.mktemp("pipeline")
    gloo.on_ranks(runs.train_all, made)
    return made


def recording_of(folder: Path, name: str, rank: int) -> Recording:
    return ampmem.load(gloo.recording_of(folder, name, rank))


def summary_of(folder: Path, name: str, rank: int) -> Summary:
    return summarize(recording_of(folder, name, rank))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", runs.RUNS)
def test_categories_of_a_stage_are_sums_over_its_tensors(folder: Path, name: str, rank: int) -> None:
    summary, known = summary_of(folder, name, rank), gloo.kept(folder, name, rank)
    marks = [step.marks.after_optimizer for step in summary.steps]
    assert [{key: mark[Category(key)] for key in known[0]} for mark in marks if mark is not None] == known
    assert known[0]["communication"] > 0
    assert summary.conservation.residual_bytes == 0
    assert recording_of(folder, name, rank).remarks == ()
    assert summary.peak is not None
    assert summary.peak.communication_by_part["receive_buffers"] == known[-1]["communication"]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", runs.RUNS)
def test_which_stages_a_rank_has_is_recorded(folder: Path, name: str, rank: int) -> None:
    recording, chunks = recording_of(folder, name, rank), runs.RUNS[name].chunks
    assert recording.stages == tuple(rank + chunk * len(RANKS) for chunk in range(chunks))
    assert recording.stage_count == chunks * len(RANKS)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", runs.RUNS)
def test_steps_are_updates_and_have_a_backward_for_each_micro_batch(folder: Path, name: str, rank: int) -> None:
    recording = recording_of(folder, name, rank)
    assert [step.finished for step in recording.steps] == [True] * runs.STEPS
    backwards = runs.MICRO_BATCHES * runs.RUNS[name].chunks
    assert recording.steps[-1].backwards == backwards
    phases = recording.phases.phase[recording.phases.step == 1].tolist()
    assert phases.count(Phase.BACKWARD) == backwards
    assert Phase.EVALUATION not in phases


def test_the_last_stage_alone_has_a_loss(folder: Path) -> None:
    for name in ("gpipe", "gpipe-amp", "1f1b"):
        assert [summary_of(folder, name, rank).steps[-1].loss is None for rank in RANKS] == [True, False]


def test_a_schedule_that_fills_first_keeps_the_activations_of_all_micro_batches(folder: Path) -> None:
    """Of a first stage: what relu made, which two layers save, and the output that is sent, both per micro-batch."""
    rows = runs.BATCH
    saved = rows * 2 * runs.WIDTH * 4
    sent = rows * runs.WIDTH * 4
    recording = recording_of(folder, "gpipe", 0)
    analysis = summarize(recording).steps[-1]
    assert analysis.marks.after_forward is not None  # before the last backward: three micro-batches are done
    assert analysis.peak.categories[Category.ACTIVATIONS] <= saved + sent
    assert max_activations(recording) == saved + sent


def max_activations(recording: Recording) -> int:
    """The most that activations ever were in the last step."""
    analysis = analyse(recording)
    row = analysis.timeline.live[CODES[Category.ACTIVATIONS]]
    return int(row[1:][recording.events.step == recording.steps[-1].index].max())


@pytest.mark.parametrize("rank", RANKS)
def test_no_allocation_is_put_down_to_a_transfer_that_happens_meanwhile(folder: Path, rank: int) -> None:
    recording = recording_of(folder, "interleaved", rank)
    assert not [text for text in recording.texts if text.startswith("gloo:")]


def test_what_a_schedule_holds_is_not_blamed_on_the_script(folder: Path) -> None:
    found = autocast_in_backward(TrainingRun(analysis=analyse(recording_of(folder, "gpipe-amp", 1))))
    assert found is not None and "forward of the stages' modules" in found.change
    kept = {finding.code: finding for finding in summary_of(folder, "interleaved", 1).findings}["outputs-kept"]
    assert "or the schedule of its pipeline" in kept.message
