"""Forces a precision on an unmodified script, through torch's own autocast and GradScaler."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from ampmem.patching import Undo, hook, patch, undone_together, unseen
from ampmem.recorder.torch_private.general import (
    CHECKPOINT,
    DECORATED,
    ENGINE,
    ENTER_AUTOCAST,
    ENTER_REGION,
    EXIT_REGION,
    FIRST_GRADIENTS,
    SCALER_INIT,
    SCALER_SCALE,
    enable_scaler,
    in_backward,
    is_set_up,
    never_compiled,
    on_module_after,
    on_module_before,
    on_step_before,
    region_says,
    say_region,
    scaler_device,
    scaler_enabled,
)
from ampmem.vocabulary import AUTOCAST_PRECISIONS, AutocastDtype, Precision

_TORCH = str(Path(torch.__file__).parent) + os.sep


def entering_code() -> CodeType:
    """The code that enters an autocast region, above the ``__enter__`` of ampmem and of autocast's subclasses."""
    frame: FrameType = sys._getframe(1)
    while frame.f_code.co_name == "__enter__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


def restates(code: CodeType) -> bool:
    """Whether ``code`` is torch's and restores an autocast state: in checkpoint, custom_fwd or DataParallel."""
    of_script = code.co_name in ("decorate_autocast", ENTER_AUTOCAST)
    return code.co_filename.startswith(_TORCH) and not of_script


def of_compiled(code: CodeType) -> bool:
    """Whether ``code`` is the function through which compiled code enters regions."""
    return code.co_filename.startswith(_TORCH) and code.co_name == ENTER_AUTOCAST


def has_autocast(function: Any) -> bool:
    """Whether ``function``, such as a module's method, opens autocast itself or in a module inside it."""
    owner = getattr(function, "__self__", function)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    return _opens_autocast(function) or any(_opens_autocast(module.forward) for module in modules)


