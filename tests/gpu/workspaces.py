"""What convolutions and matrix products allocate on a GPU beside their results, for a grid of shapes.

    python tests/gpu/workspaces.py --out workspaces.json [--seconds 560] [--device cuda|sim]

The same command goes on where the last one ended: rows that the file has are left out. ``--go-on FILE`` says which file
that is, where it is another. The file is whole at any time.

Schema ``ampmem.workspaces/1``::

    {"schema": "ampmem.workspaces/1",
     "machine": {"gpu", "capability", "sm_count", "torch", "cuda", "cudnn"},
     "rows": [{"kind": "convolution" | "product",
               "pass": "forward" | "backward-data" | "backward-weight" | "mm" | "addmm" | "bmm" | "linear-gelu",
               "dtype": "fp32" | "tf32" | "fp16" | "bf16", "benchmark": true | false,
               "shape": {...},            # below
               "outputs": bytes,          # of the tensors that the op returned, as asked for
               "kept": bytes,             # asked for by the op, alive after it, and no output: a workspace that stays
               "temporary": bytes,        # the most that was alive at once during the op, without outputs and kept
               "first_temporary": bytes,  # the same of the first call, in which cuDNN may try several algorithms
               "allocs": [bytes, ...],    # all that the op asked for, in order
               "error": null | "..."}]}   # with an error there are no figures

``shape`` of a convolution: ``batch``, ``channels``, ``out``, ``image`` (height = width), ``kernel``, ``stride``,
``padding``, ``groups``, ``channels_last``; of a product: ``batch``, ``m``, ``k``, ``n``. Bytes are those that were
requested, from the trace of PyTorch's caching allocator; on a simulated device, which has no trace, from its peaks.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import results
import torch
from measured.grid import Job, jobs
from measured.ops import prepared
from results import FAILED, NO_TIME, PASSED, Fact, Row

SCHEMA: Final = "ampmem.workspaces/1"
_EVERY: Final = 5.0
"""Seconds between two writings of the file."""
_MOST_ALLOCS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one call asked for, in bytes; ``allocs`` may be empty where there is no trace."""

    outputs: int
    kept: int
    temporary: int
    allocs: tuple[int, ...] = ()


def memory_of(trace: Sequence[dict[str, Any]], outputs: int) -> Memory:
    """From the allocator's trace of one call, which returned ``outputs`` bytes, and nothing else ran beside."""
    alive: dict[int, int] = {}
    now = most = 0
    allocs = []
    for entry in trace:
        address, size = int(entry.get("addr", 0)), int(entry.get("size", 0))
        if entry["action"] == "alloc":
            alive[address] = size
            now += size
            most = max(most, now)
            allocs.append(size)
        elif entry["action"] == "free_requested":
            now -= alive.pop(address, 0)  # what was there before the call is not the call's
    return Memory(
        outputs=outputs, kept=max(now - outputs, 0), temporary=most - now, allocs=tuple(allocs[:_MOST_ALLOCS])
    )


def traced(call: Callable[[], list[torch.Tensor]]) -> Memory:
    """By the trace of the caching allocator."""
    memory: Any = torch.cuda.memory
    torch.cuda.synchronize()
    memory._record_memory_history("all", context=None, max_entries=100_000, clear_history=True)
    try:
        made = call()
        torch.cuda.synchronize()
        trace = memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        memory._record_memory_history(None)
    return memory_of(trace, _bytes(made))


def by_peaks(call: Callable[[], list[torch.Tensor]]) -> Memory:
    """By the allocator's statistics, where there is no trace."""
    torch.cuda.reset_peak_memory_stats()
    before = _requested("current")
    made = call()
    now, most, outputs = _requested("current") - before, _requested("peak") - before, _bytes(made)
    return Memory(outputs=outputs, kept=max(now - outputs, 0), temporary=max(most - now, 0))


