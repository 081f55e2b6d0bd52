"""Which forced changes to run a script with, and what the runs say (``ampmem.advise/1``).

Everything here is said of runs that were made, on a simulated GPU or a real device. No peak is computed from another;
only what a change costs on a simulated GPU, and how it is written in code, follows from other records of the runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from ampmem.analysis.analyse import analyse
from ampmem.analysis.fit import Memory
from ampmem.analysis.jsonable import Json, OneOf, Positive, Signed, plain, schema_of
from ampmem.analysis.layers import outside_in, process_outside_in
from ampmem.analysis.summary import summary_of
from ampmem.events import OptimizerRecord, ParameterRecord, Recording
from ampmem.results import Deviation
from ampmem.units import format_bytes, format_duration
from ampmem.version import __version__
from ampmem.vocabulary import AUTOCAST_ARMS, NOTHING_FORCED, Device, Forced, SourceKind


class Change(StrEnum):
    """A kind of change that can be allowed."""

    CHECKPOINT = "checkpoint"
    OFFLOAD = "offload"
    FOREACH = "foreach"
    FUSED = "fused"
    ALLOCATOR = "allocator"
    PRECISION = "precision"
    BATCH = "batch"
    BUCKET_VIEW = "bucket-view"
    RESHARD = "reshard"
    PREFETCH = "prefetch"
    POLICY = "policy"


EXPANDABLE = "expandable_segments:True"
"""The setting of the allocator that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The modules of one structure that hang below ``prefix``, by their numbers there."""

    prefix: str
    numbers: tuple[int, ...]

    def first(self, count: int) -> tuple[str, ...]:
        """The names of the first ``count``."""
        return tuple(f"{self.prefix}.{number}".removeprefix(".") for number in self.numbers[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the recording of the script as it is says of it, as far as it came."""

    blocks: Blocks | None
    optimizers: tuple[str, ...]
    updated: int
    """How many parameters are trained."""
    trained_bytes: int = 0
    batch: int | None = None
    """How many samples a DataLoader puts into a batch; ``None`` where no DataLoader was seen to make the last one."""
    no_precision: str | None = None
    """Why autocast in bfloat16 is not tried; ``None`` where it is."""
    device: Device = Device.SIMULATED
    """What the runs are made on."""
    device_name: str = ""
    replicated: bool = False
    """Whether it trains on several ranks, each with all of the parameters."""
    sharded: bool = False
    """Whether it trains on several ranks, each with a part of some parameters."""
    ranks: tuple[int, ...] = ()
    """The ranks that changes are run as; empty where the script runs in one process."""
    stages: tuple[tuple[str, ...], ...] = ()
    """The names of the blocks that each rank has, where they differ, as stages of a pipeline do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with changes. ``memory`` is ``None`` where it ran out, or where ``failure`` says why there was no run.

    ``flops`` are those of the last step, of which ``recomputed_flops`` ran in backward once more, and ``moved_bytes``
    are what it has copied between the GPU and the CPU; 0 where not known. ``step_ns`` is how long a step takes without
    recording, on a real device. ``rank`` is whose peaks these are, where there are several ranks.
    """

    memory: Memory | None
    failure: str | None = None
    rank: int | None = None
    flops: int = 0
    recomputed_flops: int = 0
    moved_bytes: int = 0
    step_ns: int | None = None


Trials = Mapping[Forced, Trial]
"""The runs so far, by their changes; the first is of the script as it is."""


def script_of(recording: Recording) -> Script:
    """What can be changed in the script that was recorded."""
    several = recording.run.world_size > 1
    sharded = any(parameter.global_elements is not None for parameter in recording.parameters)
    return Script(
        blocks=_blocks(recording.parameters),
        optimizers=tuple(dict.fromkeys(_class_names(recording.optimizers))),
        updated=sum(parameter.trainable for parameter in recording.parameters),
        trained_bytes=sum(parameter.bytes for parameter in recording.parameters if parameter.trainable),
        batch=next((step.batch_size for step in reversed(recording.steps) if step.batch_loaded), None),
        no_precision=_no_precision(recording),
        device=_DEVICES.get(recording.run.source, Device.SIMULATED),
        device_name=recording.run.device_name,
        replicated=several and not sharded,
        sharded=several and sharded,
    )


