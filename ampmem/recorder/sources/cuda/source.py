"""Source ``cuda``: the trace of PyTorch's caching allocator, read and emptied at the end of every step.

The trace is switched on when the script initializes CUDA, emptied at each :meth:`CudaSource.drain`, and switched off at
the end. It is PyTorch's memory history, or rows of the compiled extension's tracker, which have the same events. One
device is recorded: the one with the largest peak at the first mark, or the one that ran out of memory before that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import time_ns
from typing import Any

import numpy as np

from ampmem.allocator.blocks import DEFAULT_POOL
from ampmem.allocator.settings import (
    NATIVE,
    UNCACHED,
    VARIABLES,
    Settings,
    backend_of_environment,
    round_size,
    settings_of_environment,
    text_of_environment,
)
from ampmem.allocator.snapshot import ALLOC, FREE_REQUESTED
from ampmem.errors import UsageError
from ampmem.events import Action, AllocatorRecord, Fact, LayersRecord, OomRecord
from ampmem.names import warning
from ampmem.patching import Undo, undone_together
from ampmem.recorder.facts.addresses import AliveBlocks, RealAddresses
from ampmem.recorder.facts.log import Log
from ampmem.recorder.models.live import collection_paused
from ampmem.recorder.sources.base import NO_EVENTS, Place, RawEvents, Source, joined
from ampmem.recorder.sources.cuda.device import Snapshot, Stats, TorchCuda, forget_observer
from ampmem.recorder.sources.cuda.events import HeldBlocks, History, Level, Settled, TraceWindow, extents_in
from ampmem.recorder.sources.cuda.nodes import NO_NODES, NodeRecorder, Nodes, SeenNodes
from ampmem.recorder.sources.cuda.oom import OomKeeper
from ampmem.recorder.sources.cuda.trace import IS_ALLOC, IS_FREE, IS_SEGMENT, Counted, MarkCount, SeenBlocks, Stamps
from ampmem.recorder.sources.cuda.tracker import (
    NO_ROWS,
    Table,
    Tracked,
    Tracker,
    devices_in,
    on_device,
    pools_in,
    threads_by_device,
    trace_on,
    tracker_of,
    until_snapshot,
)
from ampmem.recorder.sources.extension import find
from ampmem.recorder.sources.window import Window, check_free, install
from ampmem.recorder.torch_private.general import in_backward
from ampmem.units import format_count
from ampmem.vocabulary import Mark, SourceKind


class TracePeaks:
    """The peak of allocated block bytes of each device so far.

    ``torch.cuda.reset_peak_memory_stats`` resets the allocator's own peak; the trace still shows it.
    """

    def __init__(self, devices: Callable[[], int], stats: Callable[[int], Stats], settings: Settings) -> None:
        self._devices = devices
        self._stats = stats
        self._settings = settings
        self._known: dict[int, int] = {}

    def now(self) -> dict[int, int]:
        """The peaks in bytes, by device, from the trace and the allocator's statistics."""
        for device in range(self._devices()):
            self.note_peak(device, self._stats(device).allocated_peak)
        return {device: self._known[device] for device in sorted(self._known)}

    def note_peak(self, device: int, peak: int) -> None:
        """Add the largest sum of block bytes that the events of ``device`` have."""
        self._known[device] = max(self._known.get(device, 0), peak)

    def note_rows(self, table: Table, recorded: int | None) -> None:
        """Add the peaks in a tracker's newest rows, for all devices but the ``recorded`` one.

        Without the size of each block there is no peak to be known but the allocator's own.
        """
        for device in devices_in(table) - {recorded}:
            rows = Tracked(*on_device(device, table).T)
            uses = rows.kind <= IS_FREE
            if rows.block[uses].all():
                change = np.where(rows.kind == IS_ALLOC, rows.block, -rows.block)[uses]
                left = np.cumsum(change[::-1])  # by each row and all after it, the last first
                self.note_peak(device, self._stats(device).allocated - int(left.min(initial=0)))

    def note(self, snapshot: Snapshot, recorded: int | None = None) -> None:
        """Add the peaks of the trace in ``snapshot``, for all devices but the ``recorded`` one."""
        for device, trace in enumerate(snapshot["device_traces"]):
            if device != recorded:
                alive = HeldBlocks.of(snapshot, device).alive
                self.note_peak(device, self._largest(trace, {address: block.size for address, block in alive.items()}))

    def _largest(self, trace: Sequence[Mapping[str, Any]], blocks: dict[int, int]) -> int:
        """The peak in ``trace``, backwards from the ``blocks`` after it; sizes of other blocks are rounded requests."""
        now = most = sum(blocks.values())
        for row in reversed(trace):
            if row["action"] == FREE_REQUESTED:
                blocks[row["addr"]] = round_size(int(row["size"]), self._settings)
                now += blocks[row["addr"]]
                most = max(most, now)
            elif row["action"] == ALLOC:
                now -= blocks.pop(row["addr"], 0)
        return most


