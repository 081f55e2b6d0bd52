"""Optimizers that divide their state between ranks."""

from pathlib import Path

import pytest
from support import gloo
from support import zero_runs as runs
from support.precisions import judged, terms

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category

pytestmark = pytest.mark.slow
RANKS = (0, 1)
OTHERS = "parameters that no optimizer of this process has updated"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recordings of every run, of both ranks."""
    made = tmp_path_factory.mktemp("zero")
    gloo.on_ranks(runs.train_all, made)
    return made


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", runs.RUNS)
def test_categories_of_a_rank_are_sums_over_its_tensors(folder: Path, name: str, rank: int) -> None:
    recording = ampmem.load(gloo.recording_of(folder, name, rank))
    summary, known = summarize(recording), gloo.kept(folder, name, rank)
    marks = [step.marks.after_optimizer for step in summary.steps]
    assert [{key: mark[Category(key)] for key in known[0]} for mark in marks if mark is not None] == known
    assert summary.conservation.residual_bytes == 0
    assert recording.remarks == ()


@pytest.mark.parametrize("name", runs.RUNS)
def test_state_that_other_ranks_keep_is_missing_for_that_reason(folder: Path, name: str) -> None:
    others = [gloo.kept(folder, f"{name}-others", rank) for rank in RANKS]
    assert sum(others) == sum(parameter.numel() for parameter in runs.model().parameters())
    for rank in RANKS:
        analysis = analyse(ampmem.load(gloo.recording_of(folder, name, rank)))
        verdict = judged(analysis)  # every byte has a name
        assert terms(verdict, "after_optimizer", "optimizer_state")[OTHERS] == -8 * others[rank]
