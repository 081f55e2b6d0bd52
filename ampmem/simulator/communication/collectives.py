"""What a collective does on paper: each peer has what this rank has, and it is over at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ampmem.patching import added, replace_all
from ampmem.simulator.communication.communicators import Communicators
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import FakeTensor
from ampmem.simulator.private_communication import ALL_GATHERS, FUNCTIONAL, REDUCE_SCATTERS, WAITS, done

c10d = torch.ops.c10d

_RETURN_TENSORS = (
    *ALL_GATHERS,
    *REDUCE_SCATTERS,
    c10d.allreduce_.default,
    c10d.broadcast_.default,
    c10d.scatter_.default,
    c10d.alltoall_.default,
)
"""These return what they were given first, and the work."""
_RETURN_WORK = (
    c10d.allgather_coalesced_.default,
    c10d.allgather_into_tensor_coalesced_.default,
    c10d.allreduce_coalesced_.default,
    c10d.alltoall_base_.default,
    c10d.barrier.default,
    c10d.gather_.default,
    c10d.recv_.default,
    c10d.recv_any_source_.default,
    c10d.reduce_.default,
    c10d.reduce_scatter_tensor_coalesced_.default,
    c10d.send.default,
)


_GATHERS = (*ALL_GATHERS, c10d.gather_.default)
"""What these bring is what this rank has, from each."""
_IN_PLACE = (
    c10d.allreduce_.default,
    c10d.allreduce_coalesced_.default,
    c10d.broadcast_.default,
    c10d.reduce_.default,
    c10d.send.default,
    c10d.barrier.default,
)
"""These leave what was there, or a sum of it. What all others bring is not known."""


class Collectives:
    """Answers the ops of collectives.

    Tensors on the simulated device have no values, so nothing is to do for most of them; what is known of one number
    is kept up. Tensors on the CPU are real, and torch's backend without peers copies what is to be gathered; it does
    not sum, so that is done here.
    """

    def __init__(self, mode: SimulatedMode, communicators: Communicators) -> None:
        self._mode = mode
        self._communicators = communicators

    def install(self) -> Callable[[], None]:
        """Answer from now on; returns what undoes it."""
        answers = self._mode.answers
        with ExitStack() as undo:
            for op in (*_RETURN_TENSORS, *_RETURN_WORK):
                answers[op] = self._answer
            answers.update(dict.fromkeys(WAITS, self._wait))
            answers.update(dict.fromkeys(FUNCTIONAL, self._functional))
            undo.callback(added("answers", "collectives", answers.clear))
            owners = (torch.distributed, torch.distributed.distributed_c10d)
            undo.callback(replace_all(owners, {"all_reduce": self._all_reduce(), "reduce": self._reduce()}))
            return undo.pop_all().close

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not c10d.barrier.default and not any(isinstance(tensor, FakeTensor) for tensor in _tensors(args)):
            return func(*args, **kwargs)
        self._communicators.used(func, args)
        self._flatten(func, args)
        if func not in _IN_PLACE:
            self._fill(list(_tensors(args[0])), list(_tensors(args[1])) if func in _GATHERS else [])
        work = done(_tensors(args[0]))
        return (args[0], work) if func in _RETURN_TENSORS else work

    def _fill(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """``outputs`` have what the one of ``inputs`` has, where that is a number that is known."""
        values = self._mode.values
        known = values.get(inputs[0]) if len(inputs) == 1 and inputs[0].numel() == 1 else None
        for tensor in outputs:
            values.forget(tensor)
            if known is not None:
                values.note(tensor, known)

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        """It returns what it is given. Its meta kernel makes another tensor, which no device does."""
        return args[0] if isinstance(args[0], FakeTensor) else func(*args, **kwargs)

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A collective that returns what it has filled; its meta kernel makes that."""
        if not any(isinstance(tensor, FakeTensor) for tensor in _tensors(args)):
            return func(*args, **kwargs)
        self._communicators.used_by_name(func, args)
        result = self._mode.run(func, args, kwargs)
        for tensor in _tensors(result):
            self._mode.values.forget(tensor)  # one that is filled in place, too
        return result

    def _all_reduce(self) -> Callable[..., Any]:
        """In Python, since an op does not tell what it reduces by."""
        original = torch.distributed.all_reduce

        @functools.wraps(original)
        def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            work = original(tensor, op, group, async_op)
            self._sum_up(tensor, op, group)
            return work

        return all_reduce

    def _reduce(self) -> Callable[..., Any]:
        original = torch.distributed.reduce

        @functools.wraps(original)
        def reduce(
            tensor: Tensor, dst: Any = None, op: Any = ReduceOp.SUM, group: Any = None, *rest: Any, **how: Any
        ) -> Any:
            work = original(tensor, dst, op, group, *rest, **how)
            self._sum_up(tensor, op, group)
            return work

        return reduce

    def _sum_up(self, tensor: Tensor, op: Any, group: Any) -> None:
        """``tensor`` has what ``op`` makes of one like it from each rank."""
        size = torch.distributed.get_world_size(group)
        if size < 1:
            return
        if type(tensor) in (Tensor, torch.nn.Parameter):
            _reduce_alike(tensor, op, size)
        elif isinstance(tensor, FakeTensor) and (known := self._mode.values.get(tensor)) is not None:
            self._mode.values.note(tensor, _reduce_alike(torch.tensor(known, dtype=tensor.dtype), op, size).item())

    def _flatten(self, func: Any, args: Any) -> None:
        """NCCL gathers into one piece, and scatters from one; from lists of tensors it is made for the while."""
        if func is ALL_GATHERS[0] or func is REDUCE_SCATTERS[0]:
            many = args[0] if func is ALL_GATHERS[0] else args[1]
            sizes = [sum(_bytes(tensor) for tensor in tensors) for tensors in many]
            if any(tensor.device.type == self._mode.device_model.label for tensor in _tensors(many)):
                self._mode.device_model.scratch(f"torch.distributed.{func.name()}", [size for size in sizes if size])


def _reduce_alike(tensor: Tensor, op: Any, size: int) -> Tensor:
    """``tensor``, which becomes what ``op`` makes of ``size`` tensors like it."""
    with torch.no_grad():
        if op == ReduceOp.SUM and tensor.dtype != torch.bool:
            tensor.mul_(size)
        elif op == ReduceOp.PRODUCT and tensor.dtype != torch.bool:
            tensor.pow_(size)
        elif op == ReduceOp.BXOR and size % 2 == 0:
            tensor.zero_()
    return tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Any:
    """All tensors in ``value``, lists of lists too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
