"""The allocator's statistics: counters that the model keeps, and the frozen copy that it gives out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A statistic now and at its highest."""

    current: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What ``torch.cuda.memory_stats`` says of all pools together; bytes where the name says so.

    ``allocated`` are blocks in use, ``requested`` the bytes that their owners asked for, ``active`` also has
    the blocks that wait for other streams, ``reserved`` is what came from the device, ``inactive_split``
    the free parts of segments that are in use (``struct DeviceStats``, ``c10/core/CachingDeviceAllocator.h``).
    """

    allocated_bytes: Stat
    requested_bytes: Stat
    active_bytes: Stat
    reserved_bytes: Stat
    inactive_split_bytes: Stat
    allocation: Stat
    active: Stat
    segment: Stat
    inactive_split: Stat
    oversize_allocations: Stat
    oversize_segments: Stat
    num_alloc_retries: int
    num_ooms: int
    num_sync_all_streams: int
    num_device_alloc: int
    num_device_free: int

    def memory_stats(self) -> dict[str, int]:
        """The same numbers under the keys of ``torch.cuda.memory_stats``."""
        found: dict[str, int] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int):
                found[name] = value
                continue
            key = name if name.startswith("oversize") else f"{name}.all"
            found[f"{key}.current"] = value.current
            found[f"{key}.peak"] = value.peak
        return found


class Counters:
    """The running numbers behind :class:`Statistics`.

    ``active`` is not counted by itself: it is what is allocated and what is awaiting events, and its peak
    can differ from that of what is allocated only while something is awaiting.
    """

    __slots__ = (
        "active_bytes_peak",
        "active_peak",
        "allocated",
        "allocated_peak",
        "allocations",
        "allocations_peak",
        "awaiting",
        "awaiting_bytes",
        "awaiting_bytes_peak",
        "awaiting_requested",
        "inactive_split",
        "inactive_split_bytes",
        "inactive_split_bytes_peak",
        "inactive_split_peak",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_ooms",
        "num_sync_all_streams",
        "oversize_allocations",
        "oversize_allocations_peak",
        "oversize_segments",
        "oversize_segments_peak",
        "requested",
        "requested_peak",
        "reserved",
        "reserved_peak",
        "segments",
        "segments_peak",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    allocations: int
    allocations_peak: int
    allocated: int
    allocated_peak: int
    requested: int
    requested_peak: int
    awaiting: int
    awaiting_bytes: int
    awaiting_bytes_peak: int
    awaiting_requested: int
    active_peak: int
    active_bytes_peak: int
    inactive_split: int
    inactive_split_peak: int
    inactive_split_bytes: int
    inactive_split_bytes_peak: int
    reserved: int
    reserved_peak: int
    segments: int
    segments_peak: int
    oversize_allocations: int
    oversize_allocations_peak: int
    oversize_segments: int
    oversize_segments_peak: int
    num_alloc_retries: int
    num_ooms: int
    num_sync_all_streams: int
    num_device_alloc: int
    num_device_free: int

    def note_active(self) -> None:
        """Move the peaks of ``active``; called after an allocation while blocks are awaiting events."""
        self.active_peak = max(self.active_peak, self.allocations + self.awaiting)
        self.active_bytes_peak = max(self.active_bytes_peak, self.allocated + self.awaiting_bytes)

    def add_reserved(self, size: int) -> None:
        """Memory came from the device."""
        self.num_device_alloc += 1
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def remove_reserved(self, size: int) -> None:
        """Memory went back to the device."""
        self.num_device_free += 1
        self.reserved -= size

    def add_segment(self, *, oversize: bool) -> None:
        """One more segment, not an expandable one."""
        self.segments += 1
        self.segments_peak = max(self.segments_peak, self.segments)
        if oversize:
            self.oversize_segments += 1
            self.oversize_segments_peak = max(self.oversize_segments_peak, self.oversize_segments)

    def add_oversize_allocation(self) -> None:
        """A block of at least ``max_split_size`` was handed out."""
        self.oversize_allocations += 1
        self.oversize_allocations_peak = max(self.oversize_allocations_peak, self.oversize_allocations)

    def change_inactive_split(self, count: int, size: int) -> None:
        """``count`` blocks and ``size`` bytes more (less where negative)."""
        self.inactive_split += count
        if self.inactive_split > self.inactive_split_peak:
            self.inactive_split_peak = self.inactive_split
        self.inactive_split_bytes += size
        if self.inactive_split_bytes > self.inactive_split_bytes_peak:
            self.inactive_split_bytes_peak = self.inactive_split_bytes

    def reset_peaks(self) -> None:
        """``resetPeakStats``: every peak becomes the current value."""
        self.active_peak = self.active_bytes_peak = 0
        for name in self.__slots__:
            if name.endswith("_peak") and not name.startswith("active"):
                setattr(self, name, getattr(self, name.removesuffix("_peak")))
        self.note_active()

    def statistics(self) -> Statistics:
        """A frozen copy."""
        return Statistics(
            allocated_bytes=Stat(current=self.allocated, peak=self.allocated_peak),
            requested_bytes=Stat(current=self.requested, peak=self.requested_peak),
            active_bytes=Stat(
                current=self.allocated + self.awaiting_bytes, peak=max(self.active_bytes_peak, self.allocated_peak)
            ),
            reserved_bytes=Stat(current=self.reserved, peak=self.reserved_peak),
            inactive_split_bytes=Stat(current=self.inactive_split_bytes, peak=self.inactive_split_bytes_peak),
            allocation=Stat(current=self.allocations, peak=self.allocations_peak),
            active=Stat(current=self.allocations + self.awaiting, peak=max(self.active_peak, self.allocations_peak)),
            segment=Stat(current=self.segments, peak=self.segments_peak),
            inactive_split=Stat(current=self.inactive_split, peak=self.inactive_split_peak),
            oversize_allocations=Stat(current=self.oversize_allocations, peak=self.oversize_allocations_peak),
            oversize_segments=Stat(current=self.oversize_segments, peak=self.oversize_segments_peak),
            num_alloc_retries=self.num_alloc_retries,
            num_ooms=self.num_ooms,
            num_sync_all_streams=self.num_sync_all_streams,
            num_device_alloc=self.num_device_alloc,
            num_device_free=self.num_device_free,
        )
