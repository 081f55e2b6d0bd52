"""The last request that failed for lack of memory: its op, the live memory, and why cached memory did not serve it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from ampmem.allocator.blocks import SnapshotSegment
from ampmem.allocator.gpus import GPUS
from ampmem.allocator.oom import Candidates, Reason, candidates, explanation, largest_size, unpack_segments
from ampmem.allocator.settings import GIB, MIB
from ampmem.analysis.jsonable import NOT_IN_JSON, AtLeast, Positive, like
from ampmem.analysis.largest import LargeAllocation
from ampmem.analysis.largest import largest as largest_allocations
from ampmem.analysis.levers import Lever, levers_of
from ampmem.analysis.parameters import own_bytes, own_elements
from ampmem.analysis.static_model.verdict import state_to_come
from ampmem.analysis.timeline.categories import CATEGORIES, Breakdown, Category
from ampmem.analysis.timeline.lifetimes import Mask, Tensors
from ampmem.analysis.timeline.marks import phase_at, unfinished_step
from ampmem.analysis.timeline.timeline import ByPhase, MemoryHistory, PhaseName
from ampmem.errors import RecordingError
from ampmem.events import NO_STEP, Fact, OomRecord, Phase, Recording, RunRecord
from ampmem.vocabulary import OF_INFERENCE, AutocastDtype, Device, Precision, SourceKind

_REASONS = {
    Reason.OVERSIZE: "raise max_split_size_mb in PYTORCH_ALLOC_CONF, or leave it out",
    Reason.WRONG_STREAM: "allocate on one stream, or call torch.cuda.empty_cache() before the other one needs memory",
    Reason.WRONG_POOL: "drop CUDA graphs and memory pools that are no longer used, then call torch.cuda.empty_cache()",
    Reason.LIMITED: "allow the process more memory with torch.cuda.set_per_process_memory_fraction",
}
_MOST = 1 << 62
_ERROR = "OutOfMemoryError"
_EXPANDABLE = "set PYTORCH_ALLOC_CONF=expandable_segments:True"
_LARGEST = {
    Category.ACTIVATIONS: "make the batch smaller, or recompute activations with torch.utils.checkpoint",
    Category.CAST_COPIES: "run what needs no gradient under torch.no_grad(), and use a weight once per forward",
    Category.OPTIMIZER_STATE: "use an optimizer with a smaller state, or spread the state over several GPUs",
    Category.KEPT_PREDICTIONS: "keep results on the CPU (.cpu()), or compute the metric for each batch",
    Category.GRADIENTS: "set gradients to None before the forward (zero_grad(set_to_none=True))",
}
_OTHERWISE = "make the batch or the model smaller, or spread the model over several GPUs"
_IN_SETUP = "make the model smaller, or use a larger GPU"
"""The advice during setup, where there is no batch yet."""
_STATES_OF_ADAM = 2
_STEPS = 3
"""The default number of recorded steps."""
_STEPS_OF_ADVISE = 2
"""The number of steps that ``ampmem advise`` records."""
_BATCH_SIZE = re.compile(r"-b|(--?)?([\w-]+[._-])?(batch[_-]?size|bs|bsz)|--?batch", re.IGNORECASE)
"""The names that scripts give to the argument for the batch size."""
_WITHOUT_BATCH = (Phase.SETUP, Phase.OPTIMIZER)
"""Phases whose memory a smaller batch hardly changes."""
_PHASES = {
    "data": "data loading",
    "optimizer": "the optimizer's update",
    "evaluation": "an evaluation",
    "between": "the script outside of its steps",
}
_NOT_OF_A_STEP = ("data", "evaluation")
_MODEL = "make the model smaller, or spread it over several GPUs"
_FOREACH = "let the optimizer update one parameter at a time (foreach=False)"
_OR_FUSED = f"{_FOREACH}, or use fused=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFree:
    """The largest free block that the request could use, of other streams, and of other pools, in bytes; 0 for none."""

    usable: int
    other_streams: int
    other_pools: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change that may help, by an unknown amount; ``finding`` is the code of the finding that may know the amount."""

    change: str
    finding: str | None = None

    @property
    def for_any_script(self) -> bool:
        """Whether it is advice for any script, which nothing in this run suggests more than in others."""
        return self.change in (_LARGEST[Category.ACTIVATIONS], _OTHERWISE, _IN_SETUP, _MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCome:
    """The bytes that the step would still have allocated after the failed request, which may be a part of them.

    ``gradients`` are those of the ``parameters`` without one. ``optimizer_state`` is what ``optimizers``, named by
    class, still lack; ``None`` if no optimizer is known, or its state is unknown.
    """

    gradients: int
    parameters: int
    optimizer_state: int | None
    optimizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The last request that failed for lack of memory, and the allocator's state then; sizes in bytes.

    ``step`` is ``None`` outside of every step. ``ended_the_run`` is false if the script went on. ``failures`` counts
    the failed requests of the recording. ``asked`` is the needed block, ``segment`` the request to the device, and
    ``lacking`` how much more the device would have had to give; 0 if it refused although it had enough. ``device`` is
    the device's index, and ``recorded`` is false if another device was recorded: then ``alive`` has all of its tensors
    as ``other``. ``allowed`` is the process's limit; ``None`` without one. ``op``, ``module`` and ``stack`` (outermost
    call first) say who asked, where that is known. ``alive`` are the tensors, and ``largest`` the largest of them.
    ``reserved`` is what the allocator held, ``cached`` the part of it in free blocks. ``outside`` is the device's
    memory held by others; ``None`` if the device's size is unknown, as in a snapshot: then ``device_total`` is ``None``
    too. ``later`` says that the request came after the recorded steps: then only allocations that were alive at their
    end have a category in ``alive``, and ``largest`` are among these. ``parameters_there`` counts the parameter
    elements on the device, ``None`` if unknown: fewer than all while the model is being moved. ``to_come`` is ``None``
    if unknown. ``options`` are the ``changes``, with the findings that know more, and ``levers`` changes of
    the whole run with the most bytes that each saves at the failure. ``next_commands`` are shell commands to run next:
    changes that make the script fit, the largest batch size that fits (if the command line has one), and the whole step
    on a larger simulated GPU. ``residual_bytes`` is the difference between ``alive`` and the allocator's own blocks.
    """

    step: int | None
    phase: PhaseName
    ended_the_run: bool
    failures: Positive
    asked: int
    segment: int
    lacking: int = 0
    device: int = 0
    recorded: bool = True
    device_total: int | None
    device_free: int
    allowed: int | None = None
    op: str | None
    module: str | None
    stack: tuple[str, ...]
    alive: Breakdown
    temporaries_by_phase: ByPhase
    to_come: ToCome | None = None
    largest: tuple[LargeAllocation, ...] = ()
    reserved: int
    cached: int
    outside: int | None
    largest_free: LargestFree
    reason: Reason
    explanation: str
    changes: Annotated[tuple[str, ...], AtLeast(1)]
    options: tuple[Option, ...] = field(metadata=NOT_IN_JSON)
    levers: tuple[Lever, ...] = ()
    next_commands: tuple[str, ...] = ()
    residual_bytes: int
    later: bool = False
    parameters_there: int | None = None

    @property
    def where(self) -> str:
        """Step and phase in words, to follow the word "in"."""
        if self.later:
            return "the run after the recorded steps"
        phase = _PHASES.get(self.phase, self.phase)
        if self.step is None or self.phase == Phase.SETUP.name.lower():
            return phase
        if self.phase == Phase.BETWEEN.name.lower():
            return f"step {self.step}, outside of forward, backward and update"
        return f"{phase} {'in' if self.phase in _NOT_OF_A_STEP else 'of'} step {self.step}"

    @property
    def left(self) -> int:
        """Bytes that the device could give, or this process could take if that was less."""
        return self.device_free if self.allowed is None else min(self.device_free, max(self.allowed - self.reserved, 0))

    @property
    def by_the_limit(self) -> bool:
        """Whether the process's limit, not the device's memory, made the request fail."""
        return self.left < min(self.device_free, self.segment)


def failed_request(history: MemoryHistory, tensors: Tensors) -> FailedRequest | None:
    """The last failed request, which is the one that ends a script; ``None`` if no request failed.

    ``tensors`` are those of ``history``. Raises :class:`RecordingError` when the allocator's state cannot be read.
    """
    recording = history.recording
    if not recording.ooms:
        return None
    oom = recording.ooms[-1]
    segments, free = _state(oom)
    position = failure_position(history)
    blocks = [block for segment in segments for block in segment.blocks]
    reserved = sum(segment.size for segment in segments)
    requested = sum(block.requested for block in blocks if block.allocated)
    recorded = recording.allocator is None or recording.allocator.device == oom.device
    still = None
    if oom.later is not None:  # what was alive at the end of the recording may have been freed since
        still = history.lifetimes.alive_at(position) & np.isin(history.lifetimes.address, oom.later)
    if still is None and recorded:
        alive = history.timeline.breakdown(position)
    else:
        nothing = np.zeros(len(history.lifetimes), dtype=np.bool_)
        alive = _by_category(history, nothing if still is None else still, requested)
    limit, total = oom.limit, oom.total
    left = None if limit is None else max(limit - reserved, 0)
    reason = free.reason(oom.asked, oom.segment, oom.free, left)
    phase = phase_at(recording.phases, oom.time_ns)
    cached = sum(block.size for block in blocks if not block.allocated and not block.awaiting)
    during = recorded and still is None
    temporaries = history.timeline.temporaries_by_phase(position if during else 0)
    largest_free = LargestFree(
        usable=largest_size(free.usable),
        other_streams=largest_size(free.other_stream),
        other_pools=largest_size(free.other_pool),
    )
    expandable = any(segment.expandable for segment in segments)
    # A snapshot does not say whose each gradient is, so the missing ones are unknown.
    coming = _to_come(history, position, phase) if during and total is not None else None
    there = _parameters_there(history, position) if during else None
    has_all_state = coming is not None and coming.optimizer_state == 0
    updating = phase is Phase.OPTIMIZER and (temporaries["optimizer"] > 0 or has_all_state)
    options = (
        *_against(reason, expandable=expandable),
        *_against_the_largest(recording, alive, phase, updating=updating),
    )
    last = unfinished_step(recording)
    found = like(
        FailedRequest,
        oom,
        step=None if last is None and oom.step == NO_STEP else oom.step if last is None else last.index,
        phase=phase.name.lower(),
        ended_the_run=_ended_the_run(recording, oom),
        failures=len(recording.ooms),
        lacking=max(oom.segment - (oom.free if left is None else min(oom.free, left)), 0),
        recorded=recorded,
        device_total=total,
        device_free=oom.free,
        allowed=limit,
        op=oom.op or None,
        module=oom.module or None,
        stack=tuple(line for line in oom.stack.split("\n") if line),
        alive=alive,
        temporaries_by_phase=temporaries,
        to_come=coming,
        largest=largest_allocations(history, tensors, position, among=still) if recorded else (),
        reserved=reserved,
        cached=cached,
        outside=None if total is None or limit == oom.total else max(total - oom.free - reserved, 0),
        largest_free=largest_free,
        reason=reason,
        explanation=explanation(reason, oom.asked, cached),
        changes=tuple(option.change for option in options),
        options=options,
        levers=levers_of(history, tensors, position) if during and recording.run.step_on not in OF_INFERENCE else (),
        residual_bytes=abs(sum(alive.values()) - requested),
        later=oom.later is not None,
        parameters_there=there,
    )
    return replace(found, next_commands=_commands(recording, found, oom, phase)) if recorded else found


def failure_position(history: MemoryHistory) -> int:
    """The position at which the last request failed, in a recording with a failed request."""
    return history.timeline.position(history.recording.ooms[-1].time_ns)


def _by_category(history: MemoryHistory, known: Mask, size: int) -> Breakdown:
    """``size`` bytes by category: the allocations in ``known`` in their categories, and the rest as ``other``."""
    sizes = history.lifetimes.bytes
    found = {category: int(sizes[known & history.classes.of(category)].sum()) for category in CATEGORIES}
    return {**found, Category.OTHER: found[Category.OTHER] + max(size - sum(found.values()), 0)}


def _parameters_there(history: MemoryHistory, position: int) -> int:
    """The elements of the parameters with memory at ``position``."""
    facts = history.facts
    there = _names_of_rows(
        history, (facts.fact == Fact.PARAMETER) & history.lifetimes.alive_at(position)[facts.allocation]
    )
    return sum(own_elements(record) for record in history.parameters if record.name in there)


def _to_come(history: MemoryHistory, position: int, phase: Phase) -> ToCome | None:
    """The gradients and the optimizer state that the trained parameters still lack."""
    recording, facts = history.recording, history.facts
    optimizers = (*recording.optimizers, *recording.waiting)
    runs = (recording.phases.phase == Phase.FORWARD) | (recording.phases.phase == Phase.BACKWARD)
    trained = [record for record in recording.parameters if record.trainable]
    if not trained or not (optimizers or runs.any()) or recording.run.step_on in OF_INFERENCE:
        return None
    of_gradients = facts.fact == Fact.GRADIENT
    there = _names_of_rows(history, of_gradients & history.lifetimes.alive_at(position)[facts.allocation])
    backwards = [(step, marks.after_backward) for step, marks in zip(recording.steps, history.marks, strict=True)]
    if any(after is not None for step, after in backwards if step.finished):
        # A parameter without a gradient in a whole step never gets one.
        ever = _names_of_rows(history, of_gradients)
        trained = [record for record in trained if record.name in ever]
    oom = recording.ooms[-1]
    last = next((after for step, after in backwards if step.index == oom.step), None)
    over = phase is Phase.OPTIMIZER or (last is not None and last <= oom.time_ns)
    without = [] if over else [record for record in trained if record.name not in there]
    updated = [record for record in trained if not over or record.name in there]
    return ToCome(
        gradients=sum(map(own_bytes, without)),
        parameters=len(without),
        optimizer_state=state_to_come(history, position, {record.name for record in updated}),
        optimizers=tuple(dict.fromkeys(record.class_name for record in optimizers)),
    )


def _names_of_rows(history: MemoryHistory, rows: Mask) -> set[str]:
    """The names in these ``rows`` of the facts."""
    return {history.recording.texts[name] for name in np.unique(history.facts.name[rows]).tolist()}


def _ended_the_run(recording: Recording, oom: OomRecord) -> bool:
    failure = recording.run.failure
    if oom.later is None or failure is None:
        return unfinished_step(recording) is not None
    return "out of memory" in failure.message or failure.error.endswith(_ERROR)


def _state(oom: OomRecord) -> tuple[tuple[SnapshotSegment, ...], Candidates]:
    """The allocator's segments and their free blocks."""
    try:
        segments = unpack_segments(oom.segments)
        first, second = map(int, oom.pool.split(","))
        sizes = [segment.size for segment in segments]
        sizes += [size for segment in segments for block in segment.blocks for size in (block.size, block.requested)]
        if min(sizes, default=0) < 0 or sum(sizes) > _MOST:
            raise ValueError("invalid block size")
    except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise RecordingError(f"the recording is damaged: its out-of-memory state cannot be read ({error})") from error
    return segments, candidates(segments, oom.asked, oom.stream, (first, second))


