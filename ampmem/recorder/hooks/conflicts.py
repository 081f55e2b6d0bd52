"""Script actions that conflict with recording: its own profiler or memory history, and swapped tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from ampmem.patching import Undo, patch
from ampmem.recorder.facts.log import Misses
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.sources.window import OTHER_PROFILER, prepared_elsewhere
from ampmem.recorder.torch_private.cuda import HISTORY
from ampmem.recorder.torch_private.general import PREPARE, SWAP

Tensors: TypeAlias = tuple[torch.Tensor, ...]
LetGo: TypeAlias = Callable[[Tensors], Undo]
"""Drops every weak reference to these tensors; the returned undo takes the references again."""


def make_way_for_profilers(listener: Listener) -> Undo:
    """End the recording when the script prepares a profiler: PyTorch allows only one. Returns the undo."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _prepare_trace(profiler: Any) -> Any:
            if listener.on_thread():
                listener.stop_recording(OTHER_PROFILER)
                return original(profiler)
            with prepared_elsewhere():
                listener.stop_recording(OTHER_PROFILER)  # the recording stops on its own thread
                return original(profiler)

        return _prepare_trace

    return patch(*PREPARE, wrap)


def make_way_for_history(listener: Listener) -> Undo:
    """End the recording when the script calls ``_record_memory_history``: there is one history. Returns the undo."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _record_memory_history(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("record_cuda", True):  # otherwise only of pinned host memory, a separate history
                listener.stop_recording("the script called _record_memory_history, and PyTorch keeps only one history")
            return original(*args, **kwargs)

        return _record_memory_history

    return patch(*HISTORY, wrap)


def let_go_of_swapped(holders: Sequence[LetGo], misses: Misses) -> Undo:
    """Make all ``holders`` drop their references while tensors are swapped, also by ``Module.to``; returns the undo.

    torch refuses to swap a tensor that has weak references.
    """

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
