"""The base of forced changes, and the changes of training on several ranks: arguments of torch's wrappers.

This module may import FSDP.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from ampmem.patching import Undo, patch, undone_together
from ampmem.recorder.torch_private.entries import Place


class _Decided(Exception):
    """The reason why the script's value of an argument stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """The argument ``name`` of the calls at ``place``; ``new`` makes the new value.

    An equal value is not a change. ``new`` raises :class:`_Decided` if the script's value has to stay. ``default`` is
    the value that torch uses for ``None``.
    """

    place: Place
    name: str
    new: Callable[[Any], Any]
    default: Any = None


def _bucket_view() -> Iterator[_Argument]:
    yield _Argument(place=(DistributedDataParallel, "__init__"), name="gradient_as_bucket_view", new=lambda given: True)


def _reshard() -> Iterator[_Argument]:
    from torch.distributed import fsdp

    strategies = fsdp.ShardingStrategy
    full: dict[Any, Any] = {each: strategies.HYBRID_SHARD for each in strategies if "HYBRID_SHARD_ZERO2" in each.name}
    full |= {strategies.SHARD_GRAD_OP: strategies.FULL_SHARD, None: strategies.FULL_SHARD}
    yield _Argument(place=(fsdp, "fully_shard"), name="reshard_after_forward", new=lambda given: True)
    yield _Argument(
        place=(fsdp.FullyShardedDataParallel, "__init__"),
        name="sharding_strategy",
        new=lambda given: full.get(given, given),
        default=strategies.FULL_SHARD,
    )


def _bfloat_policy() -> Iterator[_Argument]:
    from torch.distributed import fsdp

    def to_bfloat16(given: Any) -> Any:
        if given.param_dtype not in (None, torch.bfloat16):
            dtype = str(given.param_dtype).removeprefix("torch.")
            raise _Decided(f"the script has its own {type(given).__name__}, to {dtype}")
        if given.param_dtype is torch.bfloat16:
            return given
        return replace(given, param_dtype=torch.bfloat16, reduce_dtype=given.reduce_dtype or torch.float32)

    yield _Argument(place=(fsdp, "fully_shard"), name="mp_policy", new=to_bfloat16)
    none = fsdp.MixedPrecision()
    yield _Argument(
        place=(fsdp.FullyShardedDataParallel, "__init__"),
        name="mixed_precision",
        new=lambda given: to_bfloat16(none if given is None else given),
        default=none,
    )


def _backward_prefetch() -> Iterator[_Argument]:
    from torch.distributed import fsdp

    yield _Argument(place=(fsdp.FullyShardedDataParallel, "__init__"), name="backward_prefetch", new=lambda given: None)


def _gradient_sync() -> Iterator[_Argument]:
    from torch.distributed import fsdp

    place: Place = (fsdp.FSDPModule, "set_requires_gradient_sync")
    yield _Argument(place=place, name="requires_gradient_sync", new=lambda given: True)


class ForcedChange:
    """A forced change; ``option`` is its command-line option."""

    def __init__(self, option: str, note: Callable[[str], None]) -> None:
        self.option, self.note = option, note
        self._done = False
        self._refused: dict[str, None] = {}

    def install(self) -> Undo:
        """Install the change; returns the undo."""
        raise NotImplementedError

    def unmet(self) -> list[str]:
        """Why the change was not made, or not everywhere; empty if it was."""
        reasons = list(self._refused)
        if not self._done and not reasons:
            reasons.append(self._why_not_done())
        return [f"{self.option}: {reason}" for reason in reasons]

    def _why_not_done(self) -> str:
        """Why the change was not made, where nothing was refused."""
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Note that the change is not made, for ``reason``."""
        if reason not in self._refused:
            self._refused[reason] = None
            self.note(f"not forced: {reason}")


Hook: TypeAlias = Callable[[str, Any, Callable[[str], None]], ForcedChange]
"""Makes a change of its option as written, its value, and the function that takes notes."""


