"""``torch.distributed`` without peers: process groups, collectives of tensors, and collectives of objects.

Each simulated peer has the same data as this rank, and every collective completes at once. Torch would send objects as
bytes through the device, which has no values here, so they are passed on directly.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ampmem.patching import Undo, added, in_place_of, replace_all, undone_together
from ampmem.simulator.communication.nccl import Communicators, Connections
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import communication as private
from ampmem.simulator.private.general import FakeTensor
from ampmem.simulator.where import stop
from ampmem.simulator.world import World

_Names: TypeAlias = "weakref.WeakKeyDictionary[Any, str]"
"""The backend that the script asked for, by process group."""
_NCCL = (2, 27, 5)
"""The NCCL version that scripts see, for those that require a minimum."""
_DEFAULT = "cpu:gloo,cuda:nccl"
"""Torch's backends if a script names none."""
_NO_GROUP = (
    "the script created no process group, so only one process was simulated. Start it with torchrun, or call "
    "init_process_group"
)


@undone_together
def install(world: World, device: SimulatedDevice) -> Iterator[Undo]:
    """Let the script make process groups of ``world``; the returned undo also destroys those that are left."""
    distributed = torch.distributed
    owners = (distributed, distributed.distributed_c10d)
    # Weakly, so that a process group can die as it would without ampmem.
    named: _Names = weakref.WeakKeyDictionary()
    own = {
        "init_process_group": functools.partial(_init_process_group, world, named, device),
        "new_group": functools.partial(_new_group, named),
        "get_backend": functools.partial(_get_backend, named),
    }
    patches = {name: in_place_of(getattr(distributed, name), function) for name, function in own.items()}
    yield _end
    if world.size > 1:
        device.warn(_NO_GROUP)  # retracted when the script creates a process group
    yield replace_all(owners, patches)
    yield replace_all((distributed,), {"is_nccl_available": lambda: True})
    yield replace_all((torch.cuda.nccl,), {"version": lambda: _NCCL})
    # The mesh's module imports these functions by name, and creates the default group if the script has not.
    meshes = {name: patches[name] for name in ("init_process_group", "new_group")}
    yield replace_all((distributed.device_mesh,), meshes)


def _init_process_group(
    world: World,
    named: _Names,
    device: SimulatedDevice,
    original: Callable[..., None],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *_: Any,
    **__: Any,
) -> None:
    if world_size not in (-1, world.size):
        raise stop(
            f"the script starts a process group of {world_size} ranks, but {world.size} are simulated; use "
            f"--world-size {world_size}, or let the script read WORLD_SIZE"
        )
    if rank not in (-1, world.rank):
        raise stop(
            f"the script starts as rank {rank}, but rank {world.rank} is simulated; use --rank {rank}, or let the "
            "script read RANK"
        )
    original(private.FAKE, store=private.FakeStore(), world_size=world.size, rank=world.rank)
    device.retract(_NO_GROUP)
    named[dist.group.WORLD] = str(backend or _DEFAULT)


def _new_group(
    named: _Names,
    original: Callable[..., Any],
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: Any = None,
    device_id: Any = None,
    **how: Any,
) -> Any:
    made = original(ranks, group_desc=group_desc, **how)
    if isinstance(made, dist.ProcessGroup):
        named[made] = str(backend or named.get(dist.group.WORLD, _DEFAULT))
    return made


def _get_backend(named: _Names, original: Callable[..., str], group: Any = None) -> str:
    """The backend that the script asked for: it may decide by it."""
    found = original(group)
    name = named.get(group or dist.group.WORLD, "nccl")
    return dist.Backend("nccl" if "nccl" in name else name) if found == private.FAKE else found


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


c10d = torch.ops.c10d

_RETURN_TENSORS = (
    *private.ALL_GATHERS,
    *private.REDUCE_SCATTERS,
    c10d.allreduce_.default,
    c10d.broadcast_.default,
    c10d.scatter_.default,
    c10d.alltoall_.default,
)
"""Collectives that return their first argument, and the work."""
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


_GATHERS = (*private.ALL_GATHERS, c10d.gather_.default)
"""Collectives that bring this rank's own data from each peer."""
_LEAVE = (c10d.send.default, c10d.barrier.default, c10d.broadcast_.default)
"""Collectives that write nothing; what all others bring is unknown.

A script's broadcast to a receiving rank is unknown, too, but that is handled in Python, because C++ broadcasts what DDP
computes alike on each rank.
"""
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
"""Reductions that leave equal inputs from all ranks as they are.

That includes sums and products of booleans, and xor of an odd number of ranks.
"""