def _against(reason: Reason, *, expandable: bool) -> Iterator[Option]:
    """The changes that may help, by the ``reason`` why free blocks could not serve the request."""
    if reason in _REASONS:
        yield Option(change=_REASONS[reason])
    elif reason is Reason.FRAGMENTED and not expandable:
        yield Option(change=_EXPANDABLE)


def _against_the_largest(recording: Recording, alive: Breakdown, phase: Phase, *, updating: bool) -> Iterator[Option]:
    """The changes that may make the largest category smaller; ``updating`` says that an update makes temporaries."""
    foreach = [record for record in (*recording.optimizers, *recording.waiting) if record.implementation == "foreach"]
    if updating and foreach:
        change = _OR_FUSED if any(record.takes_fused for record in foreach) else _FOREACH
        yield Option(change=change, finding="foreach-temporaries")
    most = max(alive, key=lambda category: alive[category])
    otherwise = _IN_SETUP if most is Category.PARAMETERS and phase is Phase.SETUP else _OTHERWISE
    if phase in (Phase.FORWARD, Phase.BACKWARD) and most is not Category.ACTIVATIONS and alive[Category.ACTIVATIONS]:
        yield Option(change=_LARGEST[Category.ACTIVATIONS])
        otherwise = _MODEL
    finding = "gradients-through-forward" if most is Category.GRADIENTS else None
    yield Option(change=_LARGEST.get(most, otherwise), finding=finding)


