"""What a process has on a GPU beside the memory of PyTorch's allocator: the CUDA context with the kernels in it.

It grows with the chip, and with the kernels that a run loads: since CUDA 11.7 a kernel is loaded when it is first used.
Where all are loaded at once (``CUDA_MODULE_LOADING=EAGER``, or an older CUDA), it is more than 1000 MB
(pytorch/pytorch#107667), which is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ampmem.allocator.settings import MIB


class Context(NamedTuple):
    """The least and the most bytes that the CUDA context is taken to hold."""

    least: int
    most: int


class Reading(NamedTuple):
    """The figures of one of PyTorch's out-of-memory messages, as it prints them.

    What the process has in use and what is allocated are in GiB, rounded to 0.01; what is reserved and not allocated
    (``cached``) is in MiB. What is left is neither: the context.
    """

    in_use: float
    allocated: float
    cached: float

    @property
    def mib(self) -> float:
        """The context in MiB, within 10 MiB."""
        return (self.in_use - self.allocated) * 1024 - self.cached


READINGS: Mapping[str, Sequence[Reading]] = {
    "T4": (
        Reading(14.71, 14.54, 10.14),
        Reading(14.37, 14.20, 59.17),
        Reading(14.74, 14.31, 320.39),
        Reading(10.20, 9.21, 899.87),
        Reading(14.52, 14.06, 330.42),
    ),
    "V100": (
        Reading(31.72, 29.66, 1.68 * 1024),
        Reading(31.54, 28.49, 2.68 * 1024),
        Reading(16.95, 2.10, 14.46 * 1024),
        Reading(15.75, 14.89, 497.13),
    ),
    "A100": (
        Reading(39.12, 25.48, 13.11 * 1024),
        Reading(39.19, 38.61, 102.73),
        Reading(77.89, 55.51, 21.87 * 1024),
        Reading(74.35, 73.25, 615.51),
    ),
    "A10": (
        Reading(22.05, 21.68, 24.24),
        Reading(22.03, 20.51, 1.22 * 1024),
        Reading(22.12, 21.72, 23.99),
        Reading(22.04, 21.75, 15.17),
    ),
    "RTX 3060": (
        Reading(11.66, 11.37, 174.05),
        Reading(11.68, 11.37, 211.54),
        Reading(11.54, 11.34, 105.47),
    ),
    "RTX 3090": (
        Reading(11.79, 11.44, 43.59),
        Reading(23.49, 23.24, 1.17),
        Reading(19.40, 17.97, 1.02 * 1024),
    ),
    "RTX 4060": (
        Reading(7.47, 7.38, 0.35),
        Reading(7.52, 7.29, 74.34),
        Reading(5.73, 4.59, 1.03 * 1024),
    ),
    "RTX 4090": (
        Reading(23.26, 22.19, 656.69),
        Reading(23.48, 23.11, 0.14),
        Reading(22.58, 22.05, 94.18),
        Reading(22.64, 20.64, 1.55 * 1024),
        Reading(23.04, 21.37, 1.22 * 1024),
        Reading(23.46, 22.91, 2.00),
    ),
    "L40S": (
        Reading(44.44, 43.90, 132.19),
        Reading(44.43, 43.68, 251.29),
        Reading(44.40, 43.94, 41.95),
    ),
    "RTX 5090": (
        Reading(31.29, 30.80, 2.80),
        Reading(31.28, 30.76, 33.46),
        Reading(31.33, 30.57, 185.26),
    ),
    "H100": (
        Reading(79.13, 77.91, 648.28),
        Reading(39.75, 39.13, 35.42),
        Reading(79.08, 77.69, 674.48),
        Reading(139.60, 138.14, 824.86),
        Reading(139.20, 2.05, 136.64 * 1024),
    ),
    "B200": (Reading(168.34, 167.64, 4.62),),
}
"""By chip, of processes that were at work and ran out of memory, under torch 2.1 or newer, which prints all three.

Published in public repositories, and found by the capacity that each message names, which tells the GPU. Those of the
RTX 4060 are of a GeForce with 8 GB whose model is not said, those of the A10 may be an A10G's, one of the L40S is an
RTX 6000 Ada's of the same chip, and the H200, of the H100's chip, is with that.
"""

_BEYOND = 0.1
"""How much less and more than the readings it is taken to be."""
_BEYOND_FEW = 0.25
"""The same where there are fewer than three."""
_STEP = 16 * MIB


def context_of(chip: str | None) -> Context:
    """What is assumed for a GPU of ``chip``; of one without readings, from the least of any chip to the most."""
    if chip is None or chip not in READINGS:
        every = [context_of(known) for known in READINGS]
        return Context(min(each.least for each in every), max(each.most for each in every))
    found = [reading.mib * MIB for reading in READINGS[chip]]
    beyond = _BEYOND if len(found) > 2 else _BEYOND_FEW
    least, most = min(found) * (1 - beyond), max(found) * (1 + beyond)
    return Context(int(least // _STEP) * _STEP, int(-(-most // _STEP)) * _STEP)
