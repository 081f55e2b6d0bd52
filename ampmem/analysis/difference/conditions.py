"""In what two runs differ that is no code of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampmem.analysis.difference.side import Side
from ampmem.analysis.summary import Summary
from ampmem.vocabulary import Arm, SourceKind


class ConditionKind(StrEnum):
    """What may differ."""

    DEVICE = "device"
    PRECISION = "precision"
    BATCH_SIZE = "batch size"
    STEPS = "recorded steps"
    END = "end"
    ARGUMENTS = "arguments"
    RANK = "rank"
    WORLD_SIZE = "number of ranks"
    TORCH = "torch"
    AMPMEM = "ampmem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that differs: then the difference is not of the code alone."""

    what: ConditionKind
    before: str
    after: str


def conditions_of(before: Side, after: Side) -> tuple[Condition, ...]:
    """What differs; what is not known of one is no difference."""
    old, new = _circumstances(before), _circumstances(after)
    return tuple(
        Condition(what=what, before=old[what], after=new[what])
        for what in ConditionKind
        if what in old and what in new and old[what] != new[what]
    )


def _circumstances(side: Side) -> dict[ConditionKind, str]:
    summary = side.summary
    found = {
        ConditionKind.DEVICE: _device(summary),
        ConditionKind.STEPS: str(len(summary.steps)),
        ConditionKind.END: _end(summary),
        ConditionKind.RANK: str(summary.rank),
        ConditionKind.WORLD_SIZE: str(summary.world_size),
        ConditionKind.TORCH: summary.torch,
        ConditionKind.AMPMEM: summary.ampmem,
    }
    if summary.source != SourceKind.SNAPSHOT or summary.arm.name != Arm.AS_IS:
        found[ConditionKind.PRECISION] = _precision(summary)
    if summary.last_step.batch_size is not None:
        found[ConditionKind.BATCH_SIZE] = str(summary.last_step.batch_size)
    if side.arguments is not None:
        found[ConditionKind.ARGUMENTS] = " ".join(side.arguments) or "none"
    return found


def _device(summary: Summary) -> str:
    name = summary.device.name or summary.device.type
    return f"{name}, simulated" if summary.source == SourceKind.SIMULATED else name


def _precision(summary: Summary) -> str:
    arm = summary.arm
    return ", ".join([str(arm.name), *([arm.dtype] if arm.dtype else [])])


def _end(summary: Summary) -> str:
    last, oom = summary.steps[-1], summary.ended_by
    if oom is not None:
        return f"out of memory in {oom.where}"
    return "whole" if last.finished else f"failed in step {last.index}"
