"""Reads the stacks of a trace: the op of each event, its phase and step, and what lived meanwhile."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise, takewhile
from typing import Final

from ampmem.allocator.snapshot import ALLOC, Frame, Span
from ampmem.events import Phase
from ampmem.importer.replay import ALIVE, BEFORE, Allocation, TracedBlocks


class CallSite(Enum):
    """The place of a stack in a training script; other code of a script has none."""

    DATA = Phase.DATA
    FORWARD = Phase.FORWARD
    BACKWARD = Phase.BACKWARD
    OPTIMIZER = Phase.OPTIMIZER
    BETWEEN = Phase.BETWEEN

    @property
    def phase(self) -> Phase:
        """The phase of stacks at this place."""
        phase: Phase = self.value
        return phase


class Purpose(Enum):
    """The purpose of memory, if the name of a C++ function shows it."""

    CAST = "a copy in low precision that autocast makes"
    PROMOTION = "a copy in full precision that autocast makes"
    WORKSPACE = "a workspace of a library"
    REDUCTION = "scratch of a reduction"
    GRADIENT = "a gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReading:
    """The information in one stack. ``text`` has its Python frames as ``file:line function``, outermost first.

    ``op`` is the torch op that allocated (``aten::bmm``), ``implementation`` that of the optimizer if it is one of
    torch's, ``optimizing`` whether the innermost Python code is an optimizer's, ``leaving_autocast`` whether an
    autocast region is being left, ``autocast`` whether code of autocast is on the stack (it may have been disabled),
    ``scaling`` whether a GradScaler called, ``known`` whether there is a stack at all, ``native`` whether it has C++
    frames, ``casting_back`` whether it is the backward of a cast. ``multiplies`` is the dtype in which cuBLAS
    multiplies matrices (``bfloat16``), if a name shows it.
    """

    place: CallSite | None
    purpose: Purpose | None
    op: str
    text: str
    zeroing: bool
    optimizing: bool
    leaving_autocast: bool
    autocast: bool
    scaling: bool
    multiplies: str
    casting_back: bool
    implementation: str
    known: bool
    native: bool


_PYTHON: Final = (".py", ">")
_MAX_LINES: Final = 64
_MAX_NAME: Final = 300
_MAX_OP: Final = 100

_MODULE_CALLS: Final = frozenset({"_call_impl", "_wrapped_call_impl"})
_PURPOSES: Final = (
    ("getNewWorkspace", Purpose.WORKSPACE),
    ("getCUDABlasLtWorkspace", Purpose.WORKSPACE),
    ("AccumulateGrad::", Purpose.GRADIENT),
    ("gpu_reduce_kernel", Purpose.REDUCTION),
)
_ASKS_FOR_A_WORKSPACE: Final = ("run_conv_plan", "run_fused_conv", "raw_cudnn_convolution", "gemm_and_bias")
"""Functions that allocate a workspace of cuDNN or cuBLASLt directly; tensors are allocated by an op."""
_CACHED_CAST: Final = "at::autocast::cached_cast"
_POLICY: Final = re.compile(r"\(at::autocast::CastPolicy\)([1-9])")
"""The policies of autocast except the first, for ops that run in low precision."""
_ENGINE: Final = "torch::autograd::Engine::"
_IMPLEMENTATIONS: Final = (("_multi_tensor_", "foreach"), ("_fused_", "fused"), ("_single_tensor_", "for-loop"))

_AUTOCAST: Final = "torch/amp/autocast_mode.py"
_CAST_BACKWARD: Final = "::ToCopyBackward"
_SCALER: Final = "/amp/grad_scaler.py"
_TYPES: Final = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
_PRODUCT: Final = re.compile(r"\bat::cuda::blas::\w*gemm\w*<(float|double|c10::BFloat16|c10::Half)\b")

_OP: Final = re.compile(r"\bat::_ops::(\w+)::(?:call|redispatch)")
# An overload is joined to its op by an underscore; these overloads are not part of a name.
_OVERLOAD: Final = re.compile(
    r"_(?:[A-Z]\w*|dim(?:_\w+)?|out|int|names|memory_format|source|self|dtype(?:_\w+)?|correction(?:_\w+)?|device|"
    r"other|default|start(?:_\w+)?|using_ints)$"
)
_MAKERS: Final = frozenset(
    {"empty", "empty_strided", "resize", "resize_", "empty_like", "new_empty", "new_empty_strided"}
)
"""Ops that only allocate for another op, which is the one to name."""


def read_stack(stack: tuple[Frame, ...]) -> StackReading:
    """Read a stack, innermost frame first."""
    names = [frame.name for frame in stack]
    python = [frame for frame in stack if frame.filename.endswith(_PYTHON)]
    purpose = _purpose(names)
    op = _op(names)
    if purpose is Purpose.REDUCTION:
        op = f"{op} (scratch)" if op else op
    return StackReading(
        place=_place(names, python),
        purpose=purpose,
        op=op,
        text="\n".join(reversed([_line(frame) for frame in python[:_MAX_LINES]])),
        zeroing=any(frame.name == "zero_grad" for frame in python),
        optimizing=bool(python) and "optim" in python[0].filename.lower(),
        leaving_autocast=bool(python) and python[0].name == "__exit__" and python[0].filename.endswith(_AUTOCAST),
        autocast=any(frame.filename.endswith(_AUTOCAST) for frame in python),
        scaling=any(frame.filename.endswith(_SCALER) for frame in python),
        multiplies=next((_TYPES[match[1]] for match in map(_PRODUCT.search, names) if match), ""),
        casting_back=any(_CAST_BACKWARD in name for name in names),
        implementation=next(
            (word for mark, word in _IMPLEMENTATIONS if any(frame.name.startswith(mark) for frame in python)), ""
        ),
        known=bool(stack),
        native=len(python) < len(stack),
    )


def _line(frame: Frame) -> str:
    return f"{frame.filename[-_MAX_NAME:]}:{frame.line} {frame.name[:_MAX_NAME]}"


def _purpose(names: list[str]) -> Purpose | None:
    own = takewhile(lambda name: _OP.search(name) is None, names)
    if any(mark in name for name in own for mark in _ASKS_FOR_A_WORKSPACE):
        return Purpose.WORKSPACE
    if any(_CACHED_CAST in name for name in names):
        return Purpose.PROMOTION if any(_POLICY.search(name) for name in names) else Purpose.CAST
    return next((purpose for mark, purpose in _PURPOSES if any(mark in name for name in names)), None)


def _op(names: list[str]) -> str:
    """The innermost op that does more than allocate; a cast by autocast counts as a copy, whatever op needs it."""
    found = ""
    for name in names:
        match = _OP.search(name)
        if match is None:
            continue
        op = _OVERLOAD.sub("", match[1][:_MAX_OP])
        if op not in _MAKERS:
            return f"aten::{op}"
        found = found or f"aten::{op}"
    return found


def _place(names: list[str], python: list[Frame]) -> CallSite | None:
    """The place of a stack: first the engine's, which runs on its own thread; then the outermost layers of a step."""
    if any(_ENGINE in name for name in names):
        return CallSite.BACKWARD
    if any(frame.name == "zero_grad" for frame in python):
        return CallSite.BETWEEN
    for applies, place in _PLACES:
        if any(applies(frame) for frame in python):
            return place
    return None