class _ArgumentChange(ForcedChange):
    """Replaces an argument in calls of torch's functions."""

    def __init__(
        self, option: str, calls: str, arguments: Callable[[], Iterator[_Argument]], note: Callable[[str], None]
    ) -> None:
        super().__init__(option, note)
        self._calls, self._arguments = calls, arguments
        self._kept: dict[str, None] = {}

    @undone_together
    def install(self) -> Iterator[Undo]:
        for argument in self._arguments():
            yield patch(*argument.place, functools.partial(self._wrap, argument))

    def unmet(self) -> list[str]:
        return super().unmet()[:1]

    def _why_not_done(self) -> str:
        return next(iter(self._kept), f"the script does not call {self._calls}")

    def _wrap(self, argument: _Argument, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments[argument.name] = self._value_for_call(argument, bound.arguments[argument.name])
            return original(*bound.args, **bound.kwargs)

        return call

    def _value_for_call(self, argument: _Argument, given: Any) -> Any:
        """The value that the call gets; notes whether it was changed."""
        try:
            value = argument.new(given)
        except _Decided as decided:
            self.refuse(str(decided))
            return given
        owner, function = argument.place
        call = owner.__name__ if function == "__init__" else function
        said = f"{call}({argument.name}={value})"
        if value == (argument.default if given is None else given):
            self._kept[f"the script already has {said}"] = None
            return given
        self._done = True
        self.note(f"forced: {said} instead of {given}")
        return value


class _NoPrefetch(_ArgumentChange):
    """Disables FSDP's prefetching of parameters in backward.

    FSDP2 prefetches the next module unless a module names another: each is set to name itself, which is gathered
    already.
    """

    def __init__(self, option: str, note: Callable[[str], None]) -> None:
        super().__init__(option, _SHARDED, _backward_prefetch, note)
        self._ours = False

    @undone_together
    def install(self) -> Iterator[Undo]:
        from torch.distributed import fsdp

        calls: Place = (fsdp, "fully_shard")
        settings: list[Place] = [(fsdp.FSDPModule, f"set_modules_to_{which}_prefetch") for which in _PASSES]
        yield super().install()
        yield patch(*calls, self._wrap_fully_shard)
        for setting in settings:
            yield patch(*setting, functools.partial(self._wrap_setting, setting[1]))

    def _wrap_fully_shard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            sharded = original(*args, **kwargs)
            self._ours = True
            try:
                for module in sharded if isinstance(sharded, list) else [sharded]:
                    module.set_modules_to_backward_prefetch([module])
            finally:
                self._ours = False
            self._done = True
            self.note("forced: fully_shard prefetches no parameters in backward")
            return sharded

        return fully_shard

    def _wrap_setting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def set_modules(*args: Any, **kwargs: Any) -> Any:
            if not self._ours:
                self.refuse(f"the script sets itself what is prefetched ({name})")
            return original(*args, **kwargs)

        return set_modules


class _GradientSync(_ArgumentChange):
    """Has FSDP reduce gradients in each backward."""

    @undone_together
    def install(self) -> Iterator[Undo]:
        from torch.distributed import fsdp

        no_sync: Place = (fsdp.FullyShardedDataParallel, "no_sync")
        yield super().install()
        yield patch(*no_sync, self._wrap_no_sync)

    def _wrap_no_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def no_sync(_: Any) -> Any:
            self._done = True
            self.note("forced: FullyShardedDataParallel reduces gradients under no_sync(), too")
            return nullcontext()

        return no_sync


_PASSES = ("forward", "backward")
_SHARDED = "fully_shard or FullyShardedDataParallel"
_UNREDUCED = "set_requires_gradient_sync, or no_sync of FullyShardedDataParallel"


PARALLEL_HOOKS: Mapping[str, Hook] = {
    "bucket_view": lambda option, _, note: _ArgumentChange(option, "DistributedDataParallel", _bucket_view, note),
    "reshard": lambda option, _, note: _ArgumentChange(option, _SHARDED, _reshard, note),
    "policy": lambda option, _, note: _ArgumentChange(option, _SHARDED, _bfloat_policy, note),
    "no_prefetch": lambda option, _, note: _NoPrefetch(option, note),
    "gradient_sync": lambda option, _, note: _GradientSync(option, _UNREDUCED, _gradient_sync, note),
}
"""The class that forces each change of parallel training, by the field in :class:`~ampmem.vocabulary.Forced`."""
