"""The search for changes that make a script fit, and its result (``ampmem.advise/1``).

Every peak was measured in a run, on a simulated GPU or a real device; no peak is computed from another. Only the cost
of a change on a simulated GPU and its code are derived from other records of the runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.blocks import Blocks, blocks_of
from ampmem.analysis.changes import CHANGES, MEMORY_BUDGETS, Combined, Script, Trial, alone, changes_in, computing
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.findings.training_loop import gradients_through_forward, unreduced_gradients
from ampmem.analysis.fit import Memory
from ampmem.analysis.jsonable import Json, JsonDocument, OneOf, Positive, Signed, like, schema_of_printed
from ampmem.analysis.layers import outside_in
from ampmem.analysis.out_of_memory import gpu_called, rest_of_command
from ampmem.analysis.suggested import Suggestion, suggestions
from ampmem.analysis.summary import summary_of
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Recording
from ampmem.names import trains_compiled
from ampmem.results import Deviation
from ampmem.units import format_bytes, format_duration
from ampmem.version import __version__
from ampmem.vocabulary import AUTOCAST_PRECISIONS, NOTHING_FORCED, Device, Forced, SourceKind

Trials = Mapping[Forced, Trial]
"""The runs so far, by their changes; the first run is of the unchanged script."""


def changeable_script(analysis: Analysis, module_flops: Mapping[str, int] = MappingProxyType({})) -> Script:
    """The properties of the recorded script that decide which changes are tried.

    ``module_flops`` are FLOPs by module, as :func:`blocks_of` takes them.
    """
    run, recording = TrainingRun(analysis=analysis), analysis.recording
    several = recording.run.world_size > 1
    sharded = any(parameter.global_elements is not None for parameter in recording.parameters)
    compiles = trains_compiled(recording.texts)
    return Script(
        blocks=blocks_of(analysis, module_flops),
        optimizers=tuple(dict.fromkeys(optimizer.class_name for optimizer in recording.optimizers)),
        updated=sum(parameter.trainable for parameter in recording.parameters),
        trained_bytes=sum(parameter.bytes for parameter in recording.parameters if parameter.trainable),
        batch=next((step.batch_size for step in reversed(recording.steps) if step.batch_loaded), None),
        no_precision=_no_precision(recording),
        no_low_weights=_no_low_weights(recording),
        no_loss=None if compiles or any("nll_loss" in text for text in recording.texts) else _NO_LOSS,
        no_fused=_no_implementation(recording, "fused"),
        no_foreach=_no_implementation(recording, "foreach"),
        compiles=compiles,
        idle_gradients=gradients_through_forward(run) is not None,
        cached_casts=bool(recording.precision.cache) and _much_at_the_peak(run, Category.CAST_COPIES),
        workspaces=_much_at_the_peak(run, Category.WORKSPACE),
        suggestions=suggestions(run),
        device=_DEVICES.get(recording.run.source, Device.SIMULATED),
        device_name=recording.run.device_name,
        profiled=_profiled(recording),
        replicated=several and not sharded,
        sharded=several and sharded,
        unreduced=unreduced_gradients(run) is not None,
    )


def _profiled(recording: Recording) -> str:
    run = recording.run
    gpu = ["--gpu", gpu_called(run.device_name, run.source, 0)] if run.source == SourceKind.SIMULATED else []
    return rest_of_command(recording, *gpu) or ""


def needed_at_least(analysis: Analysis) -> int | None:
    """The bytes that were alive when memory ran out, and the request that failed; ``None`` if it did not."""
    failed = analysis.failed_request
    return None if failed is None else sum(failed.alive.values()) + failed.asked


_NO_LOSS = "no F.cross_entropy was seen"
_DEVICES = {SourceKind.CUDA: Device.CUDA, SourceKind.CPU: Device.CPU}


def _much_at_the_peak(run: TrainingRun, category: Category) -> bool:
    """Whether the bytes of ``category`` at the last step's peak are notable."""
    return bool(run.peaks) and run.notable(run.live(category, run.peaks[-1]))


