"""All hooks of communication: those that are there from the start, and those of what the script imports later.

Collectives, whoever calls them: what they are given and what they fill; sharding; and what wraps them.
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
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.hooks.communication.sharding import ShardingHooks
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.models import Models
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.torch_private.entries import Place, Use, probe
from ampmem.recorder.torch_private.general import tree_leaves
from ampmem.recorder.torch_private.sharded import collectives, fully_sharded, functional, returning_collectives


class FunctionHooks:
    """Logs the tensors of each collective that the script, or what it uses, starts from Python."""

    def __init__(self, listener: Listener, log: Log, texts: Texts) -> None:
        self._listener = listener
        self._texts = texts
        self._log = log

    def install(self) -> Undo:
        """Patch the functions of ``torch.distributed``; returns what undoes it."""
        return self._patched(collectives(), filled=self._arguments)

    def install_returning(self) -> Undo:
        """Patch those that return what they fill, which DTensor uses; returns what undoes it."""
        return self._patched(returning_collectives(), filled=self._result)

    def _patched(self, places: Iterable[tuple[str, Place]], *, filled: Callable[..., Any]) -> Undo:
        with ExitStack() as undo:
            for part, place in places:
                undo.callback(patch(*place, functools.partial(self._wrapper, self._texts.id(part), filled)))
            return undo.pop_all().close

    def _wrapper(self, part: int, filled: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        look, listener = self._log.misses.guarded(functools.partial(self._look, part, filled)), self._listener

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if listener.recording and listener.on_thread():
                look(result, args, kwargs)
            return result

        return run

    def _look(self, part: int, filled: Callable[..., Any], result: Any, args: Any, kwargs: Any) -> None:
        for leaf in tree_leaves(filled(result, args, kwargs)):
            if is_tensor(leaf):
                self._log.about(Fact.COLLECTIVE, leaf, part, self._log.module)

    @staticmethod
    def _arguments(_: Any, args: Any, kwargs: Any) -> Any:
        return (args, kwargs)

    @staticmethod
    def _result(result: Any, _: Any, __: Any) -> Any:
        return result


class CommunicationHooks:
    """Installs each as soon as what it patches is there; says what this torch lacks."""

    def __init__(
        self,
        listener: Listener,
        log: Log,
        models: Models,
        texts: Texts,
        arm_seen: ArmSeen,
    ) -> None:
        self._functions = FunctionHooks(listener, log, texts)
        self._sharding = ShardingHooks(listener, log, models, texts, arm_seen)
        self._misses = log.misses
        self._undo: ExitStack | None = None
        self._called = self._functional = self._sharded = False
        self._look = log.misses.guarded(self._follow)

    def install(self) -> Undo:
        """Begin; returns what undoes all, also what is installed later."""
        self._undo = ExitStack()
        self._called = self._functional = self._sharded = False
        self.follow()
        return self._close

    def follow(self) -> None:
        """A forward begins: by now the script may be one of several ranks, and have sharded a model."""
        if self._undo is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self._look()

    def _follow(self) -> None:
        assert self._undo is not None
        if not self._called:
            self._called = True
            self._undo.callback(self._functions.install())
        if not self._functional and functional():
            self._functional = True
            self._undo.callback(self._functions.install_returning())
        if not fully_sharded():
            return
        if not self._sharded:
            self._sharded = True
            for message in probe(Use.SHARDED):
                self._misses.say(message)
            self._undo.callback(self._sharding.install())
        self._sharding.look()

    def _close(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()