ENTRIES = 2_000_000
"""Maximum number of trace entries that are kept: it bounds memory, far above what a phase of a step makes."""
FEW_ENTRIES = 64
"""Number of entries that torch keeps if the tracker has them all: a failure looks for its own there."""
PART = 20_000
"""Number of allocations and frees after which the trace is read and emptied between two phases of a step.

As Python objects an entry takes over a kilobyte; the columns kept of it until the step ends take 104 bytes.
"""
_TOO_MANY = (
    "a phase of a step had more than the {entries} allocator events that are kept: some of its events are lost, and "
    "its peak may be too low"
)
_OFF = (
    "the script turned PyTorch's caching allocator off (torch.cuda.caching_allocator_enable(False)), and memory "
    "allocated since then is not in this recording; remove that call"
)
_FAILED = (
    "the device had failed when ampmem synchronized it at the end of a step; the memory counted by PyTorch's "
    "allocator is still right, but the losses and updates of that step may be wrong"
)
_NOTHING = (
    "nothing was recorded: PyTorch's caching allocator allocated nothing on a CUDA device. If the script uses a CUDA "
    f"device, do not turn that allocator off: remove {UNCACHED} and torch.cuda.caching_allocator_enable(False). To "
    "record CPU memory, use --device cpu"
)
_BY_CALL = "torch.cuda.memory._set_allocator_settings"


