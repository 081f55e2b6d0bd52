"""Forces changes that save memory on an unmodified script, as if they were written in it, and reports each.

A change that found nothing to act on, or that the script decided otherwise, is an error: the recording is not what was
asked for.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from ampmem.own_code import is_running
from ampmem.patching import Undo, hook, patch, undone_together
from ampmem.recorder.steering.compiling import COMPILE_HOOKS, COMPILE_IN_PLACE, MODULE_CALL
from ampmem.recorder.steering.parallel import PARALLEL_HOOKS, ForcedChange, Hook
from ampmem.recorder.steering.weights import BFloat16Weights
from ampmem.recorder.torch_private.entries import Place
from ampmem.recorder.torch_private.general import (
    COMPILE,
    FUSED_INITS,
    OPTIMIZER_INIT,
    ZERO_GRADS,
    below_compiled,
    called_when_traced,
    compiled_code,
    in_backward,
    is_compiled,
    is_wrapper,
    on_module_before,
    on_step_after,
    on_step_before,
    top_saved_hooks,
    version_of,
)
from ampmem.recorder.torch_private.inductor import know_functions
from ampmem.vocabulary import Forced, Precision, forced_options

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__  # the function itself is wrapped by one of another file


class ForcedChanges:
    """The forced changes that are asked for, in place from :meth:`install` until its undo.

    ``note`` is called with what was changed and what was left as in the script, for the recording.
    """

    def __init__(self, forced: Forced, note: Callable[[str], None], precision: Precision = Precision.AS_IS) -> None:
        options = forced_options()
        values = {name: getattr(forced, name) for name in forced.kinds() if name in HOOKS}
        self._parts = [
            HOOKS[name](" ".join(options[name].written(value)), value, note) for name, value in values.items()
        ]
        if precision is Precision.BF16:
            self._parts.append(BFloat16Weights(note))

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Install the patches and hooks; returns the undo."""
        for part in self._parts:
            yield part.install()

    def unmet(self) -> list[str]:
        """Why changes were not made, or not everywhere; empty if all were."""
        return [reason for part in self._parts for reason in part.unmet()]


