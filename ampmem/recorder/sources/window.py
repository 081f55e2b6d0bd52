"""One window of torch.profiler, CPU only: opened, closed, and mapped to the clock of ``time.time_ns``.

Markers at both ends of the window show how far its times must be shifted.

Kineto, torch's profiler, starts a thread with the first profile of a process; ampmem ends that thread. The thread polls
for requests to profile, which nobody makes here. A child forked while it exists hangs at its end: the thread is missing
there, but its condition variable still counts it, and C++ waits for it in the last destructors. Without the thread, a
process has as many threads as without ampmem. Source: ``ConfigLoader.cpp`` of https://github.com/pytorch/kineto.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from operator import attrgetter
from pathlib import Path
from threading import Lock
from time import monotonic, time_ns
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

from ampmem.errors import RecordingError, UsageError
from ampmem.events import Column
from ampmem.patching import patch_call, set_variables
from ampmem.recorder.facts.log import ELSEWHERE
from ampmem.recorder.sources.extension import CPU, NOTHING_OBSERVED, OTHER_DEVICE, Observed
from ampmem.recorder.sources.torch_flags import counting_begins, log_level, without_warnings
from ampmem.recorder.torch_private import general as private

_SIZE = 4096
"""Upper bound of the size of a ``ConfigLoader`` in bytes."""
_PATIENCE_S = 1.0
"""Maximum seconds to wait until the thread waits, which takes 0.1 ms from its start."""


@contextmanager
def thread_ended() -> Iterator[None]:
    """End kineto's thread, if the first profile of the process starts in this block."""
    _without_client()
    before = _threads()
    yield
    started = _threads() - before
    if len(started) == 1:
        _end(started.pop())


def _without_client() -> None:
    """Let kineto start on this thread without the line that it prints on stderr if that is not the main one.

    Kineto notifies its client, torch, only on the thread that loaded torch's libraries. Torch does nothing then, unless
    a daemon may request profiles, so no client is needed. Source: ``libkineto_api.cpp``.
    """
    if threading.get_ident() == threading.main_thread().ident or "KINETO_USE_DAEMON" in os.environ:
        return
    try:
        library = _torch_cpu()
        kineto, register = getattr(library, private.KINETO), getattr(library, private.REGISTER_CLIENT)
    except (OSError, AttributeError):
        return
    # A C++ method takes its object as the first argument; without a client there is nobody to notify.
    kineto.restype, register.argtypes, register.restype = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p), None
    register(kineto(), None)


def _torch_cpu() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _threads() -> set[str]:
    """The ids of this process's threads."""
    return {path.name for path in Path("/proc/self/task").glob("*")}


def _end(thread: str) -> None:
    """End kineto's ``thread``. It goes on if this torch does not export the function for that."""
    try:
        library = _torch_cpu()
        instance, stop = getattr(library, private.CONFIG_LOADER), getattr(library, private.STOP_THREAD)
    except (OSError, AttributeError):
        return
    instance.restype, stop.argtypes, stop.restype = ctypes.c_void_p, (ctypes.c_void_p,), None
    loader = instance()
    # The stop notifies a condition variable: if the thread did not wait on it yet, it would sleep for minutes first.
    deadline = monotonic() + _PATIENCE_S
    while monotonic() < deadline:
        waits_for = _waits_for(thread)
        if waits_for is None:
            return
        if loader <= waits_for < loader + _SIZE:
            stop(loader)
            return
        os.sched_yield()


def _waits_for(thread: str) -> int | None:
    """The address that ``thread`` waits on in the kernel; 0 while it runs, ``None`` if unknown."""
    try:
        call = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    except OSError:
        return None
    # The file has the number of the system call and its arguments; the first one of a futex is the address waited on.
    return int(call[1], 16) if len(call) > 1 else 0


MARKER = "ampmem::clock"
"""The name of the marker scopes."""

