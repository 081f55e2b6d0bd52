"""The private parts of torch by which recurrent layers reach cuDNN, beside those in ``general.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampmem.patching import replace_all

FLATTEN = (nn.RNNBase, "flatten_parameters")
"""The method that packs the parameters into one buffer. Since 0.1."""
COPIED = (nn.RNNBase, "__setstate__")
"""What runs when a module is copied. Since 0.1."""


def flat_weights(module: nn.RNNBase) -> tuple[list[Any], int]:
    """The parameters that cuDNN is given, in its order, and how many there are to be. Since 1.4."""
    return module._flat_weights, len(module._flat_weights_names)


def replace_layers(names: tuple[str, ...], stands_in: Callable[[str, Any], Any]) -> Callable[[], None]:
    """Put ``stands_in(name, original)`` where modules call the layers; returns what undoes it.

    That is ``torch._VF``, since 1.0: ``names`` are those of its functions.
    """
    return replace_all((torch._VF,), {name: stands_in(name, getattr(torch._VF, name)) for name in names})
