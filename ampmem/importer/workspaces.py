"""Which blocks are workspaces of libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ampmem.events import Fact, Phase
from ampmem.importer.claims import Claim
from ampmem.importer.frames import Purpose
from ampmem.importer.replay import ALIVE, BEFORE
from ampmem.importer.trace import Trace

CUBLAS_WORKSPACE: Final = 8_519_680
"""What cuBLAS asks for by default on GPUs older than sm_90; nothing else happens to have this size."""

LARGE_CUBLAS_WORKSPACE: Final = 33_554_432
"""What it asks for from sm_90 on; a weight may have this size, too."""

_PRODUCTS: Final = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})


def earlier_workspaces(trace: Trace, gradients: Sequence[int]) -> list[int]:
    """Those of cuBLAS from before the trace: by a size of their own, or since a product of the trace needs one."""
    sure = _throughout(trace, CUBLAS_WORKSPACE)
    if sure:
        return sure
    blocks = _throughout(trace, LARGE_CUBLAS_WORKSPACE)
    # What has a gradient is a parameter.
    spare = len(blocks) - trace.most_at_once(gradients).get(LARGE_CUBLAS_WORKSPACE, 0)
    missing = sum(_multiplies_with_an_earlier_one(trace, engine) for engine in (False, True))
    return blocks[len(blocks) - max(min(spare, missing), 0) :]


def workspaces_by_size(trace: Trace) -> list[int]:
    """Those of cuBLAS that the trace has made without C++ frames to say so: each thread makes one, and keeps it."""
    if trace.native:
        return []
    kept = [index for index, each in enumerate(trace.allocations) if each.born != BEFORE and each.died == ALIVE]
    sure = [index for index in kept if trace.allocations[index].bytes == CUBLAS_WORKSPACE]
    if sure or LARGE_CUBLAS_WORKSPACE in trace.standing:
        return sure
    large = [index for index in kept if trace.allocations[index].bytes == LARGE_CUBLAS_WORKSPACE]
    phases = [trace.course.phase[trace.allocations[index].born] for index in large]
    # More than one in a thread are something else.
    alone = len(set(phases)) == len(phases) and {*phases} <= {Phase.FORWARD, Phase.BACKWARD}
    return large if alone else []


def workspace_claims(trace: Trace, concluded: Sequence[int]) -> Iterator[Claim]:
    """Those that a frame names, and the ``concluded`` ones."""
    for index, allocation in enumerate(trace.allocations):
        if allocation.born != BEFORE and trace.birth(allocation).purpose is Purpose.WORKSPACE:
            yield Claim(index, Fact.WORKSPACE, "", True)
    for index in concluded:
        yield Claim(index, Fact.WORKSPACE, "", False)


def _throughout(trace: Trace, size: int) -> list[int]:
    return [index for index in trace.standing.get(size, ()) if trace.allocations[index].throughout]


def _multiplies_with_an_earlier_one(trace: Trace, engine: bool) -> bool:
    """Whether a thread multiplies matrices and makes no workspace that stays; each thread has one of its own."""
    multiplies = False
    for allocation in trace.allocations:
        if allocation.born == BEFORE or (trace.course.phase[allocation.born] == Phase.BACKWARD) != engine:
            continue
        birth = trace.birth(allocation)
        if birth.purpose is Purpose.WORKSPACE and allocation.died == ALIVE:
            return False
        multiplies |= birth.op in _PRODUCTS
    return multiplies
