"""DistributedDataParallel under gloo: what a rank's recording says is what its tensors and its buckets add up to."""

from pathlib import Path

import numpy as np
import pytest
from support import data_parallel_runs as runs
from support import gloo, measure

import ampmem
from ampmem.analysis.analyse import analyse
from ampmem.analysis.summary import Summary, summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.recorder.hooks.communication import MADE_BEFORE

pytestmark = pytest.mark.slow
RANKS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recordings of every run, of both ranks."""
    made = tmp_path_factory.mktemp("data_parallel")
    gloo.on_ranks(runs.train_all, made)
    return made


def summary_of(folder: Path, name: str, rank: int) -> Summary:
    return summarize(ampmem.load(gloo.recording_of(folder, name, rank)))


def steps_as_sums(summary: Summary, known: list[dict[str, int]]) -> list[dict[str, int]]:
    """What the recording says of the categories that the rank has added up, after each update."""
    marks = [step.marks.after_optimizer for step in summary.steps]
    assert len(marks) == len(known) > 0
    return [{name: mark[Category(name)] for name in known[0]} for mark in marks if mark is not None]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", [name for name, run in runs.RUNS.items() if not run.before])
def test_categories_of_a_rank_are_sums_over_its_tensors(folder: Path, name: str, rank: int) -> None:
    summary, known = summary_of(folder, name, rank), gloo.kept(folder, name, rank)
    found = steps_as_sums(summary, known)
    if name == "compressed":  # gloo's thread may still hold what the hook has made of a bucket, in half its bytes
        for each, sums in zip(found, known, strict=True):
            buckets = sums["communication"]
            assert buckets <= each["communication"] <= buckets + buckets // 2
            each["communication"] = buckets
    assert found == known
    assert summary.conservation.residual_bytes == 0
    assert ampmem.load(gloo.recording_of(folder, name, rank)).remarks == ()
    for step in summary.steps:
        after = step.marks.after_optimizer
        assert after is not None
        assert after[Category.OTHER] == after[Category.TEMPORARIES] == 0
        assert after[Category.ACTIVATIONS] <= 4  # the loss


def test_buckets_are_a_part_of_the_communication_at_the_peak(folder: Path) -> None:
    for name, run in runs.RUNS.items():
        peak = summary_of(folder, name, 0).peak
        assert peak is not None
        parts = peak.communication_by_part
        assert sum(parts.values()) == peak.categories[Category.COMMUNICATION], name
        buckets = parts["reduce_buckets"]
        # gloo's thread may still hold what was broadcast, or what a hook has made of a bucket.
        assert run.before or buckets == gloo.kept(folder, name, 0)[-1]["communication"], name
        assert (buckets == 0) == bool(run.options.get("gradient_as_bucket_view")), name


def test_parameters_and_buffers_are_broadcast_side_by_side(folder: Path) -> None:
    analysis = analyse(ampmem.load(gloo.recording_of(folder, "fp32", 0)))
    texts = np.array(analysis.recording.texts)
    broadcast = texts[analysis.classes.name] == "broadcast"
    model = runs.Model()
    whole = measure.total(model.parameters()) + measure.total(model.buffers()) - 8
    # Each type has one: float32, and the counter of batches, which is int64 and alone, is broadcast where it lies.
    assert whole in analysis.lifetimes.bytes[broadcast].tolist()


def test_buckets_of_before_the_recording_are_said_to_be_missing(folder: Path) -> None:
    summary, known = summary_of(folder, "before", 0), gloo.kept(folder, "before", 0)
    said = steps_as_sums(summary, known)
    assert said[0] == known[0] | {"communication": 0}
    assert said[1:] == known[1:]  # it has made them anew
    assert ampmem.load(gloo.recording_of(folder, "before", 0)).remarks == (MADE_BEFORE,)
