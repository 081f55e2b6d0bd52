"""What torch's own C++ allocates while it runs one function, seen through the ops that it calls."""

from __future__ import annotations

from time import time_ns
from typing import Any, NamedTuple

import torch

from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.torch_private.general import TorchDispatchMode, schema_of, without_functions


class Made(NamedTuple):
    """When and where an op made a tensor with memory of its own, which dies as it would without ampmem."""

    time_ns: int
    address: int
    bytes: int
    elements: int
    floating: bool


class Allocations(TorchDispatchMode):
    """Notes each tensor that an op makes while it is on; to ``follow`` it, since another thread may free it."""

    def __init__(self, log: Log, *, follow: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._follow = follow
        self.made: list[Made] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in ForwardMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            with without_functions():
                self._note(func, result)
        except Exception as error:
            self._log.missed(error)
        return result

    def _note(self, func: Any, result: Any) -> None:
        schema = schema_of(func)
        if schema is None or any(value.alias_info is not None for value in schema.returns):
            return  # a view, or what was there before
        now = time_ns()
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if is_tensor(tensor) and (address := self._log.storage_address(tensor)):
                if self._follow:
                    self._log.follow(tensor)
                size = torch.Tensor.untyped_storage(tensor).nbytes()
                self.made.append(Made(now, address, size, tensor.numel(), tensor.is_floating_point()))
