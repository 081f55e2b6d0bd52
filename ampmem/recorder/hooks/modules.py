"""Global module hooks: when forward starts and ends, which module runs, what the root is fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ampmem.events import Fact
from ampmem.recorder.log import storage_address
from ampmem.recorder.steering.arms import sample_autocast
from ampmem.recorder.torch_private import graph_task, hooks_with_kwargs, tree_leaves

if TYPE_CHECKING:
    from ampmem.recorder.session import Session


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return graph_task() != -1


class ModuleHooks:
    """Keeps the stack of running modules and tells the session about outermost forwards."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._running: list[tuple[int, int]] = []
        """(id, path) of each module whose forward is running, outermost first."""

    def install(self) -> Callable[[], None]:
        """Register the hooks; returns what removes them."""
        after = torch_module.register_module_forward_hook(self._after, with_kwargs=True, always_call=True)
        handles = [
            after,
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_parameter_registration_hook(self._changed),
            torch_module.register_module_buffer_registration_hook(self._changed),
            torch_module.register_module_module_registration_hook(self._changed),
        ]

        def remove() -> None:
            for handle in handles:
                handle.remove()
            # The handle forgets this one entry.
            hooks_with_kwargs.pop(after.id, None)

        return remove

    def _changed(self, module: nn.Module, *_: object) -> None:
        self._session.models.registered(module)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        session = self._session
        # Asked first: dynamo traces the hooks too, and must find nothing in them that breaks the script's graph.
        if torch.compiler.is_compiling() or not session.on_thread():
            return
        outermost = not self._running
        if outermost:
            session.models.add_registered()
        path = session.models.path_id(module)
        if outermost:
            session.forward_started(recomputing=in_backward() and torch.is_grad_enabled())
            self._note_inputs(args)
        sample_autocast(session.arm_seen, session.device_type)
        self._running.append((id(module), path))
        self._enter(path)

    def _after(self, module: nn.Module, args: Any, kwargs: Any = None, result: Any = None) -> None:
        # Called with (module, args, result) instead when the forward raised.
        if torch.compiler.is_compiling():
            return
        running = self._running
        if not any(entry == id(module) for entry, _ in running):
            return
        while running and running.pop()[0] != id(module):
            pass
        self._enter(running[-1][1] if running else 0)
        if not running:
            if isinstance(kwargs, dict):
                self._note_inputs(kwargs)
            self._session.forward_ended()

    def _enter(self, path: int) -> None:
        self._session.log.running(path)
        self._session.forward.mode.module = path

    def _note_inputs(self, arguments: Any) -> None:
        sizes: list[int] = []
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None and not isinstance(leaf, nn.Parameter):
                dtype = self._session.texts.dtype_id(leaf.dtype)
                self._session.log.fact(Fact.INPUT, storage_address(leaf), dtype=dtype)
                sizes.extend(leaf.shape[:1])
        if sizes:
            self._session.open_step.batch_size = sizes[0]
