"""Forces weights in bfloat16 on an unmodified script, as ``model.to(torch.bfloat16)`` before its optimizer would."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampmem.patching import Undo, hook, patch, undone_together
from ampmem.recorder.facts.addresses import parts_of
from ampmem.recorder.models.live import live_modules
from ampmem.recorder.models.optimizers import parameters_of
from ampmem.recorder.steering.parallel import ForcedChange
from ampmem.recorder.torch_private.entries import Place
from ampmem.recorder.torch_private.general import OPTIMIZER_INIT, is_compiled, on_module_before
from ampmem.units import format_bytes

_LOW = torch.bfloat16
_MASTER_BYTES = 4
"""Bytes per element of an FP32 master copy."""
_MOVES: tuple[tuple[int, Place], ...] = ((0, (nn.Module, "to")), (0, (nn.Module, "cuda")))
"""The methods that move a model to its device, and the position of the model among the arguments.

The weights are cast before, so that the device never has them in float32.
"""
_LOSSES: tuple[Place, ...] = tuple(
    (functional, name)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
)
"""Losses whose backward needs targets of the output's type."""


class BFloat16Weights(ForcedChange):
    """Casts the script's models to bfloat16 when they are moved, wrapped, given to an optimizer, or first run.

    A model gets its inputs in bfloat16, and so does a module with own weights, as code between modules may make others;
    losses get their targets in the output's type. A model that the script casts itself stays as it is: the change is
    refused.

    When the recording ends the weights stay in bfloat16, and so do the casts of inputs and targets, as the script may
    run on. So this is for a process of ampmem's own, not for a block in somebody else's.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__("--precision bf16", note)
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._cast: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The parameters that were cast."""
        self._installed = False

    @undone_together
    def install(self) -> Iterator[Undo]:
        self._installed = True
        for place in _LOSSES:
            patch(*place, _with_equal_types)
        hook(on_module_before, self._before)
        yield functools.partial(setattr, self, "_installed", False)
        for index, place in (*_MOVES, *_wrappers()):
            yield patch(*place, functools.partial(self._wrap_taker, index))
        yield patch(*OPTIMIZER_INIT, self._wrap_optimizer)

    def _why_not_done(self) -> str:
        return "no model with float32 weights was seen"

    def _wrap_taker(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, called after its argument at ``index``, a module, was cast."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            module = args[index] if len(args) > index else kwargs.get("module")
            types = any(isinstance(each, torch.dtype | Tensor) for each in (*args, *kwargs.values()))
            if isinstance(module, nn.Module) and not types:
                self._cast_whole(module)
            return original(*args, **kwargs)

        return call

    def _wrap_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            # The class makes states after this, in the type that its parameters have by then.
            wide = {id(each) for each in parameters_of(optimizer) if each.dtype == torch.float32}
            owners = (
                [each for each in live_modules() if not wide.isdisjoint(map(id, each.parameters()))] if wide else []
            )
            inner = {id(each) for owner in owners for each in owner.children()}
            for owner in owners:
                if id(owner) not in inner:
                    self._cast_whole(owner)
            low = [each for each in parameters_of(optimizer) if self._done and each.requires_grad]
            # Of sharded parameters this rank has a part, as their optimizer has.
            trained = sum(part.numel() for each in low for part in parts_of(each) if part.dtype == _LOW)
            if trained:
                words = f"{trained:,} parameters of {type(optimizer).__name__} on this device"
                size = format_bytes(_MASTER_BYTES * trained)
                self.note(f"FP32 master copies would add {size} (computed: {_MASTER_BYTES} B for each of the {words})")

        return __init__

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._installed and not torch.compiler.is_compiling():
            self._cast_whole(module)
        # The modules inside of a compiled one run without hooks.
        own = module.parameters(recurse=is_compiled(module))
        weight = next((each for each in own if each.is_floating_point()), None)
        if weight is None or weight.dtype != _LOW:
            return None
        return tuple(map(_low, args))

    def _cast_whole(self, root: nn.Module) -> None:
        """Cast ``root`` unless the script has cast it."""
        if root in self._seen:
            return
        new = [module for module in root.modules() if module not in self._seen]
        self._seen.update(new)
        weights = {id(each): each for module in new for each in module.parameters(recurse=False)}.values()
        scripts = {each.dtype for each in weights if each not in self._cast} - {torch.float32, torch.float64}
        low = [str(each).removeprefix("torch.") for each in scripts if each.is_floating_point]
        if low:
            self.refuse(f"the script casts its model itself: weights are {low[0]}")
            return
        wide = [each for each in weights if each.dtype == torch.float32]
        self._cast.update((each, None) for each in wide)
        if any(each in self._cast for each in root.parameters()):
            root.register_forward_pre_hook(_with_low_inputs, with_kwargs=True)
        if not wide:
            return
        root.to(dtype=_LOW)
        self._done = True
        self.note(f"forced: weights and buffers of {type(root).__name__} in bfloat16")


def _wrappers() -> Iterable[tuple[int, Place]]:
    """(position of the model argument, place) of the wrappers for several ranks, which look at parameters' types."""
    yield 1, (DistributedDataParallel, "__init__")
    if torch.distributed.is_available():
        from torch.distributed import fsdp

        yield 0, (fsdp, "fully_shard")
        yield 1, (fsdp.FullyShardedDataParallel, "__init__")


def _with_equal_types(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, Tensor) and input.dtype == _LOW:
            target = _low(target)
        return original(input, target, *args, **kwargs)

    return loss


def _with_low_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _low(args), _low(kwargs)


def _low(value: Any) -> Any:
    """``value`` with bfloat16 in place of float32, also in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.to(_LOW) if value.dtype == torch.float32 else value
    if type(value) in (tuple, list):
        return type(value)(map(_low, value))
    return {key: _low(each) for key, each in value.items()} if type(value) is dict else value
