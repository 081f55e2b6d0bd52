"""What the script hands to a process group: which memory is for receiving, and what a thread of the group may free.

A collective that is not waited for keeps its tensors, and the thread that runs it lets go of them last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampmem.events import Fact
from ampmem.patching import Undo, patch
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private.distributed import COLLECTIVES, RECEIVES
from ampmem.recorder.torch_private.general import tree_leaves
from ampmem.vocabulary import Communication


class CollectiveHooks:
    """Looks at the tensors that are handed to process groups."""

    def __init__(self, listener: Listener, log: Log, texts: Texts) -> None:
        self._listener = listener
        self._log = log
        self._receives = texts.id(Communication.RECEIVE_BUFFERS)
        self._look = log.misses.guarded(self._note)

    def install(self) -> Undo:
        """Wrap every collective of a process group; returns what undoes it."""
        with ExitStack() as undo:
            for place in COLLECTIVES:
                undo.callback(patch(*place, functools.partial(self._wrap, receives=place in RECEIVES)))
            return undo.pop_all().close

    def _wrap(self, original: Callable[..., Any], *, receives: bool) -> Callable[..., Any]:
        look = self._look

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            look(receives, args, kwargs)
            return original(*args, **kwargs)

        return run

    def _note(self, receives: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._listener.recording:
            return
        for leaf in tree_leaves((args, kwargs)):
            if is_tensor(leaf):
                self._log.follow(leaf)
                if receives and self._listener.on_thread():
                    self._log.about(Fact.COMMUNICATION, leaf, self._receives)
