"""What a collective does on paper: each peer has what this rank has, and it is over at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ampmem.patching import added, replace_all
from ampmem.simulator.communication.communicators import Communicators
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private.communication import ALL_GATHERS, FUNCTIONAL, REDUCE_SCATTERS, WAITS, done
from ampmem.simulator.private.general import FakeTensor

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
_LEAVE = (c10d.send.default, c10d.barrier.default, c10d.broadcast_.default)
"""These write nothing; what all others bring is not known. Nor is what a script's broadcast brings to a rank that does
not send: that is seen in Python, as C++ sends what DDP has worked out on each rank alike."""
_SAME = (
    ReduceOp.SUM,
    ReduceOp.PRODUCT,
    ReduceOp.AVG,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)
"""What these make of the same from each rank is that: sums and products of yes-or-nos, an exclusive or of an odd
number of ranks."""


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
        former = dict(answers)

        def put_back() -> None:
            answers.clear()
            answers.update(former)

        with ExitStack() as undo:
            for op in (*_RETURN_TENSORS, *_RETURN_WORK):
                answers[op] = self._answer
            answers.update(dict.fromkeys(WAITS, self._wait))
            answers.update(dict.fromkeys(FUNCTIONAL, self._functional))
            undo.callback(added("answers", "collectives", put_back))
            reductions = {
                "all_reduce": self._all_reduce(),
                "all_reduce_coalesced": self._all_reduce_coalesced(),
                "reduce": self._reduce(),
            }
            undo.callback(replace_all((dist, dist.distributed_c10d), reductions))
            undo.callback(replace_all((dist.ProcessGroup,), {"broadcast": self._broadcast()}))
            return undo.pop_all().close

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not c10d.barrier.default and not any(isinstance(tensor, FakeTensor) for tensor in _tensors(args)):
            return func(*args, **kwargs)
        self._communicators.used(func, args)
        self._flatten(func, args)
        if func not in _LEAVE:
            self._fill(list(_tensors(args[0])), list(_tensors(args[1])) if func in _GATHERS else [])
        work = done(_tensors(args[0]))
        return (args[0], work) if func in _RETURN_TENSORS else work

    def _fill(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """``outputs`` have what the one of ``inputs`` has, where that is known."""
        known = self._mode.known.of(inputs[0]) if len(inputs) == 1 else None
        known = known if known is None else known.clone()
        for tensor in outputs:
            self._mode.forget(tensor.untyped_storage())
            if known is not None:
                self._mode.known.note(tensor, known)

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
            self._mode.forget(tensor.untyped_storage())  # one that is filled in place, too
        return result

    def _broadcast(self) -> Callable[..., Any]:
        original = dist.ProcessGroup.broadcast

        @functools.wraps(original)
        def broadcast(group: Any, tensors: Any, *how: Any, **named: Any) -> Any:
            work = original(group, tensors, *how, **named)
            root = (*how, named.get("opts", named.get("root", 0)))[0]
            if getattr(root, "rootRank", root) != group.rank():
                self._fill([tensor for tensor in _tensors(tensors) if isinstance(tensor, FakeTensor)], [])
            return work

        return broadcast

    def _all_reduce(self) -> Callable[..., Any]:
        """In Python, since an op does not tell what it reduces by."""
        original = dist.all_reduce

        @functools.wraps(original)
        def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            known = self._known(tensor)
            work = original(tensor, op, group, async_op)
            self._sum_up(tensor, known, op, group)
            return work

        return all_reduce

    def _all_reduce_coalesced(self) -> Callable[..., Any]:
        original = dist.all_reduce_coalesced

        @functools.wraps(original)
        def all_reduce_coalesced(
            tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            several = list(_tensors(tensors))
            known = [self._known(tensor) for tensor in several]
            work = original(tensors, op, group, async_op)
            for tensor, each in zip(several, known, strict=True):
                self._sum_up(tensor, each, op, group)
            return work

        return all_reduce_coalesced

    def _reduce(self) -> Callable[..., Any]:
        original = dist.reduce

        @functools.wraps(original)
        def reduce(
            tensor: Tensor,
            dst: Any = None,
            op: Any = ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
            group_dst: Any = None,
        ) -> Any:
            known = self._known(tensor)
            work = original(tensor, dst, op, group, async_op, group_dst)
            arrives = dist.get_rank() == dst if group_dst is None else dist.get_rank(group) == group_dst
            if arrives or not isinstance(tensor, FakeTensor):
                self._sum_up(tensor, known, op, group)
            return work

        return reduce

    def _known(self, tensor: Any) -> Tensor | None:
        """A copy of what ``tensor`` on the device holds; the op makes that unknown."""
        known = self._mode.known.of(tensor) if isinstance(tensor, FakeTensor) else None
        return None if known is None else known.clone()

    def _sum_up(self, tensor: Tensor, known: Tensor | None, op: Any, group: Any) -> None:
        """``tensor``, which held ``known``, has what ``op`` makes of one like it from each rank."""
        size = dist.get_world_size(group)
        if size < 1:
            return
        if type(tensor) in (Tensor, torch.nn.Parameter):
            _reduce_alike(tensor, op, size)
        elif known is not None and _reduce_alike(known, op, size):
            self._mode.known.note(tensor, known)

    def _flatten(self, func: Any, args: Any) -> None:
        """NCCL gathers into one piece, and scatters from one; from lists of tensors it is made for the while."""
        if func is ALL_GATHERS[0] or func is REDUCE_SCATTERS[0]:
            many = args[0] if func is ALL_GATHERS[0] else args[1]
            sizes = [sum(_bytes(tensor) for tensor in tensors) for tensors in many]
            if any(tensor.device.type == self._mode.device_model.label for tensor in _tensors(many)):
                self._mode.device_model.scratch(f"torch.distributed.{func.name()}", [size for size in sizes if size])


def _reduce_alike(tensor: Tensor, op: Any, size: int) -> bool:
    """Make of ``tensor`` what ``op`` makes of ``size`` tensors like it; whether that is how to do it."""
    with torch.no_grad():
        if op == ReduceOp.SUM and tensor.dtype != torch.bool:
            tensor.mul_(size)
        elif op == ReduceOp.PRODUCT and tensor.dtype != torch.bool:
            tensor.pow_(size)
        elif op == ReduceOp.BXOR and size % 2 == 0:
            tensor.zero_()
        else:
            return any(op == same for same in _SAME)
    return True


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Any:
    """All tensors in ``value``, lists of lists too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
