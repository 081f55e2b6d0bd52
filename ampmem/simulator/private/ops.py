"""The private parts of torch that say what an op is and what was written, beside those in ``general.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from ampmem.patching import added

PRODUCT = torch.ops.aten._unsafe_view.default
"""The last op of a matrix product of more than two dimensions. Since 0.4."""


KERNELS_OF_CUDA = ("aten::_fused_rms_norm", "aten::silu_backward", "aten::mish_backward")
"""The ops that CUDA has a kernel of its own for, although they could be run as several ops: from 2.11 to 2.15."""


@functools.cache
def is_composite(func: Any, device: str = "cuda") -> bool:
    """Whether ``func`` is run as several ops on a device of that type too. The question can be asked since 1.10."""
    if not isinstance(func, torch._ops.OpOverload) or not _has_kernel(func.name(), "CompositeImplicitAutograd"):
        return False
    return func.name() not in KERNELS_OF_CUDA if device == "cuda" else not _has_kernel(func.name(), device.upper())


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def kernels_of_cuda() -> Callable[[], None]:
    """Let autograd see that CUDA has kernels for :data:`KERNELS_OF_CUDA`, in builds without; returns what undoes it.

    Without a kernel autograd differentiates the parts of an op, and keeps what each of them needs. The kernels that
    are put in place never run: the mode is above them. ``Library`` is there since 1.8, ``_destroy`` since 2.1.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in KERNELS_OF_CUDA:
        if not _has_kernel(name, "CUDA"):
            library.impl(name.removeprefix("aten::"), _never, "CUDA")
    return added("torch.library", "kernels of CUDA", library._destroy)


def _never(*_: Any) -> Any:
    raise RuntimeError("unreachable")


@functools.cache
def is_higher_order(func: Any) -> bool:
    """Whether ``func`` takes functions, as flex attention does. Since 2.0."""
    return isinstance(func, torch._ops.HigherOrderOperator)


@functools.cache
def unwraps_itself(kind: type) -> bool:
    """Whether tensors of class ``kind`` stand for others, on which they run ops: DTensor and the like.

    The protocol by which they name those is there since 2.1.
    """
    return hasattr(kind, "__tensor_flatten__")


def schema_of(func: Any) -> Any:
    """The schema of an op. Since 2.11 or before."""
    return func._schema


def give_back(library: torch.library.Library) -> Callable[[], None]:
    """What takes out of torch what ``library`` has put in place of its kernels. Since 2.11 or before."""
    return library._destroy


def name_nodes(function: type[torch.autograd.Function], name: str) -> None:
    """Let the nodes of autograd that ``function`` makes be called ``name``. Since 2.11 or before."""
    function._backward_cls.__name__ = name


def has_forward_gradients() -> bool:
    """Whether tensors may carry forward gradients now. Since 2.11 or before."""
    return forward_ad._current_level >= 0


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's C++ object, which no other has while it lives. Since 2.11 or before."""


@functools.cache
def arguments_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that the op ``func`` writes to. Aliases in schemas since 1.10.

    All of ops that are not torch's own, whose schemas may not tell; the statistics of batch norm, of which some of
    torch's own do not.
    """
    if is_higher_order(func):
        return ()
    own = func.namespace in _OWN
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if not own or _is_written(argument) or argument.name.startswith("running_")
    )


_OWN = ("aten", "prims", "prim")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@functools.cache
def is_computed(func: Any) -> bool:
    """Whether the op ``func``, one of torch's own, makes its result of its arguments alone. Tags since 2.0."""
    name = str(func.overloadpacket.__name__)
    return (
        func.namespace == "aten"
        and not arguments_written(func)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not name.removeprefix("new_").startswith(("empty", "resize"))
    )


@functools.cache
def has_size_of_data(func: Any) -> bool:
    """Whether the size of what the op ``func`` returns depends on the values that it is given. Tags since 2.0."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())  # ops that take functions have none
