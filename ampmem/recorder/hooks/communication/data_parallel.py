"""DistributedDataParallel: the buckets in which its reducer lays gradients side by side, and what it broadcasts.

The reducer is C++ and shows its buckets to nobody but a communication hook, which would change what the script does.
They are known by where they are made: its constructor and ``_rebuild_buckets`` allocate each by an op, and together
they have as many elements as the parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, NamedTuple

import torch

from ampmem.events import Fact
from ampmem.patching import Undo, patch
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private.distributed import BROADCASTS, REBUILD_BUCKETS, REDUCER_INIT, STATIC_GRAPH
from ampmem.recorder.torch_private.general import TorchDispatchMode, schema_of, without_functions
from ampmem.vocabulary import Communication


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


MADE_BEFORE = (
    "DistributedDataParallel was made before the recording began: the buckets that it had for gradients then count as "
    "other memory, and on the CPU they are in no sum"
)
NOT_TOLD = "DDP's buckets could not be identified (unexpected layout); they count as other memory"


@dataclass(slots=True, kw_only=True)
class _Reducer:
    """What is known of one: ``elements`` of its gradients that are not sparse, and the memory where they are to go.

    ``noted`` says that the latter is in the recording.
    """

    elements: int | None
    blocks: list[Made] = field(default_factory=list)
    noted: bool = False


class DataParallelHooks:
    """Logs the memory that DistributedDataParallel has for communication, and follows it before a recording, too."""

    def __init__(self, listener: Listener, log: Log, texts: Texts) -> None:
        self._listener = listener
        self._log = log
        self._text = texts.id
        self._reducers: weakref.WeakKeyDictionary[Any, _Reducer] = weakref.WeakKeyDictionary()
        guarded = log.misses.guarded
        self._look_at_new, self._look_at_rebuilt = guarded(self._new), guarded(self._asked_to_rebuild)
        self._look_at_static, self._look_at_broadcast = guarded(self._static), guarded(self._broadcast)

    def install(self) -> Undo:
        """Wrap the reducer's two functions and the broadcast; returns what undoes it."""
        with ExitStack() as undo:
            undo.callback(patch(*REDUCER_INIT, self._wrap_init))
            undo.callback(patch(*REBUILD_BUCKETS, self._wrap_rebuild))
            undo.callback(patch(*STATIC_GRAPH, self._wrap_static))
            for place in BROADCASTS:
                undo.callback(patch(*place, self._wrap_broadcast))
            return undo.pop_all().close

    def blocks(self) -> dict[int, int]:
        """Address and bytes of what reducers have now."""
        return {made.address: made.bytes for known in self._reducers.values() for made in known.blocks}

    def _wrap_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(reducer: Any, *args: Any, **kwargs: Any) -> None:
            _, made = self._watched(original, reducer, *args, **kwargs)
            if made is not None:
                self._look_at_new(reducer, made, *args, **kwargs)

        return __init__

    def _wrap_rebuild(self, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        @functools.wraps(original)
        def _rebuild_buckets(reducer: Any) -> bool:
            rebuilt, made = self._watched(original, reducer)
            if made is not None:
                self._look_at_rebuilt(reducer, made if rebuilt else None)
            return bool(rebuilt)

        return _rebuild_buckets

    def _wrap_static(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def _set_static_graph(reducer: Any) -> None:
            _, made = self._watched(original, reducer)
            if made is not None:
                self._look_at_static(reducer, made)

        return _set_static_graph

    def _wrap_broadcast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            result, made = self._watched(original, *args, **kwargs)
            if made is not None:
                self._look_at_broadcast(made)
            return result

        return broadcast

    def _watched(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Made] | None]:
        """What ``original`` returns, and what it allocates; ``None`` where nobody looks."""
        if torch.compiler.is_compiling() or not self._listener.on_thread():
            return original(*args, **kwargs), None
        with Allocations(self._log, follow=self._listener.recording) as seen:
            return original(*args, **kwargs), seen.made

    def _new(
        self,
        reducer: Any,
        made: list[Made],
        params: Sequence[torch.Tensor],
        bucket_indices: Iterable[Iterable[int]],
        per_bucket_size_limits: object = None,
        process_group: object = None,
        expect_sparse_gradients: Sequence[bool] = (),
        *_: object,
        **__: object,
    ) -> None:
        """``reducer`` was made with these arguments; the integers say which parameters a step has used."""
        sparse = {index for index, expected in enumerate(expect_sparse_gradients) if expected}
        dense = [params[index].numel() for bucket in bucket_indices for index in bucket if index not in sparse]
        known = self._reducers[reducer] = _Reducer(elements=sum(dense))
        self._take(known, made)

    def _asked_to_rebuild(self, reducer: Any, made: list[Made] | None) -> None:
        """A forward begins; ``made`` is what the reducer allocated, where it has made its buckets anew."""
        known = self._reducers.get(reducer)
        if known is None:
            known = self._reducers[reducer] = _Reducer(elements=None)
            if self._listener.recording:
                self._listener.remark(MADE_BEFORE)
        if made is not None:
            kept = [block for block in known.blocks if not block.floating]
            self._take(known, kept + [block for block in made if block.floating])
        elif self._listener.recording and not known.noted:
            self._log_blocks(known)

    def _static(self, reducer: Any, made: list[Made]) -> None:
        """Every step of ``reducer`` uses the same parameters, which it has ``made`` room to note."""
        known = self._reducers.get(reducer)
        if known is not None:
            self._take(known, known.blocks + made)

    def _take(self, known: _Reducer, blocks: list[Made]) -> None:
        """These are the reducer's now."""
        elements = sum(block.elements for block in blocks if block.floating)
        if known.elements not in (None, elements):
            known.blocks = []
            self._listener.remark(NOT_TOLD)
            return
        known.blocks, known.noted = blocks, False
        if self._listener.recording:
            self._log_blocks(known)

    def _log_blocks(self, known: _Reducer) -> None:
        known.noted = True
        for block in known.blocks:
            self._log.fact(Fact.COMMUNICATION, block.address, self._text(Communication.REDUCE_BUCKETS))

    def _broadcast(self, made: list[Made]) -> None:
        if self._listener.recording:
            for block in made:  # by now it may be no more
                self._log.fact(Fact.COMMUNICATION, block.address, self._text(Communication.BROADCAST), at=block.time_ns)
