"""The recordings that hostile ones are made from: small, and with a row in every table between them."""

import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from support.build import RUN, add_plain_steps, as_batches, gpu_run, predicted, small_run

from ampmem.events import (
    AllocatorRecord,
    Fact,
    LayersRecord,
    OomRecord,
    OptimizerRecord,
    ParameterRecord,
    Phase,
    PrecisionRecord,
    Recording,
    TermsRecord,
)
from ampmem.failure import FailureKind, FailureRecord
from ampmem.recording import Description, RecordingWriter
from ampmem.recording.database import ROWS
from ampmem.recording.watched import Ending, Grown, HeldMemory, Row, WatchedHeader, Why
from ampmem.recording.watched_file import WatchedFile
from ampmem.vocabulary import Mark, Precision, SourceKind

AMP = PrecisionRecord(name=Precision.AMP, dtype="bfloat16", cache=True, scaler=True)
TERMS = TermsRecord(tensors=5000, workspaces={"cuBLAS": 512}, scratch={"aten::sort": 100}, rounding=24, cached=2000)
PREDICTION = predicted(
    0,
    outside=1 << 20,
    allocated=TERMS,
    reserved=TERMS,
    highest_allocated=9000,
    highest_reserved=12000,
    bounds={"cuDNN's workspaces": 400},
    unmodelled=("what sort allocates",),
    libraries={"NCCL's buffers": 100},
    libraries_at_most={"NCCL's buffers": 300},
)
ALLOCATOR = AllocatorRecord(
    variable="PYTORCH_ALLOC_CONF",
    settings="expandable_segments:True",
    expandable_segments=True,
    streams=1,
    private_pools=0,
    device=0,
    peaks=(20000,),
)
OPTIMIZERS = (
    OptimizerRecord(
        class_name="AdamW",
        implementation="foreach",
        bases=("Adam", "Optimizer"),
        settings={"lr": 0.1, "amsgrad": False, "momentum": 0, "fused": None, "name": "first"},
    ),
    OptimizerRecord(class_name="Adafactor", implementation="for-loop", bases=("Optimizer",)),
)
PARAMETERS = (
    ParameterRecord(
        name="layers.0.weight",
        elements=100,
        bytes=400,
        dtype="float32",
        trainable=True,
        shape=(10, 10),
        kind="Linear",
        optimizer=0,
    ),
    ParameterRecord(
        name="layers.1.weight",
        elements=50,
        bytes=200,
        dtype="float32",
        trainable=False,
        shape=(50,),
        optimizer=1,
        global_elements=97,
    ),
    ParameterRecord(
        name="tied.weight", elements=100, bytes=400, dtype="float32", trainable=True, shares="layers.0.weight"
    ),
)


def on_cpu() -> Recording:
    """Two steps on the CPU, and what else a CPU run writes."""
    story = small_run()
    story.fact(Fact.OPTIMIZER_STATE, 0x8000, "exp_avg of layers.0.weight")
    story.fact(Fact.HELD, 0x9000, "DynamicCache.layers[0].keys")
    recording = story.recording(precision=AMP, notes=("warning: a note", "another"))
    return replace(recording, parameters=PARAMETERS, optimizers=OPTIMIZERS, plain_step_ns=(100, 110))


def on_gpu() -> Recording:
    """Two steps on a GPU and a third in which memory runs out."""
    story = gpu_run()
    story.begin(2)
    story.enter(Phase.FORWARD)
    failed = story.alloc(0x8800, 300, op="aten::mm", module="layers.1", block=512)
    story.end(loss=None)
    failure = FailureRecord(kind=FailureKind.RAISED, message="CUDA out of memory", error="torch.OutOfMemoryError")
    run = replace(RUN, source=SourceKind.SIMULATED, device_type="cuda", device_name="a GPU", failure=failure)
    recording = story.recording(run=run, precision=AMP, notes=(failure.note,))
    oom = OomRecord(
        time_ns=failed + 1,
        step=2,
        device=0,
        stream=0,
        pool="0,0",
        asked=8192,
        segment=1 << 21,
        total=1 << 30,
        free=100,
        op="aten::mm",
        module="layers.1",
        stack="train.py:9 main",
        segments="[[32768,2048,0,1,0,[0,0],[[512,64,1],[1536,0,0]]],[65536,4096,0,0,1,[0,0],[[4096,4000,2]]]]",
    )
    layers = tuple(
        LayersRecord(
            step=step,
            mark=mark,
            requested=8600,
            allocated=9000,
            active=9000,
            reserved=20000,
            device_used=30000,
            process_used=25000,
        )
        for step in range(2)
        for mark in (Mark.AFTER_FORWARD, Mark.PEAK)
    )
    return replace(
        recording,
        steps=(*recording.steps[:-1], replace(recording.steps[-1], finished=False)),
        parameters=PARAMETERS,
        optimizers=OPTIMIZERS,
        ooms=(oom,),
        layers=layers,
        prediction=PREDICTION,
        allocator=ALLOCATOR,
    )


def write_whole(path: Path, recording: Recording) -> Path:
    """``recording`` as a file, as a run writes it, but without the numbers of rows.

    With them a row more or less would be all that is ever found wrong.
    """
    with closing(RecordingWriter(path, recording.run)) as writer:
        for number, batch in enumerate(as_batches(recording, max(1, len(recording.steps)))):
            writer.append(replace(batch, layers=recording.layers if number == 0 else ()))
        writer.describe(
            Description(
                precision=recording.precision,
                parameters=recording.parameters,
                optimizers=recording.optimizers,
                notes=recording.notes,
                allocator=recording.allocator,
                prediction=recording.prediction,
            )
        )
    if recording.plain_step_ns:
        add_plain_steps(path, recording.plain_step_ns)
    return _uncounted(path)


def _uncounted(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM meta WHERE key = ?", (ROWS,))
    return path


WATCHED = WatchedHeader(
    ampmem="0.1",
    torch="2.13.0",
    source="cuda",
    device="a GPU",
    script="train.py",
    arguments=("--batch-size", "8"),
    started_ns=1,
    every=500,
    limit=1 << 30,
    world_size=2,
    job="a job",
)
ENDING = Ending(
    step=40,
    time_ns=900,
    failure=FailureRecord(kind=FailureKind.RAISED, message="CUDA out of memory", error="torch.OutOfMemoryError"),
    out_of_memory=True,
    asked=1 << 29,
    free=1 << 20,
    total=1 << 30,
    reserved=1 << 28,
    phase="forward",
    batch="16x8 int64",
    line="train.py:9",
    held=(
        HeldMemory(what="parameters", bytes=400, count=2),
        HeldMemory(what="train.py:9", bytes=9000, count=3, line=True),
    ),
)


def watched_row(step: int) -> Row:
    """A step of a run whose memory grows."""
    alive = 100_000 + 1000 * step
    return Row(step, 10 * step, alive + 500, "backward", alive, 1 << 20, 1 << 28, 1, 2000, "8x8 int64", step < 2)


def write_watched(path: Path) -> Path:
    """A watched run that grew and ran out of memory, with one full recording, and with something in every table."""
    with tempfile.TemporaryDirectory() as folder, closing(WatchedFile(path, WATCHED)) as file:
        file.full(write_whole(Path(folder) / "full.ampmem", on_cpu()), Why.START, 0, 1)
        for step in range(40):
            file.row(watched_row(step))
        file.note("memory ran out in step 3, and the script continued")
        file.grown(Grown(step=30, steps=10, held=(HeldMemory(what="kept[*]", bytes=10_000, count=10),)))
        file.end(ENDING)
    return _uncounted(path)
