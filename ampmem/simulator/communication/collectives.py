"""Collectives on simulated tensors: done at once, with the memory that NCCL takes from the allocator for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import tree_leaves
from ampmem.simulator.private_parallel import (
    ALL_GATHER_LISTS,
    REDUCE_SCATTER_LISTS,
    WITH_RESULT,
    WITHOUT_RESULT,
    completed,
)

_IN_ONE_PIECE = {ALL_GATHER_LISTS: 0, REDUCE_SCATTER_LISTS: 1}
"""Which argument has lists of tensors that NCCL moves as one tensor of its own."""


def answer(mode: SimulatedMode) -> None:
    """Let ``mode`` answer for them: nobody is there to send anything, so nothing is written."""

    def work(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        lists = _IN_ONE_PIECE.get(func)
        if lists is not None:
            _in_one_piece(mode, func, args[lists])
        return completed([leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)])

    def result_and_work(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0], work(func, args, kwargs)

    mode.answer(dict.fromkeys(WITH_RESULT, result_and_work) | dict.fromkeys(WITHOUT_RESULT, work))


def _in_one_piece(mode: SimulatedMode, func: Any, lists: Sequence[Sequence[Tensor]]) -> None:
    """As ``ProcessGroupNCCL::allgather`` and ``reduce_scatter`` do where all tensors of a list are of one size."""
    for tensors in lists:
        if len({tensor.shape for tensor in tensors}) == 1 and tensors[0].numel():
            size = len(tensors) * tensors[0].numel() * tensors[0].element_size()
            mode.device_model.scratch(str(func.name()), [size])
