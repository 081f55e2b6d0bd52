"""Global module hooks: the start and end of forward, the running module, the inputs of the root.

Forward starts with a module that is part of a model (it has parameters, or belongs to a module that has), or that gets
a tensor that requires a gradient. Any other module is a transform of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import get_ident
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ampmem.events import Fact, Phase
from ampmem.names import CASTS_COMPILED
from ampmem.own_code import OWN_FOLDERS
from ampmem.patching import Undo, added, hook, patch_call, undone_together
from ampmem.recorder.compiled.code import CompiledCode
from ampmem.recorder.facts.guests import is_nn_parameter, is_tensor
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.anatomy import has_parameters
from ampmem.recorder.torch_private import general as private

_FSDP1 = "FullyShardedDataParallel"
_MODULE = nn.Module.forward.__code__.co_filename
"""The file of ``nn.Module``, whose functions call a module and its hooks."""
WHOLE_GRADIENTS = (
    f"{_FSDP1} (FSDP1): the parameters are this rank's shards; an unsharded gradient counts as gradients until it is "
    "reduced"
)


class ModuleHooks:
    """Keeps the stack of running modules and reports outermost forwards."""

    def __init__(self, listener: Listener, follow: Callable[[], None]) -> None:
        self._listener, self._log, self._models = listener, listener.log, listener.models
        self._stacks, self._arm_seen = listener.update.stacks, listener.precision_seen
        self._follow = follow
        """Called before a forward starts."""
        guarded = self._log.misses.guarded
        self._look_at_new = guarded(self._models.registered)
        self._look_before, self._look_after = guarded(self._before), guarded(self._ended)
        self._running: list[tuple[int, int, int]] = []
        """(id, path, call) of each module in forward, outermost first; a transform has no path."""
        self._started_at: int | None = None
        """Number of transforms that were running when forward started; ``None`` outside of forward."""
        self._thread = 0
        """The thread on which forward started."""
        self._before_transform: Phase | None = None
        """The phase to go back to after the outermost transform."""
        self._said_elsewhere = False
        """Whether a model on another thread was reported already."""
        self._feeds_batch = False
        """Whether forward started with a part of a model, whose input is the batch; a loss's input is the targets."""

    def install(self) -> Callable[[], None]:
        """Register the hooks; returns the undo."""
        with ExitStack() as undo:
            # always_call: a module that raised has ended, too.
            after = private.on_module_after(self._after, with_kwargs=True, always_call=True)
            undo.callback(private.hooks_with_kwargs.pop, after.id, None)  # removing the handle leaves this entry behind
            undo.callback(added("torch.nn.modules.module", "register_module_forward_hook", after.remove))
            undo.callback(hook(private.on_module_before, self.before))
            undo.callback(hook(private.on_new_parameter, self._changed))
            undo.callback(hook(private.on_new_buffer, self._changed))
            undo.callback(hook(private.on_new_module, self._changed))
            return undo.pop_all().close

    def compiled_starts(self, module: nn.Module, trains: bool, inputs: list[Any]) -> None:
        """Note that compiled code runs ``module`` with ``inputs``: no other hook sees that.

        Inside an autograd.Function gradients are off; ``trains`` says whether they are on outside.
        """
        with torch.set_grad_enabled(trains):
            self._look_before(module, tuple(inputs), sys._getframe())

    def compiled_ends(self, module: nn.Module, trains: bool, *, raised: bool) -> None:
        """Note that this code has returned, or ``raised``."""
        with torch.set_grad_enabled(trains):
            self._look_after(module, None if raised else {})

    def in_forward(self) -> bool:
        """Whether a forward is running."""
        return self._started_at is not None

    def _changed(self, module: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._look_at_new(module)

    @private.never_compiled
    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note that ``module`` is about to run."""
        # First of all: dynamo traces the hooks too, and anything else here would break the script's graph.
        if not torch.compiler.is_compiling() and not self._starts_inside(module, sys._getframe(1)):
            self._look_before(module, args, sys._getframe(1))

    # Most modules run inside of others. What that takes touches none of the script's objects, so it needs no guard.
    @private.never_compiled
    @private.untraced
    def _starts_inside(self, module: nn.Module, caller: FrameType) -> bool:
        """Note that ``module``, which has a name, is about to run inside of another; whether that is so."""
        # Other threads may run modules at once; the stack of running ones is the recorded thread's.
        if self._started_at is None or get_ident() != self._thread or private.is_tracing():
            return False
        path = self._models.known_path_id(module)
        if path:
            self._starts(module, path, caller)
        return path != 0

    def _starts(self, module: nn.Module, path: int, caller: FrameType) -> None:
        self._arm_seen.sample()
        self._running.append((id(module), path, self._entered(caller)))
        self._log.started(path)

    def _before(self, module: nn.Module, args: tuple[Any, ...], caller: FrameType) -> None:
        # Tracing by torch.jit is not part of a step, and its tracer fails under a dispatch mode.
        if private.is_tracing():
            return
        if not self._listener.on_thread():
            self._ran_elsewhere(module)
            return
        if self._started_at is None:
            self._models.add_registered()
            owned = self._models.owns(module)
            if not owned and not _needs_gradient(args):
                if not self._running:
                    self._before_transform = self._listener.data_started(transform=True)
                self._running.append((id(module), 0, 0))
                return
            if any(base.__name__ == _FSDP1 for base in type(module).__mro__):
                self._listener.remark(WHOLE_GRADIENTS)
            path = self._models.path_id(module)
            self._started_at, self._feeds_batch, self._thread = len(self._running), owned, get_ident()
            self._follow()
            try:
                self._listener.forward_started(module, recomputing=private.in_backward() and torch.is_grad_enabled())
            except BaseException:  # StopScript: the module will not run
                self._started_at = None
                raise
            self._note_inputs(args)
        else:
            path = self._models.path_id(module)
        self._starts(module, path, caller)

    def _entered(self, caller: FrameType) -> int:
        """Note the frame that will run the module: ``caller`` of the hook, if that is torch's own code."""
        if self._stacks.by_cpp or caller.f_code.co_filename != _MODULE:
            return 0
        return self._stacks.entered(caller)

    def _ran_elsewhere(self, module: nn.Module) -> None:
        """Report once that a ``module`` with parameters runs on a thread that is not recorded."""
        if self._listener.recording and not self._said_elsewhere and has_parameters(module):
            self._said_elsewhere = True
            self._listener.forward_elsewhere(type(module).__name__)

    @private.never_compiled
    def _after(self, module: nn.Module, args: Any, kwargs: Any = None, result: Any = None) -> None:
        # Torch calls it with (module, args, result) if the forward raised.
        if not torch.compiler.is_compiling() and not self._ends_inside(module):
            self._look_after(module, kwargs)

    @private.never_compiled
    @private.untraced
    def _ends_inside(self, module: nn.Module) -> bool:
        """Note that ``module``, the innermost that runs, has ended, and another goes on; whether that is so."""
        running = self._running
        if self._started_at is None or len(running) < self._started_at + 2 or running[-1][0] != id(module):
            return False
        call = running.pop()[2]
        if call:
            self._stacks.left(call)
        self._log.enter_module(running[-1][1])
        return True

    def _ended(self, module: nn.Module, kwargs: Any) -> None:
        running = self._running
        if not running:
            return
        if running[-1][0] == id(module):  # as a rule
            self._stacks.left(running.pop()[2])
        elif any(entry == id(module) for entry, _, _ in running):
            while running:
                entry, _, call = running.pop()
                self._stacks.left(call)
                if entry == id(module):
                    break
        else:
            return
        started_at = self._started_at
        if started_at is not None:
            self._log.enter_module(running[-1][1] if running else 0)
            if len(running) <= started_at:
                if isinstance(kwargs, dict):
                    self._note_inputs(kwargs)
                self._started_at = None
                self._listener.forward_ended(raised=not isinstance(kwargs, dict))
        if not running and self._before_transform is not None:
            before, self._before_transform = self._before_transform, None
            self._listener.data_ended(before)

    def _note_inputs(self, arguments: Any) -> None:
        sizes: list[int] = []
        for leaf in private.tree_leaves(arguments):
            if is_tensor(leaf) and leaf.grad_fn is None and not is_nn_parameter(leaf):
                self._log.about(Fact.INPUT, leaf)
                if leaf.requires_grad:
                    self._listener.input_seen(leaf)
                if leaf.dim():
                    sizes.append(leaf.size(0))  # a nested tensor has no shape
        if sizes and self._feeds_batch:
            self._listener.batch_seen(sizes[0])


def _needs_gradient(args: tuple[Any, ...]) -> bool:
    """Whether any of ``args`` is a tensor that requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    return any(is_tensor(leaf) and leaf.requires_grad for leaf in private.tree_leaves(args))


def quiet_compiled_modules() -> Undo:
    """Make compiled modules warn about global hooks only if the script has some; returns the undo."""

    def wrap(original: Callable[[], Any]) -> Callable[[], Any]:
        def _has_any_global_hook() -> Any:
            return original() and any(not _is_own(each) for each in private.module_hooks())

        return _has_any_global_hook

    return patch_call(*private.HAS_HOOKS, wrap)


class UnseenByCompiled:
    """Hides ampmem's global module hooks while compiled code runs.

    Dynamo would otherwise compile the code once with them and once without. Meanwhile ops are seen by the dispatch
    mode, and the forward by the hooks on the compiled module itself.

    They stay if nothing else has seen forward start. A model compiled in place (``model.compile()``) that runs then is
    reported: its compiled code has the hooks' calls inside, where they do nothing. A note says so if autocast could
    have made casts in compiled code, and none was seen.
    """

    def __init__(self, listener: Listener, modules: ModuleHooks, code: CompiledCode) -> None:
        self._listener, self._log, self._arm_seen = listener, listener.log, listener.precision_seen
        self._modules = modules
        self._code = code
        self._under_autocast: tuple[int, int] | None = None
        """For the outermost compiled code running under autocast: ``id`` of its frame, and the casts before it."""
        self._thread = get_ident()
        self._put_back: Undo | None = None
        self._runs_in = 0
        """``id`` of dynamo's frame that runs the code for which the hooks are hidden."""
        self._unpatch: Undo | None = None

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Patch the function with which dynamo enters and leaves compiled code; returns the undo."""
        yield patch_call(*private.COMPILE, self._wrap_compile)
        yield self._end
        self._look()

    def show(self) -> None:
        """Put the hooks back, before some are removed."""
        if self._put_back is not None:
            self._put_back()
            self._put_back, self._runs_in = None, 0

    def _end(self) -> None:
        self.show()
        if self._unpatch is not None:
            self._unpatch()
            self._unpatch = None

    def _look(self) -> None:
        """Patch dynamo, if it has been imported by now."""
        place = private.compiled_code()
        if place is not None and self._unpatch is None:
            self._unpatch = patch_call(*place, self._wrap)

    def _wrap_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            self._look()
            return compiled

        return compile

    def _wrap(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # Dynamo calls it before and after compiled code; in between, the compiler calls it too, and code that is
        # excluded from compilation.
        def _maybe_set_eval_frame(callback: Any) -> Any:
            if get_ident() == self._thread:
                frame = sys._getframe(1)
                if frame.f_code.co_name == private.RUNS_COMPILED:
                    self._count_casts(id(frame))
                # With the callback None or False dynamo compiles nothing.
                if self._put_back is None and callback is not None and callback is not False:
                    if frame.f_code.co_name == private.RUNS_COMPILED:
                        if self._listener.recording and not self._modules.in_forward():
                            self._look_for_model(frame.f_locals.get("fn"))
                        else:
                            self._put_back, self._runs_in = private.taken_out(_is_own), id(frame)
                elif id(frame) == self._runs_in:
                    self.show()
            return original(callback)

        return _maybe_set_eval_frame

    def _look_for_model(self, call: Any) -> None:
        """Report the model that was compiled in place, if ``call`` is its compiled function."""
        module = getattr(call, "__self__", None) if type(call) is MethodType else None
        if isinstance(module, nn.Module) and call.__func__.__name__ == private.CALLS_MODULE and has_parameters(module):
            self._listener.compiled_in_place(type(module).__name__)

    def _count_casts(self, frame: int) -> None:
        """Compare the casts before and after the compiled code that runs in the frame with this ``id``."""
        began, casts = self._under_autocast, self._casts()
        if began is None:
            self._under_autocast = None if casts is None else (frame, casts)
        elif began[0] == frame:
            self._under_autocast = None
            if casts == began[1]:
                self._listener.remark(CASTS_COMPILED)

    def _casts(self) -> int | None:
        """Note that compiled code runs; the number of parameter casts so far, or ``None`` if it is not under autocast.

        A graph whose text says everything counts as one: it has no cast that was not seen.
        """
        if not self._listener.recording:
            return None
        self._arm_seen.compiled = True
        if not self._arm_seen.on():
            return None
        self._arm_seen.sample()  # a compiled function calls no module
        return self._log.casts + self._code.explained


def _is_own(function: Any) -> bool:
    """Whether ``function`` is part of ampmem."""
    code = getattr(function, "__code__", None) if type(function) in (FunctionType, MethodType) else None
    return code is not None and code.co_filename.startswith(OWN_FOLDERS)
