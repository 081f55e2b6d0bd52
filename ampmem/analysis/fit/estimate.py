"""What a simulated run would take of a GPU's memory, in terms that add up, and what is not known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ampmem.analysis.jsonable import Name, Signed
from ampmem.events import PredictionRecord, TermsRecord


class Fit(StrEnum):
    """Whether the run fits on the GPU."""

    FITS = "fits"
    MAY_NOT_FIT = "may-not-fit"
    """Without what is not known it fits; with the most that is assumed for that it does not."""
    DOES_NOT_FIT = "does-not-fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The device's memory at one instant, in bytes.

    tensors + workspaces + scratch + rounding = ``allocated``; + cached = ``reserved``; + outside + libraries =
    ``total``, what ``nvidia-smi`` would show.
    """

    tensors: int
    workspaces: Mapping[Name, int]
    scratch: Mapping[Name, int]
    rounding: int
    allocated: int
    cached: int
    reserved: int
    outside: int
    libraries: Mapping[Name, int]
    """What libraries hold outside of the allocator at least, such as NCCL's buffers."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestPeaks:
    """The peaks with the most that is assumed for what is not known."""

    allocated: int
    reserved: int
    total: int
    bounds: Mapping[Name, int]
    """The largest single request that was assumed, by what it is for; of what is outside of the allocator, all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The peaks of a simulated run, and whether its GPU has that much.

    ``margin`` is what is left of ``gpu_bytes`` at the peak of reserved memory, ``None`` when a request failed; below 0
    where what is outside of the allocator does not fit beside it. ``highest`` is ``None`` where nothing had to be
    assumed.
    """

    gpu_bytes: int
    fit: Fit
    margin: Signed | None
    at_peak_allocated: Terms
    at_peak_reserved: Terms
    highest: HighestPeaks | None
    not_modelled: tuple[str, ...]


def prediction_of(record: PredictionRecord) -> Prediction:
    """The prediction in its terms."""
    highest = None
    if record.bounds or record.libraries_at_most:
        highest = HighestPeaks(
            allocated=record.highest_allocated,
            reserved=record.highest_reserved,
            total=record.highest_reserved + record.outside + sum(record.libraries_at_most.values()),
            bounds={**record.bounds, **record.libraries_at_most},
        )
    reserved = _terms(record.reserved, record)
    fits = highest is None or highest.total <= record.total
    too_large = record.ran_out or reserved.total > record.total
    fit = Fit.DOES_NOT_FIT if too_large else Fit.FITS if fits else Fit.MAY_NOT_FIT
    return Prediction(
        gpu_bytes=record.total,
        fit=fit,
        margin=None if record.ran_out else record.total - reserved.total,
        at_peak_allocated=_terms(record.allocated, record),
        at_peak_reserved=reserved,
        highest=highest,
        not_modelled=record.unmodelled,
    )


def _terms(record: TermsRecord, of: PredictionRecord) -> Terms:
    asked = record.tensors + sum(record.workspaces.values()) + sum(record.scratch.values())
    allocated = asked + record.rounding
    reserved = allocated + record.cached
    return Terms(
        tensors=record.tensors,
        workspaces=record.workspaces,
        scratch=record.scratch,
        rounding=record.rounding,
        allocated=allocated,
        cached=record.cached,
        reserved=reserved,
        outside=of.outside,
        libraries=of.libraries,
        total=reserved + of.outside + sum(of.libraries.values()),
    )
