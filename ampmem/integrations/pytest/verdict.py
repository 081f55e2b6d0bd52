"""What a test took, held against its limits and its baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from ampmem.analysis.budgets.budget import NONE_ALLOWED, PEAK
from ampmem.analysis.budgets.check import CheckResult, Limit, check
from ampmem.analysis.budgets.run import Run, run_of
from ampmem.analysis.difference.side import Side
from ampmem.analysis.summary import Summary
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.integrations.pytest.baselines import Baselines
from ampmem.integrations.pytest.limits import Limits
from ampmem.integrations.pytest.recorder import Recorder
from ampmem.reporters.text.check import render_check
from ampmem.reporters.text.layout import NARROWEST, WIDEST, Layout

if TYPE_CHECKING:
    from ampmem.api import Profile

WRITTEN, SAME, COMPARED = "written", "as it was", "compared"
"""What became of a block's baseline."""

_NO_BLOCK = (
    "no block was recorded: a limit on a test that takes the fixture ampmem holds for the blocks that this "
    "records; write `with ampmem.profile(model):` around the steps"
)


class Size(TypedDict):
    """Bytes of what ``key`` names, of growth for each step, and what they are held against; ``None`` where unknown."""

    key: str
    took: int | None
    limit: int | None
    before: int | None


class Row(TypedDict):
    """What came of one block, as xdist can send it from a worker. The peak is the first of ``sizes``."""

    test: str
    block: int
    sizes: list[Size]
    largest: str
    """The largest category at the peak."""
    baseline: str
    failed: bool
    """Whether the test failed by itself: then there is what it made until it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What came of one block; ``failure`` is what a failing test prints, and empty for a block that is well."""

    row: Row
    failure: str = ""


def judge(
    test: str, file: str, recorder: Recorder, baselines: Baselines | None, width: int, *, failed: bool = False
) -> list[Judgement]:
    """Each block that ``recorder`` has of the ``test`` in ``file``, in order; messages have so many columns.

    ``failed`` says that the test has failed by itself.
    """
    blocks, limits = recorder.blocks(), recorder.limits()
    if not blocks and (limits.budgets or baselines is not None):
        return [_nothing(_Block(test, file, 1, many=False, failed=failed), limits, f"memory: {_NO_BLOCK}")]
    layout = Layout(width=min(max(width, NARROWEST), WIDEST))
    return [
        _judge_block(_Block(test, file, number, many=len(blocks) > 1, failed=failed), block, limits, baselines, layout)
        for number, block in enumerate(blocks, start=1)
    ]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a test, from 1 on."""

    test: str
    file: str
    number: int
    many: bool
    failed: bool

    @property
    def label(self) -> str:
        """What messages call it: pytest names the test above them."""
        return f"memory of block {self.number}" if self.many else "memory"


def _judge_block(
    which: _Block, block: Profile, limits: Limits, baselines: Baselines | None, layout: Layout
) -> Judgement:
    held = bool(limits.budgets) or baselines is not None
    try:
        run = run_of(block.recording(), which.label)
        before, became = _baseline(which, run, baselines)
    except AmpmemError as error:
        if isinstance(error, NothingRecorded) and not held:
            return _nothing(which, limits, "")  # the block has said it, and nothing was promised
        return _nothing(which, limits, f"{which.label}: {error}")
    too_few = _too_few(run.summary, limits)
    allow = NONE_ALLOWED if baselines is None else baselines.allow
    try:
        result = check(run, limits.budgets, before, allow)
    except UsageError as error:  # it is of another kind of device
        return _nothing(which, limits, f"{which.label}: {error}")
    failure = "" if result.ok or not held else render_check(_of_test(result, which.file), layout)
    parts = [f"{which.label}: {too_few}" if too_few else "", failure]
    return Judgement(row=_row(which, run, result, before, became), failure="\n".join(part for part in parts if part))


def _baseline(which: _Block, run: Run, baselines: Baselines | None) -> tuple[Side | None, str]:
    """What the block is compared with, and what became of that."""
    if baselines is None:
        return None, ""
    if not baselines.update:
        return baselines.read(which.test, which.number), COMPARED
    written = baselines.write(which.test, which.number, run.side)
    return None, WRITTEN if written else SAME


def _too_few(summary: Summary, limits: Limits) -> str:
    made = sum(1 for step in summary.steps if step.finished)
    if made >= limits.steps:
        return ""
    steps = "1 step" if made == 1 else f"{made} steps"
    return f"growth takes {limits.steps} steps, and {steps} ended; train for more, or say steps={max(made, 2)}"


def _row(which: _Block, run: Run, result: CheckResult, before: Side | None, became: str) -> Row:
    peak, whole = run.summary.peak, run.summary.whole
    limits = [each for each in result.judged if each.limit_of is Limit.BUDGET]
    sizes = [Size(key=each.key, took=each.after, limit=each.limit, before=None) for each in limits]
    at_peak = next((size for size in sizes if size["key"] == PEAK), None)
    if at_peak is None:
        at_peak = Size(key=PEAK, took=whole.at_most, limit=None, before=None)
    else:
        sizes.remove(at_peak)
    at_peak["before"] = None if before is None else before.summary.whole.bytes
    largest = max(peak.categories, key=lambda key: peak.categories[key])
    return Row(
        test=which.test,
        block=which.number,
        sizes=[at_peak, *sizes],
        largest=str(largest),
        baseline=became,
        failed=which.failed,
    )


def _nothing(which: _Block, limits: Limits, failure: str) -> Judgement:
    sizes = [Size(key=budget.key, took=None, limit=budget.limit, before=None) for budget in limits.budgets]
    if not sizes:
        sizes = [Size(key=PEAK, took=None, limit=None, before=None)]
    row = Row(test=which.test, block=which.number, sizes=sizes, largest="", baseline="", failed=which.failed)
    return Judgement(row=row, failure=failure)


def _of_test(result: CheckResult, file: str) -> CheckResult:
    """``result`` with stacks that begin in the test's own ``file``: what pytest has called before is no news."""

    def cut(stack: tuple[str, ...]) -> tuple[str, ...]:
        return next((stack[i:] for i, frame in enumerate(stack) if frame.startswith(f"{file}:")), stack)

    return replace(
        result,
        broken=tuple(
            replace(
                broken,
                grew=tuple(replace(change, stack=cut(change.stack)) for change in broken.grew),
                moved=tuple(replace(change, stack=cut(change.stack)) for change in broken.moved),
                held=tuple(replace(group, stack=cut(group.stack)) for group in broken.held),
            )
            for broken in result.broken
        ),
    )
