"""FSDP2's parameters: modules have the shards, but while they run the whole ones in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ampmem.recorder.torch_private.sharded import (
    fully_sharded,
    groups_of,
    is_offloaded,
    padding_of,
    params_of,
    shard_of,
    stand_ins,
)


class Sharded:
    """Which parameter is the shard of which whole one. Weak references to FSDP2's own objects, none to tensors."""

    def __init__(self) -> None:
        self._by_shard: dict[int, weakref.ref[Any]] = {}
        """By ``id`` of the shard, FSDP2's object for it."""
        self._by_stand_in: dict[int, weakref.ref[Any]] = {}
        """By ``id`` of what modules have in the shard's place."""

    def look(self, modules: Iterable[nn.Module]) -> Iterator[Any]:
        """Find the groups of FSDP2's among ``modules``, which are yielded, and note their parameters."""
        if not fully_sharded():
            return
        for module in modules:
            for group in groups_of(module):
                for param in params_of(group):
                    self.add(param)
                yield group

    def add(self, param: Any) -> None:
        """Note what belongs to FSDP2's object ``param`` by now."""
        shard = shard_of(param)
        if shard is not None:
            self._by_shard[id(shard)] = weakref.ref(param)
        for tensor in stand_ins(param):
            self._by_stand_in[id(tensor)] = weakref.ref(param)

    def kept(self, parameter: nn.Parameter) -> nn.Parameter:
        """``parameter``, or the shard that is this rank's where it stands in for that."""
        if not self._by_stand_in:
            return parameter
        reference = self._by_stand_in.get(id(parameter))
        param = None if reference is None else reference()
        if param is None or not any(tensor is parameter for tensor in stand_ins(param)):
            return parameter
        shard = shard_of(param)
        return parameter if shard is None else shard

    def manages(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is a shard of FSDP2's."""
        return self._param(parameter) is not None

    def offloaded(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is a shard that FSDP2 keeps on the CPU."""
        return is_offloaded(self._param(parameter))

    def padding(self, parameter: torch.Tensor) -> int:
        """Bytes in the memory of the shard ``parameter`` that are no element's."""
        param = self._param(parameter)
        return 0 if param is None else padding_of(param) * parameter.element_size()

    def _param(self, parameter: torch.Tensor) -> Any:
        reference = self._by_shard.get(id(parameter))
        param = None if reference is None else reference()
        return param if param is not None and shard_of(param) is parameter else None