MARKERS = 4
"""Number of markers at each end of a window; several, since the first in a process is slow."""
_ACTIVITIES = {ProfilerActivity.CPU}
_PARTS: dict[ProfilerActivity, set[str]] = {
    ProfilerActivity.CPU: {"CPU_OP", "CPU_INSTANT_EVENT", "USER_ANNOTATION"},
    # Empty, but present: the first profile of a process decides whether later ones, such as the script's, can have it.
    ProfilerActivity.CUDA: set(),
}
_ALLOCATIONS = "CPU_INSTANT_EVENT"
"""The activity of allocations, left out where possible.

Torch's event tree has allocations without it, too; kineto would format a text for each, which doubles the time to close
a window. But without it torch warns on stderr that kineto has not seen them all.
"""
_SCOPES = {private.USER_SCOPE, private.BACKWARD_SCOPE}
"""The recorded scopes: ampmem's markers, and the autograd nodes that backward runs.

Recording every op too would double the cost of profiling; the dispatch mode sees the ops of forward already.
"""

COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:")
"""Prefixes of a process group's records.

They end on the group's threads, so events nested in one need not belong to it.
"""


class ClockMark(NamedTuple):
    """Times of a marker by ``time.time_ns``: just before it began, inside it, and just after its end."""

    before_ns: int
    within_ns: int
    after_ns: int


Marks: TypeAlias = tuple[list[ClockMark], list[ClockMark]]
"""The markers of a window's two ends, ``MARKERS`` each."""

Span: TypeAlias = tuple[int, int]
"""Start and end by the profiler's clock."""


class ProfileLost(RecordingError):
    """Another thread has started a profile: there is one per process, so the window's is lost."""

    def __init__(self) -> None:
        super().__init__(OTHER_PROFILER)


OTHER_PROFILER = "the script started torch.profiler, and PyTorch allows only one profiler at a time"
_PREPARING = Lock()
_open: set[Window] = set()
"""The windows that are open now."""


@contextmanager
def prepared_elsewhere() -> Iterator[None]:
    """A block in which another thread prepares a profile; all open windows are lost."""
    with _PREPARING:
        for window in _open:
            window.lost = True
        yield


class Window:
    """A profile of the calling thread, and of the backward passes it starts; used like a :class:`CompiledExtension`.

    ``device`` says that blocks of a CUDA device are wanted: torch's event tree has those only inside another event.
    """

    def __init__(self, *, device: bool = False) -> None:
        self._config = profile(profile_memory=True).config()
        self._marks: list[ClockMark] = []
        self._opened = False
        self._device = device
        self._scope: Any = None
        """The scope around the whole window, for a device."""
        self.lost = False
        """Whether another thread has prepared a profile since the start."""

    def start(self) -> None:
        """Start the profiler."""
        with counting_begins() if self._device else nullcontext():
            if self._opened:
                self._start()
            else:
                self._start_first()
        if self._device:
            self._scope = private.enter_scope(WHOLE)

    def _start_first(self) -> None:
        restore = set_variables({"KINETO_LOG_LEVEL": "99"})  # kineto reads it at its first start: no lines on stderr
        try:
            with thread_ended():
                self._start()
            self._opened = True
        finally:
            restore()

    def take(self, *, go_on: bool) -> Observed:
        """The blocks and nodes observed since the start, or the last call. Raises :class:`ProfileLost`."""
        self._leave_scope()
        with _PREPARING:
            _open.discard(self)
            if self.lost:
                self._end()
                raise ProfileLost
            marks = (self._marks, _mark())
            result = _disabled()
        if go_on:  # before the long walk: no event is missed meanwhile
            self.start()
        return EventTree(result.experimental_event_tree()).observed(marks)

    def _leave_scope(self) -> None:
        """End the scope, which must not outlast the profile that it is in."""
        scope, self._scope = self._scope, None
        if scope is not None:
            private.exit_scope(scope)

    def abandon(self) -> None:
        """Stop in a forked child; the parent's profile goes on."""
        self._leave_scope()
        if not private.profiler_enabled():  # the thread that forked has no profile
            return
        # The fork came from inside a hook of backward, or a node of the script.
        if private.in_backward():  # scopes that began in the profile must end in it
            atexit.register(self._end)
        else:
            self._end()

    def _end(self) -> None:
        """Drop the profile; torch crashes if kineto has no prepared profile to end, hence the new preparation."""
        if private.profiler_enabled():
            if self.lost:
                self._prepare()
            _disabled()

    def _start(self) -> None:
        with _PREPARING:
            # Preparing and enabling are two calls of torch: no other thread may prepare a profile in between.
            config = self._prepare()
            private.enable_profiler(config, _ACTIVITIES, _SCOPES)
            _open.add(self)
        self._marks = _mark()

    def _prepare(self) -> Any:
        if private.FILTERS:
            left_out = set() if log_level() is None else {_ALLOCATIONS}
            parts = {activity: kinds - left_out for activity, kinds in _PARTS.items()}
            private.prepare_profiler(self._config, set(parts), parts)
        else:
            private.prepare_profiler(self._config, _ACTIVITIES)
        return self._config


