"""All hooks of communication: those that are there from the start, and those of what the script imports later."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ampmem.patching import Undo
from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.hooks.communication.functions import FunctionHooks
from ampmem.recorder.hooks.communication.sharding import ShardingHooks
from ampmem.recorder.hooks.listener import Listener
from ampmem.recorder.models.models import Models
from ampmem.recorder.steering.arms import ArmSeen
from ampmem.recorder.torch_private.entries import Use, probe
from ampmem.recorder.torch_private.sharded import fully_sharded, functional


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
