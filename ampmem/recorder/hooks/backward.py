"""Backward: when it starts and ends, its root, and the gradients that it leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ampmem.events import Fact
from ampmem.patching import patch
from ampmem.recorder.hooks.modules import in_backward
from ampmem.recorder.log import storage_address
from ampmem.recorder.sources.cuda.late import LateNumber, number_of
from ampmem.recorder.torch_private import ENGINE, Place, below_functorch, without_dispatch

if TYPE_CHECKING:
    from ampmem.recorder.session import Session


class BackwardHooks:
    """Wraps ``backward`` and ``grad`` of ``torch.autograd``, and the one function behind both.

    The first gradient, ``ones_like(loss)``, is made before the engine runs but belongs to backward;
    a script that imported ``backward`` by name before the session began is met at the engine.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.running = False
        """Whether the recorded thread is in the engine, which may run on threads of its own."""
        self._handles: dict[int, Any] = {}

    def install(self) -> Callable[[], None]:
        """Patch the entries; returns what undoes that and removes every gradient hook."""
        entries: tuple[Place, ...] = ((torch.autograd, "backward"), (torch.autograd, "grad"), ENGINE)
        undo = [patch(*entry, self._wrap) for entry in entries]

        def remove() -> None:
            for entry in undo:
                entry()
            for handle in self._handles.values():
                handle.remove()
            self._handles.clear()

        return remove

    def watch_gradients(self) -> None:
        """Hook every parameter that gets a gradient and is not hooked yet."""
        for slot, parameter in self._session.models.parameters():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._handles:
                note = functools.partial(self._note_gradient, slot.name_id, slot.path_id)
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(note)

    def _note_gradient(self, name: int, path: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            dtype = self._session.texts.dtype_id(parameter.grad.dtype)
            self._session.log.fact(Fact.GRADIENT, storage_address(parameter.grad), name, path, dtype)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.running or not session.recording or not session.on_thread() or in_backward():
                return original(*args, **kwargs)
            self.running = True
            inside_forward = session.forward.active and session.forward.mode.module != 0
            session.backward_started(_scalar(args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))))
            try:
                return original(*args, **kwargs)
            finally:
                self.running = False
                session.backward_ended()
                if inside_forward:  # torch.func.grad, or a model that computes forces
                    session.forward_started(recomputing=False)

        return run


def _scalar(roots: Any) -> float | LateNumber | None:
    """The loss, when backward starts at exactly one number."""
    root = roots[0] if isinstance(roots, (tuple, list)) and len(roots) == 1 else roots
    if not isinstance(root, torch.Tensor) or root.numel() != 1 or root.is_meta:
        return None
    root = below_functorch(root)
    if type(root) is not torch.Tensor:
        return None
    with without_dispatch():  # the script's own modes count only what the script does
        return number_of(root)