def _disabled() -> Any:
    """Torch's result, without its warning that kineto has seen no allocations."""
    with without_warnings() if private.FILTERS else nullcontext():
        return private.disable_profiler()


def check_free() -> None:
    """Raise :class:`UsageError` if another profiler is running: a second would replace it."""
    if private.profiler_enabled():
        raise UsageError(
            "torch.profiler is running, and PyTorch allows only one profiler at a time; start ampmem outside of it"
        )


def install() -> Callable[[], None]:
    """Keep the script's ``record_function`` scopes out of the profile; returns what undoes it.

    A scope that the profiler saw begin must not end after that profiler was stopped: it points into
    what the profiler had recorded. Scopes begun while recording is off do nothing.
    """
    return patch_call(*private.ENTER_SCOPE, _without_recording)


WHOLE = "ampmem::window"
"""The name of the scope around a whole window."""


class _Around(NamedTuple):
    """The node around the current place of the walk, as in :class:`Observed`."""

    name: int = 0
    own: int = -1
    number: int = -1
    thread: int = -1


_fields, _start = attrgetter("extra_fields"), attrgetter("start_time_ns")
_of_allocation = attrgetter("ptr", "alloc_size", "total_allocated", "device")


class EventTree:
    """Reads blocks and autograd nodes out of a profile's event tree.

    Each attribute of an event costs a call into C++: those of allocations, which are most of the tree, are read by
    loops in C.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.markers: list[Span] = []
        self._names: dict[str, int] = {"": 0}
        self._spans: list[tuple[int, int, int, int, int]] = []
        """The nodes that ran, as in :class:`Observed`; parents come before their children."""
        self._times: list[int] = []
        self._allocations: list[tuple[int, int, int, torch.device]] = []
        self._runs: list[tuple[int, _Around]] = []
        """(index of the first allocation, node around it) of each run of allocations."""
        self._thread: int | None = None
        """The profiler's number of the recorded thread, known from the markers."""
        pending = [(roots, _Around())]
        while pending:
            pending += reversed(self._visit(*pending.pop()))

    def _visit(self, events: list[Any], around: _Around) -> list[tuple[list[Any], _Around]]:
        """Read the ``events`` inside ``around``; returns their children, each list with the node around it."""
        fields = list(map(_fields, events))
        kinds = list(map(type, fields))
        allocated = [kind is private.ALLOCATION for kind in kinds]
        if any(allocated):
            self._runs.append((len(self._times), around))
            self._times += map(_start, compress(events, allocated))
            self._allocations += map(_of_allocation, compress(fields, allocated))
        found = []
        for event, of_event, kind in zip(events, fields, kinds, strict=True):
            if kind is private.OP_FIELDS:  # otherwise a call of the CUDA runtime
                name = event.name
                if name == MARKER:
                    self.markers.append((event.start_time_ns, event.end_time_ns))
                    self._thread = event.start_tid
                    continue
                inside = around
                if name != WHOLE and not name.startswith(COLLECTIVES):
                    inside = self._node(event, name, of_event.sequence_number, around)
                if children := event.children:
                    found.append((children, inside))
        return found

    def _node(self, event: Any, name: str, own: int, around: _Around) -> _Around:
        thread, place = event.start_tid, self._names.setdefault(name, len(self._names))
        # Ops that a node calls have no number of their own. A node inside another on the engine's thread was made
        # there, by a recomputed forward: autograd numbers the nodes of each thread from 0 on.
        made_there = around.number >= 0 and thread != self._thread
        # ELSEWHERE keeps its number apart from that of another node of the recorded thread, which may be equal.
        number = around.number if own < 0 else own + ELSEWHERE if made_there else own
        self._spans.append((event.start_time_ns, event.end_time_ns, place, number, thread))
        return _Around(place, own, number, thread)

    def observed(self, marks: Marks) -> Observed:
        """The blocks and nodes, as the compiled extension observes them; nothing if the clock's markers are missing."""
        if len(self.markers) < 2 * MARKERS:
            return NOTHING_OBSERVED
        shift = shift_between(self.markers, marks)
        devices = {device: _index_of(device) for device in {each[-1] for each in self._allocations}}
        numbers = [(*rest, devices[device]) for *rest, device in self._allocations]
        around = np.array([each for _, each in self._runs], dtype=np.int64).reshape(-1, len(_Around._fields))
        counts = np.diff([*(first for first, _ in self._runs), len(self._times)])
        columns = [
            shift(np.array(self._times, dtype=np.int64)),
            *np.array(numbers, dtype=np.int64).reshape(-1, 4).T,
            *np.repeat(around, counts, axis=0).T,
        ]
        order = np.argsort(columns[0], kind="stable")  # a thread of the engine comes after the threads before it
        spans = np.array(self._spans, dtype=np.int64).reshape(-1, 5)
        spans[:, :2] = shift(spans[:, :2])
        return Observed(*(column[order] for column in columns), spans=spans, names=list(self._names))


