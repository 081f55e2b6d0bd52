"""Makes runs of a script comparable: sets the seed, and writes each run's losses and gradients to a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ampmem.patching import Undo, hook, patch_call, undone_together
from ampmem.recorder.torch_private.general import LOSSES, in_backward, on_step_before
from ampmem.results import GRADIENT, LOSS, ResultsWriter, Values


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_anew() -> None:
    """Seed the random numbers of Python, numpy and torch from the operating system, as in a new process."""
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


class Results:
    """Writes to ``path`` each loss that backward starts from and the gradients that each optimizer is about to use."""

    def __init__(self, path: Path) -> None:
        self._writer = ResultsWriter(path.absolute())

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Install patches and hooks; returns an undo that also closes the file."""
        yield self.close
        yield patch_call(*LOSSES, self._wrap_backward)
        yield hook(on_step_before, self._before_update)

    def close(self) -> None:
        """Stop writing, because all steps to compare have ended."""
        self._writer.close()

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                for root in (tensors,) if isinstance(tensors, Tensor) else tensors:
                    self._writer.add(LOSS, _values(root))
            return original(tensors, *args, **kwargs)

        return backward

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        for group, held in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(held["params"]):
                if parameter.grad is not None:
                    self._writer.add(f"{GRADIENT} {group} {number}", _values(parameter.grad))


def _values(tensor: Tensor) -> Values:
    """The elements of ``tensor`` as a numpy array; types that numpy lacks are widened, so every value is exact."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    if dense.dtype in (torch.bfloat16, torch.float16):
        dense = dense.float()
    values: Values = dense.cpu().numpy()
    return values
