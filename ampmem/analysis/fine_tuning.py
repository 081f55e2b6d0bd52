"""What training a model takes of a GPU, by method and precision, and its largest batch (``ampmem.estimate/1``).

Every size is the peak of a run; every largest batch is the end of a search by runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from ampmem.analysis.fit import Point, Points, PrecisionFit, Vary, bracket, next_to_fit, precision_fits
from ampmem.analysis.jsonable import Json, JsonDocument, OneOf, Positive, like, named, schema_of_printed
from ampmem.version import __version__
from ampmem.vocabulary import Precision

SCHEMA = "ampmem.estimate/1"


class Method(StrEnum):
    """What is trained."""

    FULL = "full"
    """All weights."""
    LORA = "lora"
    """Adapters of low rank beside all linear layers but the head."""
    NF4 = "nf4"
    """Such adapters beside linear layers with weights of 4 bits."""
    INT8 = "int8"
    """Such adapters beside linear layers with weights of 8 bits."""


class EstimateCell(NamedTuple):
    """A method in a precision; ``roomy`` on a GPU with enough memory for it."""

    method: Method
    precision: Precision
    roomy: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.precision}{' with enough memory' if self.roomy else ''}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The script's arguments, without the batch."""
        return ("--method", self.method, "--precision", self.precision)


_NEAR = 16
"""The search ends when the smallest batch that does not fit is larger by at most this part of the largest that fits."""


def next_runs(points: Mapping[EstimateCell, Points], batch: int, total: int) -> list[tuple[EstimateCell, int]]:
    """The cells and batches to run next: ``batch`` first, then the search for the largest that fits in ``total`` bytes.

    If ``batch`` does not fit, it also runs where there is enough memory, so that its peak is known.
    """
    due = []
    for cell, mine in points.items():
        there = points[cell._replace(roomy=False)]
        value = next_batch(mine, batch, total)
        if cell.roomy:
            value = batch if not mine and batch in there and there[batch] is None else None
        if value is not None:
            due.append((cell, value))
    return due


def next_batch(points: Points, batch: int, total: int) -> int | None:
    """The next batch to run in the search that begins with ``batch``; ``None`` at its end."""
    fits, too_large = bracket(points)
    if fits and too_large and too_large - fits <= fits // _NEAR:
        return None
    low = batch if batch not in points or (fits or 0) >= batch else 1
    return next_to_fit(points, Vary(name="--batch", low=low, high=None), total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated(PrecisionFit):
    """One method in one precision, with its runs on the GPU.

    ``arguments`` are the script's. ``asked`` is the run with the batch that was asked; if it does not fit, its peaks
    are those on a GPU with enough memory.
    """

    method: Method
    arguments: str
    asked: Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and how.

    ``lora`` is the rank of adapters, ``batch`` the number of samples that was asked, of ``seq`` tokens each, null for a
    model of images. ``world_size`` is the number of ranks that share the model with FSDP, null for one GPU; the peaks
    are then rank 0's.
    """

    model: str
    methods: tuple[Method, ...]
    optimizer: str
    lora: Positive
    batch: Positive
    seq: Positive | None
    checkpointing: bool
    world_size: Positive | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(JsonDocument):
    """The result for one model on a GPU of ``gpu_bytes``. ``notes`` are the runs', each once."""

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    training: Training
    gpu: str
    total: Positive = field(metadata=named("gpu_bytes"))
    runs: int
    cells: tuple[Estimated, ...]
    notes: tuple[str, ...]


def estimate_schema() -> dict[str, Json]:
    """The JSON Schema of an :class:`Estimate`."""
    return schema_of_printed(Estimate, SCHEMA, "ampmem estimate")


def estimate(
    points: Mapping[EstimateCell, Points], training: Training, *, gpu: str, total: int, notes: tuple[str, ...]
) -> Estimate:
    """The result of these runs on a GPU of ``total`` bytes; a cell whose asked batch was not run is left out."""
    batch = training.batch
    return Estimate(
        schema=SCHEMA,
        ampmem=__version__,
        training=training,
        gpu=gpu,
        total=total,
        runs=sum(map(len, points.values())),
        cells=tuple(
            _estimated(each, points, batch) for each, mine in points.items() if not each.roomy and batch in mine
        ),
        notes=notes,
    )


def _estimated(cell: EstimateCell, points: Mapping[EstimateCell, Points], batch: int) -> Estimated:
    (fit,) = precision_fits({cell.precision: points[cell]})
    (asked,) = (point for point in fit.points if point.value == batch)
    roomy = points.get(cell._replace(roomy=True), {})
    if batch in roomy:
        ((needed,),) = (each.points for each in precision_fits({cell.precision: roomy}))
        asked = like(Point, needed, fits=False, may_fit=False)
    return like(Estimated, fit, method=cell.method, arguments=" ".join(cell.arguments), asked=asked)
