"""The optimizer's update that runs: a whole ``step`` is one op, as no mode looks into it."""

from __future__ import annotations

from time import time_ns

from ampmem.recorder.facts.log import Log
from ampmem.recorder.facts.texts import Texts
from ampmem.recorder.models.stacks import Stacks


class RunningUpdate:
    """From :meth:`begin` to :meth:`end` it runs; after that it is the one that ran last."""

    def __init__(self, log: Log, stacks: Stacks, texts: Texts) -> None:
        self._log = log
        self.stacks = stacks
        self._texts = texts
        self._began = (0, 0, 0)
        """When, and the ids of its name and of the stack that called it."""
        self.stepping: list[int] = []
        """``id`` of each optimizer whose ``step`` is running: wrappers step inside each other."""
        self.name = ""
        """``Adam.step``."""

    def begin(self, optimizer: str) -> None:
        """The ``step`` of an optimizer of this class begins."""
        self.name = f"{optimizer}.step"
        self._began = (time_ns(), self._texts.id(self.name), self.stacks.capture())

    def end(self) -> None:
        """It has ended, or memory ran out in it."""
        self._log.op(*self._began)