def _commands(recording: Recording, found: FailedRequest, oom: OomRecord, phase: Phase) -> tuple[str, ...]:
    """The commands to run next; empty without a command line, as in a notebook's cell."""
    run, total = recording.run, found.device_total
    script = _script(run)
    if total is None or script is None:
        return ()
    precision, shared = _shared_options(recording)
    mine, lines = gpu_called(run.device_name, run.source, total), []
    if phase is not Phase.SETUP and not found.later:
        least_steps = ["--steps", str(oom.step + 1)] if oom.step >= _STEPS_OF_ADVISE else []
        lines.append(advise_command(recording, mine, *least_steps) or "")
    varied = batch_varied(run.arguments)
    if varied is not None and phase not in _WITHOUT_BATCH and not found.later:
        precisions = ["--precision", str(recording.precision.name if recording.precision.forced else Precision.AS_IS)]
        lines.append(shlex.join(["ampmem", "fit", "--gpu", mine, *precisions, *shared, *script, *varied]))
    steps = ["--steps", str(oom.step + 1)] if oom.step >= _STEPS else []
    steps += ["--run-to-end"] if found.later else []
    least = _least_needed(recording, found, total)
    # A larger GPU does not help where the process's limit was reached: the script must raise it.
    at_the_limit = mine if least <= total else _larger(least)
    gpu = at_the_limit if found.by_the_limit else _larger(max(2 * total, least))
    larger = ["ampmem", "profile", "--device", str(Device.SIMULATED), "--gpu", gpu]
    lines.append(shlex.join([*larger, *precision, *shared, *steps, *script, *run.arguments]))
    return tuple(lines)


