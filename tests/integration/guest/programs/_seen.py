"""What programs print of what they see: random numbers, and what is in torch that is not torch's own."""

import hashlib
import pickle
import random

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def digest(value: object) -> str:
    """A short name of ``value``, the same in every process; tensors are given as lists."""
    return hashlib.sha256(pickle.dumps(value)).hexdigest()[:12]


def print_random_state() -> None:
    """Python's and torch's random numbers, as far as they have got; the program has seeded both."""
    print("random", digest(random.getstate()), digest(torch.get_rng_state().tolist()))


def print_left_in_torch(model: nn.Module | None = None) -> None:
    """Hooks, modes and patches that are in place now, of ``model`` too."""
    hooks = {name: len(value) for name, value in vars(torch_module).items() if name.startswith("_global") and value}
    hooks |= {name: len(value) for name, value in vars(torch_optimizer).items() if name.startswith("_global") and value}
    print("hooks", hooks, "modes", len(_get_current_dispatch_mode_stack()))
    print("saved-tensor hooks", torch._C._autograd._top_saved_tensors_default_hooks(True))
    print("profiler", torch._C._autograd._profiler_enabled())
    print("backward", torch.autograd.backward.__code__.co_filename.rpartition("torch")[2])
    if model is not None:
        for name, parameter in model.named_parameters():
            print(name, [key for key in sorted(vars(parameter)) if key.startswith("_")], parameter._backward_hooks)
