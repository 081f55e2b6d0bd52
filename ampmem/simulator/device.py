"""The memory of the simulated device: the address of each fake storage, and the events of its allocator."""

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
    "assumed: the device keeps up with the script, so a block used on other streams is free again at the next "
    "allocation after its tensor was freed; up to: the other streams use it until the script waits for them"
)
_OLDEST_FIRST = "2.12" <= TorchVersion(torch.__version__) < "2.13"
"""Whether among free blocks of equal size the oldest is used, instead of the one with the lowest address."""
_NAMED = 3
"""Maximum number of lines named that read guessed numbers before the script failed."""
_CROSSING = "gradients that wait for another stream in backward"


class DeviceEvent(NamedTuple):
    """One alloc or free. ``allocated`` is the sum of requested bytes after it; ``node`` as in ``RawEvents``."""

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
    """A weak reference to a storage that still has its key after the storage was freed."""

    __slots__ = ("key",)
    key: int


class SimulatedDevice:
    """Gives each fake storage a block of the modelled allocator, and frees the block with the storage.

    ``recorder`` is called with each event while it is set. ``settings`` are those in force at the start. If
    ``environment`` is given, the settings are read from it again at the first request, as PyTorch reads them at the
    first use of CUDA: until then the script may have changed them.
    """

    def __init__(
        self, gpu: GpuSpec, settings: Settings, *, label: str = "cuda", environment: Mapping[str, str] | None = None
    ) -> None:
        self.gpu = gpu
        self.label = label
        """The simulated type of torch device: ``cuda``, or ``cpu`` for comparisons with the CPU profiler."""
        self.allocator = DeviceCachingAllocator(
            settings, total_memory=gpu.total_memory, outside=gpu.context.least, oldest_first=_OLDEST_FIRST
        )
        self.order = StreamOrder(lambda stream: self.allocator.streams.recorded.get(stream, 0))
        self._environment = environment
        self.in_force = ("", "")
        """The variable or function of torch that set the allocator, and the settings as text; both empty by default."""
        self.recorder: Callable[[DeviceEvent], None] | None = None
        self.on_workspace: Callable[[int, str], None] | None = None
        """Called with the address of every workspace and its library."""
        self.on_scratch: Callable[[int, str], None] | None = None
        """Called with the address of scratch memory and its op."""
        self.workspaces: dict[int, str] = {}
        """The libraries' workspaces, by address."""
        self.on_out_of_memory: Callable[[OutOfMemory], None] | None = None
        self.out_of_memory: OutOfMemory | None = None
        """The last request that failed."""
        self.assumptions: dict[str, None] = {}
        """Assumptions of this run, in order of appearance."""
        self.warnings: dict[str, None] = {}
        """Doubts about the run's numbers, in order of appearance."""
        self.made_up: dict[str, tuple[float, str]] = {}
        """The lines of the script that read an unknown number, last one last: the guess, and how to give another."""
        self.unmodelled: dict[str, None] = {}
        """Memory that the model leaves out, in order of appearance."""
        self.seeds = 0
        """Number of times that the random generator was given a seed or a state."""
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
        """Held while a thread runs an op or uses the allocators."""
        self._busy = False
        self._dead: list[_StorageRef] = []
        """Freed storages whose blocks are not freed yet.

        A storage may be freed at any time on any thread, and a destructor must not wait: if the allocators are in use,
        the thread that uses them frees the blocks afterwards.
        """

    def assume(self, text: str) -> None:
        """Add ``text`` once to the recording's assumptions."""
        self.assumptions[text] = None

    def warn(self, text: str) -> None:
        """Add ``text`` once to the warnings."""
        self.warnings[warning(text)] = None

    def seeded(self, *given: object, **named: object) -> None:
        """Note that the random generator was seeded; the value ``given`` changes no size."""
        self.seeds += 1

    def retract(self, text: str) -> None:
        """Remove a warning that is no longer true."""
        self.warnings.pop(warning(text), None)

    def doubts(self, *, failed: bool) -> list[str]:
        """Warnings about the run's numbers; for a script that ``failed``, first the guessed numbers that it read."""
        lines = list(self.made_up)[: -_NAMED - 1 : -1] if failed else []
        if not lines:
            return list(self.warnings)
        read = ", ".join(f"{self.made_up[line][0]} at {line}" for line in lines)
        told = (
            f"before it failed, the script read made-up numbers, because a simulated device has no data: {read}. If "
            f"one of them caused the failure, give the real number: {self.made_up[lines[0]][1]}"
        )
        warned = tuple(warning(f"{line}: ") for line in lines)
        return [told, *(text for text in self.warnings if not text.startswith(warned))]

    def leave_out(self, what: str) -> None:
        """Note that memory for ``what``, which a GPU would allocate, is in none of the numbers."""
        self.unmodelled[what] = None

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Hold the allocators: no other thread uses them, and no block is freed meanwhile."""
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
        """Free the blocks of freed storages; if a thread holds the allocators, it does so afterwards."""
        while self._dead and not self._busy and self.lock.acquire(blocking=False):
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
                self.lock.release()

    def storage_address(self, tensor: torch.Tensor) -> int:
        """The device address of the first byte of ``tensor``'s storage; for a real tensor its real address.

        0 if it cannot be read.
        """
        try:
            storage = tensor.untyped_storage()
            block = self._blocks.get(storage_key(storage))
            if block is not None:
                return block.address
            return 0 if storage.device.type == "meta" else storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0

    def address(self, storage: torch.UntypedStorage) -> int:
        """The address of a ``storage`` without values: the device's, or for one on the CPU a number of its own."""
        block = self._blocks.get(storage_key(storage))
        if block is not None:
            return block.address
        return storage_key(storage) if storage.nbytes() else 0

    def data_address(self, tensor: torch.Tensor) -> int:
        """The device address of ``tensor``'s first element; real or 0 as for :meth:`storage_address`."""
        try:
            if tensor.untyped_storage().device.type == "meta":
                address = self.storage_address(tensor)
                return address and address + int(tensor.storage_offset()) * tensor.element_size()
            return tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0

    def born(self, storage: torch.UntypedStorage) -> None:
        """Give ``storage`` a block if it has none. Raises ``torch.OutOfMemoryError`` as the device would."""
        with self.lock:
            self.bury()  # a freed storage may have had the same address
            key = storage_key(storage)
            if key not in self._references:
                reference = _StorageRef(storage, self._died)
                reference.key = key
                self._references[key] = reference
            size = storage.nbytes()
            if key not in self._blocks and size > 0:
                self._blocks[key] = self.malloc(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Give ``storage`` a new block and free its old one, if its size has changed."""
        with self.lock:
            self.bury()
            key = storage_key(storage)
            if key not in self._references:
                return  # it is not on this device
            block = self._blocks.get(key)
            if block is not None and block.requested != storage.nbytes():
                self.free(self._blocks.pop(key))
            self.born(storage)

    def not_written(self, text: str, *, aloud: bool = False) -> None:
        """Add ``text``, about a file that the script does not get, to the recording's notes.

        It is printed on standard error if nothing is recorded any more, and always if ``aloud``.
        """
        if text not in self.assumptions and (aloud or self.recorder is None):
            Terminal(sys.stderr).say(text)
        self.assume(text)

    def configure(self, text: str, by: str) -> None:
        """Apply the allocator settings in ``text``, set by ``by``. Raises ``UsageError`` for unknown settings."""
        self._settle()
        self._take(parse_settings(text, self.allocator.settings), by, text)

    def _settle(self) -> None:
        """Read the settings from the environment at the first call."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        variable, text = text_of_environment(environment)
        try:
            settings = settings_of_environment(environment)
        except UsageError as error:
            raise stop(f"{variable}={text}: {error}" if variable else str(error)) from None
        former = self.allocator.settings.memory_fraction
        if settings.memory_fraction is None and former is not None:  # it was set by a call
            settings = replace(settings, memory_fraction=former)
        self._take(settings, variable, text)

    def _take(self, settings: Settings, by: str, text: str) -> None:
        self.in_force = by, text
        if settings != self.allocator.settings:
            self.allocator.configure(settings)
            self._highest.configure(settings)
            self._highest.limit = allowed_memory(settings, self.gpu.total_memory)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the process to this fraction of the device (``set_per_process_memory_fraction``)."""
        with self._at_work():
            self.allocator.set_memory_fraction(fraction)
            self._highest.limit = allowed_memory(self.allocator.settings, self.gpu.total_memory)

    def malloc(self, size: int) -> Block:
        """A block of the current stream without a storage. Raises ``torch.OutOfMemoryError``."""
        if self._environment is not None:
            self._settle()
        stream = self.order.current()
        with self._at_work():
            try:
                # The device keeps up (KEEPS_UP); the second allocator, of the upper bound, lags behind.
                if self.allocator.counters.awaiting:
                    self.allocator.complete_events()
                block = self.allocator.malloc(size, stream)
            except OutOfMemory as error:
                self.out_of_memory = error.with_traceback(None)  # its frames hold the script's tensors
                if self.on_out_of_memory is not None:
                    self.on_out_of_memory(error)
                raise torch.OutOfMemoryError(f"CUDA {error} (simulated {self.gpu.name})") from None
            self._highest.malloc(block)
            self._peaks.note(self._highest.limit)
            self._report(Action.ALLOC, block)
        return block

    def free(self, block: Block) -> None:
        """Free ``block``."""
        with self._at_work():
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        self._report(Action.FREE, block)
        self._highest.free(block)
        self.allocator.free(block)

    def workspace(self, library: str, size: int) -> None:
        """Allocate a workspace that ``library`` keeps forever."""
        held = self._peaks.workspaces
        held[library] = held.get(library, 0) + size
        try:
            block = self.malloc(size)
        except torch.OutOfMemoryError:
            held[library] -= size  # a script may catch the error and go on
            raise
        self.workspaces[block.address] = library
        if self.on_workspace is not None:
            self.on_workspace(block.address, library)

    def scratch(self, op: str, sizes: Sequence[int]) -> None:
        """Allocate and free scratch memory of ``op``, as in :meth:`scratch_during`."""
        with self.scratch_during(op, sizes):
            pass

    @contextmanager
    def scratch_during(self, op: str, sizes: Sequence[int | torch.UntypedStorage]) -> Iterator[None]:
        """Allocate scratch of all these sizes (bytes), which ``op`` frees at the end of the block.

        A negative number frees the newest block of so many bytes before the next allocation. A storage in the list is a
        result, which gets its memory at that point.
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
            # Last one first, as C++ destroys the locals of a function.
            for block in reversed(blocks):
                self.free(block)

    def could_have(self, size: int) -> bool:
        """Whether ``size`` bytes can be allocated now, after freeing cached memory if necessary."""
        with self._at_work():
            try:
                self.allocator.free(self.allocator.malloc(size, self.order.current()))
            except OutOfMemory:
                return False
            return True

    def assume_scratch(self, what: str, most: int, asker: object = None) -> None:
        """Assume that unknown scratch ``what`` has at most ``most`` bytes, freed at once.

        ``asker`` is equal for requests of the same size for the same work, such as one pass of a convolution.
        """
        with self._at_work():
            self._highest.assume(what, most, (what, asker))

    def assume_all_that_is_free(self, what: str, limit: int | None) -> None:
        """Assume that ``what`` takes at most all free memory, or ``limit`` bytes of it, freed at once."""
        kept = sum(most for _, most in self._libraries.values())
        with self._at_work():
            self._highest.fill(what, self.gpu.total_memory - self.gpu.context.most - kept, limit)

    def hold_outside(self, what: str, least: int, most: int) -> None:
        """Note that a library holds from ``least`` to ``most`` bytes of ``what`` outside of the allocator."""
        self._libraries[what] = (least, most)
        self.allocator.driver.outside = self.outside

    @property
    def outside(self) -> int:
        """Minimum bytes in use outside of the allocator: the CUDA context and what libraries keep."""
        return self.gpu.context.least + sum(least for least, _ in self._libraries.values())

    def empty_cache(self) -> None:
        """Free cached memory, as ``torch.cuda.empty_cache`` does."""
        with self._at_work():
            self._highest.empty_cache()
            self.allocator.empty_cache()

    def record_stream(self, storage: torch.UntypedStorage, stream: int) -> None:
        """Note that ``stream`` uses the block of ``storage``, too: once freed, it waits for ``stream``."""
        with self._at_work():
            block = self._blocks.get(storage_key(storage))
            if block is None or block.segment.stream == stream:
                return
            self.assume(KEEPS_UP)
            self.allocator.record_stream(block, stream)
            self._highest.record_stream(block, stream)

    def synchronize(self, until: Reached | None = None) -> None:
        """Note that the script waits until the device has reached ``until``, or has completed everything."""
        with self._at_work():
            self._highest.synchronize(until)

    def synchronize_current(self) -> None:
        """Note that the script waits for the current stream, as when it reads a number."""
        if self._highest.counters.awaiting:
            self.synchronize(self.order.reached(self.order.current()))

    def prediction(self) -> PredictionRecord:
        """The predicted memory of the run so far on this GPU."""
        if self.order.backward_elsewhere:
            self.leave_out(_CROSSING)
        found = prediction(self._peaks, self._highest, self.gpu, self._libraries)
        return replace(found, unmodelled=tuple(self.unmodelled), ran_out=self.out_of_memory is not None)

    def segments(self) -> tuple[SnapshotSegment, ...]:
        """The allocator's current segments and blocks."""
        with self._at_work():
            return self.allocator.snapshot()

    def tensors(self) -> dict[int, weakref.ref[torch.UntypedStorage]]:
        """The storage of each block that has one, by address: later storages at that address are different."""
        with self._at_work():
            return {block.address: self._references[key] for key, block in self._blocks.items()}

    def live(self) -> dict[int, tuple[int, int, int]]:
        """(requested bytes, block bytes, stream) of each block in use, by address."""
        with self._at_work():
            used = [block for block in self.allocator.blocks() if block.requested and block.state == ALLOCATED]
        return {block.address: (block.requested, block.size, block.segment.stream) for block in used}

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _StorageRef)
        self._dead.append(reference)
        self.bury()

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
