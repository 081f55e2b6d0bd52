"""What a simulated run would take of a GPU's memory, in terms that add up; and where mixed precision breaks even."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ampmem.analysis.jsonable import Name, Signed
from ampmem.events import PredictionRecord, Recording, TermsRecord
from ampmem.names import CUDNN_TRIALS


def break_even(batch_size: int, copies: int, saved: int) -> float | None:
    """The batch size at which autocast saves as much as ``copies`` bytes, when it saves ``saved`` at ``batch_size``.

    ``None`` where no batch size pays: autocast saves nothing of the activations. 0.0 where copies cost nothing.
    """
    if batch_size <= 0 or saved <= 0:
        return None
    return batch_size * copies / saved


def first_saving(batch_size: int, copies: int, saved: int) -> int | None:
    """The first whole batch size above :func:`break_even`, and so the first at which autocast saves; 1 or more."""
    if batch_size <= 0 or saved <= 0:
        return None
    return batch_size * copies // saved + 1


# What a simulated run would take of a GPU's memory, in terms that add up, and what is not known of it.


class Fit(StrEnum):
    """Whether the run fits on the GPU."""

    FITS = "fits"
    MAY_NOT_FIT = "may-not-fit"
    """Without what is not known it fits; with the most that is assumed for that it does not."""
    DOES_NOT_FIT = "does-not-fit"
    NOT_KNOWN = "not-known"
    """The run was not seen to its end: it needs so much at least."""


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
    """The largest single request that was assumed, by what it is for; of what libraries hold outside, all."""
    outside: int
    """The most that is assumed for the CUDA context."""
    least_reserved: int | None
    """The least that is reserved, where what is not known comes and goes between the tensors: the run without it
    reserves no least amount then. ``None`` elsewhere. Never below the peak of allocated memory."""
    likely_reserved: int | None
    """What is reserved with what is likely, likewise."""
    unfilled_allocated: int | None = None
    """``allocated`` without the trials of ``torch.backends.cudnn.benchmark``, which may take all that is free for a
    moment, and never more. ``None`` where there were none."""
    unfilled_reserved: int | None = None
    """``reserved`` without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The peaks of a simulated run, and whether its GPU has that much.

    ``margin`` is what is left of ``gpu_bytes`` at the peak of reserved memory, or of allocated memory where what is
    reserved may be less (``highest.least_reserved``); ``None`` when a request failed; below 0 where what is outside of
    the allocator does not fit beside it. ``allowed`` is what the process may take
    (``set_per_process_memory_fraction``), and ``margin`` what is left of that where it is less; ``None`` without such
    a limit. ``highest`` is ``None`` where nothing had to be assumed. Of a run that ``stopped`` before its end all is
    that of the part that was seen.
    """

    gpu_bytes: int
    fit: Fit
    margin: Signed | None
    at_peak_allocated: Terms
    at_peak_reserved: Terms
    highest: HighestPeaks | None
    not_modelled: tuple[str, ...]
    stopped: str = ""
    """Up to where the run was seen, where it did not come to its end and no request failed; else empty."""
    allowed: int | None = None

    @property
    def limited(self) -> bool:
        """Whether what the process may take is the least that is left, and not what the device has."""
        return self.allowed is not None and self.allowed - self.most_reserved < self.gpu_bytes - self.most_total

    @property
    def least_reserved(self) -> int:
        """The least peak of reserved memory."""
        least = None if self.highest is None else self.highest.least_reserved
        return self.at_peak_reserved.reserved if least is None else least

    @property
    def likely_total(self) -> int:
        """What ``nvidia-smi`` would likely show."""
        likely = None if self.highest is None else self.highest.likely_reserved
        reserved = self.at_peak_reserved.reserved
        return self.at_peak_reserved.total + (0 if likely is None else likely - reserved)

    @property
    def most_allocated(self) -> int:
        """The highest peak of allocated memory, without what may take all that is free."""
        found = self.highest
        if found is None:
            return self.at_peak_allocated.allocated
        return found.allocated if found.unfilled_allocated is None else found.unfilled_allocated

    @property
    def most_reserved(self) -> int:
        """The most reserved memory, in bytes."""
        found = self.highest
        if found is None:
            return self.at_peak_reserved.reserved
        return found.reserved if found.unfilled_reserved is None else found.unfilled_reserved

    @property
    def most_total(self) -> int:
        """The most that ``nvidia-smi`` would show, in bytes."""
        found = self.highest
        return self.at_peak_reserved.total if found is None else found.total - found.reserved + self.most_reserved

    @property
    def filled(self) -> int | None:
        """Bytes that ``torch.backends.cudnn.benchmark`` may take for a moment, of those that are free, at most."""
        return None if self.highest is None else self.highest.bounds.get(CUDNN_TRIALS)

    @property
    def least_total(self) -> int:
        """The least that ``nvidia-smi`` would show, in bytes."""
        return self.at_peak_reserved.total - self.at_peak_reserved.reserved + self.least_reserved


STOPPED = "up to where the script failed"
_NOT_ENDED = "up to where its recording breaks off"


def prediction_in(recording: Recording) -> Prediction | None:
    """The prediction in a simulated run's recording; ``None`` for a run that was measured."""
    if recording.prediction is None:
        return None
    stopped = _NOT_ENDED if recording.ended is False else ""
    return prediction_of(recording.prediction, stopped=STOPPED if recording.run.failure is not None else stopped)


def prediction_of(record: PredictionRecord, *, stopped: str = "") -> Prediction:
    """The prediction in its terms; ``stopped`` says up to where the run was seen that did not come to its end."""
    highest = None
    outside = max(record.outside, record.outside_at_most)
    if record.bounds or record.libraries_at_most or outside > record.outside:
        highest = HighestPeaks(
            allocated=record.highest_allocated,
            reserved=record.highest_reserved,
            total=record.highest_reserved + outside + sum(record.libraries_at_most.values()),
            bounds={**record.bounds, **record.libraries_at_most},
            least_reserved=record.least_reserved,
            likely_reserved=record.likely_reserved,
            outside=outside,
            unfilled_allocated=record.unfilled_allocated,
            unfilled_reserved=record.unfilled_reserved,
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
