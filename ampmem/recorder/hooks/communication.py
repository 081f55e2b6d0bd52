"""Hooks of communication: collectives, DistributedDataParallel (DDP), FSDP2 and functional collectives.

Collectives: the tensors that they are given and fill, which of them receive, and which may be freed on a thread of the
process group. DDP: the reducer's buckets of gradients, and what it broadcasts. FSDP2: the gathered parameters, their
whole gradients, and what it reduces.
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
from ampmem.patching import Undo, patch_call, together
from ampmem.recorder.facts.addresses import parts_of
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.torch_private import distributed as private
from ampmem.recorder.torch_private.entries import Place, Use, probe
from ampmem.recorder.torch_private.general import TorchDispatchMode, op_schema, tree_leaves, without_functions
from ampmem.vocabulary import Communication


class CollectiveHooks:
    """Logs the tensors that are passed to process groups."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._log = listener, listener.log
        self._receives = self._log.texts.id(Communication.RECEIVE_BUFFERS)
        self._look = self._log.misses.guarded(self._note)

    def install(self) -> Undo:
        """Wrap every collective of process groups; returns the undo."""
        return together(
            patch_call(*place, functools.partial(self._wrap, receives=place in private.RECEIVES))
            for place in private.COLLECTIVES
        )

    def _wrap(self, original: Callable[..., Any], *, receives: bool) -> Callable[..., Any]:
        look = self._look

        def run(*args: Any, **kwargs: Any) -> Any:
            look(receives, args, kwargs)
            return original(*args, **kwargs)

        return run

    def _note(self, receives: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._listener.recording:
            return
        for leaf in tree_leaves((args, kwargs)):
            if is_tensor(leaf):
                self._log.follow(leaf)
                if receives and self._listener.on_thread():
                    self._log.about(Fact.COMMUNICATION, leaf, self._receives)


class Made(NamedTuple):
    """When and where an op made a tensor with a storage of its own; it keeps no reference to the tensor."""

    time_ns: int
    address: int
    bytes: int
    elements: int
    floating: bool


class Allocations(TorchDispatchMode):
    """Notes each tensor that an op makes while the mode is on.

    With ``follow`` the source also sees its free, which may be on another thread.
    """

    def __init__(self, log: Log, *, follow: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._follow = follow
        self.made: list[Made] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as in ForwardMode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in ForwardMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            with without_functions():
                self._note(func, result)
        except Exception as error:
            self._log.misses.add(error)
        return result

    def _note(self, func: Any, result: Any) -> None:
        # A mode also sees the ops that C++ calls, such as those of DDP's reducer.
        schema = op_schema(func)
        if schema is None or any(value.alias_info is not None for value in schema.returns):
            return  # a view, or an argument itself (in place, out=)
        now = time_ns()
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if is_tensor(tensor) and (address := self._log.storage_address(tensor)):
                if self._follow:
                    self._log.follow(tensor)
                size = torch.Tensor.untyped_storage(tensor).nbytes()
                self.made.append(Made(now, address, size, tensor.numel(), tensor.is_floating_point()))


MADE_BEFORE = (
    "DistributedDataParallel was created before the recording began: the gradient buckets that it had then count as "
    "other memory, and on the CPU they are not counted at all"
)
NOT_TOLD = "DDP's buckets could not be identified (unexpected layout); they count as other memory"


@dataclass(slots=True, kw_only=True)
class _Reducer:
    """A reducer's number of dense gradient elements (``None``: unknown) and the blocks of its buckets.

    ``noted`` says whether the blocks are in the recording.
    """

    elements: int | None
    blocks: list[Made] = field(default_factory=list)
    noted: bool = False


class DataParallelHooks:
    """Logs the memory that DDP has for communication; also follows it before a recording begins."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._log = listener, listener.log
        self._text = self._log.texts.id
        self._reducers: weakref.WeakKeyDictionary[Any, _Reducer] = weakref.WeakKeyDictionary()

    def install(self) -> Undo:
        """Wrap the reducer's three functions and the broadcasts; returns the undo."""
        looks: dict[Place, Callable[..., object]] = {
            private.REDUCER_INIT: self._new,
            private.REBUILD_BUCKETS: self._asked_to_rebuild,
            private.STATIC_GRAPH: self._static,
            **dict.fromkeys(private.BROADCASTS, self._broadcast),
        }
        guarded = self._log.misses.guarded
        return together(
            patch_call(*place, functools.partial(self._wrap, guarded(look))) for place, look in looks.items()
        )

    def blocks(self) -> dict[int, int]:
        """Address and bytes of the blocks of all live reducers."""
        return {made.address: made.bytes for known in self._reducers.values() for made in known.blocks}

    def _wrap(self, look: Callable[..., object], original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, after which ``look`` is called with its result, the tensors that it made, and its arguments."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._listener.on_thread():
                return original(*args, **kwargs)
            # DDP allocates its buckets in C++, out of Python's sight; but by ops of torch, which a mode sees.
            with Allocations(self._log, follow=self._listener.recording) as seen:
                result = original(*args, **kwargs)
            look(result, seen.made, *args, **kwargs)
            return result

        return run

    def _new(
        self,
        _: object,
        made: list[Made],
        reducer: Any,
        params: Sequence[torch.Tensor],
        bucket_indices: Iterable[Iterable[int]],
        per_bucket_size_limits: object = None,
        process_group: object = None,
        expect_sparse_gradients: Sequence[bool] = (),
        *__: object,
        **___: object,
    ) -> None:
        """``reducer`` was made with these arguments; its integer tensors note which parameters a step used."""
        # Sparse gradients have no bucket.
        sparse = {index for index, expected in enumerate(expect_sparse_gradients) if expected}
        dense = [params[index].numel() for bucket in bucket_indices for index in bucket if index not in sparse]
        known = self._reducers[reducer] = _Reducer(elements=sum(dense))
        self._set_buckets(known, made)

    def _asked_to_rebuild(self, rebuilt: bool, made: list[Made], reducer: Any) -> None:
        """A forward begins; ``made`` is what the reducer has allocated: its new buckets, if it ``rebuilt`` them."""
        known = self._reducers.get(reducer)
        if known is None:
            known = self._reducers[reducer] = _Reducer(elements=None)
            if self._listener.recording:
                self._listener.remark(MADE_BEFORE)
        if rebuilt:
            # Rebuilding replaces the buckets; the integer tensors, which note the used parameters, stay.
            kept = [block for block in known.blocks if not block.floating]
            self._set_buckets(known, kept + [block for block in made if block.floating])
        elif self._listener.recording and not known.noted:
            self._log_blocks(known)

    def _static(self, _: object, made: list[Made], reducer: Any) -> None:
        """DDP has set ``static_graph`` on ``reducer``; ``made`` are its new tensors that note the used parameters."""
        known = self._reducers.get(reducer)
        if known is not None:
            self._set_buckets(known, known.blocks + made)

    def _set_buckets(self, known: _Reducer, blocks: list[Made]) -> None:
        """Set ``blocks`` as the reducer's, if they have as many elements as its gradients."""
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

    def _broadcast(self, _: object, made: list[Made], *__: object, **___: object) -> None:
        if self._listener.recording:
            for block in made:  # it may be freed by now, hence the time
                self._log.fact(Fact.COMMUNICATION, block.address, self._text(Communication.BROADCAST), at=block.time_ns)


_POLICY = (
    "FSDP2 gathers {shard} parameters as {whole} (MixedPrecisionPolicy): modules compute with these copies, which "
    "count as communication; a precision forced by ampmem does not change that"
)

_Look = Callable[..., Any]


class ShardingHooks:
    """Follows FSDP2's groups of parameters: gathered, resharded, reduced."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._log = listener, listener.log
        self._models, self._precision_seen = listener.models, listener.precision_seen
        self._path = 0
        """Text id of the module whose group is being worked on."""
        self._names: dict[int, tuple[int, int]] = {}
        """Text ids of the name and module of each shard, by its ``id``."""

    def install(self) -> Undo:
        """Patch FSDP2's functions on a group; returns the undo."""
        wrappers: dict[str, tuple[_Look | None, _Look | None]] = {
            private.UNSHARD: (self._note_module, self._after_unshard),
            private.WAIT: (self._before_wait, self._after_wait),
            private.RESHARD: (self._before_reshard, self._after_reshard),
            private.POST_BACKWARD: (self._before_post_backward, self._after_post_backward),
            private.REDUCE: (self._before_reduce, self._after_reduce),
            private.INPUTS: (None, self._after_inputs),
        }
        return together(
            patch_call(*place, self._wrapper(*looks))
            for name, looks in wrappers.items()
            for place in private.places(name)
        )

    def look(self) -> None:
        """Name the shards, and log the parameters that are gathered already; called when a forward begins."""
        groups = list(self._models.sharded.look(self._models.modules()))
        if groups:
            self._names = {id(each): (slot.name_id, slot.path_id) for slot, each in self._models.parameters()}
        for group in groups:
            self._note_module(group)
            self._note_whole(group)

    def _wrapper(self, before: _Look | None, after: _Look | None) -> Callable[[_Look], _Look]:
        guarded, listener = self._log.misses.guarded, self._listener
        look_before = None if before is None else guarded(before)
        look_after = None if after is None else guarded(after)

        def wrap(original: _Look) -> _Look:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not (listener.recording and listener.on_thread()):
                    return original(*args, **kwargs)
                seen = None if look_before is None else look_before(*args, **kwargs)
                result = original(*args, **kwargs)
                if look_after is not None:
                    look_after(seen, result, *args)
                return result

            return run

        return wrap

    def _note(self, part: Communication, tensors: Iterable[Any]) -> None:
        name = self._log.texts.id(part.value)
        for tensor in tensors:
            if is_tensor(tensor):
                self._log.about(Fact.COMMUNICATION, tensor, name, self._path)

    def _note_module(self, group: Any, *_: Any, **__: Any) -> None:
        """Note the module of ``group``, to which the following memory belongs."""
        self._path = self._models.known_path_id(private.fsdp_module(group))

    def _after_unshard(self, _: Any, __: Any, group: Any, *___: Any) -> None:
        self._note(Communication.ALL_GATHER, [private.gathered(group)])

    def _after_inputs(self, _: Any, inputs: Any, *__: Any) -> None:
        self._note(Communication.ALL_GATHER, tree_leaves(inputs))

    def _before_wait(self, group: Any) -> bool:
        """Whether an all-gather is pending, whose parameters are there after the wait."""
        self._note_module(group)
        return private.is_gathering(group)

    def _after_wait(self, was_gathering: bool | None, _: Any, group: Any) -> None:
        if was_gathering:
            self._note_whole(group)

    def _note_whole(self, group: Any) -> None:
        """Log the memory of the unsharded parameters of ``group``, and their names."""
        for param in private.params_of(group):
            self._models.sharded.add(param)
            self._note(Communication.UNSHARDED_PARAMETERS, private.whole_memory(param))
            shard, whole = private.shard_of(param), private.whole_of(param)
            if shard is not None and whole is not None and shard.dtype != whole.dtype:
                self._precision_seen.other = True
                self._log.misses.say(_POLICY.format(whole=_word(whole.dtype), shard=_word(shard.dtype)))
            name = self._names.get(id(shard))
            if whole is not None and name is not None:
                self._models.parameters_at.add(whole, name[0])

    def _before_reshard(self, group: Any) -> list[int]:
        """Addresses of the unsharded parameters, which resharding frees."""
        self._note_module(group)
        wholes = [whole for param in private.params_of(group) if (whole := private.whole_of(param)) is not None]
        return [self._log.storage_address(part) for whole in wholes for part in parts_of(whole)]

    def _after_reshard(self, addresses: list[int] | None, _: Any, group: Any) -> None:
        # Resharding frees the storages: whatever is allocated there next is not a parameter.
        for address in addresses or ():
            self._models.parameters_at.remove(address)
        self._note_whole(group)  # parameters that stay gathered, wholly or in part

    def _before_post_backward(self, group: Any, *_: Any) -> None:
        self._note_module(group)
        self._note_gradients(group)

    def _note_gradients(self, group: Any) -> None:
        for param in private.params_of(group):
            self._note(Communication.UNSHARDED_GRADIENTS, private.whole_gradients(param))

    def _before_reduce(self, params: Any, gradients: Any, *_: Any, **__: Any) -> None:
        self._note(Communication.UNSHARDED_GRADIENTS, gradients)

    def _after_reduce(self, _: Any, result: Any, *__: Any) -> None:
        self._note(Communication.REDUCE_SCATTER, result)

    def _after_post_backward(self, _: Any, __: Any, group: Any, *___: Any) -> None:
        self._note_gradients(group)  # micro-batches whose gradients are not reduced yet
        shards = [shard for param in private.params_of(group) if (shard := private.shard_of(param)) is not None]
        gradients = [(self._names.get(id(shard), (0, 0))[0], shard.grad) for shard in shards if shard.grad is not None]
        # FSDP2 reduces a group's gradients into one storage, of which each shard's gradient is a view.
        if len(gradients) > 1:  # all in one storage, which is not a single parameter's
            gradients.insert(0, (0, gradients[0][1]))
        for name, gradient in gradients:
            self._log.about(Fact.GRADIENT, gradient, name, self._path)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FunctionHooks:
    """Logs the tensors of each collective that Python code starts."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._log = listener, listener.log

    def install(self) -> Undo:
        """Patch the functions of ``torch.distributed``, which fill their arguments; returns the undo."""
        return self._patched(private.collectives(), filled=lambda result, arguments: arguments)

    def install_returning(self) -> Undo:
        """Patch the functional collectives, which return new tensors (DTensor uses them); returns the undo."""
        return self._patched(private.returning_collectives(), filled=lambda result, arguments: result)

    def _patched(self, places: Iterable[tuple[str, Place]], *, filled: Callable[[Any, Any], Any]) -> Undo:
        return together(
            patch_call(*place, functools.partial(self._wrapper, self._log.texts.id(part), filled))
            for part, place in places
        )

    def _wrapper(self, part: int, filled: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        look, listener = self._log.misses.guarded(self._look), self._listener

        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if listener.recording and listener.on_thread():
                look(part, filled(result, (args, kwargs)))
            return result

        return run

    def _look(self, part: int, tensors: Any) -> None:
        for leaf in tree_leaves(tensors):
            if is_tensor(leaf):
                self._log.about(Fact.COLLECTIVE, leaf, part, self._log.module)


class CommunicationHooks:
    """Installs each group of hooks once its module is imported; notes what this torch lacks."""

    def __init__(self, listener: Listener) -> None:
        self._functions = FunctionHooks(listener)
        self._sharding = ShardingHooks(listener)
        self._misses = listener.log.misses
        self._undo = ExitStack()
        self._waiting: list[tuple[Callable[[], bool], Callable[[], Undo]]] | None = None
        """(is its module imported, ``install``) of each group of hooks not installed yet; ``None`` when not active."""
        self._look = self._misses.guarded(self._follow)

    def install(self) -> Undo:
        """Begin; returns the undo of all hooks, including those installed later."""
        self._waiting = [
            (torch.distributed.is_available, self._functions.install),
            (private.functional, self._functions.install_returning),
            (private.fully_sharded, self._install_sharding),
        ]
        self.follow()
        return self._close

    def follow(self) -> None:
        """Install the hooks whose modules are imported by now; called when a forward begins."""
        if self._waiting is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self._look()

    def _follow(self) -> None:
        assert self._waiting is not None
        for entry in list(self._waiting):
            is_imported, install = entry
            if is_imported():
                self._waiting.remove(entry)  # first, so that an install that fails is not tried again
                self._undo.callback(install())
        if private.fully_sharded():
            self._sharding.look()

    def _install_sharding(self) -> Undo:
        for message in probe(Use.SHARDED):
            self._misses.say(message)
        return self._sharding.install()

    def _close(self) -> None:
        self._waiting = None
        self._undo.close()