def _steps(frame: Frame) -> bool:
    if frame.filename.endswith("torch/optim/optimizer.py"):
        return frame.name in ("wrapper", "profile_hook_step", "_use_grad")
    return frame.name == "step" and "optim" in frame.filename.lower() and "lr_scheduler" not in frame.filename


def _goes_back(frame: Frame) -> bool:
    engine = frame.filename.endswith(("torch/_tensor.py", "torch/autograd/__init__.py"))
    return engine and frame.name in ("backward", "grad")


def _calls_module(frame: Frame) -> bool:
    return frame.name == "forward" or (
        frame.name in _MODULE_CALLS and frame.filename.endswith("torch/nn/modules/module.py")
    )


_PLACES: Final = (
    (_steps, CallSite.OPTIMIZER),
    (_goes_back, CallSite.BACKWARD),
    (_calls_module, CallSite.FORWARD),
    (lambda frame: "torch/utils/data/" in frame.filename, CallSite.DATA),
)


_STEP: Final = "Optimizer.step#"
_LONGEST_NAME: Final = 100
_AFTER: Final = {Phase.BACKWARD: Phase.BETWEEN, Phase.OPTIMIZER: Phase.BETWEEN, Phase.DATA: Phase.BETWEEN}
"""The phase of events without a place, by the place before; a loss is computed after forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From ``start_ns`` until the next stretch the script was in ``phase`` of ``step``."""

    start_ns: int
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step; the last one of a trace may have ended without an ``update``."""

    index: int
    start_ns: int
    end_ns: int
    update: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The phase and step of each event of the replay."""

    phase: tuple[Phase, ...]
    step: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    steps: tuple[StepSpan, ...]
    optimizer_names: tuple[str, ...]


