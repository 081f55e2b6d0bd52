"""Records what was on the device when memory ran out, and whether the script ended with that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import time_ns
from typing import Any

import torch

from ampmem.allocator.oom import pack_segments
from ampmem.allocator.snapshot import read_segments
from ampmem.events import OomRecord
from ampmem.recorder.sources.base import Place
from ampmem.recorder.sources.cuda.device import TorchCuda
from ampmem.recorder.sources.cuda.events import OOM

KEPT = 8
"""Maximum number of failures kept per step, the last ones: scripts retry with smaller batches."""


class OomKeeper:
    """Observes the allocator's out-of-memory errors, before the script gets them."""

    def __init__(self, api: TorchCuda) -> None:
        self._api = api
        self._records: deque[OomRecord] = deque(maxlen=KEPT)
        self.locate: Callable[[], Place] | None = None

    def observe(self, device: int, segment: int, total: int, free: int) -> None:
        """Memory ran out; called on the thread that requested it, without the allocator's lock."""
        now = time_ns()
        place = Place() if self.locate is None else self.locate()
        # Now, while the memory is full: when the script gets its error, tensors of its frames may be freed.
        snapshot = self._api.snapshot()
        request = last_failure(snapshot, device)
        whole = self._whole(device, total)
        first, second = request.get("pool_id", (0, 0))
        self._records.append(
            OomRecord(
                time_ns=now,
                step=place.step,
                device=device,
                stream=int(request.get("stream", 0)),
                pool=f"{first},{second}",
                asked=int(request.get("size", segment)),
                segment=segment,
                total=whole,
                free=free,
                op=place.op,
                module=place.module,
                stack=place.stack,
                segments=pack_segments(read_segments(snapshot["segments"], device)),
                limit=total if total < whole else None,
            )
        )

    def _whole(self, device: int, told: int) -> int:
        """The device's total memory: torch reports the process's limit if there is one."""
        whole = told
        with suppress(RuntimeError):  # a failed device
            if not self._api.capturing():
                whole = self._api.memory_info(device)[1]
        return max(whole, told)

    @property
    def device(self) -> int | None:
        """The device on which memory last ran out, if any."""
        return self._records[-1].device if self._records else None

    def name_ops(self, op_at: Callable[[int, int], str]) -> None:
        """Name the ops of failures in backward, which no mode saw, by device and time."""
        named = [
            record if record.op else replace(record, op=op_at(record.device, record.time_ns))
            for record in self._records
        ]
        self._records.clear()
        self._records.extend(named)

    def take(self) -> list[OomRecord]:
        """The failures since the last call, on all devices."""
        taken = list(self._records)
        self._records.clear()
        return taken


def ended_with(failure: BaseException | None, ooms: Sequence[OomRecord], forward_ns: int) -> bool:
    """Whether the script got no further than the last of ``ooms``, which are in order of time.

    ``failure`` is the exception that ended it, if any; ``forward_ns`` the time when its last forward began. A script
    that caught the failure and ended by itself got no further either; one that failed with another error did.
    """
    if not ooms or ooms[-1].time_ns < forward_ns:
        return False
    return failure is None or isinstance(failure, SystemExit) or is_out_of_memory(failure)


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether ``failure`` is the device's out-of-memory error, or was caused by one."""
    error: BaseException | None = failure
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        # Causes and contexts can form a circle.
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def last_failure(snapshot: Mapping[str, Any], device: int) -> Mapping[str, Any]:
    """The trace's entry of the failure; it has the block's size, where torch's error has only the segment's."""
    traces = snapshot["device_traces"]
    if device < len(traces):
        for entry in reversed(traces[device]):
            if entry["action"] == OOM:
                found: Mapping[str, Any] = entry
                return found
    return {}
