"""``torch.cuda`` with one GPU of the named kind: availability, properties, memory statistics, streams.

Streams, events and regions determine the order in which a device that computes nothing would work. Threads of the
script see the device too: a dispatch mode is per thread, and weight loaders use several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ampmem.errors import UsageError
from ampmem.own_code import script_line
from ampmem.patching import Undo, patch, put_in, replace_all, undone_together
from ampmem.simulator.device import SimulatedDevice
from ampmem.simulator.memory.order import DEFAULT, Reached
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import general
from ampmem.simulator.torch_cuda import compiled, derivatives, tensors, triton, types, unsupported
from ampmem.simulator.torch_cuda.properties import properties
from ampmem.simulator.where import stop
from ampmem.simulator.world import check_index, here

if TYPE_CHECKING:
    from collections.abc import Iterator


_SNAPSHOTS = "a simulated device has no snapshot; ampmem profile --snapshot FILE writes one from the recording"


@undone_together
def install(mode: SimulatedMode, *, alone: bool, cache: Path | None) -> Iterator[Undo]:
    """Replace the functions of ``torch.cuda``, and of tensors on the device; returns the undo.

    ``alone`` if no other ranks are simulated. ``cache`` is the folder for what the compiler keeps.
    """
    device = mode.device_model
    yield replace_all((torch.cuda,), _queries(device) | _actions())
    yield replace_all((torch.cuda, torch.cuda.memory), _memory(device))
    owner, sets, gets = general.ACCELERATOR_SETTINGS
    yield replace_all((owner,), {sets: _settings(device), gets: lambda: device.in_force[1]})
    yield replace_all((torch.cuda, torch.cuda.random), _random(device))
    yield replace_all((torch.cuda.nvtx,), _nvtx())
    yield replace_all((torch.accelerator,), _accelerator(device))
    yield _install_streams(device)
    yield replace_all((torch.backends.cudnn,), _CUDNN)
    yield tensors.install(mode)
    yield types.install()
    yield triton.install(mode)
    yield derivatives.install(mode)
    yield _share_with_threads(mode)
    yield compiled.install(mode, cache)
    yield unsupported.install(alone=alone)


def _queries(device: SimulatedDevice) -> dict[str, Any]:
    found = properties(device)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        general.LAZY_INIT: lambda: None,
        general.LAZY_CALL: lambda callable, **kwargs: None,
        "init": lambda: None,
        "device_count": lambda: here().local_size,
        "current_device": lambda: here().local_rank,
        "get_device_name": lambda device=None: found.name,
        "get_device_capability": lambda device=None: (found.major, found.minor),
        "get_device_properties": lambda device=None: found,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or found.major >= 8,
        "is_tf32_supported": lambda: found.major >= 8,
        "get_arch_list": lambda: [f"sm_{found.major}{found.minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "utilization": lambda device=None: 0,
        "temperature": lambda device=None: 0,
        "power_draw": lambda device=None: 0,
    }


def _actions() -> dict[str, Any]:
    return {
        "set_device": check_device,
        "device": Region,
        "device_of": Region,
        general.DEVICE_GUARD: Region,
        "ipc_collect": lambda: None,
        "set_sync_debug_mode": lambda debug_mode: None,
        "get_sync_debug_mode": lambda: 0,
        general.SLEEP: lambda cycles: None,
        "is_current_stream_capturing": lambda: False,
    }


def _memory(device: SimulatedDevice) -> dict[str, Any]:
    allocator = device.allocator
    counters = allocator.counters

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(allocator.driver.free, 0), total

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        simulated.set_memory_fraction(fraction)

    def no_history(enabled: Any = "all", *_: Any, **__: Any) -> None:
        # Noted here, too: the recording may stop the script before its dump.
        if enabled:
            simulated.not_written(
                f"torch.cuda.memory.{general.RECORD_HISTORY} has no effect at {script_line()}, and "
                f"{general.DUMP_SNAPSHOT} writes nothing: {_SNAPSHOTS}",
                aloud=True,
            )

    def no_snapshot(filename: str = "dump_snapshot.pickle", **_: Any) -> None:
        simulated.not_written(
            f"torch.cuda.memory.{general.DUMP_SNAPSHOT} wrote nothing at {script_line()}: {_SNAPSHOTS}", aloud=True
        )

    def empty_snapshot(*_: Any, **__: Any) -> dict[str, Any]:
        simulated.not_written(
            f"torch.cuda.memory.{general.SNAPSHOT} was empty at {script_line()}: {_SNAPSHOTS}", aloud=True
        )
        return {"segments": [], "device_traces": [[]], "allocator_settings": {}}

    total = device.gpu.total_memory
    simulated = device
    return {
        "memory_allocated": lambda device=None: counters.allocated,
        "max_memory_allocated": lambda device=None: counters.allocated_peak,
        "memory_reserved": lambda device=None: counters.reserved,
        "max_memory_reserved": lambda device=None: counters.reserved_peak,
        "memory_cached": lambda device=None: counters.reserved,
        "max_memory_cached": lambda device=None: counters.reserved_peak,
        "memory_stats": lambda device=None: counters.memory_stats(),
        "reset_peak_memory_stats": lambda device=None: counters.reset_peaks(),
        "reset_max_memory_allocated": lambda device=None: counters.reset_peaks(),
        "reset_max_memory_cached": lambda device=None: counters.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: None,
        "empty_cache": device.empty_cache,
        "mem_get_info": mem_get_info,
        "memory_summary": lambda device=None, abbreviated=False: str(counters.memory_stats()),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: allocator.settings.memory_fraction or 1.0,
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": lambda *_, **__: [],
        general.RECORD_HISTORY: no_history,
        general.SNAPSHOT: empty_snapshot,
        general.SET_SETTINGS: _settings(device),
        general.DUMP_SNAPSHOT: no_snapshot,
    }


def _settings(device: SimulatedDevice) -> Callable[[str], None]:
    """The function that changes the allocator's settings during the run."""

    def set_settings(env: str) -> None:
        try:
            device.configure(env, f"torch.cuda.memory.{general.SET_SETTINGS}")
        except UsageError as error:
            raise stop(str(error)) from None

    return set_settings