def script_course(replay: TracedBlocks, readings: Sequence[StackReading], spans: Sequence[Span]) -> Course:
    """The phases and steps of the script during the trace."""
    updates = [span for span in spans if span.name.startswith(_STEP)]
    phases = _phases(replay, readings, updates)
    stretches = _with_updates(_stretches(replay, phases), updates, replay)
    start = replay.events[0].time_ns if replay.events else 0
    end = replay.events[-1].time_ns + 1 if replay.events else 1
    steps = _step_spans(stretches, start, end)
    ends = [step.end_ns for step in steps]
    return Course(
        phase=tuple(phases),
        # After the last step there is no step with that index.
        step=tuple(bisect_right(ends, event.time_ns) for event in replay.events),
        stretches=tuple(Stretch(start_ns=at, phase=phase, step=bisect_right(ends, at)) for at, phase in stretches),
        steps=steps,
        # AdamW from ``Optimizer.step#AdamW.step``.
        optimizer_names=tuple(
            dict.fromkeys(span.name.removeprefix(_STEP).removesuffix(".step")[:_LONGEST_NAME] for span in updates)
        ),
    )


def _phases(replay: TracedBlocks, readings: Sequence[StackReading], updates: Sequence[Span]) -> list[Phase]:
    """The phase of each event. Frees often have no stack, and then get the phase of the event before.

    The engine's thread has no Python frames: if other events have them, an alloc without any is on that thread.
    """
    traced = any(readings[event.stack].text for event in replay.events)
    now = Phase.BETWEEN
    found: list[Phase] = []
    pending = iter(updates)
    update = next(pending, None)
    for event in replay.events:
        reading = readings[event.stack]
        while update is not None and update.end_ns < event.time_ns:
            update = next(pending, None)
        if reading.place is CallSite.BACKWARD:
            now = Phase.BACKWARD
        elif update is not None and update.start_ns <= event.time_ns:
            now = Phase.OPTIMIZER
        elif reading.place is not None:
            now = reading.place.phase
        elif reading.known and (reading.text or not traced):
            now = _AFTER.get(now, now)
        elif event.action == ALLOC and traced:
            now = Phase.BACKWARD
        found.append(now)
    return found


def _stretches(replay: TracedBlocks, phases: Sequence[Phase]) -> list[tuple[int, Phase]]:
    stretches: list[tuple[int, Phase]] = []
    before = 0
    for event, phase in zip(replay.events, phases, strict=True):
        if not stretches or stretches[-1][1] != phase:
            # An update ends right after its last event, before any other free.
            updated = bool(stretches) and stretches[-1][1] == Phase.OPTIMIZER
            stretches.append((min(before + 1, event.time_ns) if updated else event.time_ns, phase))
        before = event.time_ns
    return stretches