def _requested(which: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


Measure = Callable[[Callable[[], list[torch.Tensor]]], Memory]


def measure(job: Job, how: Measure) -> dict[str, Any]:
    """The row of ``job``; an error of the op, such as out of memory, is in the row."""
    row: dict[str, Any] = job.row()
    try:
        with prepared(job) as call:
            first = how(call)
            then = how(call)
    except RuntimeError as error:  # out of memory is one, too
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    kept = max(first.kept, then.kept)  # a workspace that stays is asked for in the first call only
    figures = asdict(then) | {"kept": kept, "first_temporary": first.temporary, "allocs": list(then.allocs)}
    return row | figures | {"error": None}


def machine() -> dict[str, Fact]:
    """What the figures depend on."""
    seen = torch.cuda.get_device_properties(0)
    return {
        "gpu": seen.name,
        "capability": [seen.major, seen.minor],
        "sm_count": seen.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
    }


class Table:
    """The file: what it has already, and what comes."""

    def __init__(self, path: Path, found: dict[str, Fact], earlier: Path | None = None) -> None:
        self._path = path
        self._machine = found
        self.rows: list[dict[str, Any]] = []
        self._written = monotonic()
        earlier = earlier or path
        if earlier.exists():
            data = json.loads(earlier.read_text(encoding="utf-8"))
            if data.get("schema") != SCHEMA or data.get("machine") != found:
                raise ValueError(f"{earlier} is of another machine or schema")
            self.rows = list(data["rows"])
        self.known = {_key(row) for row in self.rows}

    def has(self, job: Job) -> bool:
        """Whether it is measured already."""
        return _key(job.row()) in self.known

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, on the disk within seconds."""
        self.rows.append(row)
        self.known.add(_key(row))
        if monotonic() - self._written > _EVERY:
            self.write()

    def write(self) -> None:
        """The whole file anew."""
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        head = f'"schema": {json.dumps(SCHEMA)}, "machine": {json.dumps(self._machine)}'
        results.replace(self._path, f'{{{head}, "rows": [\n{lines}\n]}}\n')
        self._written = monotonic()


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in ("kind", "pass", "dtype", "benchmark", "shape")], sort_keys=True)


def run(table: Table, todo: Sequence[Job], how: Measure, ends: float, say: Callable[[str], None]) -> list[Row]:
    """Measure what the table lacks, until the time is over; a row of outcomes for each kind of call."""
    done: dict[str, list[int]] = {}
    for job in todo:
        counts = done.setdefault(job.group, [0, 0, 0])
        if table.has(job):
            counts[0] += 1
        elif monotonic() > ends:
            counts[2] += 1
        else:
            row = measure(job, how)
            table.add(row)
            counts[1 if row["error"] else 0] += 1
            largest = "" if row["error"] else f"{row['temporary']} B, kept {row['kept']} B"
            say(f"{job}: {row['error'] or largest}")
    table.write()
    return [
        Row(
            name=group,
            outcome=PASSED if measured else NO_TIME if left else FAILED,
            detail=f"{measured} measured, {failed} failed, {left} left",
        )
        for group, (measured, failed, left) in done.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--most", type=int, default=0, help="only the first so many of each kind")
    parser.add_argument("--go-on", type=Path, help="a file of an earlier run, whose rows are taken over")
    parser.add_argument("--quiet", action="store_true", help="no line for each call")
    options = parser.parse_args(arguments)
    ends = monotonic() + options.seconds
    todo = jobs(options.most)
    say = (lambda text: None) if options.quiet else (lambda text: print(text, flush=True))
    with _device(options.device):
        how = traced if options.device == "cuda" else by_peaks
        try:
            table = Table(options.out.absolute(), machine(), options.go_on)
        except ValueError as error:
            print(f"workspaces.py: {error}", file=sys.stderr)
            return 2
        rows = run(table, todo, how, ends, say)
    for row in rows:
        results.report(row)
        print(f"{row.name}: {row.outcome}: {row.detail}")
    return 0 if rows and results.verdict(rows) == "ok" else 1


def _device(name: str) -> AbstractContextManager[object]:
    """The GPU that is there, or a simulated one."""
    if name == "cuda":
        return nullcontext()
    from ampmem.allocator.gpus import find_gpu
    from ampmem.simulator.start import Simulation

    return _Simulated(Simulation(find_gpu("h200")))


class _Simulated(AbstractContextManager[object]):
    """A simulation that ends with its block."""

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation

    def __exit__(self, *_: object) -> None:
        self._simulation.end()


if __name__ == "__main__":
    sys.exit(main())
