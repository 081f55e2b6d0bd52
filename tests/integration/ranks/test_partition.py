"""A rank's flat slice of all parameters in float32 is a master copy, by its elements and values."""

from pathlib import Path

import pytest
from support import gloo
from support import partition_runs as runs

import ampmem
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category

pytestmark = pytest.mark.slow


def test_a_slice_is_a_master_copy_and_all_else_what_it_is(tmp_path: Path) -> None:
    gloo.on_ranks(runs.train_all, tmp_path / "ranks")
    whole = sum(parameter.numel() for parameter in runs.model().parameters())
    for rank in (0, 1):
        summary = summarize(ampmem.load(gloo.recording_of(tmp_path / "ranks", "partitioned", rank)))
        known = gloo.kept(tmp_path / "ranks", "partitioned", rank)
        marks = [step.marks.after_optimizer for step in summary.steps]
        assert [{key: mark[Category(key)] for key in known[0]} for mark in marks if mark is not None] == known
        assert known[0]["master_copies"] == 4 * ((whole + 1) // 2)
        assert summary.conservation.residual_bytes == 0
