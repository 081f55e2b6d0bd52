"""Whole training steps: PyTorch's allocator and the simulated one come to the same peaks, to the byte."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import programs
import steps

CASES = [("fsdp2", "amp-nocache"), ("ddp", "fp32")]


def test_steps_have_the_same_peaks_on_the_simulated_gpu() -> None:
    found = steps.rows(torch.__version__.partition("+")[0], "a100-80", CASES)
    assert [row.failed for row in found] == [""] * len(CASES)
    assert [(row.allocated, row.reserved, row.categories) for row in found] == [(0, 0, {})] * len(CASES)
    assert all(row.workspace >= 2 * 8_519_680 or torch.__version__ >= "2.15" for row in found)


def test_the_command_names_all_programs() -> None:
    assert tuple(programs.PROGRAMS) == steps.NAMES
    assert programs.PRECISIONS == steps.PRECISIONS
