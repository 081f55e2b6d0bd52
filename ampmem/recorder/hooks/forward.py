"""Hooks of forward: the dispatch mode that sees each op, and the saved-tensor hooks that are on in backward.

In forward, saved tensors are read from the autograd nodes: autograd itself is not patched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from time import time_ns
from typing import Any

import torch

from ampmem.additions import ADD, InPlaceAdditions
from ampmem.events import Fact
from ampmem.own_code import OP_CALLER
from ampmem.patching import Undo, added, patch_call, together, undone_together, unseen
from ampmem.recorder.facts.addresses import PLAIN, parts_of
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.casts import CastHooks
from ampmem.recorder.hooks.ops import OpRecorder
from ampmem.recorder.models.stacks import Stacks
from ampmem.recorder.process import forked_since
from ampmem.recorder.torch_private import general as private
from ampmem.vocabulary import FUSED_ATTENTION


class SavedByNodes:
    """Logs the tensors saved by the autograd nodes of ops and Functions.

    It has weak references only, so nodes are freed as without ampmem. Nothing is read under saved-tensor hooks of the
    script, such as checkpoint's: they decide what is kept.
    """

    def __init__(self, log: Log) -> None:
        self._readable: Callable[[], bool] = lambda: False
        self._log = log
        self._names: dict[type, tuple[str, ...]] = {}
        """Names of the saved tensors' attributes (``_saved_*``), by class of node."""
        self.in_cpp: OpRecorder | None = None
        """The C++ extension, while it reads the nodes of ops in place of the mode: Functions are read here."""
        self._op = self._number = 0
        self._results: list[weakref.ref[torch.Tensor]] = []
        """Tensors that the newest op returned; ``_op`` is its text id, ``_number`` that of its node if it made one."""
        self._functions: list[weakref.ref[Any]] = []
        """Contexts of Functions that have called ``save_for_backward`` and may still be in their forward."""

    def returned(self, op: int, results: Sequence[Any]) -> None:
        """Note that the op with this text id returns ``results``. With gradients off it makes no node.

        Views are left out: an in-place op on a view has no node of its own, and reading the view's ``grad_fn`` while
        torch makes it would never end.
        """
        if torch.is_grad_enabled() and self._readable():
            self._results = [weakref.ref(each) for each in results if is_tensor(each) and not private.is_view(each)]
            self._op, self._number = op, private.next_node() - 1

    def read(self) -> None:
        """Log the tensors saved by nodes made since the last call."""
        results, self._results = self._results, []
        for reference in results:
            result = reference()
            node = None if result is None else result.grad_fn
            # Autograd numbers nodes as they are made: the op's own has the number that was the next before it.
            if node is not None:
                if private.node_number(node) == self._number:  # else it is an older node, and the op made none
                    self._read(node, type(result) in PLAIN)
                break
        if self._functions:
            self._read_functions()
        if self.in_cpp is not None:
            self.in_cpp.read_saved()
            if not self._functions:
                self.in_cpp.call_before(None)

    def before_swap(self, tensors: tuple[torch.Tensor, ...]) -> Undo:
        """Read what the newest op saved, before ``tensors`` are swapped."""
        self.read()
        return lambda: None

    def _read(self, node: Any, plain: bool) -> None:
        kind = type(node)
        # The attributes of a class never change, and looking for them takes longer than reading them.
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = private.saved_names(kind)
        # A node returns a new alias of its result: no mode may see that op, but a subclass needs dispatch to make it.
        with private.without_dispatch() if plain and names else nullcontext():
            saved = [_unpacked(getattr, node, name) for name in names]
        for tensors in saved:
            for tensor in tensors:
                if tensor is not None:
                    self._log.about(Fact.SAVED, tensor, self._op)

    def _read_functions(self) -> None:
        running = []
        for reference in self._functions:
            context = reference()
            if context is None:  # freed: no gradient is needed, or its forward failed
                continue
            if private.to_save(context) is not None:  # its forward still runs
                running.append(reference)
                continue
            name = self._log.texts.id(type(context).__name__.removesuffix("Backward"))
            for tensor in _unpacked(private.saved_by, context):
                if tensor is not None:
                    self._log.about(Fact.SAVED, tensor, name)
        self._functions = running

    def install(self, readable: Callable[[], bool]) -> Callable[[], None]:
        """Patch ``ctx.save_for_backward``; returns the undo. ``readable`` says whether nodes may be read now."""
        self._readable = readable

        def wrap(original: Callable[..., None]) -> Callable[..., None]:
            def save_for_backward(ctx: Any, *tensors: torch.Tensor | None) -> None:
                original(ctx, *tensors)
                if self._readable():
                    self._functions = [known for known in self._functions if known() not in (None, ctx)]
                    self._functions.append(weakref.ref(ctx))
                    if self.in_cpp is not None:
                        self.in_cpp.call_before(read)

            return save_for_backward

        def wrap_hooks(original: Callable[..., None]) -> Callable[..., None]:
            """Read saved tensors before the script registers hooks on them, which reading would then run."""

            def register_hooks(saved: Any, *hooks: Any) -> None:
                read()
                original(saved, *hooks)

            return register_hooks

        read = self._log.misses.guarded(self.read)
        return together(
            patch_call(*place, each) for place, each in ((private.SAVES, wrap), (private.HOOKS_ON_SAVED, wrap_hooks))
        )


