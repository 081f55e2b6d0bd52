"""What ``--assume`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampmem.errors import UsageError
from ampmem.vocabulary import Device

if TYPE_CHECKING:
    from ampmem.simulator.assumed import Assumed


def assumed_data(device: Device, assume: tuple[str, ...]) -> Assumed | None:
    """What each ``--assume`` says; ``None`` for a real device. Raises :class:`UsageError` for what cannot be meant."""
    if device != Device.SIMULATED:
        if assume:
            raise UsageError(
                "--assume says what a simulated device takes for granted, so it needs --device sim or --gpu"
            )
        return None
    from ampmem.simulator.assumed import OPTION, assumed_of

    return assumed_of(assume, OPTION)
