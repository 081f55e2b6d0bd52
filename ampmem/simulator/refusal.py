"""What is said where no simulation can start; apart, since it is said when the parts of torch are missing."""

from __future__ import annotations

import torch

from ampmem.errors import AmpmemError, UsageError
from ampmem.failure import failure_of

_CANNOT = "this build of torch ({version}) cannot simulate a CUDA device: {why}. {others}{instead}"
_OTHERS = "CPU builds of torch 2.13 can, and CUDA builds from 2.11 on, which need no GPU for it; "
_INSTEAD = "--device cpu measures on the CPU instead"
_OUR_FAULT = (
    "the simulation could not be started with torch {version}: {why}. This is a fault of ampmem's own, and none of the "
    "script's; please report it. {instead}"
)
_TRIED = "2.13."
"""How the version starts whose CPU build can, as it was released: of another 2.13 it says nothing to name that."""


def refusal(why: object) -> UsageError:
    """The error that says that torch lacks something and what can simulate; ``why`` in its first line."""
    lines = str(why).strip().splitlines() or [type(why).__name__]
    others = "" if torch.__version__.startswith(_TRIED) else _OTHERS
    return UsageError(_CANNOT.format(version=torch.__version__, why=lines[0], others=others, instead=_INSTEAD))


def our_fault(error: Exception) -> AmpmemError:
    """The error for an ``error`` that nobody expected while the simulation was started."""
    return AmpmemError(_OUR_FAULT.format(version=torch.__version__, why=failure_of(error).line, instead=_INSTEAD))
