"""Which ``torch.autograd.Function`` saves: autograd itself says only that a tensor is saved, not for whom."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ampmem.patching import patch
from ampmem.recorder.torch_private import SAVES, TO_SAVE


@dataclass(slots=True, kw_only=True)
class _Saving:
    """A Function that has said what it saves: autograd does so when its forward is over."""

    context: weakref.ref[Any]
    name: str
    tensors: int
    """How many are still to be saved."""


class FunctionSaves:
    """Follows ``ctx.save_for_backward``, which is the only sign of a Function that torch shows in every version.

    Functions run inside one another's forward, so those that have not saved yet are a stack.
    """

    def __init__(self) -> None:
        self._stack: list[_Saving] = []

    def next_saved(self) -> str:
        """The name of the Function for which the tensor that is being saved now is; empty when it is an op's."""
        while self._stack:
            newest = self._stack[-1]
            context = newest.context()
            if context is None:  # its forward failed
                self._stack.pop()
                continue
            if getattr(context, TO_SAVE, None) is not None:  # its forward still runs, and an op in there saves
                return ""
            newest.tensors -= 1
            if newest.tensors == 0:
                self._stack.pop()
            return newest.name
        return ""

    def install(self, hooked: Callable[[], bool]) -> Callable[[], None]:
        """Follow what is saved while ``hooked`` says that the saved-tensor hooks are ours; returns what undoes it."""

        def wrap(original: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(original)
            def save_for_backward(ctx: Any, *tensors: torch.Tensor | None) -> None:
                original(ctx, *tensors)
                if hooked():
                    self._will_save(ctx, sum(tensor is not None for tensor in tensors))

            return save_for_backward

        return patch(*SAVES, wrap)

    def _will_save(self, context: Any, tensors: int) -> None:
        if self._stack and self._stack[-1].context() is context:  # the last call counts
            self._stack.pop()
        if tensors and context.next_functions:  # else no gradient is wanted, and nothing will be saved
            name = type(context).__name__.removesuffix("Backward")
            self._stack.append(_Saving(context=weakref.ref(context), name=name, tensors=tensors))
