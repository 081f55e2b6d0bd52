"""A peak that foreach updates make."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ampmem.analysis.findings.base import NOTABLE_BYTES, Finding, Section, TrainingRun
from ampmem.analysis.timeline.categories import Category
from ampmem.analysis.timeline.lifetimes import Mask
from ampmem.events import Column, OptimizerRecord, Phase
from ampmem.units import format_bytes

_AT_ONCE = {"Adam": 2, "AdamW": 2}
"""Copies of the parameter at hand that an update with ``foreach=False`` has at once: the root of the second moment, and
the same divided by the bias correction. One of the parameter before is there, too: its denominator is a local variable
until the next one takes its place. Source: ``_single_tensor_adam`` of torch/optim/adam.py.
"""


def check(run: TrainingRun) -> Finding | None:
    """The run's peak is in a foreach update and has temporaries of it.

    What goes is the difference to the most that is alive outside of all updates. Without temporaries
    (``fused``) an update needs no more than what it leaves behind; with ``foreach=False`` it takes one parameter at a
    time.
    """
    timeline = run.analysis.timeline
    temporaries = timeline.temporaries_by_phase(run.peak)["optimizer"]
    found = _updating(run)
    inside = _inside_updates(run)
    if found is None or not temporaries or not (run.peak_in_update if run.at_failure else inside[run.peak]):
        return None
    number, optimizer = found
    one_by_one = _one_by_one(run, number, optimizer)
    if run.at_failure:
        return _at_failure(run, optimizer, temporaries, one_by_one)
    start = timeline.position(run.steps[0].start_ns)
    end = timeline.position((run.unfinished or run.steps[-1]).end_ns)
    outside = int(timeline.total[start : end + 1][~inside[start : end + 1]].max(initial=0))
    peak = int(timeline.total[run.peak])
    if not run.notable(peak - outside):
        return None
    choices: list[tuple[str, int]] = [("fused=True", peak - outside)] if optimizer.takes_fused else []
    if one_by_one is not None:
        choices.append(("foreach=False", peak - max(outside, peak - temporaries + one_by_one)))
    if len(run.recording.optimizers) > 1:  # the update of another one may be the peak then
        most = run.off_peak(_temporaries_of(run, optimizer)) or 0
        choices = [(option, min(size, most)) for option, size in choices]
    best, saved = max(choices, key=lambda choice: choice[1], default=("foreach=False", 0))
    return Finding(
        code="foreach-temporaries",
        severity="advice",
        section=Section.TIMELINE,
        message=f"at the peak {format_bytes(temporaries)} are temporaries of the foreach update of "
        f"{optimizer.class_name}.",
        bytes=temporaries,
        change=f"{optimizer.class_name}(..., {best})",
        evidence=(
            f"peak, in the update: {format_bytes(peak)}",
            f"largest total outside of updates: {format_bytes(outside)}",
            *(f"{option}: {_effect(size)}" for option, size in choices),
        ),
        off_peak=saved if saved > 0 else None,
    )


def _at_failure(
    run: TrainingRun, optimizer: OptimizerRecord, temporaries: int, one_by_one: int | None
) -> Finding | None:
    """What of the update's ``temporaries`` would not have been there when the request failed."""
    choices = [("fused=True", temporaries)] if optimizer.takes_fused else []
    if one_by_one is not None:
        choices.append(("foreach=False", temporaries - one_by_one))
    best, saved = max(choices, key=lambda choice: choice[1], default=("foreach=False", 0))
    if not run.notable(temporaries):
        return None
    return Finding(
        code="foreach-temporaries",
        severity="advice",
        section=Section.TIMELINE,
        message=f"at the failure {format_bytes(temporaries)} are temporaries of the foreach update of "
        f"{optimizer.class_name}.",
        bytes=temporaries,
        change=f"{optimizer.class_name}(..., {best})",
        evidence=tuple(f"{option}: {format_bytes(size)} less at the failure" for option, size in choices if size > 0),
        off_peak=saved if saved > 0 else None,
    )


def _temporaries_of(run: TrainingRun, optimizer: OptimizerRecord) -> Column:
    """For each allocation its bytes, where it is a temporary of an update of this class of optimizers."""
    lifetimes, classes = run.analysis.lifetimes, run.analysis.classes
    of_class = np.array([text == f"{optimizer.class_name}.step" for text in run.recording.texts])
    mine = classes.of(Category.TEMPORARIES) & (lifetimes.phase == Phase.OPTIMIZER) & of_class[lifetimes.op]
    return np.where(mine, lifetimes.bytes, 0)


def _effect(saved: int) -> str:
    if abs(saved) < NOTABLE_BYTES:
        return "the peak stays"
    return f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} at the peak"


def _updating(run: TrainingRun) -> tuple[int, OptimizerRecord] | None:
    """The optimizer whose update is at the peak, with its number; ``None`` where that is none with foreach.

    The op of the temporaries names its class. Where no op does, as in a snapshot, all optimizers must have foreach.
    """
    records = run.recording.optimizers
    alive = run.analysis.lifetimes.alive_at(run.peak)
    mine = alive & run.analysis.classes.of(Category.TEMPORARIES) & (run.analysis.lifetimes.phase == Phase.OPTIMIZER)
    sizes: dict[str, int] = {}
    for allocation in np.flatnonzero(mine).tolist():
        name = run.text(run.analysis.lifetimes.op[allocation]).removesuffix(".step")
        sizes[name] = sizes.get(name, 0) + int(run.analysis.lifetimes.bytes[allocation])
    largest = max(sizes, key=lambda name: sizes[name], default="")
    named = [(number, record) for number, record in enumerate(records) if record.class_name == largest]
    rest = named if named else list(enumerate(records))
    return rest[0] if rest and all(record.implementation == "foreach" for _, record in rest) else None


def _one_by_one(run: TrainingRun, number: int, optimizer: OptimizerRecord) -> int | None:
    """Bytes of temporaries that the update with ``foreach=False`` has at most; ``None`` where that is not known."""
    copies = _AT_ONCE.get(optimizer.class_name)
    if copies is None or (optimizer.bases or ("",))[-1] != "Optimizer":
        return None
    decay = optimizer.settings.get("weight_decay")
    copies += bool(decay) and optimizer.class_name == "Adam" and not optimizer.settings.get("decoupled_weight_decay")
    copies += bool(optimizer.settings.get("maximize"))
    sizes = [each.bytes for each in run.recording.parameters if each.trainable and each.optimizer in (None, number)]
    return max((copies * size + before for before, size in pairwise([0, *sizes])), default=0)


def _inside_updates(run: TrainingRun) -> Mask:
    """For each position whether it is between two events of an update: its end, when it is clean again, is not."""
    updating = run.recording.events.phase == Phase.OPTIMIZER
    inside = np.zeros(len(updating) + 1, dtype=np.bool_)
    inside[1:-1] = updating[:-1] & updating[1:]
    return inside
