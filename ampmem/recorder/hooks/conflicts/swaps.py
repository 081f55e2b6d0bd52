"""A script that swaps two tensors: torch refuses where anybody has a weak reference to one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from ampmem.patching import Undo, patch
from ampmem.recorder.facts.misses import Misses
from ampmem.recorder.torch_private.tensors import SWAP

Tensors: TypeAlias = tuple[torch.Tensor, ...]
LetGo: TypeAlias = Callable[[Tensors], Undo]
"""Drops every weak reference to these tensors, and returns what takes them again."""


def install(holders: Sequence[LetGo], misses: Misses) -> Undo:
    """Have all ``holders`` let go of what is swapped, also by ``Module.to``; returns what undoes it."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def swap_tensors(t1: Any, t2: Any) -> None:
            with ExitStack() as again:
                for let_go in guarded:
                    take = let_go((t1, t2))
                    if take is not None:
                        again.callback(misses.guarded(take))
                original(t1, t2)

        return swap_tensors

    guarded = [misses.guarded(let_go) for let_go in holders]
    return patch(*SWAP, wrap)
