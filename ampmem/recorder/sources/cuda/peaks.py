"""How much the devices held at most, whatever the script does with the allocator's own peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampmem.allocator.settings import Settings, round_size
from ampmem.allocator.snapshot import ALLOC, FREE_REQUESTED
from ampmem.recorder.sources.cuda.device import CudaApi, Snapshot


class Peaks:
    """The largest sum of blocks that each device has had by now.

    ``torch.cuda.reset_peak_memory_stats`` takes the allocator's own peak down to what is there; the trace has it.
    """

    def __init__(self, api: CudaApi, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        self._known: dict[int, int] = {}

    def now(self) -> dict[int, int]:
        """By device; also where only the allocator says so."""
        for device in range(self._api.device_count()):
            self._know(device, self._api.stats(device).allocated_peak)
        return dict(self._known)

    def note(self, snapshot: Snapshot) -> None:
        """Take in what the trace of ``snapshot`` led through, on every device."""
        blocks: dict[int, dict[int, int]] = {}
        for segment in snapshot["segments"]:
            of_device = blocks.setdefault(segment["device"], {})
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    of_device[int(block["address"])] = int(block["size"])
        for device, trace in enumerate(snapshot["device_traces"]):
            self._know(device, self._largest(trace, blocks.get(device, {})))

    def _largest(self, trace: Sequence[Mapping[str, Any]], blocks: dict[int, int]) -> int:
        """Backwards from the ``blocks`` that are there after ``trace``; others count as what they are rounded to."""
        now = most = sum(blocks.values())
        for row in reversed(trace):
            if row["action"] == FREE_REQUESTED:
                blocks[row["addr"]] = round_size(int(row["size"]), self._settings)
                now += blocks[row["addr"]]
                most = max(most, now)
            elif row["action"] == ALLOC:
                now -= blocks.pop(row["addr"], 0)
        return most

    def _know(self, device: int, peak: int) -> None:
        self._known[device] = max(self._known.get(device, 0), peak)