def _index_of(device: torch.device) -> int:
    return CPU if device.type == "cpu" else (device.index or 0) if device.type == "cuda" else OTHER_DEVICE


def shift_between(markers: Sequence[Span], marks: Marks) -> Callable[[Column], Column]:
    """A function from the profiler's times to ``time.time_ns``: linear between the two ends of the window.

    ``markers`` are all markers in the profile.
    """
    ends = (markers[:MARKERS], markers[-MARKERS:])
    # The profiler counts ticks of the processor, whose rate the system corrects: so the offset may differ at the ends.
    offsets = [_offset(spans, burst) for spans, burst in zip(ends, marks, strict=True)]
    (first, _), (last, _) = ends[0][0], ends[1][0]

    def shift(times: Column) -> Column:
        return times + np.interp(times - first, (0, last - first), offsets).astype(np.int64)

    return shift


def _offset(spans: Sequence[Span], burst: Sequence[ClockMark]) -> int:
    """The difference in ns between ``time.time_ns`` and the profiler's clock.

    Each marker bounds it: it began between the first two times taken, and ended between the last two. Together the
    bounds leave a few hundred ns, less than an op takes before it allocates.
    """
    least: list[int] = []
    most: list[int] = []
    for (start, end), mark in zip(spans, burst, strict=True):
        least += (mark.before_ns - start, mark.within_ns - end)
        most += (mark.within_ns - start, mark.after_ns - end)
    return (max(least) + min(most)) // 2


def _mark() -> list[ClockMark]:
    """Put markers into the profile, with the times around each."""
    marks = []
    for _ in range(MARKERS):
        before = time_ns()
        scope = private.enter_scope(MARKER)
        within = time_ns()
        private.exit_scope(scope)
        marks.append(ClockMark(before, within, time_ns()))
    return marks


def _without_recording(original: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(scope: Any) -> Any:
        private.enable_record_function(False)
        try:
            return original(scope)
        finally:
            private.enable_record_function(True)

    return __enter__