def advise_command(recording: Recording, gpu: str | None, *options: str) -> str | None:
    """The command that proves changes for the recorded script on ``gpu``, by default the recording's.

    ``None`` if no command line started the script, or if no simulated GPU is like the recorded one.
    """
    gpu = gpu or _known_gpu(recording.run.device_name, recording.run.source)
    rest = None if gpu is None else rest_of_command(recording, "--gpu", gpu, *options)
    return rest and f"ampmem advise {rest}"


def rest_of_command(recording: Recording, *options: str) -> str | None:
    """What follows the name of a command that runs the recorded script; ``None`` if no command line started it."""
    script, (precision, shared) = _script(recording.run), _shared_options(recording)
    return None if script is None else shlex.join([*options, *precision, *shared, *script, *recording.run.arguments])


def _script(run: RunRecord) -> list[str] | None:
    """The script as a command line names it; ``None`` if no command line started it."""
    script = run.script.split(" ", 1) if run.script.startswith("-m ") else [run.script]
    return None if len(script) == 1 and not script[0].endswith(".py") else script


def _shared_options(recording: Recording) -> tuple[list[str], list[str]]:
    """The recording's options that other commands take too: the precision, and the rest."""
    run, precision = recording.run, recording.precision
    dtype = {"bfloat16": AutocastDtype.BF16, "float16": AutocastDtype.FP16}.get(precision.dtype or "")
    shared = [word for each in run.assume for word in ("--assume", each)]
    shared += ["--dtype", str(dtype)] if precision.forced and dtype is not None else []
    if run.world_size > 1:
        shared += ["--world-size", str(run.world_size), "--rank", str(run.rank)]
    if run.step_on:
        shared += ["--step-on", run.step_on]
    return ["--precision", str(precision.name)] if precision.forced else [], shared


