"""Sums over tensors, to be compared with what ampmem says: printed as JSON as an update starts, from the second on."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

MATRICES = ["Linear", "Conv1D", "Conv1d", "Conv2d", "ConvTranspose2d"]
"""Classes of modules whose parameters autocast casts on a GPU."""


def watch(model: nn.Module, *outside: nn.Parameter) -> None:
    """Print the sums for ``model`` and the optimizer that updates it.

    ``outside`` are those of its parameters that are multiplied outside of their layers.
    """
    cast: dict[int, int] = {}
    multiplied_elsewhere = {id(parameter) for parameter in outside}
    updates = 0

    def forward(module: nn.Module, _: Any) -> None:
        if type(module).__name__ not in MATRICES or torch._C._current_graph_task_id() != -1:  # what backward recomputes
            return
        for parameter in (*module.parameters(recurse=False), *outside):
            kind, known = parameter.device.type, cast.get(id(parameter), 0)
            if torch.is_autocast_enabled(kind):
                plain = inner(parameter)[0] is parameter  # a quantized one is no copy in another precision
                if plain and parameter.dtype != torch.get_autocast_dtype(kind):
                    each_time = not torch.is_autocast_cache_enabled() and id(parameter) not in multiplied_elsewhere
                    cast[id(parameter)] = 2 * parameter.numel() + (known if each_time else 0)

    def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal updates
        updates += 1
        if updates > 1:
            parameters = list(model.parameters())
            device, state = parameters[0].device, all_tensors(list(optimizer.state.values()))
            found = {
                "parameters": of_storages(parameters),
                "gradients": of_storages(each.grad for each in parameters if each.grad is not None),
                "optimizer_state": of_storages(tensor for tensor in state if tensor.device == device),
                "state_elsewhere": of_storages(tensor for tensor in state if tensor.device != device),
                "cast_copies": sum(cast.values()),
            }
            print("sums", json.dumps(found), flush=True)
        cast.clear()

    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(update)


def of_storages(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages in which ``tensors`` lie."""
    plain = (part for tensor in tensors for part in inner(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, plain)}.values())


def inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of which one consists that stands for others, such as a quantized one; else itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor, *scales(getattr(tensor, "quant_state", None))]
    return [part for name in tensor.__tensor_flatten__()[0] for part in inner(getattr(tensor, name))]


def scales(state: Any) -> list[torch.Tensor]:
    """The tensors that say how a 4-bit weight of bitsandbytes is quantized, which may be quantized themselves."""
    found = getattr(state, "__dict__", {})
    return [*all_tensors(found), *(scales(found["state2"]) if "state2" in found else [])]


def all_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, however nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in inner for tensor in all_tensors(item)]
