"""All hooks of a session except forward's: those that find the ends of steps, and those of a recording.

Those here are for what conflicts with recording: the script's own profiler or memory history, and swapped tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch

from ampmem.patching import Undo, patch_call
from ampmem.recorder.compiled.code import CompiledCode
from ampmem.recorder.facts.log import Misses
from ampmem.recorder.hooks import boundaries, children
from ampmem.recorder.hooks.backward import BackwardHooks
from ampmem.recorder.hooks.boundaries import Calls
from ampmem.recorder.hooks.communication import CollectiveHooks, CommunicationHooks, DataParallelHooks
from ampmem.recorder.hooks.compiled import CompileHooks
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.hooks.modules import ModuleHooks, UnseenByCompiled, quiet_compiled_modules
from ampmem.recorder.hooks.optimizers import OptimizerHooks
from ampmem.recorder.marker import Marker
from ampmem.recorder.options import Options
from ampmem.recorder.ranks.places import Places
from ampmem.recorder.sources.base import Source
from ampmem.recorder.sources.window import OTHER_PROFILER, prepared_elsewhere
from ampmem.recorder.torch_private.cuda import HISTORY
from ampmem.recorder.torch_private.general import PREPARE, SWAP

Tensors: TypeAlias = tuple[torch.Tensor, ...]
LetGo: TypeAlias = Callable[[Tensors], Undo]
"""Drops every weak reference to these tensors; the returned undo takes the references again."""


def make_way_for_profilers(listener: Listener) -> Undo:
    """End the recording when the script prepares a profiler: PyTorch allows only one. Returns the undo."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_trace(profiler: Any) -> Any:
            # One profiler per process: ampmem's ends before the script's is prepared.
            if listener.on_thread():
                listener.stop_recording(OTHER_PROFILER)
                return original(profiler)
            with prepared_elsewhere():
                listener.stop_recording(OTHER_PROFILER)  # the recording stops on its own thread
                return original(profiler)

        return _prepare_trace

    return patch_call(*PREPARE, wrap)


def make_way_for_history(listener: Listener) -> Undo:
    """End the recording when the script calls ``_record_memory_history``: there is one history. Returns the undo."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def _record_memory_history(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("record_cuda", True):  # otherwise only of pinned host memory, a separate history
                listener.stop_recording("the script called _record_memory_history, and PyTorch keeps only one history")
            return original(*args, **kwargs)

        return _record_memory_history

    return patch_call(*HISTORY, wrap)


def release_swapped(holders: Sequence[LetGo], misses: Misses) -> Undo:
    """Make all ``holders`` drop their references while tensors are swapped, also by ``Module.to``; returns the undo.

    torch refuses to swap a tensor that has weak references.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def swap_tensors(t1: Any, t2: Any) -> None:
            # torch.utils.swap_tensors raises if either tensor has a weak reference, and exchanges all that they have.
            with ExitStack() as again:
                for before_swap in guarded:
                    take = before_swap((t1, t2))
                    if take is not None:
                        again.callback(misses.guarded(take))
                original(t1, t2)

        return swap_tensors

    guarded = [misses.guarded(before_swap) for before_swap in holders]
    return patch_call(*SWAP, wrap)


class Hooks:
    """Makes all hooks; each ``install`` returns its undo.

    ``hold_tensors`` lists the other holders of weak references, which must let go when tensors are swapped.
    """

    def __init__(self, listener: Listener, source: Source, options: Options, *, hold_tensors: Sequence[LetGo]) -> None:
        log, precision_seen = listener.log, listener.precision_seen
        self.optimizers = OptimizerHooks(listener)
        communication = CommunicationHooks(listener)
        self.modules = ModuleHooks(listener, communication.follow)
        self.data_parallel = DataParallelHooks(listener)
        self.calls = Calls(options.step_on, listener) if isinstance(options.step_on, Marker) else None
        self.places = Places(options.place)
        self.code = CompiledCode(log, listener.models, listener.update.stacks)
        self.compiled = UnseenByCompiled(listener, self.modules, self.code)
        self.early: list[Callable[[], Undo]] = [
            self.optimizers.install,
            BackwardHooks(listener).install,
            partial(children.install, listener),
            self.places.install,
            quiet_compiled_modules,
            self.compiled.install,
            CompileHooks(listener, log, self.code, self.modules, precision_seen).install,
            self.data_parallel.install,
            CollectiveHooks(listener).install,
            partial(release_swapped, (*hold_tensors, self.optimizers.before_swap), log.misses),
        ]
        """Hooks installed from the start: those that find the ends of steps, and those that see objects being made."""
        if self.calls is not None:
            self.early.append(self.calls.install)
        self.others: list[Callable[[], Undo]] = [
            partial(boundaries.install_data, listener),
            communication.install,
        ]
        """Hooks installed only while recording."""
        if source.uses_profiler:
            self.others.append(partial(make_way_for_profilers, listener))
        if source.uses_history:
            self.others.append(partial(make_way_for_history, listener))