def gpu_called(name: str, source: str, total: int) -> str:
    """The value of ``--gpu`` for this device: its known name, its name in the command, else its memory."""
    return _known_gpu(name, source) or f"{total // MIB}MiB"


def _known_gpu(name: str, source: str) -> str | None:
    known = next((key for key, gpu in GPUS.items() if gpu.name == name), None)
    return known or (name if source == SourceKind.SIMULATED else None)


def _least_needed(recording: Recording, found: FailedRequest, total: int) -> int:
    """The least memory in bytes for the failed request, and then for the gradients and the first update.

    An unknown optimizer counts as Adam with its temporaries.
    """
    there = total - found.device_free + found.segment
    if found.later:
        return there
    to_move = max(sum(map(own_bytes, recording.parameters)) - found.alive[Category.PARAMETERS], 0)
    coming, trained = found.to_come, [record for record in recording.parameters if record.trainable]
    if recording.run.step_on in OF_INFERENCE:
        return there + to_move
    whole = sum(map(own_bytes, trained))
    if coming is None:
        return there + to_move + whole * (1 + _STATES_OF_ADAM + 1)
    state = whole * (_STATES_OF_ADAM + 1) if coming.optimizer_state is None else coming.optimizer_state
    return there + to_move + coming.gradients + state


def _larger(least: int) -> str:
    """The smallest GPU that ``--gpu`` knows with ``least`` bytes, else that much memory."""
    enough = {key: gpu.total_memory for key, gpu in GPUS.items() if gpu.total_memory >= least}
    return min(enough, key=lambda key: enough[key], default=f"{-(-least // GIB)}GiB")


def batch_varied(arguments: Sequence[str]) -> list[str] | None:
    """``arguments`` with the batch size varied from 1 to the one that failed; ``None`` if there is no such argument."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        rest = i + 1
        if not equals and rest < len(arguments):
            value, rest = arguments[rest], rest + 1
        if _BATCH_SIZE.fullmatch(name) and value.isdecimal() and int(value) > 0:
            spec = f"{name}{equals or ' '}1:{int(value)}"
            return [*arguments[:i], *arguments[rest:], "--vary", spec]
    return None