def _random(device: SimulatedDevice) -> dict[str, Any]:
    """The random generator of a device that draws no numbers: only its state can be read and set."""
    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), device.seeded),
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": _state(),
        "get_rng_state_all": lambda: [_state()],
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), device.seeded),
    }


def _accelerator(device: SimulatedDevice) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: here().local_size,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: here().local_rank,
        "set_device_index": check_device,
        "set_device_idx": check_device,
        "current_device_idx": lambda: here().local_rank,
        "empty_cache": device.empty_cache,
        "memory_allocated": lambda device_index=None: device.allocator.counters.allocated,
        "max_memory_allocated": lambda device_index=None: device.allocator.counters.allocated_peak,
        "memory_reserved": lambda device_index=None: device.allocator.counters.reserved,
        "max_memory_reserved": lambda device_index=None: device.allocator.counters.reserved_peak,
        "reset_peak_memory_stats": lambda device_index=None: device.allocator.counters.reset_peaks(),
    }


def _state() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _nvtx() -> dict[str, Any]:
    @contextmanager
    def nothing(msg: str, *_: Any, **__: Any) -> Iterator[None]:
        yield

    marks = dict.fromkeys(("range_push", "mark", "range_start"), lambda *_, **__: 0)
    return {**marks, "range_pop": lambda: 0, "range": nothing}


_CUDNN = {"is_available": lambda: True, "is_acceptable": lambda tensor: False}


class Stream:
    """A stream of the device ``model``; two with the same number are equal."""

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
        """The number, instead of a handle."""
        return self.stream_id

    def synchronize(self) -> None:
        """Wait for all work given to the stream."""
        self.model.synchronize(self.model.order.reached(self.stream_id))

    def query(self) -> bool:
        """``True``: all work is completed, and the script relies on it."""
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        """``False``: CUDA graphs are not simulated."""
        return False

    def wait_event(self, event: Any) -> None:
        """Make later work run after ``event``."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make later work run after all work given to ``stream`` so far."""
        self.model.order.wait(self.stream_id, self.model.order.reached(stream.stream_id))

    def record_event(self, event: Any = None) -> Any:
        """An event after all work given to the stream so far."""
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
    """An event of the device ``model``; its time is this machine's, and says nothing about a GPU."""

    model: ClassVar[SimulatedDevice]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = perf_counter()
        self._reached: Reached = {}

    def record(self, stream: Any = None) -> None:
        """Record the event on ``stream``, or on the current one."""
        order = self.model.order
        self._time = perf_counter()
        self._reached = order.reached(order.current() if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        """Make later work of ``stream``, or of the current one, run after the event."""
        order = self.model.order
        order.wait(order.current() if stream is None else stream.stream_id, self._reached)

    def query(self) -> bool:
        """``True``: the event has occurred, and the script relies on it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for the event."""
        self.model.synchronize(self._reached)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two events on this machine."""
        end.synchronize()
        return (end._time - self._time) * 1000


class Region:
    """``torch.cuda.device(...)``: a region that changes nothing."""

    idx = prev_idx = 0

    def __init__(self, where: Any = None, **_: Any) -> None:
        check_device(where)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class StreamRegion:
    """``torch.cuda.stream(...)``: a region with another current stream; ``None`` changes nothing."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


@undone_together
def _install_streams(device: SimulatedDevice) -> Iterator[Undo]:
    """Replace torch's streams, events and regions; returns the undo."""
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
    yield replace_all((torch.cuda, torch.cuda.streams), kinds)
    default = {"default_stream": lambda device=None: stream(stream_id=DEFAULT)}
    yield replace_all((torch.cuda,), regions | wait | default)
    yield replace_all((torch.accelerator,), {"current_stream": current, "set_stream": enter} | wait)
    yield replace_all((torch,), {"Stream": stream, "Event": event})
    yield put_in(*general.RAW_STREAM, lambda where: device.order.current())


def _external(stream: type[Stream]) -> type[Stream]:
    """``torch.cuda.ExternalStream``: a stream made by another library, by its handle."""

    def init(self: Stream, stream_ptr: int, device: Any = None, **_: Any) -> None:
        Stream.__init__(self, device, stream_ptr=stream_ptr)

    return type("ExternalStream", (stream,), {"__init__": init, "__module__": "torch.cuda.streams"})


def check_device(where: Any) -> None:
    """Raise an error for a device, by number or name, other than the simulated one; streams and tensors pass."""
    if isinstance(where, str):
        where = torch.device(where)
    check_index(where.index if isinstance(where, torch.device) else where if isinstance(where, int) else None)


def _share_with_threads(mode: SimulatedMode) -> Callable[[], None]:
    """Make threads that start from now on see the device; returns the undo. Ops run one at a time."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def start(thread: threading.Thread) -> None:
            mode.shared = True
            # Dispatch modes are per thread: without this one the thread's ops would look for a real GPU.
            with mode:
                original(thread)

        return start

    return patch(*general.THREAD_STARTS, wrapper)