class _Forwards(ForcedChange):
    """Runs the forward of chosen modules in another way.

    A module's name is its name in ``named_modules()`` of the outermost module that runs. The forwards of the modules'
    classes are replaced, not those of the modules, so a copy of a model has nothing of ampmem's.
    """

    def __init__(self, option: str, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._chosen: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._ran: set[str] = set()
        self._inside = threading.local()
        self._planned: list[str] = []
        """The notes on modules that are chosen, and have not run yet."""
        self._sees_calls = False
        self._undo = ExitStack()
        self._owners: set[type[nn.Module]] = set()

    def install(self) -> Undo:
        self._undo.callback(hook(on_module_before, self._before))
        self._undo.callback(patch(*COMPILE_IN_PLACE, self._wrap_compile))
        return self._undo.close

    def _wrap_compile(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def compile(module: nn.Module, *args: Any, **options: Any) -> None:
            original(module, *args, **options)
            self._see_calls()  # hooks are a part of what was compiled, where they do nothing

        return compile

    def _see_calls(self) -> None:
        """Choose modules before their model's call: torch looks up ``forward`` before it calls hooks."""
        if not self._sees_calls:
            self._sees_calls = True
            self._undo.callback(patch(*MODULE_CALL, self._wrap_call))

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            self._before(module, args)
            return original(module, *args, **kwargs)

        return __call__

    def unmet(self) -> list[str]:
        found = super().unmet()
        more = f" ({len(found) - 1} more are refused)" if len(found) > 1 else ""
        return [f"{reason}{more}" for reason in found[:1]]

    def _before(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and module not in self._seen:
            self._seen.update(module.modules())
            self._choose_of(module)

    def _choose_of(self, root: nn.Module) -> None:
        """Choose modules of ``root``, an outermost module that is about to run for the first time."""
        raise NotImplementedError

    def _run(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the ``forward`` of ``module``, which was chosen."""
        raise NotImplementedError

    def _choose(self, name: str, module: nn.Module) -> None:
        self._chosen[module] = name
        owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        if owner not in self._owners:
            self._owners.add(owner)
            place: Place = (owner, "forward")  # a class of the script or of torch
            self._undo.callback(patch(*place, self._wrap))

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        called = forward.__qualname__  # of which dynamo knows another one

        @functools.wraps(forward)
        def run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._run_compiled(called, module, forward, args, kwargs)
            if not self._is_due(module):
                return forward(module, *args, **kwargs)
            name = self._chosen[module]
            self._made()
            self._ran.add(name)
            return self._run(name, module, forward, args, kwargs)

        return run

    def _run_compiled(self, called: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the ``forward``, ``called`` so, of ``module``, chosen or not, in compiled code: dynamo traces this."""
        return forward(module, *args, **kwargs)

    @called_when_traced
    def _made(self) -> None:
        """Note that a chosen module runs in the other way."""
        self._done = True
        while self._planned:
            self.note(self._planned.pop(0))

    def _is_due(self, module: nn.Module) -> bool:
        """Whether this forward of ``module`` is to run in the other way."""
        if module not in self._chosen or in_backward() or not torch.is_grad_enabled():
            return False
        return module is not getattr(self._inside, "of", None)

    def _alone(self, forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` of ``module`` without the change.

        It may call the forward of a base class, which may be replaced, too.
        """
        before, self._inside.of = getattr(self._inside, "of", None), module
        try:
            return forward(module, *args, **kwargs)
        finally:
            self._inside.of = before


class _Checkpoints(_Forwards):
    """Runs modules whose names match ``patterns`` under ``torch.utils.checkpoint``: backward recomputes them."""

    def __init__(self, option: str, patterns: tuple[str, ...], note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._patterns = patterns
        self._matched = False
        self._compiled: list[str] = []
        """The names of chosen modules that are compiled by themselves."""

    def _why_not_done(self) -> str:
        if not self._seen and compiled_code() is not None:
            return "the model runs only inside of compiled functions, where ampmem does not know its modules' names"
        if not self._matched:
            return "the model that ran has no module with such a name"
        if self._compiled:
            return f"{self._compiled[0]} is compiled, and dynamo does not take the change"
        return "none of the modules ran forward with gradients on"

    def _choose_of(self, root: nn.Module) -> None:
        taken: list[str] = []
        chosen: list[str] = []
        self._undo.callback(self._unmark)
        for name, named in root.named_modules():
            each = below_compiled(named)
            inside = any(name.startswith(f"{other}.") for other in taken)
            if name and not inside and any(_matches(name, pattern) for pattern in self._patterns):
                self._matched = True
                taken.append(name)
                reason = _no_checkpoint(each)
                if reason is None:
                    self._choose(name, each)
                    chosen.append(name)
                    self._compiled += [name] * is_compiled(named)
                else:
                    self.refuse(f"{name} {reason}")
        if chosen:
            self._planned.append(f"forced: activation checkpointing of {_counted(chosen)}")

    def _choose(self, name: str, module: nn.Module) -> None:
        super()._choose(name, module)
        if compiled_code() is not None:  # dynamo reads the module's attributes, and cannot read what is kept here
            setattr(module, _MARK, type(module).forward.__qualname__)

    def _unmark(self) -> None:
        for module in self._chosen:
            vars(module).pop(_MARK, None)

    def _run_compiled(self, called: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if getattr(module, _MARK, "") != called or not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        self._made()
        return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)

    def _run(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = _buffers(module)
        result = checkpoint(self._alone, forward, module, *args, use_reentrant=False, **kwargs)
        self._compare(name, module, before)
        return result

    def _compare(self, name: str, module: nn.Module, before: dict[str, tuple[int, int]]) -> None:
        """Refuse modules whose forward changes buffers: backward runs it again, and would change them twice."""
        after = _buffers(module)
        changed = next((buffer for buffer in after if after[buffer] != before.get(buffer)), None)
        if changed is not None:
            self.refuse(f"{name} changes its buffer {changed} in forward, and recomputation would change it again")
            del self._chosen[module]

    def _is_due(self, module: nn.Module) -> bool:
        if not super()._is_due(module):
            return False
        name = self._chosen[module]
        if name not in self._ran and is_running(_CHECKPOINT_FILE):
            self.refuse(f"the script checkpoints {name} itself")
            del self._chosen[module]
            return False
        return True


class _Offload(_Forwards):
    """Keeps saved tensors of the outermost modules in CPU memory: ``save_on_cpu`` around their forward."""

    def install(self) -> Undo:
        self._see_calls()
        return self._undo.close

    def _why_not_done(self) -> str:
        return "no model ran forward with gradients on"

    def _choose_of(self, root: nn.Module) -> None:
        if next(root.parameters(), None) is None:
            return
        reason = _not_in_python(root)
        if reason is None:
            self._choose(type(root).__name__, root)
            self._planned.append(f"forced: saved tensors of {type(root).__name__} are kept in CPU memory")
        else:
            self.refuse(f"{type(root).__name__} {reason}")

    def _run(self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if top_saved_hooks(True) is not None:
            self.refuse(f"the script has its own saved-tensor hooks around {name}")
            del self._chosen[module]
            return forward(module, *args, **kwargs)
        with torch.autograd.graph.save_on_cpu():
            return self._alone(forward, module, *args, **kwargs)


_MARK = "ampmem_checkpoints"
"""The attribute of a module that is checkpointed in compiled code: the name of the forward, while it is recorded."""


def _matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` matches ``name``, compared part by part between the dots."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """(``id``, version) of each buffer of ``module``, by name."""
    return {name: (id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()}


def _no_checkpoint(module: nn.Module) -> str | None:
    """Why ``module`` must not run its forward twice; ``None`` if there is no known reason."""
    counting = next((type(each).__name__ for each in module.modules() if _counts(each)), None)
    if counting is not None:
        return f"has a {counting} inside, whose running statistics a second forward would change"
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        return f"is a {type(module).__name__}, which has no forward of its own"
    return _replaced(module)


def _not_in_python(module: nn.Module) -> str | None:
    """Why the forward of ``module`` cannot be replaced; ``None`` if it can."""
    if is_compiled(module):
        return "is compiled, so its own settings decide what it saves and recomputes"
    return _replaced(module)


def _replaced(module: nn.Module) -> str | None:
    """Why no other forward of its class would run; ``None`` if one would."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, whose forward is not Python code"
    if "forward" in vars(module):
        return "has a forward that the script or a library has replaced"
    return None


def _counts(module: nn.Module) -> bool:
    return bool(getattr(module, "track_running_stats", False)) and module.training


def _counted(names: list[str]) -> str:
    """``names`` as a text: ``h.0``, or ``12 modules, h.0 to h.11``."""
    return names[0] if len(names) == 1 else f"{len(names)} modules, {names[0]} to {names[-1]}"


class _Implementation(ForcedChange):
    """Makes each optimizer update ``foreach`` or ``fused``, where the script leaves the choice to torch."""

    def __init__(self, argument: str, option: str, value: bool, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._argument, self._value = argument, value
        self._changed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._making: set[int] = set()
        """``id`` of each optimizer inside its class's ``__init__``, which calls that of its base class."""

    @undone_together
    def install(self) -> Iterator[Undo]:
        if self._argument == "foreach":
            yield patch(*OPTIMIZER_INIT, self._wrap_foreach)
        else:
            yield patch(*OPTIMIZER_INIT, self._wrap_without_fused)
            for place in FUSED_INITS:
                yield patch(*place, self._wrap_fused)
        yield hook(on_step_before, self._check)

    def _why_not_done(self) -> str:
        return "the script created no torch optimizer"

    def _wrap_foreach(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            reason = _why_not(optimizer, defaults, "foreach")
            if reason is None:
                defaults["foreach"] = self._value
            original(optimizer, params, defaults)
            self._made(optimizer, reason)

        return __init__

    def _wrap_without_fused(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
            original(optimizer, params, defaults)
            if "fused" not in defaults:
                self._made(optimizer, f"{type(optimizer).__name__} has no fused implementation")

        return __init__

    def _wrap_fused(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
            if id(optimizer) in self._making:
                original(optimizer, params, *args, **kwargs)
                return
            bound = signature.bind(optimizer, params, *args, **kwargs)
            bound.apply_defaults()
            reason = _why_not(optimizer, bound.arguments, "fused")
            if reason is None:
                kwargs["fused"] = True
            self._making.add(id(optimizer))
            try:
                original(optimizer, params, *args, **kwargs)
            finally:
                self._making.discard(id(optimizer))
            self._made(optimizer, reason)

        return __init__

    def _made(self, optimizer: Optimizer, reason: str | None) -> None:
        if reason is None and any(group.get(self._argument) is not self._value for group in optimizer.param_groups):
            reason = f"the script set {self._argument} itself for a parameter group of {type(optimizer).__name__}"
        if reason is not None:
            self.refuse(reason)
            return
        self._done = True
        self._changed.add(optimizer)
        self.note(f"forced: {type(optimizer).__name__}({self._argument}={self._value})")

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._changed:
            return
        if any(group.get(self._argument) is not self._value for group in optimizer.param_groups):
            self._changed.discard(optimizer)
            self.refuse(f"the script has changed {self._argument} of {type(optimizer).__name__} back")


def _why_not(optimizer: Optimizer, chosen: Any, option: str) -> str | None:
    """Why the script's choice of implementation stays; ``None`` if it has made none."""
    name = type(optimizer).__name__
    if option not in chosen:
        return f"{name} has no {option} implementation"
    for each in ("foreach", "fused"):
        if chosen.get(each) is not None:
            return f"the script set {each}={chosen[each]} for {name} itself"
    if option == "fused" and chosen.get("differentiable"):
        return f"the script set differentiable=True for {name}, which torch does not fuse"
    return None


class _ChunkedLoss(ForcedChange):
    """Computes ``F.cross_entropy`` in ``count`` chunks of rows, each under ``torch.utils.checkpoint``.

    Backward then makes the log-softmax and its temporaries in the logits' dtype for one chunk at a time. Only sums are
    chunked: a sum over rows, or a mean, whose divisor is the number of rows that count.
    """

    def __init__(self, option: str, count: int, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._count = count
        self._installed = self._known = False

    def install(self) -> Undo:
        place: Place = (functional, "cross_entropy")  # nn.CrossEntropyLoss calls it through this module, too
        with ExitStack() as undo:
            undo.callback(setattr, self, "_installed", False)
            undo.callback(patch(*COMPILE, self._wrap_compile))
            undo.callback(patch(*place, self._wrap))
            self._installed = True  # code that imported the function keeps ours after the end
            return undo.pop_all().close

    def _why_not_done(self) -> str:
        return "the script did not call F.cross_entropy with gradients on"

    def _wrap(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)  # dynamo traces this
        def cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self._is_due():
                return original(*args, **kwargs)
            given = {**_OTHERS, **dict(zip(("input", *_OTHERS), args, strict=False)), **kwargs}
            if isinstance(given["input"], torch.Tensor) and not given["input"].requires_grad:
                return original(*args, **kwargs)
            reason = _not_in_chunks(given, self._count)
            self._decided(reason)
            if reason is not None:
                return original(*args, **kwargs)
            return self._computed(original, given["input"], given["target"], given["ignore_index"], given["reduction"])

        return cross_entropy

    def _wrap_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **options: Any) -> Any:
            compiled = original(*args, **options)
            if not self._known:
                self._known = True
                know_functions()
            return compiled

        return compile

    def _is_due(self) -> bool:
        if not self._installed or not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling():
            # Graphs name the function, and are run when they are traced again: its chunks are in them already.
            return torch.compiler.is_dynamo_compiling()
        if in_backward():
            return False
        if is_running(_CHECKPOINT_FILE):
            self.refuse("the script computes the loss under torch.utils.checkpoint itself")
            return False
        return True

    def _computed(
        self, original: Callable[..., torch.Tensor], logits: torch.Tensor, target: torch.Tensor, ignored: int, how: str
    ) -> torch.Tensor:
        sums = [
            checkpoint(original, *part, ignore_index=ignored, reduction="sum", use_reentrant=False)
            for part in zip(logits.chunk(self._count), target.chunk(self._count), strict=True)
        ]
        total = torch.stack(sums).sum()
        return total if how == "sum" else total / (target != ignored).sum()

    @called_when_traced
    def _decided(self, reason: str | None) -> None:
        if reason is not None:
            self.refuse(reason)
        elif not self._done:
            self._done = True
            self.note(f"forced: cross_entropy in {self._count} chunks, each under activation checkpointing")


_OTHERS = {
    "target": None,
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}
"""The arguments of ``F.cross_entropy`` after the first, with their defaults: dynamo does not trace ``inspect``."""


def _not_in_chunks(given: Mapping[str, Any], count: int) -> str | None:
    """Why a call of ``F.cross_entropy`` with these arguments is not a sum over chunks; ``None`` if it is."""
    logits, target = given["input"], given["target"]
    if given["weight"] is not None:
        return "the script gives cross_entropy class weights"
    if given["label_smoothing"]:
        return "the script gives cross_entropy label_smoothing"
    if given["size_average"] is not None or given["reduce"] is not None:
        return "the script gives cross_entropy size_average or reduce, which torch has deprecated"
    if given["reduction"] not in ("mean", "sum"):
        return f"the script gives cross_entropy reduction={given['reduction']!r}, which keeps a value for each row"
    if is_wrapper(logits) or is_wrapper(target):
        return f"cross_entropy gets a {type(logits).__name__} and a {type(target).__name__}, not plain tensors"
    if logits.dim() != 2:
        return f"the logits have {logits.dim()} dimensions, not rows and classes"
    if target.is_floating_point():
        return "the targets are probabilities, not classes"
    if len(logits) < count:
        return f"the logits have {len(logits)} rows, fewer than chunks"
    return None


class _FreedGradients(ForcedChange):
    """Sets gradients to ``None`` right after the optimizer's update, as ``zero_grad()`` there would.

    Refused in a script that never zeroes gradients: it may accumulate them over several updates.
    """

    def __init__(self, option: str, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._freed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._zeroed = False

    @undone_together
    def install(self) -> Iterator[Undo]:
        yield hook(on_step_after, self._after)
        for place in ZERO_GRADS:
            yield patch(*place, self._wrap)

    def unmet(self) -> list[str]:
        if self._done and not self._zeroed:
            return [f"{self.option}: the script calls no zero_grad(), so gradients may add up over several updates"]
        return super().unmet()

    def _why_not_done(self) -> str:
        return "no torch optimizer made an update"

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if optimizer not in self._freed:
            self._freed.add(optimizer)
            self._done = True
            self.note(f"forced: gradients are set to None after each update of {type(optimizer).__name__}")

    def _wrap(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(zero_grad)
        def zeroed(owner: Any, /, *args: Any, **kwargs: Any) -> None:
            self._zeroed = True
            zero_grad(owner, *args, **kwargs)

        return zeroed


class _BatchSize(ForcedChange):
    """Makes each DataLoader with larger batches use ``size`` samples."""

    def __init__(self, option: str, size: int, note: Callable[[str], None]) -> None:
        super().__init__(option, note)
        self._size = size
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @undone_together
    def install(self) -> Iterator[Undo]:
        place: Place = (DataLoader, "__init__")
        yield patch(*place, self._wrap)
        yield hook(on_module_before, self._before)

    def _why_not_done(self) -> str:
        return "the script created no DataLoader with a larger batch size"

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(loader, *args, **kwargs)
            bound.apply_defaults()
            size = bound.arguments["batch_size"]
            if bound.arguments["batch_sampler"] is not None:
                self.refuse("a DataLoader takes its batches from the script's own batch_sampler")
            elif size is None:
                self.refuse("a DataLoader of the script makes no batches (batch_size=None)")
            elif size > self._size:
                bound.arguments["batch_size"] = self._size
                self._done = True
                self.note(f"forced: DataLoader(batch_size={self._size}) instead of {size}")
            original(*bound.args, **bound.kwargs)

        return __init__

    def _before(self, module: nn.Module, _: Any) -> None:
        """Refuse modules whose results depend on the batch size: it would be another training."""
        if torch.compiler.is_compiling() or module in self._seen or not torch.is_grad_enabled():
            return
        self._seen.update(module.modules())
        kinds = {type(each).__name__ for each in module.modules() if isinstance(each, _OF_THE_BATCH) and each.training}
        if kinds:
            self.refuse(f"the model has {', '.join(sorted(kinds))}, whose statistics depend on the batch")


_OF_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


HOOKS: Mapping[str, Hook] = {
    **PARALLEL_HOOKS,
    **COMPILE_HOOKS,
    "checkpoint": _Checkpoints,
    "offload": lambda option, _, note: _Offload(option, note),
    "foreach": functools.partial(_Implementation, "foreach"),
    "fused": functools.partial(_Implementation, "fused"),
    "loss_chunks": _ChunkedLoss,
    "free_gradients": lambda option, _, note: _FreedGradients(option, note),
    "batch_size": _BatchSize,
}
"""What forces each change, by its field; a precision and settings of the environment need no hook."""
