"""The memory that a simulated run would need on a GPU, in terms that add up; and where mixed precision breaks even."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ampmem.analysis.jsonable import Name, Signed, like
from ampmem.events import PredictionRecord, Recording, TermsRecord
from ampmem.failure import FailureRecord
from ampmem.names import CUDNN_TRIALS


def break_even(batch_size: int, copies: int, saved: int) -> float | None:
    """The batch size at which autocast saves as many bytes of activations as its copies cost.

    Copies take ``copies`` bytes at any batch size, and activations shrink by ``saved`` bytes at ``batch_size``, in
    proportion to it. ``None`` if autocast saves nothing of the activations, 0.0 if the copies cost nothing.
    """
    if batch_size <= 0 or saved <= 0:
        return None
    return batch_size * copies / saved


def first_saving(batch_size: int, copies: int, saved: int) -> int | None:
    """The first whole batch size above :func:`break_even`, and so the first at which autocast saves; 1 or more."""
    if batch_size <= 0 or saved <= 0:
        return None
    return batch_size * copies // saved + 1


# The memory that a simulated run would need on a GPU, in terms that add up, with bounds where it is unknown.


class Fit(StrEnum):
    """Whether the run fits on the GPU."""

    FITS = "fits"
    MAY_NOT_FIT = "may-not-fit"
    """The run fits with the lower bound of the unknown memory, but not with the upper bound."""
    DOES_NOT_FIT = "does-not-fit"
    NOT_KNOWN = "not-known"
    """The run was not seen to its end; it needs at least the peak until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The memory in use on the device at one instant, in bytes.

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
    """The least that libraries hold outside of the allocator, such as NCCL's buffers."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestPeaks:
    """The peaks with the upper bound of everything that is unknown, in bytes."""

    allocated: int
    reserved: int
    total: int
    bounds: Mapping[Name, int]
    """The largest single request that was assumed, by purpose; for libraries' memory outside of the allocator, its
    sum."""
    outside: int
    """The upper bound of the CUDA context."""
    least_reserved: int | None
    """The lower bound of reserved memory, if unknown buffers come and go between the tensors: a run without them gives
    no lower bound then. ``None`` otherwise. Never below the peak of allocated memory."""
    likely_reserved: int | None
    """The likely reserved memory, under the same condition."""
    unfilled_allocated: int | None = None
    """``allocated`` without the trials of ``torch.backends.cudnn.benchmark``, which may fill the free memory for a
    moment, but never more. ``None`` without such trials."""
    unfilled_reserved: int | None = None
    """``reserved`` without these trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The peaks of a simulated run, and whether they fit on its GPU.

    ``margin`` is the rest of ``gpu_bytes`` at the peak of reserved memory, or of allocated memory if less may be
    reserved (``highest.least_reserved``); ``None`` when a request failed; negative if the memory outside of the
    allocator does not fit. ``allowed`` is the process's limit (``set_per_process_memory_fraction``), ``None`` without
    one; ``margin`` is what is left of it if that is less. ``highest`` is ``None`` if nothing had to be assumed. For a
    run that ``stopped`` early everything is about the part that was seen.
    """

    gpu_bytes: int
    fit: Fit
    margin: Signed | None
    at_peak_allocated: Terms
    at_peak_reserved: Terms
    highest: HighestPeaks | None
    not_modelled: tuple[str, ...]
    stopped: str = ""
    """How far the run was seen, if it stopped early without a failed request; else empty."""
    allowed: int | None = None

    @property
    def limited(self) -> bool:
        """Whether the process's limit leaves less than the device does."""
        return self.allowed is not None and self.allowed - self.most_reserved < self.gpu_bytes - self.most_total

    @property
    def least_reserved(self) -> int:
        """The lower bound of the peak of reserved memory, in bytes."""
        least = None if self.highest is None else self.highest.least_reserved
        return self.at_peak_reserved.reserved if least is None else least

    @property
    def likely_total(self) -> int:
        """The bytes that ``nvidia-smi`` would likely show."""
        likely = None if self.highest is None else self.highest.likely_reserved
        reserved = self.at_peak_reserved.reserved
        return self.at_peak_reserved.total + (0 if likely is None else likely - reserved)

    @property
    def most_allocated(self) -> int:
        """The upper bound of allocated memory in bytes, without cuDNN's trials, which may fill the free memory."""
        found = self.highest
        if found is None:
            return self.at_peak_allocated.allocated
        return found.allocated if found.unfilled_allocated is None else found.unfilled_allocated

    @property
    def most_reserved(self) -> int:
        """The upper bound of reserved memory, in bytes."""
        found = self.highest
        if found is None:
            return self.at_peak_reserved.reserved
        return found.reserved if found.unfilled_reserved is None else found.unfilled_reserved

    @property
    def most_total(self) -> int:
        """The upper bound of the bytes that ``nvidia-smi`` would show."""
        found = self.highest
        return self.at_peak_reserved.total if found is None else found.total - found.reserved + self.most_reserved

    @property
    def filled(self) -> int | None:
        """The most bytes that ``torch.backends.cudnn.benchmark`` may fill for a moment; ``None`` without trials."""
        return None if self.highest is None else self.highest.bounds.get(CUDNN_TRIALS)

    @property
    def least_total(self) -> int:
        """The lower bound of the bytes that ``nvidia-smi`` would show."""
        return self.at_peak_reserved.total - self.at_peak_reserved.reserved + self.least_reserved


