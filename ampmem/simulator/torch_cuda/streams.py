"""Streams, events and regions of ``torch.cuda``, of a device that does everything at once."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.mode import check_index
from ampmem.simulator.world import here

ONE_STREAM = "everything ran on one stream, so a block is free as soon as its tensor is"


class Stream:
    """A stream; all work of a simulated device is done at once."""

    stream_id = cuda_stream = 0
    device_type = 1
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        check_device(device)
        self.device_index = here().local_rank
        self.device = torch.device("cuda", self.device_index)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """Whether everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: there are none."""
        return False

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        event = event if event is not None else Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class Event:
    """An event; its time is this machine's, which says nothing about a GPU's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = perf_counter()

    def record(self, stream: Any = None) -> None:
        """It happens now."""
        self._time = perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two on this machine."""
        return (end._time - self._time) * 1000


class Region:
    """``torch.cuda.device(...)`` and ``torch.cuda.stream(...)``: regions in which nothing is different."""

    idx = prev_idx = 0

    def __init__(self, where: Any = None, **_: Any) -> None:
        check_device(where)
        self.stream: Any = None

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


def counted(device: SimulatedDevice) -> type[Stream]:
    """The class of streams that a script makes: that there are some is worth a note."""

    class ScriptStream(Stream):
        def __init__(self, device_: Any = None, priority: int = 0, **how: Any) -> None:
            super().__init__(how.get("device", device_), priority)
            device.assume(ONE_STREAM)

    return ScriptStream


def check_device(where: Any) -> None:
    """A device by number or name has to be the one that is simulated; streams and tensors pass."""
    if isinstance(where, str):
        where = torch.device(where)
    check_index(where.index if isinstance(where, torch.device) else where if isinstance(where, int) else None)
