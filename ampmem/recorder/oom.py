"""What is kept when the device runs out of memory: the request, who made it, and the allocator's segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import time_ns
from typing import Any

from ampmem.allocator.shortage import pack
from ampmem.events import NO_STEP, OomRecord
from ampmem.recorder.sources.base import Place
from ampmem.recorder.sources.cuda_device import CudaApi
from ampmem.recorder.sources.cuda_events import OOM, segments_of

KEPT = 8
"""How many failures are kept: cuDNN tries one algorithm after the other, and scripts retry with smaller batches."""

_NOWHERE = Place(step=NO_STEP, op="", module="", stack="")


class OomKeeper:
    """Looks at the allocator whenever it gives up, before the script gets to know."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self._records: list[OomRecord] = []
        self.seen = 0
        self.locate: Callable[[], Place] | None = None

    def observe(self, device: int, segment: int, total: int, free: int) -> None:
        """Memory ran out; runs on the thread that asked for it, without the allocator's lock."""
        self.seen += 1
        if self.seen > KEPT:
            return
        now = time_ns()
        place = _NOWHERE if self.locate is None else self.locate()
        snapshot = self._api.snapshot()
        request = _last_failure(snapshot, device)
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
                total=total,
                free=free,
                op=place.op,
                module=place.module,
                stack=place.stack,
                segments=pack(segments_of(snapshot, device)),
            )
        )

    def name_ops(self, op_at: Callable[[int], str]) -> None:
        """Name the ops that no mode saw, which are autograd's, by when they failed."""
        self._records = [record if record.op else replace(record, op=op_at(record.time_ns)) for record in self._records]

    def take(self, device: int | None) -> list[OomRecord]:
        """The failures on ``device`` since the last call; those of any when it is ``None``."""
        taken, self._records = self._records, []
        return [record for record in taken if device is None or record.device == device]


def _last_failure(snapshot: Mapping[str, Any], device: int) -> Mapping[str, Any]:
    """The trace's entry of the failure; it has the size of the block, where torch tells only the segment's."""
    traces = snapshot["device_traces"]
    if device < len(traces):
        for entry in reversed(traces[device]):
            if entry["action"] == OOM:
                found: Mapping[str, Any] = entry
                return found
    return {}
