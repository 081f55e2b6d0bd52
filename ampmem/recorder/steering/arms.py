"""Which precision mode the script runs in, as seen while its modules run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ampmem.events import ArmRecord, ParameterRecord
from ampmem.vocabulary import Arm


@dataclass(slots=True, kw_only=True)
class ArmSeen:
    """What :meth:`sample` met so far, on devices of one type."""

    device_type: str
    dtypes: dict[torch.dtype, None] = field(default_factory=dict)
    cache: bool | None = None
    scaler: bool = False
    other: bool = False
    """Whether parameters are cast by something other than autocast, as by a policy of FSDP2's."""

    def copy(self) -> ArmSeen:
        """All of this, as it is now."""
        return replace(self, dtypes=dict(self.dtypes))

    def on(self) -> bool:
        """Whether autocast is on. Not to be asked inside a dispatch mode: there it is always off."""
        return torch.is_autocast_enabled(self.device_type)

    def sample(self) -> None:
        """Note autocast's state now."""
        if self.on():
            self.dtypes[torch.get_autocast_dtype(self.device_type)] = None
            self.cache = bool(self.cache) or torch.is_autocast_cache_enabled()


def arm_record(
    seen: ArmSeen, parameters: Sequence[ParameterRecord], *, forced: Arm = Arm.AS_IS, wrapped: bool = False
) -> ArmRecord:
    """Name what was forced, or else what was seen: ``as-is`` when neither FP32 nor autocast describes it."""
    name = forced
    if forced == Arm.AS_IS and seen.dtypes:
        name = Arm.AMP if seen.cache else Arm.AMP_NOCACHE
    elif forced == Arm.AS_IS and not seen.other and all(parameter.dtype == "float32" for parameter in parameters):
        name = Arm.FP32
    dtype = next(iter(seen.dtypes), None)
    return ArmRecord(
        name=name,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        cache=seen.cache,
        scaler=seen.scaler,
        forced=forced != Arm.AS_IS,
        wrapped=wrapped,
    )