def _opens_autocast(function: Any) -> bool:
    """Whether ``function`` is decorated with autocast, or uses it other than to disable it."""
    while function is not None:
        if hasattr(function, DECORATED):  # set by autocast's decorator
            return True
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and _names_autocast(code) and not only_disables(code):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _names_autocast(code: CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(map(_is_autocast, code.co_names + code.co_freevars)) or any(map(_names_autocast, inner))


def _is_autocast(name: str) -> bool:
    """Whether an object called ``name`` can enter autocast: ``is_autocast_enabled``, for one, cannot."""
    return "autocast" in name and not name.startswith(("is_", "get_", "set_", "clear_"))


@functools.lru_cache(maxsize=256)
def only_disables(code: CodeType) -> bool:
    """Whether ``code`` uses autocast only with ``enabled=False``, as FP32 islands in models do."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return False
    nodes = list(ast.walk(tree))
    calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    variables = _made_here(nodes)
    # A variable such as autocast_ctx is judged where it is assigned, unless the variable itself is called.
    named = [node for node in nodes if _is_autocast(_name(node)) and (node in calls or _name(node) not in variables)]
    return bool(named) and all(node in calls and _disabled(calls[node]) for node in named)


def _made_here(nodes: Sequence[ast.AST]) -> set[str]:
    """The variables that are only assigned calls of autocast or ``nullcontext``."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
    made = [_name(node.targets[0]) for node in assigned if _makes(node.value)]
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    given = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {name for name in made if made.count(name) == stored.count(name)} - given


def _makes(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _makes(value.body) and _makes(value.orelse)
    called = _name(value.func) if isinstance(value, ast.Call) else ""
    return called == "nullcontext" or _is_autocast(called)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _disabled(call: ast.Call) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == "enabled"]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


WRAPPED = "the script does not use autocast: ampmem ran each outermost forward and its loss under autocast"
GAVE_WAY = (
    "the script entered its own autocast inside ampmem's region: the first forward ran partly under ampmem's own "
    "autocast"
)
CAME_LATE = (
    "the script entered its own autocast only after ampmem had run forwards under autocast: from then on only the "
    "script's autocast was used"
)

_DTYPES = {AutocastDtype.BF16: torch.bfloat16, AutocastDtype.FP16: torch.float16}
_PLAIN_SCALERS = (GradScaler, torch.cuda.amp.grad_scaler.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRegion:
    """An open autocast region; ``scripts`` says that the script entered it, for the session's device type."""

    region: Any
    scripts: bool


class _Regions(threading.local):
    """The autocast regions open on this thread, outermost first, of all device types, including ampmem's."""

    def __init__(self) -> None:
        self.open: list[_OpenRegion] = []

    def pop(self, region: Any) -> Any:
        """Remove ``region``; returns the one entered directly after it, if that is still open."""
        for index in range(len(self.open) - 1, -1, -1):
            if self.open[index].region is region:
                del self.open[index]
                return self.open[index].region if index < len(self.open) else None
        return None


class Steering:
    """Steers every autocast region and GradScaler of the script into one precision.

    ``fp32`` and ``bf16`` disable them all. ``amp`` enables the outermost regions of ``device_type`` and leaves regions
    disabled that the script disables inside them; ``amp-nocache`` does the same without the weight cache. ``dtype`` is
    the dtype to cast to; ``None`` keeps the script's, or torch's default for the device. A script without autocast gets
    a region of ampmem's around each outermost forward and what follows it, up to backward. GradScalers made before
    :meth:`install` stay as they are.
    """

    def __init__(
        self, precision: Precision, dtype: AutocastDtype | None, device_type: str, note: Callable[[str], None]
    ) -> None:
        self.wrapped = False
        """Whether ampmem had to open a region itself, because the script has none."""
        self._fp32 = precision not in AUTOCAST_PRECISIONS
        self._cache = precision == Precision.AMP
        self._dtype = None if dtype is None else _DTYPES[dtype]
        self._device_type = device_type
        self._note = note
        self._installed = False
        self._thread = 0
        self._regions = _Regions()
        self._ours: Any = None
        """Ampmem's own region, while it is open."""
        self._opener = 0
        """``id`` of the module whose forward opened it; 0 if checkpoint did."""
        self._scripts_own = False
        """Whether the script is known to use autocast itself on this device type."""
        self._float16_seen = False
        self._without: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that were analysed and have no autocast inside."""
        self._undecided: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        """Scalers that the script disabled; they are enabled if autocast turns out to cast to float16."""
        self._enter: Any = None
        self._exit: Any = None

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Install patches and hooks; the returned undo first leaves ampmem's region, if it is open.

        Install it before the other hooks, which must find the region open.
        """
        self._installed, self._thread = True, threading.get_ident()
        self._enter, self._exit = autocast.__enter__, autocast.__exit__
        yield functools.partial(setattr, self, "_installed", False)
        yield only_disables.cache_clear  # it holds code objects of the script
        yield patch(*ENTER_REGION, self._wrap_enter)
        yield patch(*EXIT_REGION, self._wrap_exit)
        yield patch(*SCALER_INIT, self._wrap_scaler_init)
        yield patch(*SCALER_SCALE, self._wrap_scale)
        if not self._fp32:
            for place in (FIRST_GRADIENTS, ENGINE):
                yield patch(*place, self._wrap_backward)
            yield patch(*CHECKPOINT, self._wrap_checkpoint)
            yield hook(on_module_before, self._before)
            yield hook(on_module_after, self._after, always_call=True)
            yield hook(on_step_before, lambda *_: self.leave())
        yield self.leave

    def leave(self) -> None:
        """Leave ampmem's own region, if it is open."""
        if torch.compiler.is_compiling() or self._ours is None or not self._on_thread():
            return
        self._leave_ours()
        self._note(WRAPPED)

    def _on_thread(self) -> bool:
        return threading.get_ident() == self._thread

    # -- regions of the script ------------------------------------------------------------------

    def _wrap_enter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # Subclasses such as torch.cuda.amp.autocast call it through super().
        @functools.wraps(original)
        @never_compiled
        @unseen
        def __enter__(region: Any) -> Any:
            if not self._installed:
                return original(region)
            code = entering_code()
            by_torch = restates(code)
            replayed = in_backward() and (by_torch or not torch.is_grad_enabled())
            scripts = region.device == self._device_type and not by_torch and not replayed
            if scripts and self._on_thread() and not in_backward():
                self._give_way(region, code)
            said = region_says(region)
            say_region(region, self._steered(region, scripts=scripts, replayed=replayed))
            try:
                result = original(region)
            finally:
                say_region(region, said)
            self._regions.open.append(_OpenRegion(region=region, scripts=scripts))
            return result

        return __enter__

    def _wrap_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @never_compiled
        @unseen
        def __exit__(region: Any, *exception: Any) -> Any:
            return self._exit_region(region, functools.partial(original, region, *exception))

        return __exit__

    def _exit_region(self, region: Any, leave: Callable[[], Any]) -> Any:
        """Leave ``region``, even if the one entered after it stays open and one of the two is ampmem's.

        Regions of different device types share only the flag of the cache.
        """
        above = self._regions.pop(region)
        if above is None or (self._ours is not region and self._ours is not above):
            return leave()
        cache = torch.is_autocast_cache_enabled()
        above.prev_cache_enabled = region.prev_cache_enabled
        result = leave()
        torch.set_autocast_cache_enabled(cache)
        return result

    def _steered(self, region: Any, *, scripts: bool, replayed: bool) -> tuple[bool, torch.dtype, bool]:
        """The values to enter ``region`` with: enabled, dtype, cache enabled."""
        enabled, dtype, cache = region_says(region)
        if self._fp32:
            return False, dtype, cache
        if region.device != self._device_type:
            return enabled, dtype, cache
        if replayed:  # forward's state, which was steered; only the cache is not part of it
            return enabled, dtype, cache and self._cache
        if scripts and not enabled and not self._inside_another():
            enabled = True
            if dtype not in _DTYPES.values():
                dtype = torch.get_autocast_dtype(self._device_type)
        if enabled:
            dtype = self._dtype or dtype
            self._float16_seen |= dtype == torch.float16
        return enabled, dtype, self._cache

    def _inside_another(self) -> bool:
        return torch.is_autocast_enabled(self._device_type) or any(entry.scripts for entry in self._regions.open)

    def _give_way(self, region: Any, code: CodeType) -> None:
        """Note that the script enters ``region`` itself, so ampmem opens no more regions."""
        # Regions of compiled code must not change the state it was compiled under, and those of checkpointed code not
        # the state it is recomputed under; code that only disables autocast is an FP32 island, not the script's AMP.
        if self._ours is not None and (self._opener == 0 or of_compiled(code)):
            return
        if self.wrapped and not region_says(region)[0] and only_disables(code):
            return
        self._scripts_own = True
        if self.wrapped:
            self.wrapped = False
            self._note(CAME_LATE if self._ours is None else GAVE_WAY)
        if self._ours is not None:
            self._leave_ours()

    # -- ampmem's own region ----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        # First of all: dynamo traces the hooks too, and anything else here would break the script's graph.
        if torch.compiler.is_compiling() or not self._may_open() or next(module.parameters(), None) is None:
            return
        if module not in self._without:
            self._scripts_own = has_autocast(module)
            if not self._scripts_own:
                self._without.add(module)
        if not self._scripts_own:
            self._open(id(module))

    def _may_open(self) -> bool:
        if self._ours is not None or self._scripts_own or not self._installed or not self._on_thread():
            return False
        return not in_backward() and not torch.is_autocast_enabled(self._device_type)

    def _open(self, opener: int) -> None:
        dtype = self._dtype or torch.get_autocast_dtype(self._device_type)
        self._float16_seen |= dtype == torch.float16
        region = autocast(self._device_type, dtype=dtype, cache_enabled=self._cache)
        self._enter(region)
        self._regions.open.append(_OpenRegion(region=region, scripts=False))
        self._ours, self._opener, self.wrapped = region, opener, True

    def _after(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._ours is None:
            return
        if id(module) == self._opener and not torch.is_grad_enabled():
            self.leave()

    def _leave_ours(self) -> None:
        region = self._ours
        self._exit_region(region, functools.partial(self._exit, region, None, None, None))
        self._ours = None

    def _wrap_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Checkpoint saves the autocast state before it runs its function, so before any module has started.
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._may_open():
                caller = sys._getframe(1).f_locals
                self._scripts_own = has_autocast(caller.get("run_function", caller.get("fn")))
                if not self._scripts_own:
                    self._open(0)
            return original(*args, **kwargs)

        return run

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.leave()
            return original(*args, **kwargs)

        return run

    # -- GradScalers ------------------------------------------------------------------------------

    def _wrap_scaler_init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if not self._installed:
                return
            if self._fp32:
                enable_scaler(scaler, False)
            elif not scaler_enabled(scaler) and self._may_enable(scaler):
                bound = signature.bind(scaler, *args, **kwargs)
                bound.arguments["enabled"] = True
                with suppress(AssertionError):  # a disabled scaler ignores its arguments, so they may be invalid
                    original(*bound.args, **bound.kwargs)
                complete = is_set_up(scaler)
                enable_scaler(scaler, complete and self._dtype is torch.float16)
                if complete and self._dtype is None:
                    self._undecided.add(scaler)

        return __init__

    def _may_enable(self, scaler: Any) -> bool:
        """Whether ``scaler``, which is disabled, may have to be enabled in this precision."""
        device = scaler_device(scaler)
        if device != self._device_type or (device == "cuda" and torch.cuda.amp.amp_definitely_not_available()):
            return False
        # A subclass may have set itself up as disabled before the decision.
        return self._dtype is torch.float16 or (self._dtype is None and type(scaler) in _PLAIN_SCALERS)

    def _wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._installed and scaler in self._undecided:
                self._undecided.discard(scaler)
                enable_scaler(scaler, self._float16_seen)
            return original(scaler, *args, **kwargs)

        return scale
