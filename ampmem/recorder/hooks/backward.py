"""Hooks of backward: its start and end, its loss, and the gradients that it leaves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampmem.events import Fact
from ampmem.names import FUNCTIONAL, INPUT, warning
from ampmem.patching import Undo, hook, patch
from ampmem.recorder.facts.addresses import PLAIN
from ampmem.recorder.facts.guests import gradient_of, is_tensor
from ampmem.recorder.facts.log import Log, Misses
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.models import Models, Slot
from ampmem.recorder.sources.cuda.late import LateNumber, number_of
from ampmem.recorder.torch_private.general import (
    BACKWARD,
    below_functorch,
    compiles_backward,
    forget_gradient_hooks,
    gradient_hooks,
    in_backward,
    makes_graph,
    never_compiled,
    of_functorch,
    passed_on_uncompiled,
    tracked_below,
    untraced,
    without_dispatch,
)

_MAY_BE_FREED = warning(
    "backward ran in compiled autograd, which leaves ampmem's hooks out, and the script's own hooks on gradients ran "
    "there: a gradient that they freed is not in this recording's gradients"
)


class GradientHooks:
    """Log each gradient as soon as backward has accumulated it.

    Compiled autograd would trace the hooks and cannot: while it is on, there are none, and gradients are logged when
    backward has ended.
    """

    def __init__(self, log: Log, models: Models) -> None:
        self._log = log
        self._models = models
        self._look = log.misses.guarded(self._note)
        self._look_at_input = log.misses.guarded(self._note_input)
        self._inputs: dict[int, weakref.ref[torch.Tensor]] = {}
        """The inputs that may get a gradient, by ``id``."""
        self._watched: dict[int, Undo] = {}
        """The undo of the hook on each parameter, by the parameter's ``id``."""
        self._version = 0
        """The version of the models whose parameters are hooked."""
        self._compiled = False
        """Whether the hooks are off, during a compiled backward."""

    def watch(self) -> None:
        """Hook every parameter that requires a gradient and is not hooked yet."""
        if self._version == self._models.version:
            return
        self._version = self._models.version
        for slot, parameter in self._models.parameters():
            if id(parameter) in self._watched or self._models.sharded.manages(parameter):
                continue  # with a hook on it, FSDP2 copies the gradient to the CPU in another way
            if parameter.requires_grad and parameter.is_leaf:
                try:
                    undo = hook(parameter.register_post_accumulate_grad_hook, self._hook(slot, parameter))
                except Exception as error:  # a subclass may not allow hooks
                    self._log.misses.add(error)
                    undo = _nothing
                self._watched[id(parameter)] = undo

    def _hook(self, slot: Slot, parameter: torch.Tensor) -> Callable[[torch.Tensor], object]:
        note, reader = functools.partial(self._look, slot.name_id, slot.path_id), self._log.reader
        if reader is None or type(parameter) not in PLAIN:
            return note
        return functools.partial(_called, reader.gradient_hook(note, slot.name_id, slot.path_id))

    def backward_started(self) -> None:
        """Take the hooks off if backward is compiled."""
        if compiles_backward():
            self._take_off()
            self._compiled = True
            if any(gradient_hooks(parameter) for _, parameter in self._models.parameters()):
                self._log.misses.say(_MAY_BE_FREED)

    def backward_ended(self) -> None:
        """Log the gradients that a compiled backward has left, and put the hooks back on."""
        if self._compiled:
            self._compiled = False
            for slot, parameter in self._models.parameters():
                if parameter.requires_grad and parameter.is_leaf and not self._models.sharded.manages(parameter):
                    self._look(slot.name_id, slot.path_id, parameter)
            self.watch()

    def add_input(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor``, an input, may have a gradient after the next backward."""
        self._inputs[id(tensor)] = weakref.ref(tensor)

    def note_inputs(self) -> None:
        """Log the gradients that backward has left on inputs."""
        inputs, self._inputs = self._inputs, {}
        for reference in inputs.values():
            self._look_at_input(reference)

    def _note_input(self, reference: weakref.ref[torch.Tensor]) -> None:
        tensor = reference()
        gradient = None if tensor is None else gradient_of(tensor)
        if gradient is not None:
            self._log.about(Fact.GRADIENT, gradient, self._log.texts.id(INPUT))

    def remove(self) -> None:
        """Remove all hooks, for good."""
        self._take_off()
        self._compiled = False
        self._inputs.clear()

    def _take_off(self) -> None:
        """Remove the hooks, and torch's empty hook containers: a parameter without hooks has none."""
        for undo in self._watched.values():
            undo()
        # Found through the models: torch refuses to swap a parameter that anybody has a weak reference to.
        for _, parameter in self._models.parameters():
            if id(parameter) in self._watched and not gradient_hooks(parameter):
                forget_gradient_hooks(parameter)
        self._watched.clear()
        self._version = 0

    def _note(self, name: int, path: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._log.about(Fact.GRADIENT, gradient, name, path)


@never_compiled
@untraced
def _called(hook: Callable[[torch.Tensor], object], parameter: torch.Tensor) -> None:
    """Call ``hook``, a function in C, of which dynamo would warn."""
    hook(parameter)


def _nothing() -> None:
    """An undo that does nothing."""


class BackwardHooks:
    """Wraps ``torch.autograd.backward`` and ``grad``, and the function of the engine that both call.

    The first gradient, ``ones_like(loss)``, is made before the engine runs but belongs to backward; if a script
    imported ``backward`` by name before the session began, only the engine's function is wrapped.
    """

    def __init__(self, listener: Listener, misses: Misses) -> None:
        self._listener = listener
        self._misses = misses
        self._read_loss = misses.guarded(_scalar)
        self._running = False
        """Whether the recorded thread is inside the engine."""

    def install(self) -> Undo:
        """Install the patches; returns their undo."""
        with ExitStack() as undo:
            for place in BACKWARD:
                undo.callback(patch(*place, self._wrap))
            return undo.pop_all().close

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        listener = self._listener
        started, ended = self._misses.guarded(self._started), self._misses.guarded(self._ended)
        only_shapes = self._misses.guarded(_only_shapes)

        @passed_on_uncompiled
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            # Not the step's backward: a call inside another one, in a trace of torch.compile, or for shapes alone.
            if self._running or not listener.on_thread() or in_backward() or makes_graph() or only_shapes(args, kwargs):
                return original(*args, **kwargs)
            self._running = True
            raised, result = True, None
            try:
                started(args, kwargs)
                result = original(*args, **kwargs)
                raised = False
                return result
            finally:
                self._running = False
                ended(raised, original.__name__, args, kwargs, result)

        return run

    def _started(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loss = self._read_loss(_roots(args, kwargs)) if self._listener.recording else None
        self._listener.backward_started(loss)

    def _ended(self, raised: bool, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made_graph = not raised and _creates_graph(entry, args, kwargs)
        gradients = [each for each in result or () if is_tensor(each) and of_functorch(each)]
        if gradients:
            self._listener.remark(FUNCTIONAL)
            # torch.func always passes create_graph=True; if no outer level tracks the gradients, no graph is made.
            made_graph = made_graph and any(map(tracked_below, gradients))
        self._listener.backward_ended(raised=raised, differentiable=made_graph)


_CREATE_GRAPH = {"backward": 3, "grad": 4}
"""Position of the argument ``create_graph``, by function."""


def _creates_graph(entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether backward is differentiable (``create_graph``), so more is computed from the gradients."""
    place = _CREATE_GRAPH.get(entry, 3)  # 3 in the engine's function, too
    return bool(kwargs.get("create_graph", args[place] if len(args) > place else False))


def _roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensors that backward starts from."""
    return args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))


def _only_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether only shapes are computed, as when pipeline stages agree on what they will exchange."""
    roots = _roots(args, kwargs)
    tensors = roots if isinstance(roots, (tuple, list)) else (roots,)
    return bool(tensors) and all(is_tensor(tensor) and tensor.is_meta for tensor in tensors)


def _scalar(roots: Any) -> float | LateNumber | None:
    """The loss, if backward starts from exactly one number."""
    root = roots[0] if isinstance(roots, (tuple, list)) and len(roots) == 1 else roots
    if not is_tensor(root) or root.numel() != 1 or root.is_meta:
        return None
    root = below_functorch(root)
    if type(root) is not torch.Tensor:
        return None
    with without_dispatch():  # the script's own dispatch modes must see only the script's ops
        return number_of(root)
