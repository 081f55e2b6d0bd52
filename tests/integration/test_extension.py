"""A recording by the C++ extension has the content that torch.profiler gives it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ampmem

from ampmem.events import Column, EventColumns, Fact, FactColumns, Recording
from ampmem.recorder.sources import extension
from ampmem.recording import read

pytestmark = pytest.mark.slow
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
UNLIKE = ("time_ns", "address", "allocated")
"""Columns that differ between any two runs, or with the events that are left out."""
SCALAR = 16
"""Bytes of the wrappers that a dispatch mode makes of numbers."""


def rows(recording: Recording, columns: EventColumns | FactColumns) -> list[tuple[object, ...]]:
    """The rows of ``columns``, with texts in place of their ids."""
    texts = np.array(recording.texts, dtype=object)

    def told(name: str, column: Column) -> Column:
        return texts[column] if name in ("op", "module", "stack", "name", "dtype", "shape") else column

    names = [name for name in columns.names() if name not in UNLIKE]
    found = [told(name, getattr(columns, name)).tolist() for name in names]
    return list(zip(*found, strict=True))


def content(file: Path) -> tuple[list[object], list[object]]:
    """The events and facts of a recording.

    Nodes are read in the order of their own or that of their attributes' names, so what one has saved is sorted.
    """
    recording = read(file)
    events = [
        row
        for row, size in zip(rows(recording, recording.events), recording.events.bytes, strict=True)
        if size > SCALAR
    ]
    facts: list[object] = []
    for _, group in groupby(rows(recording, recording.facts), lambda row: row[0] == Fact.SAVED):
        found = list(group)
        facts += sorted(set(found), key=str) if found[0][0] == Fact.SAVED else found
    return list(events), facts


WORKLOADS = [
    "gpt --precision amp-nocache",  # the autocast cache frees its copies in any order
    "resnet --precision amp-nocache",
    "reuse --precision amp-nocache",
    "accumulate",
    "bert",
    "checkpointed",
    "gan",
    "lm",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_content_is_the_same(
    tmp_path: Path, compiled_extension: Path, monkeypatch: pytest.MonkeyPatch, workload: str, device: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    name, *options = workload.split()
    found = {}
    for value in ("on", "off"):
        monkeypatch.setenv(extension.VARIABLE, value)
        run = ("-m", f"ampmem.workloads.{name}", "--preset", "small", "--device", device, *options)
        result = ampmem(tmp_path, "profile", "--device", device, "-o", f"{value}.ampmem", *run)
        assert result.returncode == 0, result.stderr
        found[value] = content(tmp_path / f"{value}.ampmem")
    events, facts = found["on"]
    assert len(events) > 300
    assert (events, facts) == found["off"]
