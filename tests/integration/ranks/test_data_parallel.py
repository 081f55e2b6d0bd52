"""DistributedDataParallel under gloo: what a rank's recording says is what its tensors and buckets add up to."""

from __future__ import annotations

from pathlib import Path

import data_parallel_runs as runs
import gloo
import pytest

import ampmem
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.timeline.categories import Category

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recordings of every run, of both ranks."""
    made = tmp_path_factory.mktemp("data_parallel")
    gloo.on_ranks(runs.train_all, made)
    return made


def analysis_of(folder: Path, name: str, rank: int) -> Analysis:
    return analyse(ampmem.load(gloo.recording_of(folder, name, rank)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", sorted(set(runs.RUNS) - {"before"}))
def test_categories_of_a_rank_are_sums_over_its_tensors(folder: Path, name: str, rank: int) -> None:
    summary = ampmem.summarize(ampmem.load(gloo.recording_of(folder, name, rank)))
    assert summary.conservation.residual_bytes == 0
