"""Streams, events and regions of ``torch.cuda``: they say in which order a device that computes nothing would work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any, ClassVar

import torch

from ampmem.patching import put_in, replace_all
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.memory.order import DEFAULT, Reached
from ampmem.simulator.private.general import RAW_STREAM
from ampmem.simulator.world import check_index, here


class Stream:
    """A stream of the device ``model``; two with the same number are the same."""

    model: ClassVar[SimulatedDevice]
    device_type = 1

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, stream_ptr: int = 0, **_: Any
    ) -> None:
        check_device(device)
        self.device_index = here().local_rank
        self.device = torch.device("cuda", self.device_index)
        self.priority = priority
        self.stream_id = stream_ptr or (self.model.order.next(priority) if stream_id is None else stream_id)
        self._former: list[int] = []

    @property
    def cuda_stream(self) -> int:
        """The number, for want of a handle."""
        return self.stream_id

    def synchronize(self) -> None:
        """All that the stream was given is done."""
        self.model.synchronize(self.model.order.reached(self.stream_id))

    def query(self) -> bool:
        """Whether everything is done: the answer is yes, and the script counts on it."""
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: there are none."""
        return False

    def wait_event(self, event: Any) -> None:
        """What comes next runs after ``event``."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """What comes next runs after all that ``stream`` was given so far."""
        self.model.order.wait(self.stream_id, self.model.order.reached(stream.stream_id))

    def record_event(self, event: Any = None) -> Any:
        """An event that happens when all is done that the stream was given so far."""
        event = event if event is not None else torch.cuda.Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._former.append(self.model.order.current())
        self.model.order.set(self.stream_id)
        return self

    def __exit__(self, *_: object) -> None:
        self.model.order.set(self._former.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(("cuda", self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class Event:
    """An event of the device ``model``; its time is this machine's, which says nothing about a GPU's."""

    model: ClassVar[SimulatedDevice]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = perf_counter()
        self._reached: Reached = {}

    def record(self, stream: Any = None) -> None:
        """It happens when ``stream``, or the current one, has come so far."""
        order = self.model.order
        self._time = perf_counter()
        self._reached = order.reached(order.current() if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        """What ``stream``, or the current one, is given next runs after it."""
        order = self.model.order
        order.wait(order.current() if stream is None else stream.stream_id, self._reached)

    def query(self) -> bool:
        """Whether it has happened: the answer is yes, and the script counts on it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """It has happened."""
        self.model.synchronize(self._reached)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two on this machine."""
        end.synchronize()
        return (end._time - self._time) * 1000


class Region:
    """``torch.cuda.device(...)``: a region in which nothing is different."""

    idx = prev_idx = 0

    def __init__(self, where: Any = None, **_: Any) -> None:
        check_device(where)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class StreamRegion:
    """``torch.cuda.stream(...)``: a region in which another stream is the current one; ``None`` changes nothing."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def install(device: SimulatedDevice) -> Callable[[], None]:
    """Put the classes and functions in the places of torch's; returns what undoes it."""
    body = {"model": device, "__module__": "torch.cuda.streams"}
    stream: type[Stream] = type("Stream", (Stream,), body)
    event: type[Event] = type("Event", (Event,), body)

    def current(where: Any = None) -> Stream:
        check_device(where)
        return stream(stream_id=device.order.current())

    def enter(stream: Any) -> None:
        if stream is not None:
            device.order.set(stream.stream_id)

    def synchronize(where: Any = None) -> None:
        check_device(where)
        device.synchronize()

    regions = {"stream": StreamRegion, "StreamContext": StreamRegion, "set_stream": enter, "current_stream": current}
    kinds = {"Stream": stream, "Event": event, "ExternalStream": _external(stream)}
    wait = {"synchronize": synchronize}
    with ExitStack() as undo:
        undo.callback(replace_all((torch.cuda, torch.cuda.streams), kinds))
        default = {"default_stream": lambda device=None: stream(stream_id=DEFAULT)}
        undo.callback(replace_all((torch.cuda,), regions | wait | default))
        undo.callback(replace_all((torch.accelerator,), {"current_stream": current, "set_stream": enter} | wait))
        undo.callback(replace_all((torch,), {"Stream": stream, "Event": event}))
        undo.callback(put_in(*RAW_STREAM, lambda where: device.order.current()))
        return undo.pop_all().close


def _external(stream: type[Stream]) -> type[Stream]:
    """``torch.cuda.ExternalStream``: a stream that another library made, by its handle."""

    def init(self: Stream, stream_ptr: int, device: Any = None, **_: Any) -> None:
        Stream.__init__(self, device, stream_ptr=stream_ptr)

    return type("ExternalStream", (stream,), {"__init__": init, "__module__": "torch.cuda.streams"})


def check_device(where: Any) -> None:
    """A device by number or name has to be the one that is simulated; streams and tensors pass."""
    if isinstance(where, str):
        where = torch.device(where)
    check_index(where.index if isinstance(where, torch.device) else where if isinstance(where, int) else None)
