"""Hooks of backward: its start and end, its loss, and the gradients that it leaves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ampmem.events import Fact
from ampmem.names import FUNCTIONAL, INPUT, warning
from ampmem.patching import Undo, hook, patch_call, together
from ampmem.recorder.facts.addresses import PLAIN
from ampmem.recorder.facts.guests import gradient_of, is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.models import Models, Slot
from ampmem.recorder.sources.cuda.late import LateNumber, number_of
from ampmem.recorder.torch_private import general as private

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

    def watch(self, *, there: bool = False) -> None:
        """Hook every parameter that requires a gradient and is not hooked yet.

        With ``there`` its gradient of an earlier backward is logged, too.
        """
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
                if there:
                    self._look(slot.name_id, slot.path_id, parameter)

    def _hook(self, slot: Slot, parameter: torch.Tensor) -> Callable[[torch.Tensor], object]:
        note, reader = functools.partial(self._look, slot.name_id, slot.path_id), self._log.reader
        if reader is None or type(parameter) not in PLAIN:
            return note
        return functools.partial(_called, reader.gradient_hook(note, slot.name_id, slot.path_id))

    def backward_started(self) -> None:
        """Take the hooks off if backward is compiled."""
        if private.compiles_backward():
            self._take_off()
            self._compiled = True
            if any(private.gradient_hooks(parameter) for _, parameter in self._models.parameters()):
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
        # Found through the models: with a weak reference to a parameter here, torch would refuse to swap it.
        for _, parameter in self._models.parameters():
            if id(parameter) in self._watched and not private.gradient_hooks(parameter):
                private.forget_gradient_hooks(parameter)
        self._watched.clear()
        self._version = 0

    def _note(self, name: int, path: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._log.about(Fact.GRADIENT, gradient, name, path)


@private.never_compiled
@private.untraced
def _called(hook: Callable[[torch.Tensor], object], parameter: torch.Tensor) -> None:
    """Call ``hook``. It is a function in C, about which dynamo would warn if torch called it directly."""
    hook(parameter)


def _nothing() -> None:
    """An undo that does nothing."""


class BackwardHooks:
    """Wraps the two functions of ``torch.autograd`` that its ``backward`` and ``grad`` call.

    The first one makes ``ones_like(loss)``, which belongs to backward; the second one runs the engine. ``backward`` and
    ``grad`` stay torch's own: scripts import them by name, and dynamo knows them by identity.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener, misses = listener, listener.log.misses
        self._started, self._ended = misses.guarded(self._note_start), misses.guarded(self._note_end)
        self._only_shapes, self._read_loss = misses.guarded(_only_shapes), misses.guarded(_scalar)
        self._begun = False
        """Whether the first gradients were made, and the engine has not run yet."""
        self._running = False
        """Whether the recorded thread is inside the engine."""

    def install(self) -> Undo:
        """Install the patches; returns their undo."""
        wrappers = ((private.FIRST_GRADIENTS, self._wrap_first), (private.ENGINE, self._wrap_engine))
        return together(patch_call(*place, wrap) for place, wrap in wrappers)

    def _wrap_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @private.passed_on_uncompiled
        def make(*args: Any, **kwargs: Any) -> Any:
            begins, raised = self._begins(args, kwargs), True
            try:
                gradients = original(*args, **kwargs)
                raised = False
                return gradients
            finally:
                if begins and raised:
                    self._end(args, kwargs, None, raised=True)

        return make

    def _wrap_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @private.passed_on_uncompiled
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._goes_on(args, kwargs):
                return original(*args, **kwargs)
            raised, result = True, None
            try:
                result = original(*args, **kwargs)
                raised = False
                return result
            finally:
                self._end(args, kwargs, result, raised=raised)

        return run

    @private.never_compiled
    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note the start of backward; returns whether this is the step's own backward.

        It is not if it runs inside another backward, in a trace of torch.compile, or for shapes alone.
        """
        if self._running or not self._listener.on_thread() or private.in_backward() or private.makes_graph():
            return False
        if self._begun:  # the engine has never run: vmap refused the gradients
            self._end(args, kwargs, None, raised=True)
        if self._only_shapes(_roots(args, kwargs)):
            return False
        self._begun = True
        self._started(_roots(args, kwargs))
        return True

    @private.never_compiled
    def _goes_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note that the engine is about to run; returns whether it runs the step's own backward."""
        if self._running or not self._listener.on_thread() or private.in_backward():
            return False
        self._running = self._begun or self._begins(args, kwargs)
        return self._running

    @private.never_compiled
    def _end(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, raised: bool) -> None:
        self._begun = self._running = False
        self._ended(args, kwargs, result, raised)

    def _note_start(self, roots: Any) -> None:
        self._listener.backward_started(self._read_loss(roots) if self._listener.recording else None)

    def _note_end(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, raised: bool) -> None:
        made_graph = not raised and _creates_graph(args, kwargs)
        gradients = [each for each in result or () if is_tensor(each) and private.of_functorch(each)]
        if gradients:
            self._listener.remark(FUNCTIONAL)
            # torch.func always passes create_graph=True; if no outer level tracks the gradients, no graph is made.
            made_graph = made_graph and any(map(private.tracked_below, gradients))
        self._listener.backward_ended(raised=raised, differentiable=made_graph)


def _creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the engine makes backward differentiable (``create_graph``), so more is computed from the gradients."""
    return bool(kwargs.get("create_graph", args[3] if len(args) > 3 else False))


def _roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensors that backward starts from."""
    return args[0] if args else kwargs.get("outputs", kwargs.get("t_outputs"))


def _only_shapes(roots: Any) -> bool:
    """Whether only shapes are computed, as when pipeline stages agree on what they will exchange."""
    tensors = roots if isinstance(roots, (tuple, list)) else (roots,)
    return bool(tensors) and all(is_tensor(tensor) and tensor.is_meta for tensor in tensors)


def _scalar(roots: Any) -> float | LateNumber | None:
    """The loss, if backward starts from exactly one number."""
    root = roots[0] if isinstance(roots, (tuple, list)) and len(roots) == 1 else roots
    if not is_tensor(root) or root.numel() != 1 or root.is_meta:
        return None
    root = private.below_functorch(root)
    # A subclass may run code of its own when it is read, or synchronize ranks as a DTensor does.
    if type(root) is not torch.Tensor:
        return None
    with private.without_dispatch():  # the script's own dispatch modes must see only the script's ops
        return number_of(root)
