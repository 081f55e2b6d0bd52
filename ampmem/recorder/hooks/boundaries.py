"""Hooks that mark where steps and phases begin and end, besides those of models and optimizers.

They are on the outermost modules of a script that is not recorded (yet); on the returns of the function that the user
named as the end of a step; and on the DataLoader: allocations while it makes a batch belong to phase ``data``.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ampmem.errors import UsageError
from ampmem.own_code import is_torch
from ampmem.patching import Undo, added, hook, patch_call, undone_together
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.marker import Marker
from ampmem.recorder.torch_private.general import NEXT_BATCH, SAMPLER, on_module_after, on_module_before, tree_leaves


@undone_together
def install_skimming(
    listener: Listener,
    begun: Callable[[nn.Module, tuple[Any, ...]], None],
    look: Callable[[], object] | None = None,
    inside: int | None = None,
) -> Iterator[Undo]:
    """Register hooks on outermost modules, for the time in which nothing is recorded (yet); returns the undo.

    ``begun`` gets the module with which the recording begins; ``look`` is called after each module that runs.
    ``inside`` is the ``id`` of the outermost module that runs already.
    """
    running = [] if inside is None else [inside]

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not listener.on_thread():
            return
        if not running:
            listener.skimmed(module, args)
            if listener.recording:
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
            listener.skimmed_over()

    yield hook(on_module_before, before)
    yield hook(on_module_after, after, always_call=True)


_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)


class Calls:
    """Watches the returns of the function named by ``--step-on``, which may not exist yet, on the recorded thread."""

    def __init__(self, marker: Marker, listener: Listener) -> None:
        self._marker = marker
        self._listener = listener
        self._known: dict[int, tuple[CodeType, bool]] = {}
        """For each code object of the function's name, by ``id``, whether it is the function's."""
        self.elsewhere: str | None = None
        """The place of another function of the same name, not one of torch's, that has run."""

    def install(self) -> Undo:
        """Start watching; returns the undo. Raises :class:`UsageError` if another profiler is active."""
        if sys.getprofile() is not None:
            raise UsageError(f"--step-on {self._marker.text}: a profiler is active (sys.setprofile); stop it first")
        name, see = self._marker.function, self._see

        def profiler(frame: FrameType, event: str, _: Any) -> None:
            if event == "return" and frame.f_code.co_name == name:
                see(frame)

        def remove() -> None:
            if sys.getprofile() is profiler:
                sys.setprofile(None)

        # For this thread alone, as Python has it.
        sys.setprofile(profiler)
        return added("sys", "setprofile", remove)

    def _see(self, frame: FrameType) -> None:
        code = frame.f_code
        known = self._known.get(id(code))
        if known is None:
            module = str(frame.f_globals.get("__name__", ""))
            known = self._known[id(code)] = (code, self._marker.is_in(code, module))
            if not known[1] and not is_torch(code.co_filename):
                self.elsewhere = f"{code.co_filename}:{code.co_qualname}"
        # The event "return" also comes when a generator yields or a call raises: only a return instruction counts.
        if known[1] and code.co_code[frame.f_lasti] in _RETURNS and self._listener.on_thread():
            self._listener.function_returned()


def install_data(listener: Listener) -> Callable[[], None]:
    """Wrap ``__next__`` of the DataLoader's iterators; returns the undo."""

    def loaded(iterator: Any, batch: Any) -> None:
        listener.batch_loaded(_samples(iterator, batch))

    guarded = listener.log.misses.guarded
    started, ended, count = guarded(listener.data_started), guarded(listener.data_ended), guarded(loaded)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
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

    return patch_call(*NEXT_BATCH, wrap)


def _samples(iterator: Any, batch: Any) -> int | None:
    """Number of samples in ``batch``: the first dimension of its tensors, if all agree; else ``None``."""
    samples = getattr(getattr(iterator, SAMPLER, None), "batch_size", None)
    sizes = {leaf.shape[:1] for leaf in tree_leaves(batch) if is_tensor(leaf)}
    return samples if isinstance(samples, int) and sizes == {(samples,)} else None