_DEVICES = {SourceKind.CUDA: Device.CUDA, SourceKind.CPU: Device.CPU}


def measured_memory(recording: Recording) -> Memory | None:
    """The peaks of a run on a real device, ``None`` for one that ran out of memory; what has no layers reserves none.

    What the device has in use at most is the peak of reserved memory, and what is outside of the allocator: of this
    process where the driver says so, else of all. Raises :class:`~ampmem.errors.RecordingError` and
    :class:`~ampmem.errors.NothingRecorded`.
    """
    if recording.ooms:
        return None
    analysis = analyse(recording)
    allocated = summary_of(analysis).whole.bytes
    reserved = allocated if analysis.layers is None else int(analysis.layers.level.max())
    steps = [step.index for step in recording.steps]
    own = [size for step in steps if (size := process_outside_in(recording, step)) is not None]
    every = [size for step in steps if (size := outside_in(recording, step)) is not None]
    return Memory(allocated=allocated, reserved=reserved, used=reserved + max(own or every, default=0))


def step_time(recording: Recording) -> int | None:
    """How long a step takes without recording: the median of those after the first, which makes more than others."""
    times = sorted(recording.plain_step_ns[1:] or recording.plain_step_ns)
    return times[len(times) // 2] if times else None


def how_bad(trial: Trial) -> tuple[int, ...]:
    """Orders what ranks have of a run: the worst failed, or ran out of memory, or has the most in use on its device."""
    if trial.memory is None:
        return (2 + (trial.failure is not None),)
    return (not trial.memory.surely, trial.memory.most, trial.memory.allocated)


def different_ranks(found: Iterable[tuple[Trial, Script | None]]) -> tuple[int, ...]:
    """Of ranks whose script as it is has equal peaks, parameters and costs the first one: changes are run as these."""
    first: dict[tuple[Trial, Script | None], int] = {}
    for trial, script in found:
        first.setdefault((replace(trial, rank=None), script), trial.rank or 0)
    return tuple(first.values())


def blocks_of_ranks(blocks: Iterable[Blocks | None]) -> Blocks | None:
    """The blocks of all ranks: a stage of a pipeline has some of them."""
    known = [each for each in blocks if each is not None]
    if len({each.prefix for each in known}) != 1:
        return known[0] if known else None
    numbers = sorted({number for each in known for number in each.numbers})
    return Blocks(prefix=known[0].prefix, numbers=tuple(numbers))


def _no_precision(recording: Recording) -> str | None:
    if recording.arm.forced:
        return f"every run has the precision {recording.arm.name}"
    if recording.arm.name in AUTOCAST_ARMS:
        return f"the script uses autocast already, to {recording.arm.dtype}"
    others = {parameter.dtype for parameter in recording.parameters} - {"float32"}
    return f"the script's parameters are {', '.join(sorted(others))}, not float32" if others else None


def refusal(forced: Forced, script: Script) -> str | None:
    """Why ``forced`` is not run, as far as the run of the script as it is says; ``None`` where it is."""
    if script.device is Device.CPU:
        for changes, why in (
            (forced.allocator, "it sets CUDA's caching allocator, which the CPU does not have"),
            (forced.offload, "what forward saves for backward is in the CPU's memory already"),
            (forced.foreach is False, "torch's optimizers use foreach on a CPU only where the script says so"),
        ):
            if changes:
                return why
    if (forced.bfloat16 or forced.policy) and script.no_precision is not None:
        return script.no_precision
    if forced.batch_size == 0:
        return "no DataLoader was seen to make the script's batches"
    if forced.batch_size is not None and script.batch == 1:
        return "a batch has one sample"
    return None


def _class_names(optimizers: Sequence[OptimizerRecord]) -> Iterator[str]:
    return (optimizer.class_name for optimizer in optimizers)


def _blocks(parameters: Sequence[ParameterRecord]) -> Blocks | None:
    """The numbered modules that have parameters of the same names and shapes and, of all such, the most bytes.

    A module with no other inside is not a block: it saves as much as it would recompute.
    """
    inside: dict[str, dict[int, dict[str, ParameterRecord]]] = {}
    for record in parameters:
        parts = record.name.split(".")
        for i, part in enumerate(parts[:-2]):
            if part.isdecimal():
                rest = ".".join(parts[i + 1 :])
                inside.setdefault(".".join(parts[:i]), {}).setdefault(int(part), {})[rest] = record
                break
    found: list[tuple[int, Blocks]] = []
    for prefix, modules in inside.items():
        alike: dict[frozenset[tuple[str, tuple[int, ...]]], list[int]] = {}
        for number, held in sorted(modules.items()):
            alike.setdefault(frozenset((rest, each.shape) for rest, each in held.items()), []).append(number)
        for numbers in alike.values():
            if len(numbers) > 1:
                size = sum(each.bytes for number in numbers for each in modules[number].values())
                found.append((size, Blocks(prefix=prefix, numbers=tuple(numbers))))
    return max(found, key=lambda each: each[0])[1] if found else None


def meets(trial: Trial, budget: int | None) -> bool:
    """Whether the run surely fits on the GPU and, where there is a ``budget``, takes no more of it than that."""
    memory = trial.memory
    return memory is not None and memory.surely and (budget is None or memory.most <= budget)


def next_forced(trials: Trials, script: Script, allowed: frozenset[Change], budget: int | None) -> Forced | None:
    """The changes to run next; ``None`` when the search is over.

    First each change alone, then what lowers more than one part of the peak, then the fewest blocks that are enough.
    """
    singles = _singles(script, allowed)
    for forced in singles.values():
        if forced not in trials:
            return forced
    wanted = budget is not None or not meets(trials[NOTHING_FORCED], None)
    if wanted and meets(trials[NOTHING_FORCED], budget):
        return None
    blocks = script.blocks
    whole = singles.get(Change.CHECKPOINT)
    if blocks is None or whole is None or trials[whole].failure is not None:
        blocks = None
    for base, last in _bases(trials, singles) if wanted else ((NOTHING_FORCED, None), (_update(trials), None)):
        if last is not None and meets(trials[last], budget):
            return None  # it is enough alone, where nothing is that comes before it
        forced = base if blocks is None or whole is None else replace(base, checkpoint=whole.checkpoint)
        if forced not in trials:
            return forced
        if wanted and meets(trials[forced], budget):
            return None if blocks is None else _between(trials, blocks, base, budget)
    half = None if wanted or blocks is None else Forced(checkpoint=blocks.first(len(blocks.numbers) // 2))
    return None if half in trials else half


def due(trials: Trials, script: Script, allowed: frozenset[Change], budget: int | None) -> list[Forced]:
    """The changes to run now, any of them at the same time; none when the search is over."""
    missing = [forced for forced in _singles(script, allowed).values() if forced not in trials]
    following = next_forced(trials, script, allowed, budget)
    return missing or ([] if following is None else [following])


def most_left(trials: Trials, script: Script, allowed: frozenset[Change], budget: int | None) -> int:
    """How many runs are left at most: all of them, if none that is to come is enough."""
    made = dict(trials)
    while (forced := next_forced(made, script, allowed, budget)) is not None:
        made[forced] = Trial(memory=None, failure=refusal(forced, script))
    if len(made) == len(trials):
        return 0
    found = any(meets(trial, budget) for trial in trials.values())
    blocks = 0 if found or script.blocks is None or Change.CHECKPOINT not in allowed else len(script.blocks.numbers)
    return len(made) - len(trials) + max(blocks - 1, 0).bit_length()


def _singles(script: Script, allowed: frozenset[Change]) -> dict[Change, Forced]:
    """Each change alone, in the order in which they are tried."""
    found = {Change.FUSED: Forced(fused=True), Change.FOREACH: Forced(foreach=False)}
    if script.blocks is not None:
        found[Change.CHECKPOINT] = Forced(checkpoint=script.blocks.first(len(script.blocks.numbers)))
    found[Change.OFFLOAD] = Forced(offload=True)
    if script.replicated:
        found[Change.BUCKET_VIEW] = Forced(bucket_view=True)
    if script.sharded:
        found[Change.RESHARD] = Forced(reshard=True)
        found[Change.PREFETCH] = Forced(no_prefetch=True)
        found[Change.POLICY] = Forced(policy=True)
    found[Change.ALLOCATOR] = Forced(allocator=EXPANDABLE)
    found[Change.PRECISION] = Forced(bfloat16=True)
    found[Change.BATCH] = Forced(batch_size=0 if script.batch is None else max(script.batch // 2, 1))
    return {change: forced for change, forced in found.items() if change in allowed}


def _bases(trials: Trials, singles: Mapping[Change, Forced]) -> Iterator[tuple[Forced, Forced | None]]:
    """What blocks are checkpointed with in a combination, each with one change more than the one before.

    What takes a lot of time comes late, and what may change the results last, each with that change alone.
    """
    yield NOTHING_FORCED, None
    base = _update(trials)
    if base != NOTHING_FORCED:
        yield base, None
    for change in _OF_RANKS:
        single = singles.get(change)
        if single is None or trials[single].failure is not None:
            continue
        # What is kept after forward is there already: only with resharding is something gathered ahead.
        if _helps(trials, single) or (single.no_prefetch and base.reshard):
            base = replace(base, **{name: getattr(single, name) for name in single.kinds()})
            yield base, None
    setting = singles.get(Change.ALLOCATOR)
    if setting is not None and _helps(trials, setting):
        base = replace(base, allocator=setting.allocator)
        yield base, None
    offload = singles.get(Change.OFFLOAD)
    if offload is not None and trials[offload].failure is None:
        base = replace(base, offload=True)
        yield base, offload
    policy = singles.get(Change.POLICY)
    if policy is not None and trials[policy].failure is None:
        base = replace(base, policy=True)
        yield base, policy
    precision = singles.get(Change.PRECISION)
    if precision is not None and trials[precision].failure is None and not base.policy:
        base = replace(base, bfloat16=True)
        yield base, precision
    batch = singles.get(Change.BATCH)
    if batch is not None and trials[batch].failure is None:
        size = batch.batch_size or 0
        while size:
            yield replace(base, batch_size=size), batch
            size //= 2


_OF_RANKS = (Change.BUCKET_VIEW, Change.RESHARD, Change.PREFETCH)
"""Changes of how training is spread over ranks that leave the results as they are: the cheapest first."""


def _helps(trials: Trials, forced: Forced) -> bool:
    """Whether the device has less in use with ``forced``, or may have: the script as it is ran out of memory."""
    before, after = trials[NOTHING_FORCED].memory, trials[forced]
    return after.failure is None and (before is None or (after.memory is not None and after.memory.most < before.most))


def _update(trials: Trials) -> Forced:
    """How the optimizers are to update in a combination: fused where that ran, else one by one, else as they do."""
    for forced in (Forced(fused=True), Forced(foreach=False)):
        if forced in trials and trials[forced].failure is None:
            return forced
    return NOTHING_FORCED


def _between(trials: Trials, blocks: Blocks, base: Forced, budget: int | None) -> Forced | None:
    """The next number of blocks to run with ``base``, halfway between too few and enough."""
    low, high = 0, len(blocks.numbers)
    if meets(trials.get(base, Trial(memory=None)), budget):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        forced = replace(base, checkpoint=blocks.first(middle))
        if forced not in trials:
            return forced
        low, high = (low, middle) if meets(trials[forced], budget) else (middle, high)
    return None


def ranked(trials: Trials, budget: int | None) -> list[Forced]:
    """The runs: those that meet the ``budget`` first, with the fewest changes; then by what they take; failures last.

    Where the script fits as it is and there is no budget, those that allocate least come first. What may change the
    results comes after what does not: first the precision, then the size of a batch. Of those that meet the budget
    offloading comes after all that does without.
    """
    wanted = budget is not None or not meets(trials[NOTHING_FORCED], None)

    def key(forced: Forced) -> tuple[int, ...]:
        trial = trials[forced]
        if trial.memory is None:
            return (2 + (trial.failure is not None),)
        size = (trial.memory.allocated, trial.memory.most, len(forced.checkpoint))
        computes = (forced.batch_size is not None, -(forced.batch_size or 0), forced.bfloat16 or forced.policy)
        if wanted and meets(trial, budget):
            return (0, *computes, forced.offload, len(forced.checkpoint), len(forced.kinds()), *size)
        return (1, *(() if wanted else computes), *size)

    simplest = sorted(trials, key=lambda forced: (len(forced.kinds()), forced.options()))  # runs may end in any order
    return sorted(simplest, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Three real steps on the CPU with the changes, beside three of ``base``: the script as it is, or ``foreach=True``.

    ``difference`` is ``None`` where ``failure`` says why there is none.
    """

    base: str
    difference: Deviation | None
    failure: str | None = None


PROOF_STEPS = 3
"""An update changes what the next step computes, and its state what the one after that does."""

_MOST_FLOPS = 5 * 10**11
_MOST_TRAINED = 256 << 20
_MOST_ALLOCATED = 4 << 30
"""What may be run on the CPU: the FLOPs of a step, the bytes of trained parameters, and the bytes of the peak."""


def proof_base(forced: Forced, script: Script) -> Forced:
    """What ``forced`` is to be compared with: optimizers that are not told run ``foreach`` on a GPU, not on a CPU."""
    updates = forced.fused or forced.foreach is False
    return Forced(foreach=True) if updates and script.device is not Device.CPU else NOTHING_FORCED


def why_unproven(trials: Trials, script: Script) -> str | None:
    """Why the script is too large to run on the CPU; ``None`` where it is not, or has run there."""
    if script.device is Device.CPU:
        return None
    plain = trials[NOTHING_FORCED]
    if plain.memory is None:
        return "the script as it is needs more memory than the GPU has, which is too much for a CPU"
    for size, most, what in (
        (plain.flops, _MOST_FLOPS, f"{plain.flops:.2g} FLOPs in a step, more than {_MOST_FLOPS:.2g}"),
        (script.trained_bytes, _MOST_TRAINED, f"{format_bytes(script.trained_bytes)} of parameters to train"),
        (plain.memory.allocated, _MOST_ALLOCATED, f"a peak of {format_bytes(plain.memory.allocated)}"),
    ):
        if size > most:
            return f"the script is too large to run {PROOF_STEPS} steps on the CPU: {what}"
    return None


def incomparable(forced: Forced) -> str | None:
    """Why other results are expected of ``forced``, or no run is needed; ``None`` where it is worth a run."""
    if forced.batch_size is not None:
        return "a smaller batch has other losses"
    if forced.kinds() == ("allocator",):
        return "the setting changes where tensors lie, and a CPU does not have that allocator"
    return None


def to_prove(trials: Trials, budget: int | None) -> list[Forced]:
    """The best run with changes, and of each change alone the best run that was made."""
    found: dict[tuple[str, ...], Forced] = {}
    for place, forced in enumerate(ranked(trials, budget)):
        kinds = forced.kinds()
        if forced != NOTHING_FORCED and trials[forced].failure is None and (place == 0 or len(kinds) == 1):
            found.setdefault(kinds, forced)
    return list(found.values())


def name_of(forced: Forced, script: Script) -> str:
    """The changes in words: ``checkpoint 6 of 12 blocks, fused=True``."""
    words = []
    if forced.checkpoint:
        total = 0 if script.blocks is None else len(script.blocks.numbers)
        words.append(f"checkpoint {len(forced.checkpoint)} of {total} blocks")
    words += ["offload saved tensors"] if forced.offload else []
    words += [] if forced.foreach is None else [f"foreach={forced.foreach}"]
    words += ["fused=True"] if forced.fused else []
    words += [EXPANDABLE.partition(":")[0]] if forced.allocator else []
    words += ["gradient_as_bucket_view=True"] if forced.bucket_view else []
    words += ["reshard after forward"] if forced.reshard else []
    words += ["no prefetch in backward"] if forced.no_prefetch else []
    words += ["bfloat16 policy"] if forced.policy else []
    words += ["autocast bfloat16"] if forced.bfloat16 else []
    if forced.batch_size is not None:
        words.append(f"batch size {forced.batch_size} of {script.batch}" if script.batch else "smaller batches")
    return ", ".join(words) or "the script as it is"


def cost_of(forced: Forced, script: Script, trial: Trial, before: Trial | None = None) -> str:
    """What the changes cost: the time of a step beside that of ``before`` where it was measured, and what they do."""
    words = [] if trial.step_ns is None else [_time_beside(trial.step_ns, before)]
    if trial.recomputed_flops:
        share = trial.recomputed_flops / max(trial.flops - trial.recomputed_flops, 1)
        words.append(f"recomputes {share:.1%} of the step's FLOPs".replace("%", " %"))
    elif forced.checkpoint and script.blocks is not None:
        words.append(f"forward of {len(forced.checkpoint)} of {len(script.blocks.numbers)} blocks once more in a step")
    if forced.offload:
        moved = f"{format_bytes(trial.moved_bytes)} move" if trial.moved_bytes else "saved tensors move"
        words.append(f"{moved} between GPU and CPU in a step")
    if forced.foreach is False:
        words.append(f"kernels for each of {script.updated} parameters")
    if forced.fused:
        words.append("fewer kernels")
    if forced.reshard:
        words.append("gathers parameters once more, for backward")
    if forced.no_prefetch:
        words.append("backward waits for each all-gather")
    if forced.policy:
        words.append("rounds parameters and results to bfloat16")
    if forced.bfloat16:
        words.append("rounds results to bfloat16")
    if forced.batch_size and script.batch:
        words.append(f"{script.batch / forced.batch_size:.3g} steps for as many samples")
    return "; ".join(words)


def _time_beside(step_ns: int, before: Trial | None) -> str:
    """``a step takes 12.3 ms (+8.1 %)``."""
    took = f"a step takes {format_duration(step_ns)}"
    if before is None or not before.step_ns:
        return took
    return f"{took} ({step_ns / before.step_ns - 1:+.1%})".replace("%", " %")


def code_of(forced: Forced, script: Script) -> tuple[str, ...]:
    """The changes in the script's code, where ``model`` is the outermost module that it calls."""
    lines: list[str] = []
    if forced.checkpoint and script.blocks is not None:
        which = _in_code(script.blocks, len(forced.checkpoint))
        lines.append(
            f"for block in {which}: "
            "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
        )
    if forced.offload:
        lines.append("with torch.autograd.graph.save_on_cpu():  # around the call of model, not backward")
    argument = "fused=True" if forced.fused else None if forced.foreach is None else f"foreach={forced.foreach}"
    if argument is not None:
        lines += [f"{name}(..., {argument})" for name in script.optimizers or ("the optimizer",)]
    if forced.allocator:
        lines.append(f"PYTORCH_ALLOC_CONF={forced.allocator}  # in the environment, before CUDA is used")
    if forced.bucket_view:
        lines.append("DistributedDataParallel(..., gradient_as_bucket_view=True)")
    if forced.reshard:
        lines.append("fully_shard(..., reshard_after_forward=True)  # FSDP1: ShardingStrategy.FULL_SHARD")
    if forced.no_prefetch:
        lines.append(
            "each.set_modules_to_backward_prefetch([each])  # of all sharded modules; FSDP1: backward_prefetch=None"
        )
    if forced.policy:
        policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        lines.append(f"fully_shard(..., mp_policy={policy})  # FSDP1: mixed_precision=MixedPrecision(...)")
    if forced.bfloat16:
        kind = Device.CPU if script.device is Device.CPU else Device.CUDA
        lines.append(f"with torch.autocast('{kind}', dtype=torch.bfloat16):  # around forward and loss, not backward")
    if forced.batch_size:
        lines.append(
            f"DataLoader(..., batch_size={forced.batch_size})  # and accumulate gradients, if losses are means"
        )
    return tuple(lines)


def _in_code(blocks: Blocks, count: int) -> str:
    """The first ``count`` blocks as Python finds them: ``model.blocks[:6]``."""
    held = "model"
    for part in filter(None, blocks.prefix.split(".")):
        held += f"[{part}]" if part.isdecimal() else f".{part}"
    numbers = blocks.numbers[:count]
    return f"{held}[:{count}]" if numbers == tuple(range(count)) else f"({held}[i] for i in {numbers})"


SCHEMA = "ampmem.advise/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenResults:
    """The losses and gradients of three real steps on the CPU with the change, beside those of ``compared_with``.

    ``equal`` says that all have the same bits, null where they could not be compared for the reason in ``failure``. The
    differences are the largest of any element; null where the numbers of results or their shapes differ, or where one
    is not finite.
    """

    compared_with: str
    equal: bool | None
    losses: int | None
    gradients: int | None
    loss_difference: float | None
    gradient_difference: float | None
    largest_loss: float | None
    largest_gradient: float | None
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedRun:
    """One run: the changes, and its peaks, null where memory ran out or the change was not made.

    ``options`` are those of ``ampmem profile`` that make this run. ``saved_bytes`` is what it allocates less than the
    script as it is, ``saved_reserved_bytes`` what it reserves less; null where one of the two has no peak. ``meets``
    says that it surely fits, and takes no more than the budget where there is one. ``failure`` is why the change was
    not made, or the script failed. On the CPU nothing is reserved, and no memory of a device is in use: null.

    ``cost`` is computed on a simulated GPU. On a real device it has the time of a step, ``step_ns``: a run of its own
    without recording, the median of its steps after the first; null elsewhere.

    ``step_flops`` are the floating-point operations of the last step's matrix products, convolutions and attention,
    ``recomputed_flops`` those of them that activation checkpointing computed again; null where they were not counted.
    ``moved_bytes`` are what it has copied between the GPU and the CPU, inputs too. ``proof`` is there with ``--prove``,
    for the best run and each change alone. ``rank`` is the worst of several ranks, of which all of this is said; null
    where the script runs in one process.
    """

    change: str
    rank: int | None
    options: tuple[str, ...]
    meets: bool
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None
    highest_device_used_bytes: int | None
    saved_bytes: Signed | None
    saved_reserved_bytes: Signed | None
    failure: str | None
    cost: str
    step_flops: int | None
    recomputed_flops: int | None
    moved_bytes: int | None
    step_ns: int | None
    proof: ProvenResults | None
    code: tuple[str, ...]

    @property
    def limited_bytes(self) -> int | None:
        """What a budget is for: the most that the device has in use, and on the CPU the peak allocated."""
        return self.highest_device_used_bytes or self.device_used_bytes or self.allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceDocument:
    """The whole search; ``runs`` have the best first. ``budget_bytes`` is null where only the GPU's memory counts.

    ``device`` says what the runs were made on: ``sim``, ``cuda`` or ``cpu``. ``gpu`` is the name of that, and
    ``gpu_bytes`` the memory of a simulated GPU, null for a real device. ``world_size`` is how many ranks there are, and
    ``ranks`` are those that changes were run as, empty where the script runs in one process.
    """

    schema: Annotated[str, OneOf((SCHEMA,))]
    ampmem: str
    script: str
    steps: Positive
    device: Device
    gpu: str
    gpu_bytes: Positive | None
    budget_bytes: int | None
    world_size: Positive
    ranks: tuple[int, ...]
    runs: tuple[AdvisedRun, ...]

    def to_json(self) -> str:
        """The document as JSON text, as :func:`advise_schema` describes it."""
        return json.dumps(plain(self), indent=2)


def advise_schema() -> dict[str, Json]:
    """The JSON Schema of :meth:`AdviceDocument.to_json`."""
    return schema_of(
        AdviceDocument,
        title="ampmem advise, version 1",
        description="What `ampmem advise --json` prints. Sizes are bytes; null is a value that is not known.",
    )


def advice(
    trials: Trials,
    script: Script,
    budget: int | None,
    *,
    title: str,
    steps: int,
    gpu: str,
    total: int | None,
    world_size: int = 1,
    proofs: Mapping[Forced, Proof] = MappingProxyType({}),
) -> AdviceDocument:
    """The search as its document."""
    runs = tuple(
        replace(_run(forced, trials, script, budget), proof=_proven(proofs.get(forced)))
        for forced in ranked(trials, budget)
    )
    return AdviceDocument(
        schema=SCHEMA,
        ampmem=__version__,
        script=title,
        steps=steps,
        device=script.device,
        gpu=gpu,
        gpu_bytes=total,
        budget_bytes=budget,
        world_size=world_size,
        ranks=script.ranks,
        runs=runs,
    )


def _run(forced: Forced, trials: Trials, script: Script, budget: int | None) -> AdvisedRun:
    trial, plain_run = trials[forced], trials[NOTHING_FORCED]
    memory, before = trial.memory, plain_run.memory
    layers = None if script.device is Device.CPU else memory
    saved = None if memory is None or before is None else before.allocated - memory.allocated
    saved_reserved = None if memory is None or before is None else before.reserved - memory.reserved
    return AdvisedRun(
        change=name_of(forced, script),
        rank=trial.rank,
        options=tuple(forced.options()),
        meets=meets(trial, budget),
        allocated_bytes=None if memory is None else memory.allocated,
        reserved_bytes=None if layers is None else layers.reserved,
        device_used_bytes=None if layers is None else layers.used,
        highest_device_used_bytes=None if layers is None else layers.highest,
        saved_bytes=saved,
        saved_reserved_bytes=None if layers is None else saved_reserved,
        failure=trial.failure,
        cost=cost_of(forced, script, trial, None if forced == NOTHING_FORCED else plain_run),
        step_flops=trial.flops or None,
        recomputed_flops=trial.recomputed_flops if trial.flops else None,
        moved_bytes=trial.moved_bytes if trial.flops else None,
        step_ns=trial.step_ns,
        proof=None,
        code=code_of(forced, script),
    )


def _proven(proof: Proof | None) -> ProvenResults | None:
    if proof is None:
        return None
    found = proof.difference
    known = None if found is None or not found.same_kind else found
    return ProvenResults(
        compared_with=proof.base,
        equal=None if found is None else found.equal,
        losses=None if found is None else found.losses,
        gradients=None if found is None else found.gradients,
        loss_difference=None if known is None else known.loss_difference,
        gradient_difference=None if known is None else known.gradient_difference,
        largest_loss=None if known is None else known.largest_loss,
        largest_gradient=None if known is None else known.largest_gradient,
        failure=proof.failure,
    )