def _with_updates(
    stretches: list[tuple[int, Phase]], updates: Sequence[Span], replay: TracedBlocks
) -> list[tuple[int, Phase]]:
    """Add updates that allocated nothing, so have no events, but whose times the profiler annotated."""
    if not replay.events:
        return stretches
    last = replay.events[-1].time_ns
    first = replay.events[0].time_ns
    for span in updates:
        if not first <= span.start_ns <= last or any(
            phase == Phase.OPTIMIZER and span.start_ns <= at <= span.end_ns for at, phase in stretches
        ):
            continue
        before = [phase for at, phase in stretches if at <= span.start_ns]
        inside = [(at, phase) for at, phase in stretches if span.start_ns < at <= span.end_ns]
        if not inside:
            after = _AFTER.get(before[-1], before[-1]) if before else Phase.BETWEEN
            stretches = sorted([*stretches, (span.start_ns, Phase.OPTIMIZER), (span.end_ns + 1, after)])
    return stretches


def _step_spans(stretches: Sequence[tuple[int, Phase]], start: int, end: int) -> tuple[StepSpan, ...]:
    """The steps: each ends with the last update before new work; work after the last update is one more step."""
    ends: list[int] = []
    updated = False
    for index, (_, phase) in enumerate(stretches):
        if phase in (Phase.FORWARD, Phase.DATA, Phase.BACKWARD):
            updated = False
        elif phase == Phase.OPTIMIZER:
            after = stretches[index + 1][0] if index + 1 < len(stretches) else end
            if updated:
                ends[-1] = after
            else:
                ends.append(after)
            updated = True
    bounds = [start, *ends]
    steps = [StepSpan(index, *span, True) for index, span in enumerate(pairwise(bounds))]
    working = (Phase.FORWARD, Phase.BACKWARD)
    if not steps or any(at >= bounds[-1] and phase in working for at, phase in stretches):
        steps.append(StepSpan(len(steps), bounds[-1], max(end, bounds[-1] + 1), False))
    return tuple(steps)