def _unpacked(ask: Callable[..., Any], *arguments: Any) -> Sequence[torch.Tensor | None]:
    """The saved tensors that ``ask`` returns; none if they were freed or overwritten since."""
    try:
        saved = ask(*arguments)
    except RuntimeError:
        return ()
    return saved if isinstance(saved, (tuple, list)) else (saved,)


_OVERWRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {then} instead. Hint: enable anomaly detection to "
    "find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
)


_ATTENTION = ("aten::_scaled_dot_product", "aten::_safe_softmax")
"""The names of the ops that the kernels of ``scaled_dot_product_attention`` run begin with one of these."""
_TO = "aten::to"
_MAY_COPY = frozenset({_TO, "aten::contiguous", "aten::flatten", "aten::reshape"})
"""Ops that return their argument, a view of it, or a copy.

In inference mode the dispatch mode sees these ops themselves: there is no autograd to decompose them into ``_to_copy``.
"""


class ForwardMode(private.TorchDispatchMode):
    """Logs each op and the storages that it returns."""

    # Without it torch raises at each higher-order op under the mode, such as flex attention.
    supports_higher_order_operators = True

    def __init__(self, log: Log, casts: CastHooks, stacks: Stacks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self.casts = casts
        self.stacks = stacks
        self.saved = SavedByNodes(log)
        self.read_saved = log.misses.guarded(self.saved.read)
        self._after = log.misses.guarded(self._note_result)
        self._ops: dict[Any, tuple[int, bool, bool]] = {}
        self._of_attention: set[int] = set()
        """Text ids of the ops seen so far that are a kernel of attention, or its math kernel's."""
        self._may_copy: dict[Any, bool] = {}
        """The ops of :data:`_MAY_COPY` seen so far, and whether each may cast."""
        self._additions = InPlaceAdditions(private.PRODUCT, log.misses.say)
        self.alone = True
        """Whether the script has no dispatch mode of its own below this one."""
        self.recomputed: list[int] | None = None
        """Addresses that ops returned while forward is recomputed in backward; ``None`` otherwise."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Under a mode that does not say so, torch.compile runs the code uncompiled.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the method in torch._dynamo.disable, whose first call imports all of dynamo.
        return False

    # At a graph break dynamo compiles what uncompiled code calls, and fails at code that begins with its end.
    @private.never_compiled
    @unseen
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is private.DETACH or func is private.DEVICE:
            return func(*args, **kwargs) if kwargs else func(*args)
        log = self._log
        if func is ADD and self.alone:
            func = self._op_to_call(func, args, kwargs)
        name, makes_storage, reads = self._before(func, args)
        start = time_ns()
        if log.stamp is not None:
            log.stamp(start)
        log.running_op = name
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            trace = error.__traceback__  # it begins with torch's frame for the op, which is there by our mode only
            if trace is not None and trace.tb_frame.f_code.co_filename.endswith(OP_CALLER):
                error.__traceback__ = trace.tb_next
            raise
        finally:
            log.running_op = 0
        log.op(start, name, self.stacks.capture())
        self._additions.note_result(func, result)
        if reads:
            self._after(func, name, args, result, makes_storage)
        return result

    def _op_to_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func``, or the op that torch would call in its place without this mode."""
        try:
            with private.without_functions():
                plain = all(type(each) in PLAIN for each in args)  # a simulated device chooses by itself
                return self._additions.choose(func, args, kwargs) if plain else func
        except Exception as error:
            self._log.misses.add(error)
            return func

    def _before(self, func: Any, args: Any) -> tuple[int, bool, bool]:
        """Log what was saved and which casts ``func`` reads; returns what :meth:`_new_op` returns for ``func``."""
        try:
            with private.without_functions():
                self.saved.read()
                op = self._ops.get(func)
                if op is None:
                    op = self._ops[func] = self._new_op(func)
                if op[2] and self.casts.copies:
                    self.casts.used(args, op[0])
                return op
        except Exception as error:
            self._log.misses.add(error)
            return 0, False, False

    def _note_result(self, func: Any, name: int, args: Any, result: Any, makes_storage: bool) -> None:
        """Log the ``result`` of ``func``, which is not a view op."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.saved.returned(name, results)
        if makes_storage:
            self._note(name, results)
            if name in self._of_attention and (disabled := _disabled_kernels()):
                self._log.about(Fact.DISABLED, results[0], self._log.texts.id(disabled))
            if func is private.TO_COPY:
                self.casts.made(args[0], result, self._log.module)
        elif func is private.COPY:
            self.casts.copied(args[1], result, self._log.module)
        elif func in self._may_copy and self._lies_elsewhere(result, args[0]):
            self._note(name, results)
            if self._may_copy[func]:
                self.casts.made(args[0], result, self._log.module)

    def _lies_elsewhere(self, result: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether ``result`` has another storage than the op's argument ``source``."""
        return list(map(self._log.storage_address, parts_of(result))) != list(
            map(self._log.storage_address, parts_of(source))
        )

    def _new_op(self, func: Any) -> tuple[int, bool, bool]:
        """Text id of the op's name; whether it returns new storages; whether it is not a view op."""
        schema = private.op_schema(func)
        if schema is None:  # a higher-order operator
            return self._log.texts.id(str(func)), False, False
        aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
        view = any(not alias.is_write for alias in aliases)
        if schema.name.startswith(_ATTENTION):
            self._of_attention.add(self._log.texts.id(str(schema.name)))
        if view and schema.name in _MAY_COPY:
            self._may_copy[func] = schema.name == _TO
            return self._log.texts.id(str(schema.name)), False, True
        return self._log.texts.id(str(schema.name)), not aliases, not view

    def _note(self, name: int, results: Sequence[Any]) -> None:
        log = self._log
        for tensor in results:
            if is_tensor(tensor):
                log.about(Fact.OUTPUT, tensor, name, log.module)
                if self.recomputed is not None:
                    self.recomputed += map(log.storage_address, parts_of(tensor))


def _disabled_kernels() -> str:
    """The fused kernels of attention that are disabled now: ``flash, cuDNN``."""
    cuda = torch.backends.cuda
    enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    return ", ".join(kernel for kernel, usable in zip(FUSED_ATTENTION, enabled, strict=True) if not usable)


class SavedTensors:
    """Saved-tensor hooks that log what autograd saves in backward, and change nothing else.

    With hooks in place autograd no longer checks whether a saved tensor was overwritten, so the unpack hook does, with
    the same error.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._forked = forked_since()

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Log ``tensor`` and keep an alias of it: keeping the tensor itself could make a reference cycle.

        A leaf is kept itself, as autograd does: it has no graph to be in a cycle with, and backward must see what the
        script has assigned to its ``data`` since.
        """
        with private.without_functions():
            if not self._forked() and not self._log.observed:  # else it is read from the node, which has the op's name
                self._log.about(Fact.SAVED, tensor)
            return tensor if tensor.is_leaf else unseen_detach(tensor), private.version_of(tensor)

    @unseen
    def unpack(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        """The tensor that :meth:`pack` kept; raises ``RuntimeError`` if it was overwritten since."""
        tensor, version = packed
        if private.version_of(tensor) != version:
            kind, shape = tensor.type(), list(tensor.shape)
            raise RuntimeError(
                _OVERWRITTEN.format(kind=kind, shape=shape, now=private.version_of(tensor), then=version)
            )
        return tensor


class ForwardObserver:
    """Pushes and pops the dispatch mode and the saved-tensor hooks; pops only its own.

    Where the C++ extension can see the ops as the mode would, it does so, and no mode is pushed (``hooks/ops.py``).
    ``owns_mode`` says whether a mode is the simulated device's. It also observes what follows the outermost forward if
    gradients are on, or if it ``stays``.
    """

    def __init__(
        self,
        log: Log,
        mode: ForwardMode,
        saved: SavedTensors,
        owns_mode: Callable[[object], bool],
        *,
        stays: bool = False,
    ) -> None:
        self._log = log
        self._mode = mode
        self._owns_mode = owns_mode
        self._stays = stays
        self._hooks = (saved.pack, saved.unpack)
        self._ops = OpRecorder.find(log, mode.casts, mode.stacks, log.misses.guarded(self._go_on_with_mode))
        self._by_cpp = False
        """Whether the C++ extension observes forward, and not the mode."""
        self._pop_mode: Undo | None = None
        self._pop_hooks: Undo | None = None
        self._leave_with_forward = False
        self._thread = get_ident()
        """The thread whose forward is observed: modes and hooks are per thread."""
        self._in_backward = False
        self._suspended_on: int | None = None
        """The thread on which the hooks are off, because something refuses to run under hooks."""

    @property
    def active(self) -> bool:
        """Whether forward is being observed."""
        return self._pop_mode is not None

    def enter(self, *, recomputing: bool = False) -> None:
        """Start observing; does nothing if it is on already."""
        if self._pop_mode is not None:
            return
        # Modes are a stack: above the script's mode, ours must be popped before theirs is, so at the forward's end.
        below = private.current_mode()
        not_ours = below is not None and not self._owns_mode(below)
        self._mode.alone = not not_ours
        self._leave_with_forward = not_ours or _top_hooks() not in (None, self._hooks)
        self._by_cpp = below is None and not recomputing and self._starts_in_cpp()
        if self._by_cpp:
            self._pop_mode = added("record functions", "OpRecorder", self._leave_ops)
        else:
            self._push_mode()
        self._mode.recomputed = [] if recomputing else None
        self._log.observed = True
        self._thread = get_ident()

    def _push_mode(self) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        leave = partial(self._mode.__exit__, None, None, None)
        self._pop_mode = added("dispatch modes", "ForwardMode", leave)

    def _starts_in_cpp(self) -> bool:
        """Start the C++ extension, unless only the mode sees every op; returns whether the extension runs."""
        ops = self._ops
        if ops is None or self._log.stamps_ops() or not self._log.on_own_thread or ops.needs_mode or private.compiles():
            return False
        if not self._mode.casts.of_plain_models() or not ops.start():
            return False
        self._mode.saved.in_cpp = ops
        return True

    def _go_on_with_mode(self) -> None:
        """Push the mode in the middle of a forward, unless it would be in the way of one of the script's."""
        # Called by C++ after the first op that it cannot see right, in the middle of the model's forward.
        if self._by_cpp and self._pop_mode is not None and private.current_mode() is None:
            self._pop_mode()
            self._by_cpp = False
            self._push_mode()

    def _leave_ops(self) -> None:
        assert self._ops is not None
        self._mode.saved.in_cpp = None
        self._ops.stop()

    def forward_ended(self) -> None:
        """Stop observing after the outermost forward, unless what follows is observed, too.

        It is not if a mode of the script is below ours.
        """
        if self._leave_with_forward or not (self._stays or torch.is_grad_enabled()):
            self.leave()

    def leave(self) -> None:
        """Stop observing ops, unless the script's mode is on top of ours: then ours stays until that one is popped."""
        if self._pop_mode is not None:
            if self._by_cpp or private.current_mode() is self._mode:
                self._mode.read_saved()
                self._pop_mode()
                self._pop_mode = None
                self._log.observed = False
            else:
                self._log.misses.say(
                    "the script's own dispatch mode was on top of ampmem's, so ampmem's mode stayed on in backward"
                )

    def take_recomputed(self) -> list[int]:
        """End recomputation; returns the addresses that its ops returned."""
        addresses, self._mode.recomputed = self._mode.recomputed or [], None
        return addresses

    def backward_started(self) -> None:
        """Put the saved-tensor hooks on: the engine is about to run."""
        self._in_backward = True
        self._enter_hooks()

    def backward_ended(self) -> None:
        """Take the saved-tensor hooks off: the engine has returned."""
        self._in_backward = False
        self._leave_hooks()
        self._take_hooks_out()  # the engine restores the hooks of its start at each node

    def _enter_hooks(self) -> None:
        if (
            self._in_backward
            and self._pop_hooks is None
            and _top_hooks() is None
            and private.saved_hooks_refused() is None
        ):
            private.push_saved_hooks(*self._hooks)
            self._pop_hooks = added("saved-tensor hooks", "SavedTensors", self._take_hooks_out)

    def _leave_hooks(self) -> None:
        if self._pop_hooks is not None:
            self._pop_hooks()
            self._pop_hooks = None

    def _take_hooks_out(self) -> None:
        """Take our hooks off the stack, also from under hooks that the script has pushed."""
        above = []
        while (top := _top_hooks()) not in (None, self._hooks):
            above.append(top)
            private.pop_saved_hooks()
        if top is not None:
            private.pop_saved_hooks()
        # Torch has only push and pop: the script's hooks go back on, in their order.
        for pack, unpack in reversed(above):
            private.push_saved_hooks(pack, unpack)

    def _wrap_disable(self, original: Callable[..., None]) -> Callable[..., None]:
        """Take our hooks off while torch.func or Dynamo disable hooks: torch refuses that while there are any."""

        def disable(error_message: str, fail_if_non_empty: bool = True) -> None:
            if fail_if_non_empty and self._pop_hooks is not None and _top_hooks() == self._hooks:
                self._leave_hooks()
                self._suspended_on = get_ident()
            original(error_message, fail_if_non_empty)

        return disable

    def _wrap_enable(self, original: Callable[[], None]) -> Callable[[], None]:
        def enable() -> None:
            original()
            if self._suspended_on == get_ident():  # hooks are per thread
                self._suspended_on = None
                self._enter_hooks()

        return enable

    def _reads_nodes(self) -> bool:
        """Whether forward is observed on this thread and the script has no saved-tensor hooks on."""
        return self.active and get_ident() == self._thread and _top_hooks() in (None, self._hooks)

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Patch the functions that disable hooks, and those with which Functions save tensors; returns the undo."""
        yield patch_call(*private.DISABLE_SAVED_HOOKS, self._wrap_disable)
        yield patch_call(*private.ENABLE_SAVED_HOOKS, self._wrap_enable)
        yield self._mode.saved.install(self._reads_nodes)
        # A session may end inside backward: an error, or another thread's wish.
        yield self.backward_ended


def unseen_detach(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` hidden from dispatch modes: the script's modes must count only the script's ops."""
    if type(tensor) not in PLAIN:
        return tensor.detach()  # a subclass implements detach by dispatch
    with private.without_dispatch():
        return tensor.detach()


def _top_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks on top of the stack, or ``None``."""
    return private.top_saved_hooks(True)
