"""The allocator's layers above the tensors: what it kept in reserve, and whether its own totals agree with ours."""

from __future__ import annotations

from collections.abc import Iterator

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.marks import Instants
from ampmem.events import PEAK_MARK, LayersRecord, Recording


def reserved_at_peak(recording: Recording, step: int) -> int | None:
    """What the allocator had taken from the device at the peak of the step with this index; bytes.

    Where only the marks are known, the most of them: within a step the allocator rarely gives memory back.
    """
    mine = [layers for layers in recording.layers if layers.step == step]
    peak = [layers.reserved for layers in mine if layers.mark == PEAK_MARK]
    return peak[-1] if peak else max((layers.reserved for layers in mine), default=None)


def outside_in(recording: Recording, step: int) -> int | None:
    """The most of the device's memory in the step that was not this allocator's: contexts, NCCL, other processes."""
    found = [
        layers.device_used - layers.reserved
        for layers in recording.layers
        if layers.step == step and layers.device_used is not None
    ]
    return max(found, default=None)


def marks_residual(analysis: Analysis) -> int | None:
    """How far the events are from the allocator's own count of requested bytes, at the mark where it is most.

    ``None`` where it was never asked.
    """
    timeline = analysis.timeline
    return max(
        (
            abs(int(timeline.total[timeline.position(instant)]) - layers.requested)
            for layers, instant in _marked(analysis)
        ),
        default=None,
    )


def _marked(analysis: Analysis) -> Iterator[tuple[LayersRecord, int]]:
    """Each mark of a step that ended, with its instant."""
    instants = {step.index: marks for step, marks in zip(analysis.recording.steps, analysis.marks, strict=True)}
    for layers in analysis.recording.layers:
        if layers.mark != PEAK_MARK and layers.step in instants:
            instant = _instant(instants[layers.step], layers.mark)
            if instant is not None:
                yield layers, instant


def _instant(marks: Instants, name: str) -> int | None:
    instant: int | None = getattr(marks, name)
    return instant
