"""Hooks on torch.compile: dynamo's graphs when they are compiled, and Inductor's when they are made and when they run.

None of them enters a cache's key, and nothing of the compiler is imported before the script compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ampmem.patching import Undo, patch, together, undone_together, unseen
from ampmem.recorder.compiled.code import CompiledCode
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.hooks.modules import ModuleHooks
from ampmem.recorder.steering.precision import PrecisionSeen
from ampmem.recorder.torch_private.general import ENTER_AUTOCAST, in_backward, never_compiled, untraced
from ampmem.recorder.torch_private.inductor import (
    COMPILES,
    DynamoNode,
    graph_places,
    load_compiler,
    nodes_of,
)
from ampmem.signals import Signals

never_compiled(Signals.__bool__)  # Python calls it from any code


class CompileHooks:
    """Reports compiled graphs, and their calls while the script is recorded, to ``code``."""

    def __init__(
        self, listener: Listener, log: Log, code: CompiledCode, modules: ModuleHooks, precision_seen: PrecisionSeen
    ) -> None:
        self._listener = listener
        self._modules = modules
        self._arm_seen = precision_seen
        guarded = log.misses.guarded
        self._code = code
        self._trace, self._traced = guarded(self._note_graph), guarded(code.traced)
        self._finished, self._begin, self._end = guarded(code.finished), guarded(code.begin), guarded(code.end)
        self._model_of = guarded(code.model_of)
        self._unpatch: Undo | None = None

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Patch the backend of torch.compile, and its graphs as soon as they are loaded; returns the undo."""
        yield patch(*COMPILES, self._wrap_compiler)
        yield self._undo_patches
        self._look()

    def _undo_patches(self) -> None:
        if self._unpatch is not None:
            self._unpatch()
            self._unpatch = None

    def _look(self) -> None:
        places = graph_places()
        if places is not None and self._unpatch is None:
            wraps = self._wrap_finish, self._wrap_call
            self._unpatch = together(patch(*place, wrap) for place, wrap in zip(places, wraps, strict=True))

    def _wrap_compiler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(backend: Any, model_: Any, inputs_: Any, **options: Any) -> Any:
            load_compiler()
            self._look()
            noted = self._trace(model_)
            try:
                return original(backend, model_, inputs_, **options)
            finally:
                if noted:
                    self._traced()

        return __call__

    def _note_graph(self, model: Any) -> bool:
        """Note dynamo's graph, with the regions of autocast in it; returns whether it could be read."""
        nodes = list(nodes_of(model)) if isinstance(model, torch.fx.GraphModule) else []
        for node in nodes:
            if node.target == ENTER_AUTOCAST:
                self._note_autocast(node)
        self._code.traces(nodes)
        return True

    def _note_autocast(self, node: DynamoNode) -> None:
        """Note a region of autocast that is itself compiled."""
        device, dtype, enabled, cache = (*node.arguments, None, None, None, None)[:4]
        if device == self._arm_seen.device_type and enabled is not False:
            self._arm_seen.inside(dtype, cache=cache is not False)

    def _wrap_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            self._finished(graph)
            return result

        return post_compile

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(graph: Any, inputs: Any) -> Any:
            if not self._listener.recording:
                return original(graph, inputs)
            model = self._starts(graph, inputs)
            call = self._begin(graph, inputs)
            try:
                results = original(graph, inputs)
            except BaseException:
                if model is not None:
                    self._modules.compiled_ends(*model, raised=True)
                raise
            if call is not None:
                self._end(call, results)
            if model is not None:
                self._modules.compiled_ends(*model, raised=False)
            return results

        return never_compiled(unseen(untraced(__call__)))

    def _starts(self, graph: Any, inputs: Any) -> tuple[nn.Module, bool] | None:
        """Note that forward starts, if ``graph`` runs a model and nothing else has seen that.

        Returns the model and whether it is trained.
        """
        if self._modules.in_forward() or not self._listener.on_thread() or in_backward():
            return None
        model = self._model_of(graph, inputs)
        if model is not None:
            self._modules.compiled_starts(*model, [each for each in inputs if is_tensor(each)])
            self._listener.compiled_in_place(None)
        return model
