"""Forced changes of what ``torch.compile`` compiles, and of how much compiled code keeps for backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ampmem.patching import Undo, patch, undone_together
from ampmem.recorder.steering.parallel import ForcedChange, Hook
from ampmem.recorder.torch_private.entries import Place
from ampmem.recorder.torch_private.general import COMPILE, run_uncompiled
from ampmem.recorder.torch_private.inductor import COMPILES, memory_budget, set_memory_budget

MODULE_CALL: Place = (nn.Module, "__call__")
"""What runs a module, before torch looks up how."""
COMPILE_IN_PLACE: Place = (nn.Module, "compile")


class _LeftOut(ForcedChange):
    """Returns what the script gives to ``torch.compile`` as it is; ``module.compile()`` does nothing."""

    @undone_together
    def install(self) -> Iterator[Undo]:
        yield patch(*COMPILE, self._wrap)
        yield patch(*COMPILE_IN_PLACE, self._wrap_in_place)

    def _why_not_done(self) -> str:
        return "the script compiles nothing"

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **_: Any) -> Any:  # the name of torch's own parameter
            if model is None:
                return compile  # as a decorator with arguments
            self._left_out()
            return model

        return compile

    def _wrap_in_place(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def compile(module: nn.Module, *_: Any, **__: Any) -> None:
            self._left_out()

        return compile

    def _left_out(self) -> None:
        if not self._done:
            self._done = True
            self.note("forced: torch.compile is left out")


class _PutIn(ForcedChange):
    """Compiles each outermost model before it first runs in training, by ``model.compile()``."""

    def __init__(self, option: str, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._compiles = self._script_compiles = False
        self._calls = ExitStack()

    @undone_together
    def install(self) -> Iterator[Undo]:
        yield self._undo
        yield patch(*COMPILE, self._wrap)
        self._see_calls()

    def _see_calls(self) -> None:
        self._calls.callback(patch(*MODULE_CALL, self._wrap_call))

    def _undo(self) -> None:
        self._calls.close()
        for module in self._compiled:
            run_uncompiled(module)

    def _why_not_done(self) -> str:
        return "no model was trained"

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **options: Any) -> Any:
            if not self._compiles:
                self._script_compiles = True
                self.refuse("the script calls torch.compile itself")
            return original(*args, **options)

        return compile

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and module not in self._seen and torch.is_grad_enabled():
                self._compile(module)
                if module in self._seen:
                    return module(*args, **kwargs)  # other changes may have replaced the call meanwhile
            return original(module, *args, **kwargs)

        return __call__

    def _compile(self, model: nn.Module) -> None:
        """Compile ``model``, an outermost one that is about to run, if it trains."""
        trains = model.training and any(parameter.requires_grad for parameter in model.parameters())
        if not trains or self._script_compiles:
            return
        self._seen.update(model.modules())
        self._compiles = True
        self._calls.close()  # dynamo, which may be imported here, takes what it finds for torch's own
        try:
            model.compile()
        finally:
            self._compiles = False
            self._see_calls()
        self._compiled.add(model)
        self._done = True
        self.note(f"forced: {type(model).__name__} is compiled, as by model.compile()")


class _MemoryBudget(ForcedChange):
    """Has compiled code keep at most this ``share`` of its activations for backward."""

    def __init__(self, option: str, share: float, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._share = share

    @undone_together
    def install(self) -> Iterator[Undo]:
        yield set_memory_budget(self._share)
        yield patch(*COMPILES, self._wrap)

    def _why_not_done(self) -> str:
        return "the script compiles nothing with Inductor"

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(backend: Any, *args: Any, **options: Any) -> Any:
            if memory_budget() != self._share:
                self.refuse("the script sets activation_memory_budget itself")
            elif not self._done:
                self._done = True
                self.note(f"forced: activation_memory_budget = {self._share}")
            return original(backend, *args, **options)

        return __call__


COMPILE_HOOKS: Mapping[str, Hook] = {
    "compile": lambda option, put_in, note: (_PutIn if put_in else _LeftOut)(option, note),
    "activation_memory_budget": _MemoryBudget,
}
"""What forces each change that concerns compiled code, by its field."""
