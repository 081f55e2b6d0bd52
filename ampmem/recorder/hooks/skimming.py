"""The outermost modules of a script that is not recorded, or not yet: only for what ends a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from ampmem.patching import Undo, added, hook
from ampmem.recorder.torch_private.general import on_module_after, on_module_before


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


def install(
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
