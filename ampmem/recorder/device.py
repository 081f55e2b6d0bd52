"""What a session does beside a source that watches a device's own allocator."""

from __future__ import annotations

from time import time_ns
from types import FrameType
from typing import TypeAlias

from ampmem.events import AllocatorRecord, LayersRecord, OomRecord, Phase, PredictionRecord
from ampmem.recorder.hooks.forward import ForwardMode
from ampmem.recorder.log import Log
from ampmem.recorder.models.stacks import calling_frame, current_stack
from ampmem.recorder.sources.base import DeviceSource, Place, Source
from ampmem.recorder.texts import Texts
from ampmem.vocabulary import Mark

Taken: TypeAlias = tuple[list[LayersRecord], list[OomRecord]]

_DISPATCH = ForwardMode.__torch_dispatch__.__code__


class DeviceWatch:
    """Takes marks, tags phases and says where a failure was; does nothing where ``source`` is of another kind."""

    def __init__(self, source: Source, log: Log, mode: ForwardMode, texts: Texts, *, stacks: bool) -> None:
        self._source = source if isinstance(source, DeviceSource) else None
        self._log = log
        self._mode = mode
        self._texts = texts
        self._stacks = stacks
        self.update = ""
        """The optimizer's ``step`` that runs, or ran last."""
        if self._source is not None:
            self._source.locate = self._locate
        tell = getattr(source, "tell", None)
        if tell is not None:  # a source that has facts of its own to log
            tell(log, texts)

    def begin(self) -> None:
        """Tag what is allocated from now on."""
        if self._source is not None:
            self._log.stamp = self._source.stamp
            if self._log.stamp is not None:
                self._log.stamp(time_ns())

    def end(self) -> None:
        """Tag no more."""
        self._log.stamp = None

    def mark(self, mark: Mark) -> None:
        """The script is at ``mark`` of the running step."""
        if self._source is not None and self._log.step >= 0:
            self._source.mark(self._log.step, mark)

    def take(self) -> Taken:
        """What the source has settled since the last call."""
        return ([], []) if self._source is None else (self._source.take_layers(), self._source.take_ooms())

    def notes(self) -> list[str]:
        """What a reader of the recording has to know."""
        return [] if self._source is None else self._source.notes()

    def allocator(self) -> AllocatorRecord | None:
        """How the caching allocator was set and used by now."""
        return None if self._source is None else self._source.allocator()

    def prediction(self) -> PredictionRecord | None:
        """What the run comes to on the device by now, where that is only predicted."""
        predict = getattr(self._source, "prediction", None)
        found: PredictionRecord | None = None if predict is None else predict()
        return found

    def _locate(self) -> Place:
        return Place(
            step=self._log.step,
            op=self._running_op() or (self.update if self._log.phase == Phase.OPTIMIZER else ""),
            module=self._texts.value(self._mode.module),
            stack=current_stack() if self._stacks else "",
        )

    def _running_op(self) -> str:
        """The op that the mode has called, by its frame: to note each op as it starts would cost every op."""
        frame: FrameType | None = calling_frame()
        while frame is not None:
            if frame.f_code is _DISPATCH:
                return self._texts.value(frame.f_locals["name"])
            frame = frame.f_back
        return ""
