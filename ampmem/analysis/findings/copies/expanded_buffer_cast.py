"""Buffers that are expanded first and cast afterwards."""

from __future__ import annotations

import numpy as np

from ampmem.analysis.findings.base import Finding, Section, TrainingRun
from ampmem.analysis.timeline.lifetimes import ALIVE
from ampmem.events import Column, Fact
from ampmem.units import format_bytes

_EXPANDED = 2
"""From this many times the buffer's elements on, the buffer counts as expanded."""
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def check(run: TrainingRun) -> Finding | None:
    """Casts of buffers with more elements than the buffers, in the step of the peak, when they cost most."""
    excess = _excess(run)
    alive = run.analysis.lifetimes.alive_at(run.most_alive(excess))
    size = int(excess[alive].sum())
    if not run.notable(size):
        return None
    return Finding(
        code="expanded-buffer-cast",
        severity="advice",
        section=Section.ALLOCATIONS,
        message=f"buffers are cast after they were expanded: the copies take {format_bytes(size)} more than "
        "copies of the buffers themselves would.",
        bytes=size,
        change="cast first, then expand: self.mask.to(x.dtype).expand(...)",
        evidence=run.largest(alive & (excess > 0)),
        off_peak=run.off_peak(excess),
    )


def _excess(run: TrainingRun) -> Column:
    """For each allocation that is a cast of a buffer: its bytes less those of the buffer as it is, cast."""
    facts, sizes = run.analysis.facts, run.analysis.lifetimes.bytes
    excess = np.zeros(len(sizes), dtype=np.int64)
    recent = run.analysis.lifetimes.step[facts.allocation] == run.peak_index
    for row in np.flatnonzero(recent & (facts.fact == Fact.OTHER_CAST) & (facts.name != 0)).tolist():
        copy, itemsize = facts.allocation[row], _ITEMSIZES.get(run.text(facts.dtype[row]))
        elements = _elements(run, int(facts.name[row]), int(copy))
        if itemsize is None or elements is None:
            continue
        if sizes[copy] >= _EXPANDED * elements * itemsize:
            excess[copy] = sizes[copy] - elements * itemsize
    return excess


def _elements(run: TrainingRun, name: int, copy: int) -> int | None:
    """Elements of the buffer called ``name`` when ``copy`` was made; where its type is not known, as in float32."""
    facts, lifetimes = run.analysis.facts, run.analysis.lifetimes
    rows = np.flatnonzero((facts.fact == Fact.BUFFER) & (facts.name == name))
    buffers = facts.allocation[rows]
    there = (lifetimes.born[buffers] < lifetimes.born[copy]) & (
        (lifetimes.died[buffers] == ALIVE) | (lifetimes.died[buffers] > lifetimes.born[copy])
    )
    if not there.any():
        return None
    row = rows[there][-1]
    return int(lifetimes.bytes[facts.allocation[row]]) // _ITEMSIZES.get(run.text(facts.dtype[row]), 4)