_WORK: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class BlockTrace:
    """The allocations of a trace, with the stack, phase and step of each birth and death: ``infer`` asks for them."""

    def __init__(self, replay: TracedBlocks, readings: Sequence[StackReading], course: Course) -> None:
        self.allocations = replay.allocations
        self.course = course
        self._replay = replay
        self._readings = readings
        self.native = any(readings[event.stack].native for event in replay.events if event.action == ALLOC)
        """Whether any stack of an alloc has C++ frames."""
        self.autocast = any(readings[event.stack].autocast for event in replay.events)
        """Whether autocast's own Python code is on any stack."""
        backward = [phase == Phase.BACKWARD for phase in course.phase]
        self._passes = list(accumulate(now != before for before, now in pairwise([False, *backward])))
        self.standing: dict[int, list[int]] = defaultdict(list)
        """Blocks from before the first forward that only an update frees, by size, in order of address."""
        first = next((at for at, phase in enumerate(course.phase) if phase in _WORK), len(course.phase))
        for index, allocation in enumerate(replay.allocations):
            if allocation.born < first and (allocation.died == ALIVE or self.replaced(allocation)):
                self.standing[allocation.bytes].append(index)

    def optimized(self) -> bool:
        """Whether an optimizer was seen: an update, or its own code that allocates or frees."""
        course = self.course
        seen = bool(course.optimizer_names) or any(step.update for step in course.steps)
        return seen or any(self._readings[event.stack].optimizing for event in self._replay.events)

    def born_in(self, phase: Phase) -> Iterator[tuple[int, Allocation]]:
        """The allocations of the trace made in ``phase``."""
        for index, allocation in enumerate(self.allocations):
            if allocation.born != BEFORE and self.course.phase[allocation.born] == phase:
                yield index, allocation

    def birth(self, allocation: Allocation) -> StackReading:
        """The stack that allocated ``allocation``."""
        return self._readings[self._replay.events[allocation.born].stack]

    def death(self, allocation: Allocation) -> StackReading:
        """The stack that freed ``allocation``."""
        return self._readings[self._replay.events[allocation.died].stack]

    def zeroed(self, allocation: Allocation) -> bool:
        """Whether ``zero_grad`` freed ``allocation``."""
        return allocation.died != ALIVE and self.death(allocation).zeroing

    def is_cached(self, index: int) -> bool:
        """Whether leaving autocast freed the block: autocast's cache holds only casts of whole, trained parameters."""
        allocation = self.allocations[index]
        return allocation.died != ALIVE and self.death(allocation).leaving_autocast

    def replaced(self, allocation: Allocation) -> bool:
        """Whether an update freed ``allocation``."""
        return allocation.died != ALIVE and self.course.phase[allocation.died] == Phase.OPTIMIZER

    def made_by_optimizer(self, allocation: Allocation) -> bool:
        """Whether an optimizer's own code allocated ``allocation``."""
        return allocation.born != BEFORE and self.birth(allocation).optimizing

    def step_of(self, index: int) -> int:
        """The step in which the block was allocated; -1 for before the trace."""
        born = self.allocations[index].born
        return -1 if born == BEFORE else self.course.step[born]

    def pass_of(self, index: int) -> int:
        """The pass in which the block was allocated: passes are the stretches with and without backward, in order."""
        return self._passes[self.allocations[index].born]

    def leaves(self, allocation: Allocation, phase: Phase) -> bool:
        """Whether an allocation made in ``phase`` is alive when the script leaves the phase."""
        if allocation.died == ALIVE:
            return True
        course = self.course
        return course.phase[allocation.died] != phase or course.step[allocation.died] != course.step[allocation.born]

    def outlives_backward(self, index: int) -> bool:
        """Whether an allocation made by forward is still alive after the following backward."""
        died = self.allocations[index].died
        return self._passes[-1 if died == ALIVE else died] >= self.pass_of(index) + 2

    def given_up_by_script(self, allocation: Allocation) -> bool:
        """Whether a block from before the trace stays, or is freed by neither backward nor update nor zero_grad."""
        if allocation.died == ALIVE:
            return True
        phase = self.course.phase[allocation.died]
        return not self.zeroed(allocation) and phase not in (Phase.BACKWARD, Phase.OPTIMIZER)

    def freed_by_first_backward(self) -> Iterator[int]:
        """Blocks from before the trace that the first backward frees: the ring buffer has lost their forward."""
        course = self.course
        first = next((stretch.step for stretch in course.stretches if stretch.phase == Phase.BACKWARD), None)
        for index, allocation in enumerate(self.allocations):
            if allocation.born != BEFORE or allocation.died == ALIVE:
                continue
            if course.phase[allocation.died] == Phase.BACKWARD and course.step[allocation.died] == first:
                yield index

    def most_at_once(self, blocks: Iterable[int]) -> dict[int, int]:
        """Maximum number of ``blocks`` of each size alive at one time."""
        allocations = [self.allocations[index] for index in blocks]
        changes = [(each.born, 1, each.bytes) for each in allocations]
        changes += [(each.died, -1, each.bytes) for each in allocations if each.died != ALIVE]
        alive: Counter[int] = Counter()
        most: dict[int, int] = {}
        for _, change, size in sorted(changes):
            alive[size] += change
            most[size] = max(most.get(size, 0), alive[size])
        return most

    def most_in_a_step(self, blocks: Iterable[int]) -> dict[int, int]:
        """Maximum number of ``blocks`` of each size made in one step."""
        counts = Counter((self.step_of(index), self.allocations[index].bytes) for index in blocks)
        most: dict[int, int] = {}
        for (_, size), count in counts.items():
            most[size] = max(most.get(size, 0), count)
        return most
