"""FSDP2: what it gathers, the whole parameters and their gradients, and what it reduces.

It empties storages and fills them again elsewhere (``UntypedStorage.resize_``): a fact is of the memory at its time,
and so each whole parameter is noted anew each time that it is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from ampmem.events import Fact
from ampmem.patching import Undo, patch
from ampmem.recorder.facts.guests import is_tensor
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.parts import parts_of
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.models import Models
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.torch_private.general import tree_leaves
from ampmem.recorder.torch_private.sharded import (
    INPUTS,
    POST_BACKWARD,
    REDUCE,
    RESHARD,
    UNSHARD,
    WAIT,
    gathered,
    is_gathering,
    module_of,
    params_of,
    places,
    shard_of,
    whole_gradients,
    whole_memory,
    whole_of,
)
from ampmem.vocabulary import Communication

_POLICY = (
    "FSDP2 gathers {shard} parameters as {whole} (MixedPrecisionPolicy): modules compute with those, which are in "
    "communication, and no precision that ampmem can force changes that"
)

_Look = Callable[..., Any]


class ShardingHooks:
    """Follows the groups of parameters that FSDP2 gathers, gives up and reduces."""

    def __init__(
        self,
        listener: Listener,
        log: Log,
        models: Models,
        texts: Texts,
        arm_seen: ArmSeen,
    ) -> None:
        self._listener = listener
        self._log = log
        self._models = models
        self._texts = texts
        self._arm_seen = arm_seen
        self._path = 0
        """Text id of the module whose group is at work."""
        self._names: dict[int, tuple[int, int]] = {}
        """By ``id`` of each shard, the text ids of its name and of its module."""

    def install(self) -> Undo:
        """Patch what FSDP2 does with a group; returns what undoes it."""
        wrappers: dict[str, tuple[_Look | None, _Look | None]] = {
            UNSHARD: (self._begins, self._unsharded),
            WAIT: (self._waits, self._waited),
            RESHARD: (self._gives_up, self._gave_up),
            POST_BACKWARD: (self._has_gradients, self._reduced_group),
            REDUCE: (self._reduces, self._reduced),
            INPUTS: (None, self._gave_inputs),
        }
        with ExitStack() as undo:
            for name, (before, after) in wrappers.items():
                for place in places(name):
                    undo.callback(patch(*place, self._wrapper(before, after)))
            return undo.pop_all().close

    def look(self) -> None:
        """A forward begins: name the shards, and note what is whole already."""
        groups = list(self._models.sharded.look(self._models.modules()))
        if groups:
            self._names = {id(each): (slot.name_id, slot.path_id) for slot, each in self._models.parameters()}
        for group in groups:
            self._begins(group)
            self._note_whole(group)

    def _wrapper(self, before: _Look | None, after: _Look | None) -> Callable[[_Look], _Look]:
        guarded, listener = self._log.misses.guarded, self._listener
        look_before = None if before is None else guarded(before)
        look_after = None if after is None else guarded(after)

        def wrap(original: _Look) -> _Look:
            @functools.wraps(original)
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
        name = self._texts.id(part.value)
        for tensor in tensors:
            if is_tensor(tensor):
                self._log.about(Fact.COMMUNICATION, tensor, name, self._path)

    def _begins(self, group: Any, *_: Any, **__: Any) -> None:
        self._path = self._models.known_path_id(module_of(group))

    def _unsharded(self, _: Any, __: Any, group: Any, *___: Any) -> None:
        self._note(Communication.ALL_GATHER, [gathered(group)])

    def _gave_inputs(self, _: Any, inputs: Any, *__: Any) -> None:
        self._note(Communication.ALL_GATHER, tree_leaves(inputs))

    def _waits(self, group: Any) -> bool:
        self._begins(group)
        return is_gathering(group)

    def _waited(self, was_gathering: bool | None, _: Any, group: Any) -> None:
        if was_gathering:
            self._note_whole(group)

    def _note_whole(self, group: Any) -> None:
        for param in params_of(group):
            self._models.sharded.add(param)
            self._note(Communication.UNSHARDED_PARAMETERS, whole_memory(param))
            shard, whole = shard_of(param), whole_of(param)
            if shard is not None and whole is not None and shard.dtype != whole.dtype:
                self._arm_seen.other = True
                self._log.misses.say(_POLICY.format(whole=_word(whole.dtype), shard=_word(shard.dtype)))
            name = self._names.get(id(shard))
            if whole is not None and name is not None:
                self._models.parameters_at.add(whole, name[0])

    def _gives_up(self, group: Any) -> list[int]:
        self._begins(group)
        wholes = [whole for param in params_of(group) if (whole := whole_of(param)) is not None]
        return [self._log.storage_address(part) for whole in wholes for part in parts_of(whole)]

    def _gave_up(self, addresses: list[int] | None, _: Any, group: Any) -> None:
        for address in addresses or ():
            self._models.parameters_at.remove(address)
        self._note_whole(group)  # what is kept, or partly kept

    def _has_gradients(self, group: Any, *_: Any) -> None:
        self._begins(group)
        self._note_gradients(group)

    def _note_gradients(self, group: Any) -> None:
        for param in params_of(group):
            self._note(Communication.UNSHARDED_GRADIENTS, whole_gradients(param))

    def _reduces(self, params: Any, gradients: Any, *_: Any, **__: Any) -> None:
        self._note(Communication.UNSHARDED_GRADIENTS, gradients)

    def _reduced(self, _: Any, result: Any, *__: Any) -> None:
        self._note(Communication.REDUCE_SCATTER, result)

    def _reduced_group(self, _: Any, __: Any, group: Any, *___: Any) -> None:
        self._note_gradients(group)  # of micro-batches that are not reduced yet
        shards = [shard for param in params_of(group) if (shard := shard_of(param)) is not None]
        gradients = [(self._names.get(id(shard), (0, 0))[0], shard.grad) for shard in shards if shard.grad is not None]
        if len(gradients) > 1:  # side by side in one storage, which is no single parameter's
            gradients.insert(0, (0, gradients[0][1]))
        for name, gradient in gradients:
            self._log.about(Fact.GRADIENT, gradient, name, self._path)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