class CudaSource(Source):
    """The events of one CUDA device; ``synchronize`` waits for the device at each step's end."""

    kind = SourceKind.CUDA
    device_type = "cuda"
    addresses = RealAddresses()
    uses_profiler = uses_history = True

    def __init__(
        self,
        *,
        stacks: bool = True,
        synchronize: bool = True,
        api: TorchCuda | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        extension = self._extension = find()
        self._tracker = tracker_of(extension) if api is None else tracker
        """The extension's tracker, if any: then only stacks and failures are read from the allocator's history."""
        self._api = TorchCuda() if api is None else api
        self._stacks = stacks
        self._synchronize = synchronize
        self._on = False
        self._wanted = False
        self._process = self._thread = 0
        self._device: int | None = None
        self._read = False
        """Whether events of the device were read, so that it stays the recorded one."""
        self._since_ns = 0
        self._asked = text_of_environment(os.environ)[1]
        """The allocator's settings in the environment, before the script may have changed them."""
        self._history = History(self._settings())
        self._peaks = self._no_peaks()
        self._stamps = Stamps()
        self._nodes = NodeRecorder(extension or Window(device=True))
        self._tag: Callable[[str], None] | None = None
        self._marks: dict[tuple[int, Mark], tuple[MarkCount, LayersRecord]] = {}
        self._layers: list[LayersRecord] = []
        self._oom = OomKeeper(self._api)
        self._log: Log | None = None
        self._notes: dict[str, None] = {}
        self._refused: str | None = None
        """Why recording could not begin when the script initialized CUDA."""
        self._parts: list[RawEvents] = []
        """The events of the running step that were read before its end."""
        self._uses: int | None = None
        """The allocator's number of allocations and frees when the trace was last emptied, or first asked for."""
        self._peak: Level | None = None
        """The state of the running step with the most requested bytes, as far as it was read."""
        self._in_force = ""
        self._expandable = False
        self._streams: set[int] = set()
        self._pools: set[tuple[int, int]] = set()
        self._table = NO_ROWS
        """Rows of the tracker that came after the last event that was read."""
        self._stack_of = np.zeros(1, dtype=np.int64)
        """The index among the history's texts of each of the tracker's stacks."""
        self._number = -1
        """The tracker's number of the recorded thread."""
        self.device_name = "a CUDA device"
        self.stamp = self._stamp

    def stamps_ops(self) -> bool:
        """Whether :attr:`stamp` has to be called at each op: the tracker has exact times."""
        return self._tracker is None

    def check(self) -> None:
        """Raise :class:`UsageError` if nothing can be recorded, or memory history is being recorded already."""
        problem = self._api.problem()
        if problem is not None:
            raise UsageError(problem)
        # A process has one history: emptying it at every step would take it from its owner.
        if self._api.history_is_on():
            raise UsageError(
                "the script is recording memory history already (torch.cuda.memory._record_memory_history), and "
                "PyTorch keeps only one; remove that call, or start ampmem before it"
            )
        check_free()

    def attach(self, locate: Callable[[], Place], log: Log) -> None:
        """Set ``locate``, which says where memory ran out, and ``log`` for workspaces; all else is in the trace."""
        self._oom.locate = locate
        self._log = log

    @undone_together
    def install(self) -> Iterator[Undo]:
        """Keep the script's scopes out of the profile that names nodes, and follow graph captures; returns the undo."""
        yield self._api.follow_captures()
        if self._extension is None:
            yield install()

    def start(self, baseline: Mapping[int, int]) -> None:
        """Begin, or wait for the script to initialize CUDA. The first snapshot has what is alive."""
        self._wanted = True
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._since_ns = time_ns()
        self._api.when_ready(self._switch_on)

    def mark(self, step: int, mark: Mark) -> None:
        """Take the statistics now, for ``mark`` of ``step``."""
        device = self._device_index()
        if device is None:
            return
        self._look_at_allocator()
        count, stats = self._count(device)
        used = None
        with suppress(RuntimeError):  # the device has failed: the script will get the error itself
            if not self._api.capturing():
                free, total = self._api.memory_info(device)
                used = total - free
        last = mark == Mark.AFTER_OPTIMIZER
        record = LayersRecord(
            step=step,
            mark=mark,
            requested=stats.requested,
            allocated=stats.allocated,
            active=stats.active,
            reserved=stats.reserved,
            device_used=used,
            process_used=self._api.process_used(device) if last else None,  # NVML may take a millisecond
        )
        self._marks.pop((step, mark), None)  # a later mark replaces it and goes to the end
        self._layers = [each for each in self._layers if (each.step, each.mark) != (step, mark)]
        self._marks[(step, mark)] = (count, record)
        self._read_much(stats.uses)

    def _count(self, device: int) -> tuple[MarkCount, Stats]:
        """The allocator's counts and statistics now; the time separates later events from those before."""
        if self._tracker is not None:
            stats, _, now, self._number = self._tracker.read(device)
            return MarkCount(self._stamps.last, now, Counted(stats.blocks, stats.requested)), stats
        since, now = self._stamps.last, time_ns()
        self._stamp(now)
        stats = self._api.stats(device)
        return MarkCount(since, now, Counted(stats.blocks, stats.requested)), stats

    def _stats(self, device: int) -> Stats:
        return self._api.stats(device) if self._tracker is None or not self._on else self._tracker.read(device).stats

    def pause(self) -> None:
        """Read the trace of the running step so far, if it is long."""
        if self._on:
            device = self._api.current_device() if self._device is None else self._device
            self._read_much(self._stats(device).uses)

    def _read_much(self, uses: int) -> None:
        if self._uses is None:
            self._uses = uses
        if uses - self._uses < PART or threading.get_ident() != self._thread:
            return
        # Inside backward the profiler cannot be closed, because the running nodes began in it.
        if self._tracker is not None or not in_backward():
            with collection_paused():
                self._parts.append(self._part(go_on=True))

    def drain(self) -> RawEvents:
        """The events since the last call."""
        return self._drain_trace(go_on=True)

    def blocks(self) -> AliveBlocks:
        """The live blocks after the last event; ``seen`` are the workspaces of cuBLAS."""
        alive = self._history.alive()
        total = sum(alive.values())
        known = frozenset() if self._extension is None else frozenset(self._extension.workspaces() & alive.keys())
        for address in known:
            del alive[address]
        return AliveBlocks(alive, total, known)

    def stop(self) -> RawEvents:
        """The last events; switches off what :meth:`start` switched on."""
        events = self._drain_trace(go_on=False)
        self._wanted = False
        if self._on:
            self._on = False
            if self._tracker is not None:
                self._tracker.stop()
            self._api.history(on=False, entries=0, stacks=False)
            forget_observer(self._oom.observe)
            if self._tag is not None and threading.get_ident() == self._thread:
                with suppress(RuntimeError):
                    self._tag("")
        return events

    def abandon(self) -> None:
        """Stop in a forked child. It cannot use its parent's CUDA, so there is nothing to switch off."""
        self._wanted = self._on = False
        self._nodes.abandon()

    def take_layers(self) -> list[LayersRecord]:
        """The settled marks."""
        taken, self._layers = self._layers, []
        return taken

    def take_ooms(self) -> list[OomRecord]:
        """The failures since the last call, on all devices."""
        return self._oom.take()

    def allocator(self) -> AllocatorRecord | None:
        """The settings and statistics of the caching allocator so far; ``None`` before the first allocation."""
        if self._device is None:
            return None
        set_in = [name for name in VARIABLES if os.environ.get(name) == self._in_force]
        return AllocatorRecord(
            variable=set_in[0] if set_in else _BY_CALL if self._in_force else "",
            settings=self._in_force,
            expandable_segments=self._expandable,
            streams=len(self._streams),
            private_pools=len(self._pools - {DEFAULT_POOL}),
            device=self._device,
            peaks=tuple(self._peaks.now().values()),
        )

    def nothing(self) -> str | None:
        """Why nothing of the device was recorded; ``None`` if something was."""
        return None if self._device is not None else self._refused or _NOTHING

    def notes(self) -> list[str]:
        """Notes for the reader of the recording."""
        return list(self._notes)

    def _no_peaks(self) -> TracePeaks:
        return TracePeaks(self._api.device_count, self._stats, self._settings())

    def _settings(self) -> Settings:
        try:
            return settings_of_environment(os.environ)
        except UsageError:  # an option unknown to this version of ampmem; torch knows it, or refused it
            return Settings()

    def _switch_on(self) -> None:
        """Switch the history on when CUDA is ready. Called inside torch's own initialization, so it must not raise."""
        if not self._wanted or self._on or os.getpid() != self._process:  # a forked worker is not recorded
            return
        problem = self._api.problem()
        if problem is not None:  # the script may have changed the allocator since
            self._refused = f"nothing was recorded: {problem}"
            return
        try:
            self._take_settings()
            if self._tracker is not None and not self._tracker.start():
                self._tracker = None
            entries = ENTRIES if self._tracker is None else FEW_ENTRIES
            self._api.history(on=True, entries=entries, stacks=self._stacks)
            self._on = True
            if self._tracker is None:
                self._tag = self._api.metadata_setter()
                self._stamp(time_ns())
            self._api.observe_oom(self._oom.observe)
            self._log_workspaces()
        except Exception as error:
            self._refused = f"nothing was recorded: memory history could not be switched on: {error}"
            return
        # Only now: in a CUDA build the profiler initializes CUPTI, and earlier the script may still choose its devices.
        # Nor inside backward, where compiled code may initialize CUDA: the engine would end the profile with it.
        if threading.get_ident() == self._thread and not in_backward():
            self._follow_nodes()

    def _log_workspaces(self) -> None:
        """Log the workspaces of cuBLAS that are there already: later ones are known by the op that makes them."""
        if self._extension is not None and self._log is not None:
            for address in self._extension.workspaces():
                self._log.fact(Fact.WORKSPACE, address, self._log.texts.id("cuBLAS"))

    def _take_settings(self) -> None:
        """Apply allocator settings that the script put into the environment before it imported torch.

        By then ampmem had imported torch, which reads them at CUDA's first use or, in some versions, at import.
        """
        asked = text_of_environment(os.environ)[1]
        if asked == self._asked:
            return
        if asked and self._api.settings_in_force() == self._asked:  # the script has not changed them by a call
            self._api.set_settings(asked)
        self._history = History(self._settings())
        self._peaks = self._no_peaks()

    def _follow_nodes(self) -> None:
        try:
            self._nodes.start()
        except RuntimeError as error:  # the events are useful without the names, too
            self._note(f"autograd nodes have no names in this recording: the profiler did not start ({error})")

    def _stamp(self, now_ns: int) -> None:
        # Tags are per thread: on the engine's threads the tag could not be removed again.
        if threading.get_ident() == self._thread:
            self._stamps.add(now_ns)
            if self._tag is not None:
                try:  # faster than suppress(), which takes longer than the tag
                    self._tag(str(now_ns))
                except RuntimeError:  # of a device that has failed
                    return

    def _look_at_allocator(self) -> None:
        if not self._api.caches():
            self._note(warning(_OFF))

    def _device_index(self, *, over: bool = False) -> int | None:
        """The index of the recorded device; ``None`` while no device has allocations. ``over``: the recording ends.

        A device that ran out of memory comes first: always if the script got no further, otherwise if it has blocks in
        use. Then those with trained parameters: a model may still move until events are read.
        """
        if self._on and not self._read:
            models_at = self.models_at()
            if self._device is None or (models_at and self._device not in models_at):
                self._choose(models_at, over=over)
        return self._device

    def _choose(self, models_at: frozenset[int], *, over: bool) -> None:
        if self._api.device_count() > 1:  # the script may have reset their peaks
            if self._tracker is None:
                self._peaks.note(self._api.snapshot())
            else:
                self._take_rows(self._tracker.take())
        peaks = self._peaks.now()
        if not any(peaks.values()):
            return
        current, short = self._api.current_device(), self._oom.device
        of_models = {device: peak for device, peak in peaks.items() if device in models_at and peak > 0} or peaks
        ranked = [device for device, peak in of_models.items() if peak == max(of_models.values())]
        if short is not None and not over and self._api.stats(short).blocks == 0:
            short = None  # the script only tried how much it can allocate there
        chosen = short if short in peaks else current if current in ranked else ranked[0]
        if chosen != self._device:
            self._device, self.device_name = chosen, self._api.device_name(chosen)
            self._marks, self._layers = {}, []  # of the device before

    def _drain_trace(self, *, go_on: bool) -> RawEvents:
        device = self._device_index(over=not go_on)
        if device is not None and self._synchronize:
            try:
                if not self._api.capturing():
                    self._api.synchronize(device)
            except RuntimeError as error:  # the allocator's data can still be read
                # A kernel's failure is sticky: the script's own next call raises it, too.
                what = (str(error).splitlines() or [type(error).__name__])[0]
                self._note(warning(f"{_FAILED}: {what}"))
        last = self._part(go_on=go_on)
        self._settle_peak()
        parts, self._parts = self._parts, []
        return joined([*parts, last]) if parts else last

    def _part(self, *, go_on: bool) -> RawEvents:
        """The events since the trace was last emptied."""
        device = self._device_index(over=not go_on)
        if device is None:
            self._nodes.take(go_on=go_on)
            return NO_EVENTS
        self._read = True
        self._look_at_allocator()
        since, self._since_ns = self._since_ns, time_ns()
        if self._tracker is not None:
            return self._tracked_part(self._tracker, device, since, go_on=go_on)
        # With equal counters nothing happened during the snapshot, and the history needs no second one.
        before = self._api.changes(device)
        snapshot = self._api.snapshot()
        quiet = self._api.changes(device) == before
        self._peaks.note(snapshot, device)
        self._note_window(snapshot, device)
        window = self._history.read(snapshot, device, None if quiet else self._api.snapshot)
        until = time_ns()
        if go_on:
            self._api.history(on=True, entries=ENTRIES, stacks=self._stacks)
            self._uses = self._api.stats(device).uses
        profiled = self._take_nodes(go_on=go_on)
        nodes, seen = profiled.nodes(device), profiled.blocks(device)
        settled = self._history.settle(
            window,
            stamps=self._stamps.take(),
            since_ns=since,
            until_ns=until,
            seen=seen,
            marks=[count for count, _ in self._marks.values()],
        )
        return self._raw(settled, nodes, seen)

    def _tracked_part(self, tracker: Tracker, device: int, since_ns: int, *, go_on: bool) -> RawEvents:
        """The events since the trace was last emptied, from the tracker's rows."""
        table, lost, stats = tracker.take_counted(device)
        self._take_rows((table, lost), device)
        if stats is not None:
            self._uses = stats.uses
        profiled = self._take_nodes(go_on=go_on, table=self._table)
        self._stamps.take()  # all but the last
        span = {"since_ns": since_ns, "until_ns": time_ns()}
        marks = [(count.since_ns, count.time_ns, self._number) for count, _ in self._marks.values()]
        trace, seen = trace_on(device, self._table, self._stack_of, tracker.names(), marks)
        settled = self._history.follow(trace, counted=stats, **span) if go_on else None
        if settled is not None:
            if (trace.kind >= IS_SEGMENT).any():
                self._note_tracked(device, self._table)
            self._table = NO_ROWS
        else:
            # The trace has the place of the snapshot: rows after it are of the next part.
            so_far = len(self._table)
            snapshot = self._api.snapshot()
            self._take_rows(tracker.take(), device)
            end = until_snapshot(device, self._table, so_far)
            part, self._table = self._table[:end], self._table[end:]
            self._note_window(snapshot, device)
            trace, seen = trace_on(device, part, self._stack_of, tracker.names(), marks)
            window = TraceWindow(trace, extents_in(snapshot, device), HeldBlocks.of(snapshot, device))
            settled = self._history.settle_tracked(window, **span)
        seen_all = ((settled.seen >= 0) | (settled.events.action == Action.BASELINE)).all()
        nodes = NO_NODES if seen_all else profiled.nodes(device)
        return self._raw(settled, nodes, seen)

    def _take_rows(self, taken: tuple[Table, bool], recorded: int | None = None) -> None:
        """Add rows that were ``taken`` from the tracker, with their stacks."""
        table, lost = taken
        if lost:
            self._note(_TOO_MANY.format(entries=format_count(ENTRIES)))
        self._peaks.note_rows(table, recorded)
        self._table = np.concatenate([self._table, table]) if len(self._table) else table
        new = [] if self._tracker is None else self._tracker.new_stacks()
        if new:
            self._stack_of = np.concatenate([self._stack_of, [self._history.stacks.add(frames) for frames in new]])

    def _take_nodes(self, *, go_on: bool, table: Table | None = None) -> SeenNodes:
        profiled = self._nodes.take(go_on=go_on)
        if table is not None:  # the nodes' recorder has not seen the blocks
            profiled.devices = lambda: threads_by_device(table)
        if go_on and not self._nodes.running:  # not started yet, because another thread initialized CUDA
            self._follow_nodes()
        self._oom.name_ops(lambda where, when: profiled.nodes(where).name_at(when))
        return profiled

    def _raw(self, settled: Settled, nodes: Nodes, seen: SeenBlocks) -> RawEvents:
        """The events with their autograd nodes; adds the marks among them."""
        if settled.lost:
            self._note("some allocator events were lost; their effect is shown at the start or end of the step")
        if self._device is not None:
            self._peaks.note_peak(self._device, settled.allocated_peak)
        self._settle_marks(settled)
        known = np.flatnonzero(settled.seen >= 0)
        if len(known) == len(settled.seen):  # the profiler saw each block
            op, sequence = seen.op[settled.seen] + len(nodes.ops), seen.sequence[settled.seen]
        else:  # the others have the node that ran at their time
            op, sequence = nodes.at(settled.events.time_ns)
            place = settled.seen[known]
            op[known], sequence[known] = seen.op[place] + len(nodes.ops), seen.sequence[place]
        ops, stacks = (*nodes.ops, *seen.ops), tuple(self._history.stacks.texts)
        return replace(settled.events, op=op, sequence=sequence, ops=ops, stacks=stacks)

    def _settle_marks(self, settled: Settled) -> None:
        """Add the marks, with requested bytes as tensors have them: they end with the free.

        Torch counts a request until its wait for other streams is over.
        """
        marks, self._marks = list(self._marks.values()), {}
        for count, record in marks:
            waiting = settled.awaiting_at(count.time_ns)
            self._layers.append(replace(record, requested=record.requested - waiting) if waiting else record)
        if self._peak is None or settled.peak.requested > self._peak.requested:
            self._peak = settled.peak

    def _settle_peak(self) -> None:
        """Add the peak of the step that has ended."""
        if self._peak is not None and self._layers:
            step = self._layers[-1].step
            self._layers.append(LayersRecord(step=step, mark=Mark.PEAK, device_used=None, **self._peak._asdict()))
        self._peak = None

    def _note(self, message: str) -> None:
        self._notes[message] = None

    def _note_window(self, snapshot: Snapshot, device: int) -> None:
        if len(snapshot["device_traces"][device]) >= ENTRIES:
            self._note(_TOO_MANY.format(entries=format_count(ENTRIES)))
        settings: Mapping[str, object] = snapshot.get("allocator_settings", {})
        text = next((str(settings[name]) for name in VARIABLES if name in settings), "")
        # The snapshot has the settings requested last, even refused ones: the backend cannot change once it is running.
        if backend_of_environment({VARIABLES[0]: text}) == NATIVE:
            self._in_force = text
        for segment in snapshot["segments"]:
            if segment["device"] == device:
                self._expandable |= bool(segment.get("is_expandable"))
                self._streams.add(segment["stream"])
                self._pools.add(tuple(segment.get("segment_pool_id", DEFAULT_POOL)))
        self._note_pools()
        if self._tag is None and self._tracker is None:
            self._note("this torch cannot tag allocator events: ops are matched to them by time alone")

    def _note_tracked(self, device: int, table: Table) -> None:
        """Note streams, pools and expandable segments of the tracker's rows; the settings are in the last snapshot."""
        for extent in self._history.extents:
            self._expandable |= extent.expandable
            self._streams.add(extent.stream)
        self._pools |= pools_in(device, table)
        self._note_pools()

    def _note_pools(self) -> None:
        if self._pools - {DEFAULT_POOL}:
            self._note(
                "CUDA graphs or memory pools of the script have their own memory: replays of a graph allocate "
                "nothing, so ampmem does not see what they compute"
            )
