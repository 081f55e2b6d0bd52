"""Records the blocks of a test, checks them against limits and a baseline, and reports on all tests.

This module is separate from the plugin, which pytest loads in every run; it is imported once a test is about memory.
"""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ampmem import api
from ampmem.analysis.budgets.budget import NONE_ALLOWED, PEAK, Allowance, parse_allowance
from ampmem.analysis.budgets.check import CheckResult, Limit, check_run
from ampmem.analysis.budgets.run import JudgedRun, is_same, require_replaceable, run_of
from ampmem.analysis.difference.sides import Side, read_side
from ampmem.analysis.summary import Summary
from ampmem.block import ENDS_LATER
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.integrations.pytest.limits import NO_LIMITS, Limits
from ampmem.output import write_text
from ampmem.reporters.text.check import render_check
from ampmem.reporters.text.layout import NARROWEST, WIDEST, Layout, number, table, words
from ampmem.reporters.text.plain_text import ABSENT, or_absent, signed
from ampmem.units import counted, format_peak

if TYPE_CHECKING:
    from ampmem.api import Profile
    from ampmem.recorder.models.live import Module, Optimizer

_LEFT_OPEN = (
    "a block of the fixture ampmem was still open after its test: something holds it, such as a generator that did "
    "not finish. ampmem has closed it for the following tests; close it in the test"
)


class Recorder:
    """The fixture ``ampmem``: records blocks of the test as :func:`ampmem.profile` does; otherwise like the module.

    A test that takes the fixture and has ``import ampmem`` above it works with either. A call is a block too: ``with
    ampmem(model) as prof``. The options in the test's marks apply to each block, unless the block has its own.
    """

    def __init__(self, limits: Limits = NO_LIMITS) -> None:
        self._limits = limits
        self._blocks: list[api.Profile] = []

    def profile(self, model: Module | None = None, optimizer: Optimizer | None = None, **options: Any) -> api.Profile:
        """Record a block of the test, for the limits of the test, its baseline and the report.

        It takes the arguments of :func:`ampmem.profile`.
        """
        how = self._limits.how
        if "device" in options:
            how = {name: value for name, value in how.items() if name == "step_on"}
        block = api.profile(model, optimizer, **{**how, **options})
        self._blocks.append(block)
        return block

    __call__ = profile

    def __getattr__(self, name: str) -> object:
        """The attributes of the module ``ampmem``."""
        return getattr(sys.modules["ampmem"], name)

    def whole_test(self) -> AbstractContextManager[None]:
        """Record the running test as a whole. Raises :class:`UsageError` as a block does."""
        block = self.profile()
        block.__enter__()
        return _until_the_end(block)

    def blocks(self) -> tuple[api.Profile, ...]:
        """The recorded blocks, in order."""
        return tuple(block for block in self._blocks if block.path.exists())

    def limits(self) -> Limits:
        """The limits in the marks of the test."""
        return self._limits

    def forget(self) -> None:
        """Drop the recordings; open blocks must still be left."""
        self._blocks = [block for block in self._blocks if block.is_open]

    def leave_open(self) -> str:
        """Leave open blocks, whoever holds them; returns the problem in words, or an empty text without one."""
        left = [block for block in self._blocks if block.is_open]
        said: list[str] = []
        for block in left:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                block.__exit__(None, None, None)
            said += [str(warning.message).removeprefix("ampmem: ") for warning in caught]
        self._blocks.clear()
        if not left:
            return ""
        if ENDS_LATER in said:
            return f"a block of the fixture ampmem is still open after its test, and cannot be ended here: {ENDS_LATER}"
        return _LEFT_OPEN


@contextmanager
def _until_the_end(block: api.Profile) -> Iterator[None]:
    """Leave ``block`` silently even if nothing was recorded: its check says so."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ampmem: ", RuntimeWarning)
            block.__exit__(None if failure is None else type(failure), failure, None)


_SAFE = re.compile(r"[A-Za-z0-9_.]+")
_LONGEST = 100
"""Characters of a file's name before the part that makes it unique."""


