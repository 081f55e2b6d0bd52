"""A recording by the C++ extension has the content that torch.profiler gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ampmem

from ampmem.events import Column
from ampmem.recorder.sources import extension
from ampmem.recording import read

pytestmark = pytest.mark.slow
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TIMES = ("time_ns", "address")
"""Columns that differ between any two runs."""


def content(file: Path) -> dict[str, list[object]]:
    """The events and facts of a recording, with texts in place of their ids."""
    recording = read(file)
    texts = np.array(recording.texts, dtype=object)

    def told(name: str, column: Column) -> list[object]:
        found = texts[column] if name in ("op", "module", "stack", "name", "dtype", "shape") else column
        return list(found.tolist())

    return {
        f"{kind} {name}": told(name, getattr(columns, name))
        for kind, columns in (("event", recording.events), ("fact", recording.facts))
        for name in columns.names()
        if name not in TIMES
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workload", ["gpt --precision amp-nocache", "checkpointed", "gan", "accumulate"])
def test_the_content_is_the_same(
    tmp_path: Path, compiled_extension: Path, monkeypatch: pytest.MonkeyPatch, workload: str, device: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_extension))
    name, *options = workload.split()  # without the autocast cache, which frees its copies in any order
    found = {}
    for value in ("on", "off"):
        monkeypatch.setenv(extension.VARIABLE, value)
        run = ("-m", f"ampmem.workloads.{name}", "--preset", "small", "--device", device, *options)
        result = ampmem(tmp_path, "profile", "--device", device, "-o", f"{value}.ampmem", *run)
        assert result.returncode == 0, result.stderr
        found[value] = content(tmp_path / f"{value}.ampmem")
    assert len(found["on"]["event bytes"]) > 300
    assert found["on"] == found["off"]
