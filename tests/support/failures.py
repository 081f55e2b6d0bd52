"""Recordings that end where memory ran out."""

from collections.abc import Sequence
from dataclasses import replace

from ampmem.allocator.blocks import SnapshotBlock, SnapshotSegment
from ampmem.allocator.oom import pack_segments
from ampmem.events import Fact, OomRecord, Phase, PrecisionRecord, Recording
from ampmem.failure import FailureKind, FailureRecord
from ampmem.vocabulary import SourceKind
from support.build import FP32, RUN, Story

OUT_OF_MEMORY = FailureRecord(kind=FailureKind.RAISED, error="torch.OutOfMemoryError", message="CUDA out of memory")
GRADIENTS = 40_000


def oom_at(time_ns: int, alive: Sequence[int], *, step: int = 0, **changes: object) -> OomRecord:
    """A failure with blocks of the sizes ``alive`` in one segment, and a free one of 100 bytes behind them."""
    blocks, address = [], 0
    for size in (*alive, 100):
        free = len(blocks) == len(alive)
        blocks.append(
            SnapshotBlock(address=address, size=size, requested=0 if free else size, allocated=not free, awaiting=False)
        )
        address += size
    segment = SnapshotSegment(
        address=0, size=address, stream=0, is_small=True, expandable=False, pool_id=(0, 0), blocks=tuple(blocks)
    )
    record = OomRecord(
        time_ns=time_ns,
        step=step,
        device=0,
        stream=0,
        pool="0,0",
        asked=5000,
        segment=8000,
        total=20_000,
        free=300,
        op="aten::mm",
        module="layers.1",
        stack="/v/site-packages/tool.py:1 run\ntrain.py:9 main\n/v/torch/nn/functional.py:3 linear",
        segments=pack_segments((segment,)),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def ended(
    story: Story, when: int, alive: Sequence[int], *, step: int = 0, precision: PrecisionRecord = FP32
) -> Recording:
    """The story, ended by the failure at ``when``."""
    story.end(loss=None)
    recording = story.recording(
        run=replace(RUN, source=SourceKind.CUDA, device_type="cuda", failure=OUT_OF_MEMORY),
        precision=precision,
        notes=(OUT_OF_MEMORY.note,),
    )
    last = replace(recording.steps[-1], finished=False)
    return replace(recording, steps=(*recording.steps[:-1], last), ooms=(oom_at(when, alive, step=step),))


def in_forward() -> Recording:
    """400 bytes of a parameter; forward keeps 700, of which 200 are saved, and has dropped 50 again."""
    story = Story(weight=100, name="layers.0.weight", begins=Phase.FORWARD)
    story.alloc(0x2000, 200, op="aten::mm", module="layers.0")
    story.fact(Fact.SAVED, 0x2000, "aten::mm")
    story.tensor(Fact.OUTPUT, 0x3000, 500, "aten::add", module="layers.0", op="aten::add", dtype="float32")
    story.scratch(0x4000, 50, op="aten::neg", module="layers.0")
    story.now += 10
    when = story.now
    story.free(0x2000, 0x3000)  # the exception unwinds
    return ended(story, when, (400, 200, 500))


def in_backward() -> Recording:
    """The gradient of one of two parameters is there, and 300 bytes that are to become something."""
    story = Story(weight=100, name="layers.0.weight")
    story.parameter(0x1800, "layers.1.weight", 10)
    story.begin(0, Phase.FORWARD)
    story.alloc(0x2000, 200)
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x5000, 40, "layers.1.weight")
    story.alloc(0x6000, 300)
    story.now += 10
    when = story.now
    story.enter(Phase.BETWEEN)
    return ended(story, when, (400, 40, 200, 40, 300))


def late_zero_grad() -> Recording:
    """Gradients that are the most of all are freed late in every forward, and memory runs out in the third."""
    story = Story(weight=100, name="layers.0.weight")
    for step in range(3):
        story.begin(step, Phase.FORWARD)
        story.alloc(0x2000 + step, 3000, op="aten::mm")
        story.fact(Fact.OUTPUT, 0x2000 + step, "aten::mm", "layers.0")
        if step == 2:
            break
        if step:
            story.free(0x5000, 0x2000)
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x5000, GRADIENTS, "layers.0.weight")
        story.end(Phase.OPTIMIZER)
    story.now += 10
    return ended(story, story.now, (400, 3000, 3000, GRADIENTS), step=2)
