"""Which source records a run."""

from __future__ import annotations

from ampmem.recorder.options import Options
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.baseline import Baseline
from ampmem.recorder.sources.cpu import ProfilerSource


def choose_source(options: Options, baseline: Baseline) -> Source:
    """The source for ``options.device``."""
    return ProfilerSource(baseline)
