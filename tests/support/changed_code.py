"""A small network in two versions of its code, as the recordings of a run of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.difference.difference import Difference, difference
from ampmem.analysis.difference.sides import side_of
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Fact, Phase, Recording
from support.build import FP32, RUN, Story

TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 Linear.forward"


@dataclass(frozen=True, kw_only=True)
class Code:
    """One version: ``line`` is where ``function`` of ``file`` makes each of ``layers`` of ``sizes`` bytes."""

    file: str = "/home/me/repo/net.py"
    line: int = 20
    function: str = "Net.forward"
    main: str = "main"
    sizes: Sequence[int] = (1000, 1000)
    layers: str = "layers"
    op: str = "aten::mm"
    saved_for: str = "MmBackward0"
    kept: int = 0
    batch: int = 8


def run_of(code: Code) -> Recording:
    """A run of ``code``: two steps, each of whose peaks is at the end of forward; ``kept`` bytes more stay in each."""
    story = Story()
    for i, _ in enumerate(code.sizes):
        story.parameter(0x1000 + i, f"{code.layers}.{i}.weight", 25 * (i + 1))
    folder = code.file.rpartition("/")[0]
    outer = f"{folder}/train.py:{code.line + 5} {code.main}"
    for step in range(2):
        story.begin(step, Phase.DATA)
        story.alloc(0x9000, code.batch)
        story.enter(Phase.FORWARD)
        for i, size in enumerate(code.sizes):
            stack = "\n".join((outer, f"{code.file}:{code.line + i} {code.function}", TORCH))
            story.alloc(0x2000 + i, size, op=code.op, module=f"{code.layers}.{i}", stack=stack)
            story.fact(Fact.SAVED, 0x2000 + i, code.saved_for, dtype="uint8", shape=f"[{size}]")
        if code.kept:
            story.alloc(0x8000 + step, code.kept, op="aten::add", module="(model)", stack=outer)
            story.fact(Fact.SAVED, 0x8000 + step, "AddBackward0")
        story.enter(Phase.BACKWARD)
        story.free(*(0x2000 + i for i in range(len(code.sizes))), 0x9000)
        story.end(Phase.OPTIMIZER)
    return story.recording(precision=FP32, run=RUN)


def changed(before: Code, after: Code, category: Category | None = None) -> Difference:
    """What differs between runs of two versions."""
    return difference(side_of(run_of(before), "before"), side_of(run_of(after), "after"), category=category)
