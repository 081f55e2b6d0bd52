"""What says where steps and phases begin and end, beside models and optimizers.

The outermost modules of a script that is not recorded, or not yet; the returns of one function of the script's, where
the user says that they end steps; and the DataLoader: what is born while it makes a batch belongs to phase ``data``.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn

from ampmem.errors import UsageError
from ampmem.patching import Undo, added, hook, patch
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Misses
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.marker import Marker
from ampmem.recorder.torch_private.general import NEXT_BATCH, SAMPLER, on_module_after, on_module_before, tree_leaves


class Skimmer(Protocol):
    """What is said of a script that is not recorded."""

    @property
    def recording(self) -> bool:
        """Whether it is recorded now, since the last thing that was said."""

    def on_thread(self) -> bool:
        """Whether the calling thread is the one whose steps count."""

    def skimmed(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """An outermost ``module`` is about to run, with the positional ``args``."""

    def skimmed_over(self) -> None:
        """It has returned."""


def install_skimming(
    skimmer: Skimmer,
    begun: Callable[[nn.Module, tuple[Any, ...]], None],
    look: Callable[[], object] | None = None,
) -> Undo:
    """Register the hooks; returns what removes them. ``begun`` gets the module with which the recording begins.

    ``look`` is called at the end of each module that runs.
    """
    running: list[int] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not skimmer.on_thread():
            return
        if not running:
            skimmer.skimmed(module, args)
            if skimmer.recording:
                begun(module, args)
                return
        running.append(id(module))

    def after(module: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling() or id(module) not in running:
            return
        while running and running.pop() != id(module):
            pass
        if look is not None:
            look()
        if not running:
            skimmer.skimmed_over()

    with ExitStack() as undo:
        undo.callback(hook(on_module_before, before))
        undo.callback(_hook_after(after))
        return undo.pop_all().close


def _hook_after(after: Callable[..., None]) -> Undo:
    handle = on_module_after(after, always_call=True)
    return added("torch.nn.modules.module", "register_module_forward_hook", handle.remove)


_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)


class Calls:
    """Looks at every Python call on the recorded thread: the function need not exist yet, nor be in a module."""

    def __init__(self, marker: Marker, listener: Listener) -> None:
        self._marker = marker
        self._listener = listener
        self._known: dict[int, tuple[CodeType, bool]] = {}
        """By ``id``, code of the function's name, and whether it is the function's."""
        self.elsewhere: str | None = None
        """Where a function of that name has run that is another one."""

    def install(self) -> Undo:
        """Begin to look; returns what ends it. Raises :class:`UsageError` while another profiler looks."""
        if sys.getprofile() is not None:
            raise UsageError(f"--step-on {self._marker.text}: a profiler is active (sys.setprofile); stop it first")
        name, see = self._marker.function, self._see

        def profiler(frame: FrameType, event: str, _: Any) -> None:
            if event == "return" and frame.f_code.co_name == name:
                see(frame)

        def remove() -> None:
            if sys.getprofile() is profiler:
                sys.setprofile(None)

        sys.setprofile(profiler)
        return added("sys", "setprofile", remove)

    def _see(self, frame: FrameType) -> None:
        code = frame.f_code
        known = self._known.get(id(code))
        if known is None:
            module = str(frame.f_globals.get("__name__", ""))
            known = self._known[id(code)] = (code, self._marker.is_in(code, module))
            if not known[1]:
                self.elsewhere = f"{code.co_filename}:{code.co_qualname}"
        # A generator that yields and a call that raises leave their frames too, but not by an instruction to return.
        if known[1] and code.co_code[frame.f_lasti] in _RETURNS and self._listener.on_thread():
            self._listener.function_returned()


def install_data(listener: Listener, misses: Misses) -> Callable[[], None]:
    """Wrap the iterators' ``__next__``; returns what undoes it."""

    def loaded(iterator: Any, batch: Any) -> None:
        listener.batch_loaded(_samples(iterator, batch))

    started, ended = misses.guarded(listener.data_started), misses.guarded(listener.data_ended)
    count = misses.guarded(loaded)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if not listener.recording or not listener.on_thread():
                return original(iterator)
            before = started()
            batch = None
            try:
                batch = original(iterator)
                return batch
            finally:
                count(iterator, batch)
                if before is not None:
                    ended(before)

        return __next__

    return patch(*NEXT_BATCH, wrap)


def _samples(iterator: Any, batch: Any) -> int | None:
    """How many samples a DataLoader has made into ``batch``, where that is the first dimension of all tensors in it."""
    samples = getattr(getattr(iterator, SAMPLER, None), "batch_size", None)
    sizes = {leaf.shape[:1] for leaf in tree_leaves(batch) if is_tensor(leaf)}
    return samples if isinstance(samples, int) and sizes == {(samples,)} else None
