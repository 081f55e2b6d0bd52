"""The precision in which the script runs, as seen while its modules run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ampmem.events import ParameterRecord, PrecisionRecord
from ampmem.vocabulary import Precision


@dataclass(slots=True, kw_only=True)
class PrecisionSeen:
    """The autocast states that :meth:`sample` saw on devices of one type."""

    device_type: str
    dtypes: dict[torch.dtype, None] = field(default_factory=dict)
    cache: bool | None = None
    scaler: bool = False
    other: bool = False
    """Whether something other than autocast casts parameters, such as a policy of FSDP2."""
    sampled: bool = False
    """Whether a module ran: autocast inside of compiled code is not seen."""
    compiled: bool = False
    """Whether compiled code ran."""

    def copy(self) -> PrecisionSeen:
        """A copy of the states seen so far."""
        return replace(self, dtypes=dict(self.dtypes))

    def on(self) -> bool:
        """Whether autocast is on. Inside a dispatch mode it is always off, so do not call it there."""
        return torch.is_autocast_enabled(self.device_type)

    def inside(self, dtype: torch.dtype | None, *, cache: bool) -> None:
        """Note a region of autocast inside compiled code."""
        self.dtypes[torch.get_autocast_dtype(self.device_type) if dtype is None else dtype] = None
        self.cache = bool(self.cache) or cache

    def sample(self) -> None:
        """Note autocast's current state."""
        self.sampled = True
        if self.on():
            self.dtypes[torch.get_autocast_dtype(self.device_type)] = None
            self.cache = bool(self.cache) or torch.is_autocast_cache_enabled()


def precision_record(
    seen: PrecisionSeen,
    parameters: Sequence[ParameterRecord],
    *,
    low: bool,
    casts: bool,
    forced: Precision = Precision.AS_IS,
    wrapped: bool = False,
) -> PrecisionRecord:
    """The record of the forced precision, or else of the one seen: ``as-is`` if it is not known to be FP32 or AMP.

    ``low`` says whether any tensor had a type that autocast casts to: if compiled code ran, autocast may be inside it.
    ``casts`` says whether forward has cast a parameter: without autocast, the script did so itself.
    """
    known = seen.sampled and not (seen.other or casts) and not (seen.compiled and low)
    name = forced
    if forced == Precision.AS_IS and seen.dtypes:
        name = Precision.AMP if seen.cache else Precision.AMP_NOCACHE
    elif forced == Precision.AS_IS and known and all(parameter.dtype == "float32" for parameter in parameters):
        name = Precision.FP32
    dtype = next(iter(seen.dtypes), None)
    return PrecisionRecord(
        name=name,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        cache=seen.cache,
        scaler=seen.scaler,
        forced=forced != Precision.AS_IS,
        wrapped=wrapped,
    )