class Baselines:
    """The baselines in ``folder`` (``named`` by the user): one file for each recorded block of a test.

    ``allow`` is the allowed increase over the baseline; with ``update`` the files are written, and nothing is compared.
    Raises :class:`UsageError` for an ``allow`` that is neither a share nor a size, and for a missing folder to compare
    with.
    """

    def __init__(self, folder: Path, *, named: Path, allow: str, update: bool) -> None:
        self._folder = folder
        self.named = named
        self.allow: Allowance = parse_allowance(allow)
        self.update = update
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--ampmem-baseline {named}: it is not a directory")
        if not update and not folder.is_dir():
            raise UsageError(f"--ampmem-baseline {named}: no such directory; --ampmem-update creates it")

    def read(self, test: str, block: int) -> Side:
        """The baseline of a test's block.

        Raises :class:`UsageError` if it is missing, and :class:`~ampmem.errors.RecordingError` for another kind of
        file.
        """
        path = self._folder / file_of(test, block)
        if not path.is_file():
            raise UsageError(f"baseline not found: {self.named / file_of(test, block)}; --ampmem-update writes it")
        return replace(read_side(path), label=str(self.named / file_of(test, block)))

    def write(self, test: str, block: int, side: Side) -> bool:
        """Make ``side`` the baseline of the block; returns whether the file changed: not if nothing compared has.

        The largest allocations and the findings are left out: they are for reading only, and have paths of this
        machine. Raises :class:`UsageError` if another kind of file has the name, or it cannot be written.
        """
        with suppress(AmpmemError):  # there is no baseline yet, or it cannot be read
            if is_same(self.read(test, block), side):
                return False
        path = self._folder / file_of(test, block)
        require_replaceable(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {self.named / file_of(test, block)}: {error}") from None
        write_text(path, replace(side.summary, top=(), findings=()).to_json() + "\n", force=True)
        return True


def file_of(test: str, block: int) -> Path:
    """The file for a block, counted from 1: ``tests/test_a/TestB.test_c.json`` for ``tests/test_a.py::TestB::test_c``.

    A name with other characters than letters, digits, dots and underscores, such as a parametrized test's, ends with a
    part that no other test has.
    """
    module, *names = test.split("::")
    folders = [part.replace("..", "__") for part in Path(module).with_suffix("").parts if part != "/"]
    name = ".".join(names)
    if not _SAFE.fullmatch(name) or len(name) > _LONGEST or name.startswith("."):
        told_apart = hashlib.sha256(test.encode()).hexdigest()[:8]
        name = f"{re.sub('[^A-Za-z0-9_.]+', '-', name)[:_LONGEST].strip('.-')}-{told_apart}"
    return Path(*folders, f"{name}.json" if block == 1 else f"{name}-block{block}.json")


WRITTEN, SAME, COMPARED = "written", "as it was", "compared"
"""The result for a block's baseline: written, not written because nothing changed, or compared with."""

_NO_BLOCK = (
    "no block was recorded: in a test with the fixture ampmem the limit is for the blocks that the fixture records; "
    "write `with ampmem.profile(model):` around the steps"
)


class Size(TypedDict):
    """The bytes of a budget's ``key`` (per step for growth), its limit, and the baseline's; ``None`` if unknown."""

    key: str
    took: int | None
    limit: int | None
    before: int | None


class BlockRow(TypedDict):
    """The result of one block, which xdist can send from a worker. The peak is the first of ``sizes``."""

    test: str
    block: int
    sizes: list[Size]
    largest: str
    """The largest category at the peak."""
    baseline: str
    failed: bool
    """Whether the test failed by itself: then the block has what it recorded until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judgement of one block; ``failure`` is the output of a failing test, empty if the block is fine."""

    row: BlockRow
    failure: str = ""


def judge_blocks(
    test: str, file: str, recorder: Recorder, baselines: Baselines | None, width: int, *, failed: bool = False
) -> list[Judgement]:
    """The judgement of each block of ``recorder``, for the ``test`` in ``file``; messages have ``width`` columns.

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
    """A block of a test, counted from 1."""

    test: str
    file: str
    number: int
    many: bool
    failed: bool

    @property
    def label(self) -> str:
        """The block's name in messages, above which pytest names the test."""
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
            return _nothing(which, limits, "")  # the block said so already, and no limit was set
        return _nothing(which, limits, f"{which.label}: {error}")
    too_few = _too_few(run.summary, limits)
    allow = NONE_ALLOWED if baselines is None else baselines.allow
    try:
        result = check_run(run, limits.budgets, before, allow)
    except UsageError as error:  # it is from another kind of device
        return _nothing(which, limits, f"{which.label}: {error}")
    failure = "" if result.ok or not held else render_check(_of_test(result, which.file), layout)
    parts = [f"{which.label}: {too_few}" if too_few else "", failure]
    return Judgement(row=_row(which, run, result, before, became), failure="\n".join(part for part in parts if part))


def _baseline(which: _Block, run: JudgedRun, baselines: Baselines | None) -> tuple[Side | None, str]:
    """The block's baseline to compare with, if any, and one of the words :data:`WRITTEN` to :data:`COMPARED`."""
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
    ended = counted(made, "step")
    return f"growth needs {limits.steps} steps, and {ended} finished; train longer, or give steps={max(made, 2)}"


def _row(which: _Block, run: JudgedRun, result: CheckResult, before: Side | None, became: str) -> BlockRow:
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
    return BlockRow(
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
    row = BlockRow(test=which.test, block=which.number, sizes=sizes, largest="", baseline="", failed=which.failed)
    return Judgement(row=row, failure=failure)


def _of_test(result: CheckResult, file: str) -> CheckResult:
    """``result`` with stacks that begin in the test's own ``file``, without pytest's calls before it."""

    def cut(records: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(each, stack=own(each.stack)) for each in records)

    def own(stack: tuple[str, ...]) -> tuple[str, ...]:
        return next((stack[i:] for i, frame in enumerate(stack) if frame.startswith(f"{file}:")), stack)

    limits = (replace(each, grew=cut(each.grew), moved=cut(each.moved), held=cut(each.held)) for each in result.broken)
    return replace(result, broken=tuple(limits))


NO_TESTS = (
    "no test was recorded: mark one with @pytest.mark.ampmem(peak='2 GiB'), or use the fixture ampmem in it and "
    "record a block"
)


def lines(rows: Sequence[BlockRow], baselines: Baselines | None, width: int, *, all_tests: bool) -> Iterator[str]:
    """The table if ``all_tests`` are listed, and a line about the baseline if there is one."""
    if not rows:
        yield NO_TESTS
        return
    if all_tests:
        yield from _table(rows, Layout(width=min(max(width, NARROWEST), WIDEST))).split("\n")
    if baselines is not None:
        yield _of_baselines(rows, baselines)


def _table(rows: Sequence[BlockRow], layout: Layout) -> str:
    compared = any(row["sizes"][0]["before"] is not None for row in rows)
    columns = [
        words("test", least=20),
        words("what", least=8),
        number("took"),
        number("limit"),
        *([number("since the\nbaseline", rank=1)] if compared else []),
        words("largest\nat the peak", rank=2),
    ]
    ordered = sorted(rows, key=lambda row: -(row["sizes"][0]["took"] or 0))
    return table(columns, [cells for row in ordered for cells in _lines_of(row, compared=compared)], layout)


def _lines_of(row: BlockRow, *, compared: bool) -> Iterator[list[str]]:
    said = [f"block {row['block']}"] if row["block"] > 1 else []
    said += ["failed by itself"] if row["failed"] else []
    name = f"{row['test']} ({', '.join(said)})" if said else row["test"]
    for i, size in enumerate(row["sizes"]):
        took, before = size["took"], size["before"]
        change = [ABSENT if took is None or before is None else signed(took - before)] if compared else []
        first = (name, row["largest"] or ABSENT) if i == 0 else ("", "")
        sizes = [or_absent(each, format_peak) for each in (took, size["limit"])]
        yield [first[0], size["key"], *sizes, *change, first[1]]


def _of_baselines(rows: Sequence[BlockRow], baselines: Baselines) -> str:
    became = Counter(row["baseline"] for row in rows)
    named = baselines.named
    if baselines.update:
        return f"{named}: {became[WRITTEN]} written, {became[SAME]} as they were"
    return f"{named}: {became[COMPARED]} compared"
