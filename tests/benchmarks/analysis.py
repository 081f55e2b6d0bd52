"""How long reading and summarising a recording of a million events takes, and how much memory.

Run it: ``python tests/benchmarks/analysis.py``. It fails above 5 seconds or 1 GiB.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ampmem.analysis.summary import summarize
from ampmem.events import (
    Action,
    Column,
    EventColumns,
    Fact,
    FactColumns,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PhaseColumns,
    PrecisionRecord,
    RunRecord,
    StepRecord,
)
from ampmem.recording import Batch, Description, RecordingWriter, read
from ampmem.vocabulary import SourceKind

EVENTS = 1_000_000
FACTS = 200_000
STEPS = 3
PARAMETERS = 200
SLOTS = 20_000
STEP_NS = 1_000_000_000
SECONDS = 5.0
MEMORY_KIB = 1 << 20

PHASE_SHARES = (
    (Phase.DATA, 0.0),
    (Phase.FORWARD, 0.05),
    (Phase.BACKWARD, 0.4),
    (Phase.OPTIMIZER, 0.8),
    (Phase.BETWEEN, 0.99),
)


def _column(values: object) -> Column:
    return np.ascontiguousarray(values, dtype=np.int64)


def _events(random: np.random.Generator) -> EventColumns:
    """Addresses are used again and again: each of the slots alternates between alloc and free."""
    slot = random.integers(0, SLOTS, EVENTS)
    order = np.argsort(slot, kind="stable")
    starts = np.searchsorted(slot[order], slot[order])
    turn = np.empty(EVENTS, dtype=np.int64)
    turn[order] = np.arange(EVENTS) - starts
    birth = turn % 2 == 0
    size = 256 * (1 + (slot * 7919 + turn // 2 * 104729) % 4096)
    time_ns = np.sort(random.integers(0, STEPS * STEP_NS, EVENTS))
    borders = [share * STEP_NS for _, share in PHASE_SHARES]
    phases = np.array([int(phase) for phase, _ in PHASE_SHARES])
    phase = phases[np.searchsorted(borders, time_ns % STEP_NS, side="right") - 1]
    running = np.cumsum(np.where(birth, size, -size))
    return EventColumns(
        time_ns=_column(time_ns),
        step=_column(time_ns // STEP_NS),
        phase=_column(phase),
        action=_column(np.where(birth, Action.ALLOC, Action.FREE)),
        address=_column(0x7F0000000000 + slot * 4096),
        bytes=_column(size),
        block_bytes=_column(size),
        stream=_column(np.zeros(EVENTS)),
        op=_column(np.where(birth, 401 + slot % 40, 0)),
        module=_column(np.where(birth, 201 + slot % 200, 0)),
        stack=_column(np.where(birth, 441 + slot % 60, 0)),
        allocated=_column(running),
    )


def _facts(random: np.random.Generator, events: EventColumns) -> FactColumns:
    births = np.flatnonzero(events.action == Action.ALLOC)
    about = np.sort(random.choice(births, FACTS))
    kinds = [Fact.OUTPUT] * 10 + [Fact.SAVED] * 6 + [Fact.CAST_COPY, Fact.PARAMETER, Fact.GRADIENT]
    return FactColumns(
        time_ns=events.time_ns[about],
        address=events.address[about],
        fact=random.choice(_column(kinds), FACTS),
        name=_column(1 + about % PARAMETERS),
        module=_column(201 + about % 200),
        dtype=_column(np.zeros(FACTS)),
        shape=_column(np.zeros(FACTS)),
    )


def _phases() -> PhaseColumns:
    rows = [
        (step * STEP_NS + int(share * STEP_NS), step, phase) for step in range(STEPS) for phase, share in PHASE_SHARES
    ]
    time_ns, step, phase = zip(*rows, strict=True)
    return PhaseColumns(time_ns=_column(time_ns), step=_column(step), phase=_column(phase))


def _part(columns: EventColumns | FactColumns | PhaseColumns, step: int) -> dict[str, Column]:
    mine = columns.time_ns // STEP_NS == step
    return {name: getattr(columns, name)[mine] for name in columns.names()}


def make(path: Path) -> None:
    """Write the recording, one batch per step, as a run does."""
    random = np.random.default_rng(0)
    events = _events(random)
    facts = _facts(random, events)
    phases = _phases()
    run = RunRecord(
        ampmem="0.1.0",
        torch="2.13.0",
        python="3.11",
        source=SourceKind.CUDA,
        device_type="cuda",
        device_name="a device",
        rank=0,
        world_size=1,
        script="train.py",
        arguments=(),
    )
    names = [f"blocks.{index // 4}.part{index % 4}.weight" for index in range(PARAMETERS)]
    modules = [name.rpartition(".")[0] for name in names]
    texts = names + modules + [f"aten::op{index}" for index in range(40)]
    texts += ["\n".join(f"/home/user/train/file{depth}.py:{index} call" for depth in range(12)) for index in range(60)]
    writer = RecordingWriter(path, run)
    writer.describe(
        Description(
            precision=PrecisionRecord(name="amp", dtype="bfloat16", cache=True, scaler=False),
            parameters=[
                ParameterRecord(name=name, elements=1000, bytes=4000, dtype="float32", trainable=True) for name in names
            ],
            optimizers=[OptimizerRecord(class_name="AdamW", implementation="foreach")],
            notes=[],
        )
    )
    for step in range(STEPS):
        writer.append(
            Batch(
                texts=texts if step == 0 else [],
                events=EventColumns(**_part(events, step)),
                facts=FactColumns(**_part(facts, step)),
                phases=PhaseColumns(**_part(phases, step)),
                step=StepRecord(
                    index=step,
                    start_ns=step * STEP_NS,
                    end_ns=(step + 1) * STEP_NS,
                    skipped_update=False,
                    loss=1.0,
                    loss_scale=None,
                ),
            )
        )
    writer.close()


def measure(path: Path) -> bool:
    """Read and summarise once, print the figures, and say whether they are good enough."""
    began = time.perf_counter()
    recording = read(path)
    was_read = time.perf_counter()
    after_reading = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary = summarize(recording)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if summary.conservation.residual_bytes != 0:
        raise AssertionError("the synthetic recording does not add up")
    print(f"reading      {was_read - began:6.2f} s   peak RSS {after_reading >> 10:5d} MiB")
    print(f"summarising  {done - was_read:6.2f} s   peak RSS {peak >> 10:5d} MiB")
    return done - began < SECONDS and peak < MEMORY_KIB


def main() -> None:
    """Make the recording here and measure in a fresh process, which has no memory of the making."""
    if len(sys.argv) == 2:
        sys.exit(0 if measure(Path(sys.argv[1])) else 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.ampmem"
        make(path)
        sys.exit(subprocess.run([sys.executable, __file__, str(path)], check=False).returncode)


if __name__ == "__main__":
    main()