class Collectives:
    """Runs the ops of collectives.

    Tensors on the simulated device have no values, so most collectives do nothing; known single numbers are kept up to
    date. Tensors on the CPU are real, and torch's fake backend copies what is to be gathered; it does not sum, so that
    is done here.
    """

    def __init__(self, mode: SimulatedMode, communicators: Communicators) -> None:
        self._mode = mode
        self._communicators = communicators

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Handle collectives from now on; returns the undo."""
        answers = self._mode.answers
        former = dict(answers)

        def put_back() -> None:
            answers.clear()
            answers.update(former)

        for op in (*_RETURN_TENSORS, *_RETURN_WORK):
            answers[op] = self._answer
        answers.update(dict.fromkeys(private.WAITS, self._wait))
        answers.update(dict.fromkeys(private.FUNCTIONAL, self._functional))
        yield added("answers", "collectives", put_back)
        # Patched in Python, because the ops do not show the reduction.
        reductions = {
            "all_reduce": in_place_of(dist.all_reduce, self._all_reduce),
            "all_reduce_coalesced": in_place_of(dist.all_reduce_coalesced, self._all_reduce_coalesced),
            "reduce": in_place_of(dist.reduce, self._reduce),
        }
        yield replace_all((dist, dist.distributed_c10d), reductions)
        broadcast = in_place_of(dist.ProcessGroup.broadcast, self._broadcast)
        yield replace_all((dist.ProcessGroup,), {"broadcast": broadcast})

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Tensors on the CPU are real: torch's fake backend copies them. A barrier has no tensors to tell by.
        if func is not c10d.barrier.default and not any(isinstance(tensor, FakeTensor) for tensor in _tensors(args)):
            return func(*args, **kwargs)
        self._communicators.used(func, args)
        self._flatten(func, args)
        if func not in _LEAVE:
            self._fill(list(_tensors(args[0])), list(_tensors(args[1])) if func in _GATHERS else [])
        work = private.done(_tensors(args[0]))
        return (args[0], work) if func in _RETURN_TENSORS else work

    def _fill(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Set ``outputs`` to the values of the single tensor in ``inputs``, if known."""
        known = self._known(inputs[0]) if len(inputs) == 1 else None
        for tensor in outputs:
            self._mode.forget(tensor.untyped_storage())
            if known is not None:
                self._mode.known.note(tensor, known)

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the argument itself. The meta kernel makes another tensor, which no device does."""
        return args[0] if isinstance(args[0], FakeTensor) else func(*args, **kwargs)

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a functional collective, whose meta kernel makes the output."""
        if not any(isinstance(tensor, FakeTensor) for tensor in _tensors(args)):
            return func(*args, **kwargs)
        self._communicators.used_by_name(func, args)
        result = self._mode.run(func, args, kwargs)
        for tensor in _tensors(result):
            self._mode.forget(tensor.untyped_storage())  # a functional collective may also write in place
        return result

    def _broadcast(self, original: Any, group: Any, tensors: Any, *how: Any, **named: Any) -> Any:
        work = original(group, tensors, *how, **named)
        root = (*how, named.get("opts", named.get("root", 0)))[0]
        if getattr(root, "rootRank", root) != group.rank():
            self._fill([tensor for tensor in _tensors(tensors) if isinstance(tensor, FakeTensor)], [])
        return work

    def _all_reduce(
        self, original: Any, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        known = self._known(tensor)
        work = original(tensor, op, group, async_op)
        self._sum_up(tensor, known, op, group)
        return work

    def _all_reduce_coalesced(
        self, original: Any, tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        several = list(_tensors(tensors))
        known = [self._known(tensor) for tensor in several]
        work = original(tensors, op, group, async_op)
        for tensor, each in zip(several, known, strict=True):
            self._sum_up(tensor, each, op, group)
        return work

    def _reduce(
        self,
        original: Any,
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

    def _known(self, tensor: Any) -> Tensor | None:
        """A copy of the known values of ``tensor`` on the device, which the op makes unknown."""
        known = self._mode.known.of(tensor) if isinstance(tensor, FakeTensor) else None
        return None if known is None else known.clone()

    def _sum_up(self, tensor: Tensor, known: Tensor | None, op: Any, group: Any) -> None:
        """Set ``tensor``, whose values were ``known``, to the result of ``op`` over equal tensors from all ranks."""
        size = dist.get_world_size(group)
        if size < 1:
            return
        # A real tensor: the fake backend has left this rank's own values in it.
        if type(tensor) in (Tensor, torch.nn.Parameter):
            _reduce_alike(tensor, op, size)
        elif known is not None and _reduce_alike(known, op, size):
            self._mode.known.note(tensor, known)

    def _flatten(self, func: Any, args: Any) -> None:
        """Allocate the flat tensor that NCCL gathers into, or scatters from, for lists of tensors."""
        if func is private.ALL_GATHERS[0] or func is private.REDUCE_SCATTERS[0]:
            many = args[0] if func is private.ALL_GATHERS[0] else args[1]
            sizes = [sum(_bytes(tensor) for tensor in tensors) for tensors in many]
            if any(tensor.device.type == self._mode.device_model.label for tensor in _tensors(many)):
                self._mode.device_model.scratch(f"torch.distributed.{func.name()}", [size for size in sizes if size])


def _reduce_alike(tensor: Tensor, op: Any, size: int) -> bool:
    """Reduce ``tensor`` in place as ``size`` equal tensors; ``False`` if ``op`` cannot be computed so."""
    with torch.no_grad():
        # Of equal values a sum is a multiple, a product a power, and an even number of them cancels under xor.
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
    """All tensors in ``value``, including nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


_SIZE = 8
"""Bytes of the number for the length of a pickled object."""


class Objects:
    """Collectives of objects: each peer has an object equal to this rank's."""

    def __init__(self, device: SimulatedDevice, communicators: Communicators) -> None:
        self._device = device
        self._communicators = communicators

    def install(self) -> Callable[[], None]:
        """Replace torch's functions; returns the undo."""
        among_all = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
        names = (*among_all, "send_object_list", "recv_object_list", "monitored_barrier")
        return replace_all((dist, dist.distributed_c10d), {name: getattr(self, name) for name in names})

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """``all_gather_object``: each peer has an object equal to ``obj``."""
        if _outside(group):
            return
        count = dist.get_world_size(group)
        data = pickle.dumps(obj)
        self._through_the_device("all_gather_object", group, [len(data), _SIZE, _SIZE * count, len(data) * count])
        for i in range(count):
            # Each peer's object is one of its own, as if it had come from another process.
            object_list[i] = pickle.loads(data)

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, dst: Any = None, group: Any = None, **where: Any
    ) -> None:
        """``gather_object``: each peer sends an object equal to ``obj``."""
        if _outside(group):
            return
        here = dist.get_rank() == _peer(dst, where.get("group_dst"), group)
        count = dist.get_world_size(group)
        data = pickle.dumps(obj)
        sizes = [len(data), _SIZE, _SIZE * count]
        self._through_the_device("gather_object", group, [*sizes, len(data) * count] if here else sizes)
        if here and object_gather_list is not None:
            for i in range(count):
                object_gather_list[i] = pickle.loads(data)

    def broadcast_object_list(
        self, object_list: Sequence[Any], src: Any = None, group: Any = None, device: Any = None, **where: Any
    ) -> None:
        """``broadcast_object_list``: a receiving rank gets the objects that it passes."""
        if _outside(group):
            return
        source = _peer(src, where.get("group_src"), group)
        if dist.get_rank() != source:
            self._device.assume(
                f"assumed: Python objects broadcast by rank {source} are those that rank {dist.get_rank()} had in "
                "their place"
            )
        sizes = [len(pickle.dumps(item)) for item in object_list]
        self._through_the_device("broadcast_object_list", group, [*sizes, _SIZE * len(sizes), sum(sizes)], device)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: Any = None,
        group: Any = None,
        **where: Any,
    ) -> None:
        """``scatter_object_list``; refused on a rank that only receives, since its objects are unknown."""
        if _outside(group):
            return
        source = _peer(src, where.get("group_src"), group)
        if dist.get_rank() != source or scatter_object_input_list is None:
            raise stop(
                f"rank {dist.get_rank()} is simulated alone, so the objects that rank {source} scatters are unknown; "
                f"use --rank {source}"
            )
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]

    def send_object_list(self, object_list: Sequence[Any], *_: Any, **__: Any) -> None:
        """Send nothing: the receiver does not exist."""

    def recv_object_list(self, object_list: list[Any], src: Any = None, *_: Any, **__: Any) -> int:
        """Return the objects that this rank passes."""
        self._device.assume("assumed: received Python objects are those that this rank had in their place")
        return 0 if src is None else int(src)

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Return at once: no rank is missing."""

    def _through_the_device(self, name: str, group: Any, sizes: Sequence[int], device: Any = None) -> None:
        """Allocate the bytes that NCCL sends from the device and receives on it."""
        on_device = (
            dist.get_backend(group) == dist.Backend.NCCL if device is None else torch.device(device).type != "cpu"
        )
        if on_device:
            self._communicators.note(group or dist.group.WORLD, Connections.RING)
            self._device.scratch(f"torch.distributed.{name}", [size for size in sizes if size])


def _outside(group: Any) -> bool:
    return bool(dist.get_rank(group) < 0)


def _peer(number: Any, in_group: Any, group: Any) -> int:
    """The global rank that the script means."""
    group = group or dist.group.WORLD
    if in_group is not None:
        return int(dist.get_global_rank(group, in_group))
    if number is not None:
        return int(number)
    return int(dist.get_global_rank(group, 0))
