"""The memory of the simulated device: which fake storage lies where, and what its allocator did."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from time import time_ns
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion

from ampmem.allocator.blocks import ALLOCATED, Block, SnapshotSegment
from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.oom import OutOfMemory, allowed_memory
from ampmem.allocator.settings import Settings, parse_settings, settings_of_environment, text_of_environment
from ampmem.errors import UsageError
from ampmem.events import Action, PredictionRecord
from ampmem.names import warning
from ampmem.output import Terminal
from ampmem.simulator.memory.order import Reached, StreamOrder
from ampmem.simulator.memory.peaks import Highest, Peaks, prediction
from ampmem.simulator.private.general import running_node, storage_key
from ampmem.simulator.where import stop

KEEPS_UP = (
    "assumed: the device keeps up with the script, so a block that other streams used is free again at the next "
    "allocation after its tensor died; up to: they use it until the script waits for them"
)
_OLDEST_FIRST = "2.12" <= TorchVersion(torch.__version__) < "2.13"
"""Whether of free blocks of equal size that one is taken which was made first, and not the one that lies first."""
_NAMED = 3
"""So many lines are named that read made-up numbers before the script failed."""
_CROSSING = "gradients that wait for another stream in backward"


class DeviceEvent(NamedTuple):
    """One alloc or free. ``allocated`` is the sum of the requested bytes after it; ``node`` as in ``RawEvents``."""

    time_ns: int
    action: int
    address: int
    bytes: int
    block_bytes: int
    allocated: int
    node: str
    sequence: int
    stream: int


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Dies with a storage, and still knows its key then."""

    __slots__ = ("key",)
    key: int


