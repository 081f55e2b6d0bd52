"""What ``ampmem fit --json`` prints (``ampmem.fit/1``): the dataclasses have the names and the order of the JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from ampmem.analysis.fit.fit import BASELINE, ArmFit, BreakEven, FitResult, Memory, Verdict
from ampmem.analysis.json.jsonable import Json, OneOf, Positive, Signed, plain
from ampmem.analysis.json.schema import schema_of
from ampmem.version import __version__

SCHEMA = "ampmem.fit/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedArgument:
    """The argument that differs between the runs, from ``low`` to ``high``; null: as far as it fits."""

    argument: str
    low: Positive
    high: Positive | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """The GPU; ``outside_bytes`` is what is assumed in use beside the allocator's memory, null when nothing fits.

    ``outside_at_most_bytes`` is the same with the most that is assumed. ``allowed_bytes`` is what the script lets the
    process take of the GPU, null where the script sets no limit.
    """

    name: str
    total_bytes: Positive
    outside_bytes: int | None
    outside_at_most_bytes: int | None
    allowed_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run: its peaks, null where memory ran out.

    ``fits`` is true where it surely does, ``may_fit`` where it does with the least that is assumed for what is not
    known; ``highest_device_used_bytes`` is with the most that is assumed for that, null where nothing had to be.
    """

    value: Positive
    fits: bool
    may_fit: bool
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None
    highest_device_used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPoints:
    """All runs of one arm, by ascending value.

    ``largest_fitting`` surely fits, ``smallest_not_fitting`` is the smallest above it that does not; of those above
    ``largest_that_may_fit`` is the largest that fits with the least that is assumed, null where none was run.
    """

    arm: str
    largest_fitting: Positive | None
    smallest_not_fitting: Positive | None
    largest_that_may_fit: Positive | None
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The arm's peak of what is allocated less the baseline's."""

    value: Positive
    bytes: Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Where what ``arm`` allocates at its peak falls below that of the arm ``against``, of the values that fit in both.

    ``costs_at`` is the largest value at which it is not below, ``saves_at`` the smallest above that at which it is.
    """

    arm: str
    against: str
    verdict: Verdict
    costs_at: Positive | None
    saves_at: Positive | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitDocument:
    """The whole search."""

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    script: str
    steps: Positive
    runs: int
    vary: VariedArgument
    gpu: SimulatedGpu
    arms: tuple[ArmPoints, ...]
    break_even: tuple[Crossing, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """The document as JSON text, as :func:`fit_schema` describes it."""
        return json.dumps(plain(self), indent=2)


def fit_schema() -> dict[str, Json]:
    """The JSON Schema of :meth:`FitDocument.to_json`."""
    return schema_of(
        FitDocument,
        title="ampmem fit, version 1",
        description="What `ampmem fit --json` prints. Sizes are bytes; null is a value that is not known.",
    )


def document(fit: FitResult) -> FitDocument:
    """The search as its document."""
    return FitDocument(
        schema=SCHEMA,
        ampmem=__version__,
        script=fit.script,
        steps=fit.steps,
        runs=fit.runs,
        vary=VariedArgument(argument=fit.vary.name, low=fit.vary.low, high=fit.vary.high),
        gpu=SimulatedGpu(
            name=fit.gpu,
            total_bytes=fit.total,
            outside_bytes=fit.outside,
            outside_at_most_bytes=fit.outside_at_most,
            allowed_bytes=fit.allowed,
        ),
        arms=tuple(map(_arm, fit.arms)),
        break_even=tuple(map(_crossing, fit.break_even)),
        notes=fit.notes,
    )


def _arm(arm: ArmFit) -> ArmPoints:
    return ArmPoints(
        arm=arm.name,
        largest_fitting=arm.largest_fitting,
        smallest_not_fitting=arm.smallest_not_fitting,
        largest_that_may_fit=arm.largest_that_may_fit,
        points=tuple(_point(value, memory) for value, memory in arm.points.items()),
    )


def _point(value: int, memory: Memory | None) -> Point:
    return Point(
        value=value,
        fits=memory is not None and memory.surely,
        may_fit=memory is not None,
        allocated_bytes=None if memory is None else memory.allocated,
        reserved_bytes=None if memory is None else memory.reserved,
        device_used_bytes=None if memory is None else memory.used,
        highest_device_used_bytes=None if memory is None else memory.highest,
    )


def _crossing(found: BreakEven) -> Crossing:
    return Crossing(
        arm=found.arm,
        against=BASELINE,
        verdict=found.verdict,
        costs_at=found.costs_at,
        saves_at=found.saves_at,
        differences=tuple(Difference(value=value, bytes=size) for value, size in found.differences.items()),
    )
