"""Results of checks for the tests of what is printed of them."""

from dataclasses import replace

from ampmem.analysis.budgets.budget import budgets_of
from ampmem.analysis.budgets.check import CheckResult, check_run
from ampmem.analysis.budgets.run import run_of
from ampmem.analysis.difference.sides import side_of
from ampmem.events import Fact, Phase, Recording
from support.build import Story

MIB = 1024**2


def run(
    *,
    saved: int = MIB,
    module: str = "encoder.0",
    file: str = "/repo/net.py",
    notes: tuple[str, ...] = (),
    kept: int = 0,
) -> Recording:
    """Two steps of a model in which one line saves so many bytes, and leaves so many behind."""
    story = Story()
    story.parameter(0x1000, "encoder.0.weight", MIB // 4)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(
            Fact.SAVED,
            0x10000000,
            saved,
            "aten::mm",
            module=module,
            op="aten::mm",
            stack=f"/repo/train.py:3 main\n{file}:7 Net.forward",
        )
        story.enter(Phase.BACKWARD)
        story.free(0x10000000)
        story.enter(Phase.BETWEEN)
        if kept:
            story.alloc(0x90000000 + step * 2 * kept, kept, op="aten::clone", stack=f"{file}:9 Net.forward")
        story.end()
    return story.recording(notes=notes)


def result(
    after: Recording, before: Recording | None = None, *, summary: bool = False, label: str = "run", **limits: str | int
) -> CheckResult:
    """``after`` against its limits, and against ``before``, of which a ``summary`` may be all that there is."""
    side = None if before is None else side_of(before, "main.ampmem")
    if side is not None and summary:
        side = replace(side, groups=None)
    return check_run(run_of(after, label), budgets_of(limits), side)