class SimulatedDevice:
    """Gives every fake storage a block of the modelled allocator, and takes it back when the storage dies.

    ``recorder`` gets every event while it is set. ``settings`` are those in force at the start. Where ``environment``
    is given, the settings are read from it once more at the first request, as PyTorch reads them when CUDA is first
    used: until then the script may have changed them.
    """

    def __init__(
        self,
        gpu: GpuSpec,
        settings: Settings,
        *,
        label: str = "cuda",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.gpu = gpu
        self.label = label
        """The type of torch device that it stands for: ``cuda``, unless it is compared with the CPU profiler."""
        self.allocator = DeviceCachingAllocator(
            settings, total_memory=gpu.total_memory, outside=gpu.context.least, oldest_first=_OLDEST_FIRST
        )
        self.order = StreamOrder(self.allocator.recorded_events)
        self._environment = environment
        self.in_force = ("", "")
        """What has set the allocator, a variable or a function of torch, and to what; both empty where nothing has."""
        self.recorder: Callable[[DeviceEvent], None] | None = None
        self.on_workspace: Callable[[int, str], None] | None = None
        """Gets the address of every workspace and the library that keeps it."""
        self.on_scratch: Callable[[int, str], None] | None = None
        """Gets the address of scratch and the op that asked for it."""
        self.workspaces: dict[int, str] = {}
        """The libraries' workspaces, by address."""
        self.on_out_of_memory: Callable[[OutOfMemory], None] | None = None
        self.out_of_memory: OutOfMemory | None = None
        """The last request that could not be served."""
        self.assumptions: dict[str, None] = {}
        """What this run took for granted, in the order in which it came up."""
        self.warnings: dict[str, None] = {}
        """What makes its numbers doubtful, likewise."""
        self.made_up: dict[str, tuple[float, str]] = {}
        """The lines of the script that read a number that nobody knows, the last one last: which number was read, and
        how a user says another one."""
        self.unmodelled: dict[str, None] = {}
        """What it left out, likewise."""
        self.seeds = 0
        """How often its random numbers were given a seed or a state."""
        self._libraries: dict[str, tuple[int, int]] = {}
        self._peaks = Peaks(self.allocator.counters)
        self._highest = Highest(
            settings,
            gpu.total_memory - gpu.context.least,
            sure=gpu.total_memory - gpu.context.most,
            oldest_first=_OLDEST_FIRST,
        )
        self._highest.limit = allowed_memory(settings, gpu.total_memory)
        self._blocks: dict[int, Block] = {}
        self._references: dict[int, _StorageRef] = {}
        self.lock = RLock()
        """Whoever runs an op or uses the allocators has it: there may be several threads."""
        self._busy = False
        self._dead: list[_StorageRef] = []
        """Storages that died and have their blocks still. They may do so at any time, on any thread, and wait for
        nobody there: so where the allocators are at work, who works with them takes the blocks back at the end."""

    def assume(self, text: str) -> None:
        """Keep ``text``, once, for the recording's notes."""
        self.assumptions[text] = None

    def warn(self, text: str) -> None:
        """Keep ``text``, once, for the warnings."""
        self.warnings[warning(text)] = None

    def seeded(self, *given: object, **named: object) -> None:
        """The random numbers begin anew; what is ``given`` changes no size."""
        self.seeds += 1

    def retract(self, text: str) -> None:
        """What :meth:`warn` was given is true no longer."""
        self.warnings.pop(warning(text), None)

    def doubts(self, *, failed: bool) -> list[str]:
        """What makes the run's numbers doubtful; of a script that ``failed``, first which numbers it was told."""
        lines = list(self.made_up)[: -_NAMED - 1 : -1] if failed else []
        if not lines:
            return list(self.warnings)
        read = ", ".join(f"{self.made_up[line][0]} at {line}" for line in lines)
        told = (
            f"before it failed the script read made-up numbers, as the device has no data: {read}. If the failure "
            f"comes from one of them, say what is read there: {self.made_up[lines[0]][1]}"
        )
        warned = tuple(warning(f"{line}: ") for line in lines)
        return [told, *(text for text in self.warnings if not text.startswith(warned))]

    def leave_out(self, what: str) -> None:
        """``what`` a GPU would have allocated is in none of the numbers."""
        self.unmodelled[what] = None

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Nobody else uses the allocators, and no block is taken back on the way."""
        try:
            with self.lock:
                former, self._busy = self._busy, True
                try:
                    yield
                finally:
                    self._busy = former
        finally:
            self.bury()

    def bury(self) -> None:
        """Take back the blocks of storages that died, unless somebody else will."""
        while self._dead and not self._busy and self.lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self.lock.release()

    def storage_address(self, tensor: torch.Tensor) -> int:
        """The address on this device of the first byte of ``tensor``'s storage, or the real one of a real tensor.

        0 where it has none that can be read.
        """
        try:
            storage = tensor.untyped_storage()
            block = self._blocks.get(storage_key(storage))
            if block is not None:
                return block.address
            return 0 if storage.device.type == "meta" else storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0

    def data_address(self, tensor: torch.Tensor) -> int:
        """The address of ``tensor``'s first element, likewise."""
        try:
            if tensor.untyped_storage().device.type == "meta":
                address = self.storage_address(tensor)
                return address and address + int(tensor.storage_offset()) * tensor.element_size()
            return tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0

    def born(self, storage: torch.UntypedStorage) -> None:
        """Give ``storage`` a block unless it has one. Raises ``torch.OutOfMemoryError`` as the device would."""
        with self.lock:
            self.bury()  # one that died may have been at the same address
            key = storage_key(storage)
            if key not in self._references:
                reference = _StorageRef(storage, self._died)
                reference.key = key
                self._references[key] = reference
            size = storage.nbytes()
            if key not in self._blocks and size > 0:
                self._blocks[key] = self.malloc(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` may have another size now: then it has got a new block, and given its old one back."""
        with self.lock:
            self.bury()
            key = storage_key(storage)
            if key not in self._references:
                return  # it lies elsewhere
            block = self._blocks.get(key)
            if block is not None and block.requested != storage.nbytes():
                self.free(self._blocks.pop(key))
            self.born(storage)

    def not_written(self, text: str, *, aloud: bool = False) -> None:
        """Keep ``text``, of a file that the script does not get, for the recording's notes.

        It is said on standard error where nothing is recorded any more, and always where it is to be ``aloud``.
        """
        if text not in self.assumptions and (aloud or self.recorder is None):
            Terminal(sys.stderr).say(text)
        self.assume(text)

    def configure(self, text: str, by: str) -> None:
        """Give the allocator the settings in ``text``, as ``by`` asks. Raises ``UsageError`` for unknown settings."""
        self._settle()
        self._take(parse_settings(text, self.allocator.settings), by, text)

    def _settle(self) -> None:
        """Read the settings from the environment, the first time that it is called."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        variable, text = text_of_environment(environment)
        try:
            settings = settings_of_environment(environment)
        except UsageError as error:
            raise stop(f"{variable}={text}: {error}" if variable else str(error)) from None
        former = self.allocator.settings.memory_fraction
        if settings.memory_fraction is None and former is not None:  # by a call
            settings = replace(settings, memory_fraction=former)
        self._take(settings, variable, text)

    def _take(self, settings: Settings, by: str, text: str) -> None:
        self.in_force = by, text
        if settings != self.allocator.settings:
            self.allocator.configure(settings)
            self._highest.configure(settings)
            self._highest.limit = allowed_memory(settings, self.gpu.total_memory)

    def set_memory_fraction(self, fraction: float) -> None:
        """Let the process take at most this part of the device (``set_per_process_memory_fraction``)."""
        with self._at_work():
            self.allocator.set_memory_fraction(fraction)
            self._highest.limit = allowed_memory(self.allocator.settings, self.gpu.total_memory)

    def malloc(self, size: int) -> Block:
        """A block of the current stream that belongs to no storage. Raises ``torch.OutOfMemoryError``."""
        if self._environment is not None:
            self._settle()
        stream = self.order.current()
        with self._at_work():
            try:
                if self.allocator.counters.awaiting:
                    self.allocator.complete_events()
                block = self.allocator.malloc(size, stream)
            except OutOfMemory as error:
                self.out_of_memory = error.with_traceback(None)  # whose frames hold the script's tensors
                if self.on_out_of_memory is not None:
                    self.on_out_of_memory(error)
                raise torch.OutOfMemoryError(f"CUDA {error} (simulated {self.gpu.name})") from None
            self._highest.malloc(block)
            self._peaks.note(self._highest.limit)
            self._report(Action.ALLOC, block)
        return block

    def free(self, block: Block) -> None:
        """Give ``block`` back."""
        with self._at_work():
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        self._report(Action.FREE, block)
        self._highest.free(block)
        self.allocator.free(block)

    def workspace(self, library: str, size: int) -> None:
        """Scratch that ``library`` keeps for ever."""
        held = self._peaks.workspaces
        held[library] = held.get(library, 0) + size
        try:
            block = self.malloc(size)
        except torch.OutOfMemoryError:
            held[library] -= size  # a script may go on from here
            raise
        self.workspaces[block.address] = library
        if self.on_workspace is not None:
            self.on_workspace(block.address, library)

    def scratch(self, op: str, sizes: Sequence[int]) -> None:
        """Scratch that ``op`` gives back before it ends, as in :meth:`scratch_during`."""
        with self.scratch_during(op, sizes):
            pass

    @contextmanager
    def scratch_during(self, op: str, sizes: Sequence[int | torch.UntypedStorage]) -> Iterator[None]:
        """Scratch of all these sizes, which ``op`` gives back at the end.

        A negative number gives the newest block of so many bytes back before the next one is taken. A storage is a
        result, which gets its memory in its place.
        """
        held, blocks = self._peaks.scratch, list[Block]()
        before = held.get(op, 0)
        try:
            for size in sizes:
                if isinstance(size, torch.UntypedStorage):
                    self.born(size)
                    continue
                held[op] = held.get(op, 0) + size
                if size < 0:
                    newest = max(at for at, block in enumerate(blocks) if block.requested == -size)
                    self.free(blocks.pop(newest))
                    continue
                blocks.append(self.malloc(size))
                if self.on_scratch is not None:
                    self.on_scratch(blocks[-1].address, op)
            yield
        finally:
            held.pop(op, None)
            if before:
                held[op] = before
            for block in reversed(blocks):
                self.free(block)

    def could_have(self, size: int) -> bool:
        """Whether ``size`` bytes can be had now; what is cached may be given back for them."""
        with self._at_work():
            try:
                self.allocator.free(self.allocator.malloc(size, self.order.current()))
            except OutOfMemory:
                return False
            return True

    def assume_scratch(self, what: str, most: int, asker: object = None) -> None:
        """``what`` is not known; here it is taken to be at most ``most`` bytes, given back at once.

        ``asker`` is equal for requests of the same size for the same work, such as one pass of a convolution.
        """
        with self._at_work():
            self._highest.assume(what, most, (what, asker))

    def assume_all_that_is_free(self, what: str, limit: int | None) -> None:
        """The same for what may take all memory that is free, or ``limit`` bytes of it."""
        kept = sum(most for _, most in self._libraries.values())
        with self._at_work():
            self._highest.fill(what, self.gpu.total_memory - self.gpu.context.most - kept, limit)

    def hold_outside(self, what: str, least: int, most: int) -> None:
        """A library keeps from ``least`` to ``most`` bytes of ``what`` outside of the allocator by now."""
        self._libraries[what] = (least, most)
        self.allocator.driver.outside = self.outside

    @property
    def outside(self) -> int:
        """Bytes that are taken at least, but not by the allocator: the CUDA context and what libraries keep."""
        return self.gpu.context.least + sum(least for least, _ in self._libraries.values())

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        with self._at_work():
            self._highest.empty_cache()
            self.allocator.empty_cache()

    def record_stream(self, storage: torch.UntypedStorage, stream: int) -> None:
        """``stream`` uses the block of ``storage`` too: once freed, it waits until ``stream`` has come so far."""
        with self._at_work():
            block = self._blocks.get(storage_key(storage))
            if block is None or block.segment.stream == stream:
                return
            self.assume(KEEPS_UP)
            self.allocator.record_stream(block, stream)
            self._highest.record_stream(block, stream)

    def synchronize(self, until: Reached | None = None) -> None:
        """The script waits until the device has come so far, or has done everything."""
        with self._at_work():
            self._highest.synchronize(until)

    def synchronize_current(self) -> None:
        """It waits for the current stream, as it does to read a number."""
        if self._highest.counters.awaiting:
            self.synchronize(self.order.reached(self.order.current()))

    def prediction(self) -> PredictionRecord:
        """What the run comes to on this GPU, by now."""
        if self.order.backward_elsewhere:
            self.leave_out(_CROSSING)
        return prediction(
            self._peaks,
            self._highest,
            total=self.gpu.total_memory,
            context=self.gpu.context,
            libraries=self._libraries,
            unmodelled=tuple(self.unmodelled),
            ran_out=self.out_of_memory is not None,
        )

    def segments(self) -> tuple[SnapshotSegment, ...]:
        """The allocator's segments and their blocks now."""
        with self._at_work():
            return self.allocator.snapshot()

    def tensors(self) -> dict[int, weakref.ref[torch.UntypedStorage]]:
        """Address of every block that a storage has, to that storage: a later one at the address is not the same."""
        with self._at_work():
            return {block.address: self._references[key] for key, block in self._blocks.items()}

    def live(self) -> dict[int, tuple[int, int, int]]:
        """Address of every block in use to the bytes that were asked for, those of the block, and its stream."""
        with self._at_work():
            used = [block for block in self.allocator.blocks() if block.requested and block.state == ALLOCATED]
        return {block.address: (block.requested, block.size, block.segment.stream) for block in used}

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _StorageRef)
        self._dead.append(reference)
        self.bury()

    def _take_back(self) -> None:
        self._busy = True
        try:
            while self._dead:
                reference = self._dead.pop(0)
                if self._references.get(reference.key) is reference:
                    del self._references[reference.key]
                    block = self._blocks.pop(reference.key, None)
                    if block is not None:
                        self._give_back(block)
        finally:
            self._busy = False

    def _report(self, action: Action, block: Block) -> None:
        if self.recorder is None:
            return
        node, sequence = "", -1
        counters = self.allocator.counters
        allocated = counters.requested - counters.awaiting_requested
        if action is Action.FREE:
            allocated -= block.requested
        else:
            node, sequence = running_node()
        size, stream = block.requested, block.segment.stream
        self.recorder(
            DeviceEvent(time_ns(), action, block.address, size, block.size, allocated, node, sequence, stream)
        )