_NOT_ENDED = "up to where its recording breaks off"


def until(failure: FailureRecord | None) -> str:
    """How far a run with this ``failure`` was seen; empty without one."""
    return "" if failure is None else f"up to where the script {'was interrupted' if failure.interrupted else 'failed'}"


def prediction_in(recording: Recording) -> Prediction | None:
    """The prediction in a simulated run's recording; ``None`` for a measured run."""
    if recording.prediction is None:
        return None
    stopped = _NOT_ENDED if recording.ended is False else ""
    return prediction_of(recording.prediction, stopped=until(recording.run.failure) or stopped)


def prediction_of(record: PredictionRecord, *, stopped: str = "") -> Prediction:
    """The prediction as terms; ``stopped`` says how far the run was seen, if it stopped early."""
    highest = None
    outside = max(record.outside, record.outside_at_most)
    if record.bounds or record.libraries_at_most or outside > record.outside:
        highest = like(
            HighestPeaks,
            record,
            allocated=record.highest_allocated,
            reserved=record.highest_reserved,
            total=record.highest_reserved + outside + sum(record.libraries_at_most.values()),
            bounds={**record.bounds, **record.libraries_at_most},
            outside=outside,
        )
    reserved, allocated = _terms(record.reserved, record), _terms(record.allocated, record)
    fits = highest is None or highest.total <= record.total
    if record.allowed is not None and highest is not None and highest.reserved > record.allowed:
        fits = False
    surely = reserved.total if record.least_reserved is None else allocated.total - allocated.cached
    left = record.total - surely
    if record.allowed is not None:
        left = min(left, record.allowed - (surely - record.outside - sum(record.libraries.values())))
    too_large = record.ran_out or left < 0
    seen = Fit.NOT_KNOWN if stopped else Fit.FITS if fits else Fit.MAY_NOT_FIT
    return Prediction(
        gpu_bytes=record.total,
        fit=Fit.DOES_NOT_FIT if too_large else seen,
        margin=None if record.ran_out else left,
        at_peak_allocated=allocated,
        at_peak_reserved=reserved,
        highest=highest,
        not_modelled=record.unmodelled,
        stopped="" if record.ran_out else stopped,
        allowed=record.allowed,
    )


def _terms(record: TermsRecord, of: PredictionRecord) -> Terms:
    asked = record.tensors + sum(record.workspaces.values()) + sum(record.scratch.values())
    allocated = asked + record.rounding
    reserved = allocated + record.cached
    return like(
        Terms,
        record,
        allocated=allocated,
        reserved=reserved,
        outside=of.outside,
        libraries=of.libraries,
        total=reserved + of.outside + sum(of.libraries.values()),
    )