def measured_memory(recording: Recording) -> Memory | None:
    """The peaks of a run on a real device; ``None`` if it ran out of memory.

    A recording without allocator layers has no reserved memory. The device's use is the peak of reserved memory plus
    the memory outside of the allocator: this process's where the driver reports it, else that of all processes. Raises
    :class:`~ampmem.errors.RecordingError` and :class:`~ampmem.errors.NothingRecorded`.
    """
    if recording.ooms:
        return None
    analysis = analyse(recording)
    allocated = summary_of(analysis).whole.bytes
    reserved = allocated if analysis.layers is None else int(analysis.layers.level.max())
    steps = [step.index for step in recording.steps]
    own = [size for step in steps if (size := outside_in(recording, step)[1]) is not None]
    every = [size for step in steps if (size := outside_in(recording, step)[0]) is not None]
    return Memory(allocated=allocated, reserved=reserved, used=reserved + max(own or every, default=0))


def step_time(recording: Recording) -> int | None:
    """The duration of a step without recording in ns: the median of all steps but the first, which allocates more."""
    times = sorted(recording.plain_step_ns[1:] or recording.plain_step_ns)
    return times[len(times) // 2] if times else None


def how_bad(trial: Trial) -> tuple[int, ...]:
    """A sort key for the runs of several ranks: failures are worst, then out of memory, then the most device memory."""
    if trial.memory is None:
        return (2 + (trial.failure is not None),)
    return (not trial.memory.surely, trial.memory.most, trial.memory.allocated)


def different_ranks(found: Iterable[tuple[Trial, Script | None]]) -> tuple[int, ...]:
    """The first of all ranks with equal blocks, parameters, peaks and costs: only these ranks run the changes."""
    first: dict[tuple[Trial, Script | None], int] = {}
    for trial, script in found:
        first.setdefault((replace(trial, rank=None), script), trial.rank or 0)
    return tuple(first.values())


def blocks_of_ranks(blocks: Iterable[Blocks | None]) -> Blocks | None:
    """The blocks of all ranks together: one stage of a pipeline has only some of them."""
    known = [each for each in blocks if each is not None]
    saved: dict[str, int] = {}
    flops: dict[str, int] = {}
    for each in reversed(known):  # where several ranks have a block, the first rank's counts
        saved |= zip(each.names, each.saved_bytes, strict=False)
        flops |= zip(each.names, each.flops, strict=False)
    names = tuple(dict.fromkeys(name for each in known for name in each.names))
    if not names:
        return None
    return Blocks(
        names=names,
        saved_bytes=tuple(saved[name] for name in names) if len(saved) == len(names) else (),
        flops=tuple(flops[name] for name in names) if len(flops) == len(names) else (),
    )


def _no_precision(recording: Recording) -> str | None:
    if recording.precision.name in AUTOCAST_PRECISIONS and not recording.precision.forced:
        return f"the script already uses autocast, with {recording.precision.dtype}"
    return _no_low_weights(recording)


def _no_low_weights(recording: Recording) -> str | None:
    if recording.precision.forced:
        return f"every run already has the precision {recording.precision.name}"
    others = {parameter.dtype for parameter in recording.parameters} - {"float32"}
    return f"the script's parameters are {', '.join(sorted(others))}, not float32" if others else None


def _no_implementation(recording: Recording, name: str) -> str | None:
    """Why the implementation ``name`` of an update is not tried: none of the script's optimizers has it."""
    optimizers = recording.optimizers
    if not optimizers or any(name in optimizer.settings for optimizer in optimizers):
        return None
    classes = dict.fromkeys(optimizer.class_name for optimizer in optimizers)
    return f"{' and '.join(classes)} {'has' if len(classes) == 1 else 'have'} no {name} implementation"


def why_not_run(forced: Forced, script: Script) -> str | None:
    """Why ``forced`` is not run, judging by the run of the unchanged script; ``None`` where it is run."""
    reasons = (change.why_not(value, script) for change, value in changes_in(forced))
    return next(filter(None, reasons), None)


def meets(trial: Trial, budget: int | None) -> bool:
    """Whether the run surely fits on the GPU and, if there is a ``budget`` (bytes), within that too."""
    memory = trial.memory
    return memory is not None and memory.surely and (budget is None or memory.most <= budget)


def next_forced(trials: Trials, script: Script, allowed: frozenset[str], budget: int | None) -> Forced | None:
    """The changes to run next; ``None`` when the search is over.

    First each change is tried alone, then combinations that lower several parts of the peak, then the fewest blocks
    that are enough.
    """
    singles = _singles(script, allowed)
    budgets = _budgets(trials, singles, allowed)
    for forced in (*singles.values(), *budgets):
        if forced not in trials:
            return forced
    wanted = budget is not None or not meets(trials[NOTHING_FORCED], None)
    if wanted and meets(trials[NOTHING_FORCED], budget):
        return None
    blocks = script.blocks
    whole = singles.get("checkpoint")
    if blocks is None or whole is None or trials[whole].failure is not None:
        blocks = None
    bases = _bases(trials, singles, budgets)
    for base, last in (
        bases if wanted else ((NOTHING_FORCED, None), *((each, None) for each in _free_combinations(trials, singles)))
    ):
        if last is not None and meets(trials[last], budget):
            return None  # the change is enough alone, and no cheaper one is
        # Compiled code that keeps a part of its activations chooses itself what it computes again.
        chosen = blocks if base.activation_memory_budget is None else None
        forced = base if chosen is None or whole is None else replace(base, checkpoint=whole.checkpoint)
        if forced not in trials:
            return forced
        if wanted and meets(trials[forced], budget):
            return None if chosen is None else _fewest(trials, chosen, base, budget, singles.get("loss_chunks"))
    half = None if wanted or blocks is None else Forced(checkpoint=blocks.first(len(blocks.names) // 2))
    return None if half in trials else half


def due(trials: Trials, script: Script, allowed: frozenset[str], budget: int | None) -> list[Forced]:
    """The changes to run now, all of which may run at the same time; empty when the search is over."""
    singles = _singles(script, allowed)
    every = dict.fromkeys((*singles.values(), *_budgets(trials, singles, allowed)))
    missing = [forced for forced in every if forced not in trials]
    following = next_forced(trials, script, allowed, budget)
    return missing or ([] if following is None else [following])


def most_left(trials: Trials, script: Script, allowed: frozenset[str], budget: int | None) -> int:
    """An upper bound of the runs that are left: their number if none of them meets the budget."""
    made = dict(trials)
    while (forced := next_forced(made, script, allowed, budget)) is not None:
        made[forced] = Trial(memory=None, failure=why_not_run(forced, script))
    if len(made) == len(trials):
        return 0
    blocks = 0 if script.blocks is None or "checkpoint" not in allowed else len(script.blocks.names)
    searches = int(not any(meets(trial, budget) for trial in trials.values()))
    singles = _singles(script, allowed)
    loss, compiled = singles.get("loss_chunks"), singles.get("compile")
    if loss is not None and (loss not in trials or (searches and _helps(trials, loss))):
        searches += 1  # once more with the loss in chunks, if that helps
    after = 0 if compiled is None or compiled in trials else 1 + 2 * len(MEMORY_BUDGETS)  # if compiling helps
    return len(made) - len(trials) + after + searches * max(blocks - 1, 0).bit_length()


def _singles(script: Script, allowed: frozenset[str]) -> dict[str, Forced]:
    """Each change alone, by its field, in the order in which the changes are tried."""
    found = {change.field: alone(change, script) for change in CHANGES if change.allow in allowed}
    return {field: forced for field, forced in found.items() if forced is not None}


def _budgets(trials: Trials, singles: Mapping[str, Forced], allowed: frozenset[str]) -> list[Forced]:
    """The runs with ``activation_memory_budget``, if the script compiles its model or ``model.compile()`` helps."""
    compiled = singles.get("compile")
    if "activation_memory_budget" in singles:
        base = NOTHING_FORCED
    elif compiled in trials and compiled is not None and "memory-budget" in allowed and _lowers(trials, compiled):
        base = compiled
    else:
        return []
    return [replace(base, activation_memory_budget=share) for share in MEMORY_BUDGETS]


def _lowers(trials: Trials, forced: Forced) -> bool:
    """Whether ``forced`` lowers the device's use or the allocated peak.

    With a lower allocated peak reserved memory may still rise, which another setting may change.
    """
    before, after = trials[NOTHING_FORCED].memory, trials[forced].memory
    allocates_less = before is not None and after is not None and after.allocated < before.allocated
    return allocates_less or _helps(trials, forced)


def _combinable(singles: Mapping[str, Forced], combined: Combined) -> list[Forced]:
    """The changes in ``singles`` that are ``combined`` with others in this way."""
    fields = [change.field for change in CHANGES if change.combined is combined]
    return [singles[field] for field in fields if field in singles]


def _bases(
    trials: Trials, singles: Mapping[str, Forced], budgets: Sequence[Forced]
) -> Iterator[tuple[Forced, Forced | None]]:
    """The combinations of changes that block checkpointing is added to; each has one change more than the one before.

    Changes that cost much time come late, and changes that may alter the results last. With each combination comes
    the change that it adds, alone; ``None`` for cheap changes, whose own runs do not end the search.
    """
    yield NOTHING_FORCED, None
    base = NOTHING_FORCED
    for base in _free_combinations(trials, singles):
        yield base, None
    for single in (*_combinable(singles, Combined.OF_RANKS), *_combinable(singles, Combined.SETTING)):
        # Whole parameters that stay after forward are there already: prefetching gathers ahead only with resharding.
        if trials[single].failure is None and (_helps(trials, single) or (single.no_prefetch and base.reshard)):
            base = _with(base, single)
            yield base, None
    compiled = singles.get("compile")
    if compiled is not None and _lowers(trials, compiled):
        base = _with(base, compiled)
        yield base, compiled
    yield from ((_with(base, single), single) for single in budgets if trials[single].failure is None)
    for single in _combinable(singles, Combined.COSTLY):
        # A policy casts as autocast does, and what compiled code saves is not moved.
        spare = (single.bfloat16 and base.policy) or (single.offload and base.compile)
        if trials[single].failure is None and not spare:
            base = _with(base, single)
            yield base, single
    batch = singles.get("batch_size")
    if batch is not None and trials[batch].failure is None:
        size = batch.batch_size or 0
        while size:
            yield replace(base, batch_size=size), batch
            size //= 2


def _with(base: Forced, change: Forced) -> Forced:
    """The changes of ``base`` and of ``change`` together."""
    return replace(base, **{name: getattr(change, name) for name in change.kinds()})


def _free_combinations(trials: Trials, singles: Mapping[str, Forced]) -> list[Forced]:
    """The combinations that hardly cost time: the optimizers' implementation, cheap changes, then the chunked loss."""
    implementations = (Forced(fused=True), Forced(foreach=False))
    ran = (each for each in implementations if each in trials and trials[each].failure is None)
    update = next(ran, NOTHING_FORCED)
    for single in _combinable(singles, Combined.CHEAP):
        if _lowers(trials, single):
            update = _with(update, single)
    found = [] if update == NOTHING_FORCED else [update]
    loss = singles.get("loss_chunks")
    if loss is not None and _lowers(trials, loss):
        found.append(_with(update, loss))
    return found


def _helps(trials: Trials, forced: Forced) -> bool:
    """Whether ``forced`` lowers the device's use, or may: the unchanged script ran out of memory."""
    before, after = trials[NOTHING_FORCED].memory, trials[forced]
    return after.failure is None and (before is None or (after.memory is not None and after.memory.most < before.most))


def _fewest(trials: Trials, blocks: Blocks, base: Forced, budget: int | None, loss: Forced | None) -> Forced | None:
    """The next run to find the fewest blocks that are enough with ``base``, then also with the chunked loss.

    The chunked loss recomputes little, so it is worth one block less.
    """
    following = _between(trials, blocks, base, budget, len(blocks.names))
    if following is not None or loss is None or base.loss_chunks or not _helps(trials, loss):
        return following
    counts = range(1, len(blocks.names) + 1)
    tried = ((count, trials.get(replace(base, checkpoint=blocks.first(count)))) for count in counts)
    enough = next(count for count, trial in tried if trial is not None and meets(trial, budget))
    return _between(trials, blocks, _with(base, loss), budget, enough)


def _between(trials: Trials, blocks: Blocks, base: Forced, budget: int | None, high: int) -> Forced | None:
    """The next number of blocks below ``high`` to run with ``base``: halfway between too few and enough."""
    low = 0
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
    """The runs in the order of the table: runs that meet the ``budget``, fewest changes first, then others by memory.

    Where the unchanged script fits and there is no budget, the run that allocates least comes first. Changes that may
    change the results come after the others: first the precision, then the batch size. Among the runs that meet the
    budget, those with offloading come last, and those in which compiled code keeps less.
    """
    wanted = budget is not None or not meets(trials[NOTHING_FORCED], None)

    def key(forced: Forced) -> tuple[float, ...]:
        trial = trials[forced]
        if trial.memory is None:
            return (2 + (trial.failure is not None),)
        size = (trial.memory.allocated, trial.memory.most, len(forced.checkpoint))
        computes = (forced.batch_size is not None, -(forced.batch_size or 0), len(computing(forced)))
        if wanted and meets(trial, budget):
            recomputes = (1 - (forced.activation_memory_budget or 1), len(forced.checkpoint))
            return (0, *computes, forced.offload, *recomputes, len(forced.kinds()), *size)
        return (1, *(() if wanted else computes), *size)

    # Runs may end in any order, so the key alone decides.
    simplest = sorted(trials, key=lambda forced: (len(forced.kinds()), forced.options()))
    return sorted(simplest, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Three real steps on the CPU with the changes, compared with three steps of ``base``.

    ``base`` is the unchanged script, or the script with ``foreach=True``. ``difference`` is ``None`` where ``failure``
    says why the comparison failed.
    """

    base: str
    difference: Deviation | None
    failure: str | None = None


PROOF_STEPS = 3
"""Three steps: an update changes what the second step computes, and the optimizer state what the third does."""

_MOST_FLOPS = 5 * 10**11
_MOST_TRAINED = 256 << 20
_MOST_ALLOCATED = 4 << 30
"""The largest run on the CPU: the FLOPs of a step, the bytes of trained parameters, and the bytes of the peak."""


def proof_base(forced: Forced, script: Script) -> Forced:
    """The changes that ``forced`` is compared with: ``foreach`` is the default on a GPU, but not on a CPU."""
    updates = forced.fused or forced.foreach is False
    return Forced(foreach=True) if updates and script.device is not Device.CPU else NOTHING_FORCED


def why_unproven(trials: Trials, script: Script) -> str | None:
    """Why the script is too large to run on the CPU; ``None`` if it is small enough, or was run there already."""
    if script.device is Device.CPU:
        return None
    plain = trials[NOTHING_FORCED]
    if plain.memory is None:
        return "the script as it is needs more memory than the GPU has, too much for a CPU"
    for size, most, what in (
        (plain.flops, _MOST_FLOPS, f"{plain.flops:.2g} FLOPs in a step, more than {_MOST_FLOPS:.2g}"),
        (script.trained_bytes, _MOST_TRAINED, f"{format_bytes(script.trained_bytes)} of parameters to train"),
        (plain.memory.allocated, _MOST_ALLOCATED, f"a peak of {format_bytes(plain.memory.allocated)}"),
    ):
        if size > most:
            return f"the script is too large to run {PROOF_STEPS} steps on the CPU: {what}"
    return None


def incomparable(forced: Forced) -> str | None:
    """The reason not to compare the results of ``forced``, such as an expected difference; ``None`` if they are."""
    changes = [change for change, _ in changes_in(forced)]
    reasons = (change.unproven for change in changes if change.computes or len(changes) == 1)
    return next(filter(None, reasons), None)


def to_prove(trials: Trials, budget: int | None) -> list[Forced]:
    """The runs to prove: the best run with changes, and the best run of each change alone."""
    found: dict[tuple[str, ...], Forced] = {}
    for place, forced in enumerate(ranked(trials, budget)):
        kinds = forced.kinds()
        if forced != NOTHING_FORCED and trials[forced].failure is None and (place == 0 or len(kinds) == 1):
            found.setdefault(kinds, forced)
    return list(found.values())


def name_of(forced: Forced, script: Script) -> str:
    """The changes in words: ``checkpoint 6 of 12 blocks, fused=True``."""
    return ", ".join(change.in_words(value, script) for change, value in changes_in(forced)) or "the script as it is"


def cost_of(forced: Forced, script: Script, trial: Trial, before: Trial | None = None) -> str:
    """The cost of the changes in words: ``a step takes 12.3 ms (+8.1 %); recomputes 4.0 % of the step's FLOPs``.

    The step time is compared with that of ``before``.
    """
    words = []
    if trial.step_ns is not None:
        slower = f" ({trial.step_ns / before.step_ns - 1:+.1%})" if before is not None and before.step_ns else ""
        words.append(f"a step takes {format_duration(trial.step_ns)}{slower.replace('%', ' %')}")
    if trial.recomputed_flops:
        share = trial.recomputed_flops / max(trial.flops - trial.recomputed_flops, 1)
        words.append(f"recomputes {share:.1%} of the step's FLOPs".replace("%", " %"))
    costs = (change.cost_of(value, script, trial) for change, value in changes_in(forced))
    return "; ".join((*words, *filter(None, costs)))


def code_of(forced: Forced, script: Script) -> tuple[str, ...]:
    """The changes as lines of code, in which ``model`` is the outermost module that the script calls."""
    return tuple(line for change, value in changes_in(forced) for line in change.lines(value, script))


SCHEMA = "ampmem.advise/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenResults:
    """The losses and gradients of three real steps on the CPU with the change, beside those of ``compared_with``.

    ``equal`` says that all bits are the same; null where they could not be compared, and ``failure`` says why. The
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
    """One run: the changes and the peaks; a peak is null where memory ran out or the change was not made.

    ``options`` are the options of ``ampmem profile`` that make this run, and ``command`` is the whole command.
    ``saved_bytes`` are the bytes that it allocates less than the unchanged script, ``saved_reserved_bytes`` those that
    it reserves less; null if one of the two runs has no peak. ``saved_at_least_bytes`` are those that it allocates less
    than the unchanged script had and asked for when memory ran out; null where it did not. ``meets`` says that the run
    surely fits, and within the budget if there is one. ``failure`` is the reason why the change was not made, or the
    script's failure. Reserved memory and the device's use are null on the CPU.

    ``cost`` is computed on a simulated GPU. On a real device it has the step time, ``step_ns``: the median of the steps
    after the first, in a separate run without recording; null elsewhere.

    ``step_flops`` are the floating-point operations of the last step's matrix products, convolutions and attention,
    ``recomputed_flops`` the part that activation checkpointing computed again; null if they were not counted.
    ``moved_bytes`` are the bytes copied between GPU and CPU, inputs included. With ``--prove`` the best run and each
    single change have a ``proof``. Of several ranks, the figures are those of the worst, ``rank``; null if the script
    runs in one process.

    ``checkpointed`` names the blocks that are checkpointed. ``unbeaten`` says that the run is on the Pareto front: no
    other run is better in memory or cost without being worse in the other.
    """

    change: str
    rank: int | None
    options: tuple[str, ...]
    checkpointed: tuple[str, ...]
    unbeaten: bool
    meets: bool
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None
    highest_device_used_bytes: int | None
    saved_bytes: Signed | None
    saved_reserved_bytes: Signed | None
    saved_at_least_bytes: int | None = None
    command: str = ""
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
        """The memory that a budget limits: the upper bound of the device's use, or on the CPU the allocated peak."""
        return self.highest_device_used_bytes or self.device_used_bytes or self.allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedBlock:
    """A module that can be checkpointed, and its figures from the run of the unchanged script.

    ``saved_bytes`` are the bytes that its forward keeps for backward except its result, ``flops`` the FLOPs of its
    forwards in a step. Both are null if unknown, as FLOPs on a real device.
    """

    name: str
    saved_bytes: int | None
    flops: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceDocument(JsonDocument):
    """The document of a whole search; ``runs`` have the best first. ``budget_bytes`` is null without a budget.

    ``blocks`` are in the order in which they are checkpointed. ``suggestions`` were not run: their savings are
    computed from the recording of the unchanged script.

    ``device`` is the runs' device: ``sim``, ``cuda`` or ``cpu``. ``gpu`` is its name, and ``gpu_bytes`` the memory of a
    simulated GPU, null for a real device. ``world_size`` is the number of ranks, and ``ranks`` are those as which the
    changes were run, empty if the script runs in one process.
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
    blocks: tuple[AdvisedBlock, ...]
    suggestions: tuple[Suggestion, ...]


def advise_schema() -> dict[str, Json]:
    """The JSON Schema of an :class:`AdviceDocument`."""
    return schema_of_printed(AdviceDocument, SCHEMA, "ampmem advise")


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
    """The search as a document (``ampmem.advise/1``)."""
    runs = tuple(
        replace(
            _advised_run(forced, trials, script, budget),
            proof=_proven(proofs.get(forced)),
            unbeaten=not any(_beats(other, forced, trials) for other in trials),
        )
        for forced in ranked(trials, budget)
    )
    return like(
        AdviceDocument,
        script,
        schema=SCHEMA,
        ampmem=__version__,
        script=title,
        steps=steps,
        gpu=gpu,
        gpu_bytes=total,
        budget_bytes=budget,
        world_size=world_size,
        runs=runs,
        blocks=_advised(script.blocks),
    )


def _advised(blocks: Blocks | None) -> tuple[AdvisedBlock, ...]:
    if blocks is None:
        return ()
    saved = dict(zip(blocks.names, blocks.saved_bytes, strict=False))
    flops = dict(zip(blocks.names, blocks.flops, strict=False))
    return tuple(AdvisedBlock(name=name, saved_bytes=saved.get(name), flops=flops.get(name)) for name in blocks.best)


def _beats(other: Forced, forced: Forced, trials: Trials) -> bool:
    """Whether the run with ``other`` is on a par with that of ``forced`` in memory and cost, and better in one of them.

    A run that computes something else is not compared with one that does not. A run without a peak loses to every
    other.
    """
    one, two = _price(trials[other]), _price(trials[forced])
    if two is None or one is None:
        return two is None
    same = computing(other).items() <= computing(forced).items()
    return same and one != two and all(mine <= its for mine, its in zip(one, two, strict=True))


def _price(trial: Trial) -> tuple[float, ...] | None:
    """The memory of a run and its cost: the measured step time, else the recomputed FLOPs and the moved bytes."""
    if trial.memory is None:
        return None
    if trial.step_ns is not None:
        return trial.memory.most, trial.step_ns
    return trial.memory.most, trial.recomputed_flops / max(trial.flops - trial.recomputed_flops, 1), trial.moved_bytes


def _advised_run(forced: Forced, trials: Trials, script: Script, budget: int | None) -> AdvisedRun:
    trial, plain_run = trials[forced], trials[NOTHING_FORCED]
    memory, before = trial.memory, plain_run.memory
    layers = None if script.device is Device.CPU else memory
    saved = None if memory is None or before is None else before.allocated - memory.allocated
    least = None if memory is None or plain_run.needed is None else max(plain_run.needed - memory.allocated, 0)
    saved_reserved = None if memory is None or before is None else before.reserved - memory.reserved
    return like(
        AdvisedRun,
        trial,
        change=name_of(forced, script),
        options=tuple(forced.options()),
        checkpointed=forced.checkpoint,
        unbeaten=False,
        meets=meets(trial, budget),
        allocated_bytes=None if memory is None else memory.allocated,
        reserved_bytes=None if layers is None else layers.reserved,
        device_used_bytes=None if layers is None else layers.used,
        highest_device_used_bytes=None if layers is None else layers.highest,
        saved_bytes=saved,
        saved_reserved_bytes=None if layers is None else saved_reserved,
        saved_at_least_bytes=least,
        command=f"ampmem profile {shlex.join(forced.options())} {script.profiled}" if script.profiled else "",
        cost=cost_of(forced, script, trial, None if forced == NOTHING_FORCED else plain_run),
        step_flops=trial.flops or None,
        recomputed_flops=trial.recomputed_flops if trial.flops else None,
        moved_bytes=trial.moved_bytes if trial.flops else None,
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
