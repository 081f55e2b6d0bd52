"""What autograd saves, read from the nodes that it makes: nothing of autograd's own is replaced for it.

An op's node is made when the op has run, a moment after the dispatch mode has seen that: it is looked at when the mode
is asked the next time. A ``torch.autograd.Function`` is a node that has said what it saves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from ampmem.events import Fact
from ampmem.patching import Undo, patch
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.parts import PLAIN
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.torch_private.general import next_node, without_dispatch
from ampmem.recorder.torch_private.tensors import (
    HOOKS_ON_SAVED,
    SAVES,
    is_view,
    node_number,
    saved_by,
    saved_names,
    to_save,
)


class SavedByNodes:
    """Logs the tensors that the nodes of ops and Functions hold. Weak references only: a node dies as without us.

    Under saved-tensor hooks of the script's own, such as checkpoint's, it is theirs what is kept: nothing is read.
    """

    def __init__(self, log: Log, texts: Texts) -> None:
        self._readable: Callable[[], bool] = lambda: False
        self._log = log
        self._texts = texts
        self._names: dict[type, tuple[str, ...]] = {}
        """Of each class of nodes, the attributes that are saved tensors."""
        self._op = self._number = 0
        self._results: list[weakref.ref[torch.Tensor]] = []
        """What the newest op has returned; its name's text id and its node's number, if it makes one."""
        self._functions: list[weakref.ref[Any]] = []
        """Functions that have said what they save, and may not be through with their forward."""

    def returned(self, op: int, results: Sequence[Any]) -> None:
        """The op with this text id returns ``results`` now. With gradients off it makes no node.

        One in place on a view has none that is its own, and asking for the view's while torch makes it would never end.
        """
        if torch.is_grad_enabled() and self._readable():
            self._results = [weakref.ref(each) for each in results if is_tensor(each) and not is_view(each)]
            self._op, self._number = op, next_node() - 1

    def read(self) -> None:
        """Look at the nodes that were made since the last call."""
        results, self._results = self._results, []
        for reference in results:
            result = reference()
            node = None if result is None else result.grad_fn
            if node is not None:
                if node_number(node) == self._number:  # else one from before: the op made none
                    self._read(node, type(result) in PLAIN)
                break
        if self._functions:
            self._read_functions()

    def let_go(self, tensors: tuple[torch.Tensor, ...]) -> Undo:
        """They are about to be swapped: what the newest op has saved is read now."""
        self.read()
        return lambda: None

    def _read(self, node: Any, plain: bool) -> None:
        kind = type(node)
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = saved_names(kind)
        # Of its result a node hands out a copy, which no mode is to see made; but a subclass makes that itself.
        with without_dispatch() if plain and names else nullcontext():
            saved = [_unpacked(getattr, node, name) for name in names]
        for tensors in saved:
            for tensor in tensors:
                if tensor is not None:
                    self._log.about(Fact.SAVED, tensor, self._op)

    def _read_functions(self) -> None:
        running = []
        for reference in self._functions:
            context = reference()
            if context is None:  # nobody wants its gradient, or its forward failed
                continue
            if to_save(context) is not None:  # its forward still runs
                running.append(reference)
                continue
            name = self._texts.id(type(context).__name__.removesuffix("Backward"))
            for tensor in _unpacked(saved_by, context):
                if tensor is not None:
                    self._log.about(Fact.SAVED, tensor, name)
        self._functions = running

    def install(self, readable: Callable[[], bool]) -> Callable[[], None]:
        """Follow ``ctx.save_for_backward``; returns what undoes it. ``readable``: whether nodes may be looked at."""
        self._readable = readable

        def wrap(original: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(original)
            def save_for_backward(ctx: Any, *tensors: torch.Tensor | None) -> None:
                original(ctx, *tensors)
                if self._readable():
                    self._functions = [known for known in self._functions if known() not in (None, ctx)]
                    self._functions.append(weakref.ref(ctx))

            return save_for_backward

        def wrap_hooks(original: Callable[..., None]) -> Callable[..., None]:
            """What the script puts its own hooks on is looked at before: not through those."""

            @functools.wraps(original)
            def register_hooks(saved: Any, *hooks: Any) -> None:
                read()
                original(saved, *hooks)

            return register_hooks

        read = self._log.misses.guarded(self.read)
        with ExitStack() as undo:
            undo.callback(patch(*SAVES, wrap))
            undo.callback(patch(*HOOKS_ON_SAVED, wrap_hooks))
            return undo.pop_all().close


def _unpacked(ask: Callable[..., Any], *arguments: Any) -> Sequence[torch.Tensor | None]:
    """What ``ask`` says that was saved; nothing where that was freed, or overwritten since."""
    try:
        saved = ask(*arguments)
    except RuntimeError:
        return ()
    return saved if isinstance(saved, (tuple, list)) else (saved,)
