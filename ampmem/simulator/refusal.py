"""Errors for when no simulation can start; separate, because they are needed when parts of torch are missing."""

from __future__ import annotations

import torch

from ampmem.errors import AmpmemError, UsageError
from ampmem.failure import failure_of

_CANNOT = "this build of torch ({version}) cannot simulate a CUDA device: {why}. {others}{instead}"
_OTHERS = "CPU builds of torch 2.13 can, and CUDA builds from 2.11 on, which need no GPU for it; "
_INSTEAD = "--device cpu measures on the CPU instead"
_OUR_FAULT = (
    "the simulation could not be started with torch {version}: {why}. This is an error inside ampmem, not in the "
    "script; please report it. {instead}"
)
_TRIED = "2.13."
"""Prefix of the version whose released CPU build can simulate; in another 2.13 the error does not name it."""


def refusal(why: object) -> UsageError:
    """The error that torch lacks something, and which torch can simulate; its first line has ``why``."""
    lines = str(why).strip().splitlines() or [type(why).__name__]
    others = "" if torch.__version__.startswith(_TRIED) else _OTHERS
    return UsageError(_CANNOT.format(version=torch.__version__, why=lines[0], others=others, instead=_INSTEAD))


def our_fault(error: Exception) -> AmpmemError:
    """The error for an unexpected ``error`` while the simulation was started."""
    return AmpmemError(_OUR_FAULT.format(version=torch.__version__, why=failure_of(error).line, instead=_INSTEAD))
