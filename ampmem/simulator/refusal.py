"""What is said of a torch that cannot simulate; apart, since it is said when the parts of torch are missing."""

from __future__ import annotations

import torch

from ampmem.errors import UsageError

_CANNOT = (
    "this build of torch ({version}) cannot simulate a CUDA device: {why}. torch 2.13 can, and "
    "CUDA builds from 2.11 on, which need no GPU for it; --device cpu measures on the CPU instead"
)


def refusal(why: object) -> UsageError:
    """The error that says what can simulate; ``why`` in its first line."""
    lines = str(why).strip().splitlines() or [type(why).__name__]
    return UsageError(_CANNOT.format(version=torch.__version__, why=lines[0]))
