"""``ampmem advise``: what would make a script fit, each change proven by a run of the unmodified script with it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from ampmem.allocator.gpus import gpu_to_simulate
from ampmem.analysis.advise import (
    PROOF_STEPS,
    Change,
    Proof,
    Script,
    Trial,
    advice,
    advise_schema,
    incomparable,
    meets,
    name_of,
    next_forced,
    proof_base,
    refusal,
    script_of,
    to_prove,
    why_unproven,
)
from ampmem.analysis.fit import memory_of
from ampmem.cli.options import ScriptCommand, ScriptOptions, choices, schema_option, settled, shared_options
from ampmem.cli.processes.children import ProgressLine, misplaced, profile_arguments, run_child
from ampmem.cli.processes.messages import StepEnded
from ampmem.errors import AmpmemError, RecordingError, UsageError
from ampmem.failure import FailureKind
from ampmem.recording import SUFFIX, read
from ampmem.reporters.text.advise import render
from ampmem.reporters.text.layout import layout_for
from ampmem.results import difference
from ampmem.units import format_bytes, parse_bytes
from ampmem.vocabulary import NOTHING_FORCED, Arm, Device, Forced

STEPS = 2
"""The optimizer's state is there from the end of the first step on."""

_NOT_HERE = ("device", "synchronize", "stacks", "nproc_per_node", "force")
"""Shared options that say nothing of simulated runs whose recordings are thrown away."""


@click.command(
    "advise", cls=ScriptCommand, context_settings={"allow_interspersed_args": False, "default_map": {"steps": STEPS}}
)
@click.option(
    "--budget",
    metavar="BYTES",
    help="What the script may take of the GPU's memory, such as 24GiB, with all that is outside of the allocator.  "
    "[default: all of it]",
)
@click.option(
    "--allow",
    "changes",
    default=",".join(Change),
    show_default=True,
    metavar="CHANGE,...",
    help="Which changes to try: checkpoint blocks of the model, foreach=False or fused=True of its optimizers, the "
    "allocator's expandable_segments, autocast to bfloat16 (precision), half the batch size of its DataLoader.",
)
@click.option(
    "--prove",
    is_flag=True,
    help="Also run three real steps on the CPU with the best change and with each change alone, and compare losses and "
    "gradients bit for bit with those of the script as it is. An argument cuda of the script becomes cpu.",
)
@click.option(
    "--precision",
    "--arm",
    "arm",
    type=click.Choice(choices(Arm)),
    default=Arm.AS_IS.value,
    show_default=True,
    help="The precision of every run.",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of every run's random numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table, schema ampmem.advise/1.")
@schema_option(advise_schema)
@click.option("--device", "device_option", default=Device.SIMULATED.value, hidden=True)
@shared_options
def advise(
    budget: str | None,
    changes: str,
    prove: bool,
    arm: str,
    seed: int,
    as_json: bool,
    device_option: str,
    options: ScriptOptions,
) -> None:
    """Find changes that make a script fit, each proven by running it.

    Every change is forced on the unmodified script in a run of its own on a simulated GPU, as profile
    --force-checkpoint does; every peak in the table is of such a run. Activation checkpointing is tried on all
    blocks of the model, alone and with other changes; where that is enough, the fewest blocks that are enough are
    searched for. The best comes first; changes of what is computed (precision, batch) come after all others. The
    table goes to stdout, a line for each run to stderr.

    Exit code 0: the script fits, as it is or with a change; 1: nothing that was run fits. Ctrl-C prints the runs that
    have ended.

    \b
    ampmem advise --gpu h100 train.py --batch-size 64
    ampmem advise --gpu h100 --budget 24GiB --allow checkpoint -m my_package.train
    """
    if device_option != Device.SIMULATED:
        raise UsageError(f"advise runs on a simulated GPU only; leave --device {device_option} out")
    if options.steps < STEPS:
        raise UsageError(f"--steps: at least {STEPS}, as the optimizer's state comes with the end of the first step")
    if options.dtype is not None and not Arm(arm).autocast:
        raise UsageError(f"--dtype is what autocast casts to, so it needs --precision amp or amp-nocache, not {arm}")
    allowed, limit = _allowed(changes), _bytes(budget)
    script = settled(replace(options, device=Device.SIMULATED, stacks=False, force=False))
    gpu = gpu_to_simulate(options.gpu)
    if limit is not None and limit > gpu.total_memory:
        raise UsageError(f"--budget {budget} is more than {gpu.name} has: name a larger one with --gpu")
    options.find()
    search = _Search(script, Arm(arm), seed)
    try:
        search.run(allowed, limit)
        if prove:
            search.prove(limit)
    finally:
        if NOTHING_FORCED in search.trials:
            found = advice(
                search.trials,
                search.found,
                limit,
                title=script.title,
                steps=script.steps,
                gpu=gpu.name,
                total=gpu.total_memory,
                proofs=search.proofs,
            )
            click.echo(found.to_json() if as_json else render(found, layout_for(sys.stdout)))
    if not any(meets(trial, limit) for trial in search.trials.values()):
        raise click.exceptions.Exit(1)


advise.params = [param for param in advise.params if param.name not in _NOT_HERE]


def _allowed(text: str) -> frozenset[Change]:
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in tuple(Change)), None)
    if unknown is not None:
        raise UsageError(f"--allow: unknown change {unknown!r}; there are {', '.join(Change)}")
    return frozenset(map(Change, names))


def _bytes(budget: str | None) -> int | None:
    try:
        return None if budget is None else parse_bytes(budget)
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from error


class _Search:
    """The runs, one after the other, no changes twice."""

    def __init__(self, script: ScriptOptions, arm: Arm, seed: int) -> None:
        self._script = script
        self._arm = arm
        self._seed = seed
        self.trials: dict[Forced, Trial] = {}
        self.proofs: dict[Forced, Proof] = {}
        self.found = Script(blocks=None, optimizers=(), updated=0)
        """What the first run says of the script."""

    def run(self, allowed: frozenset[Change], budget: int | None) -> None:
        """Run the script as it is, and with changes until the search is over."""
        with TemporaryDirectory(prefix="ampmem-advise-") as folder, ProgressLine() as progress:
            forced: Forced | None = NOTHING_FORCED
            while forced is not None:
                self.trials[forced] = self._try(forced, Path(folder) / f"run{SUFFIX}", progress)
                forced = next_forced(self.trials, self.found, allowed, budget)

    def prove(self, budget: int | None) -> None:
        """Run the changes that are worth it on the CPU, and keep how their results differ."""
        why = why_unproven(self.trials, self.found)
        with TemporaryDirectory(prefix="ampmem-advise-") as folder, ProgressLine() as progress:
            proving = _Proving(self._script, self._arm, self._seed, Path(folder), progress)
            for forced in to_prove(self.trials, budget):
                base = proof_base(forced)
                name, base_name = name_of(forced, self.found), name_of(base, self.found)
                reason = incomparable(forced) or why
                if reason is None:
                    self.proofs[forced] = proving.proof(replace(forced, allocator=""), name, base, base_name)
                else:
                    self.proofs[forced] = Proof(base=base_name, difference=None, failure=reason)

    def _try(self, forced: Forced, path: Path, progress: ProgressLine) -> Trial:
        name = f"run {len(self.trials) + 1}: {name_of(forced, self.found)}"
        why = refusal(forced, self.found)
        if why is not None:
            progress.stay(f"{name}: not tried: {why}")
            return Trial(memory=None, failure=why)
        progress.now(f"{name}: starting")
        script = replace(self._script, forced=forced)
        last = StepEnded(done=0, wanted=script.steps)

        def follow(step: StepEnded) -> None:
            nonlocal last
            last = step
            progress.now(f"{name}: step {step.done} of {step.wanted}")

        ended = run_child(profile_arguments(script, self._arm, self._seed, "--quiet", "-o", str(path)), follow)
        try:
            refused = ended.said is not None and ended.said.kind is FailureKind.REFUSED
            trial = Trial(memory=None, failure=ended.failure) if refused else self._outcome(path, ended.failure, forced)
            if trial.memory is not None:
                trial = replace(trial, flops=last.flops, recomputed_flops=last.recomputed_flops)
        finally:
            path.unlink(missing_ok=True)
        if trial.failure is not None and forced == NOTHING_FORCED:
            progress.stay(f"{name}: failed: {trial.failure}{misplaced(script, ended)}", tail=ended.tail)
            raise AmpmemError("the script as it is failed, and not for want of memory, so nothing can be advised")
        progress.stay(f"{name}: {_said(trial)}")
        return trial

    def _outcome(self, path: Path, failure: str | None, forced: Forced) -> Trial:
        if not path.exists():
            return Trial(memory=None, failure=failure or "it left no recording")
        try:
            recording = read(path)
            if forced == NOTHING_FORCED:
                self.found = script_of(recording)
            ended = sum(step.finished for step in recording.steps)
            if recording.ooms:
                return Trial(memory=None)
            if ended < self._script.steps:
                short = f"it ended after {ended} of {self._script.steps} steps; let it train for longer"
                return Trial(memory=None, failure=failure or short)
            return Trial(memory=memory_of(recording))
        except RecordingError as error:
            return Trial(memory=None, failure=failure or str(error))


def _said(trial: Trial) -> str:
    if trial.failure is not None:
        return f"refused or failed: {trial.failure}"
    if trial.memory is None:
        return "out of memory"
    return f"peak {format_bytes(trial.memory.allocated)} allocated, {format_bytes(trial.memory.reserved)} reserved"


class _Proving:
    """Three real steps on the CPU for each change, and for what it is compared with: no run is made twice."""

    def __init__(self, script: ScriptOptions, arm: Arm, seed: int, folder: Path, progress: ProgressLine) -> None:
        self._script = replace(
            script,
            device=Device.CPU,
            gpu=None,
            assume=(),
            world_size=None,
            rank=None,
            steps=PROOF_STEPS,
            skip=0,
            arguments=_on_cpu(script.arguments),
        )
        self._arm, self._seed = arm, seed
        self._folder, self._progress = folder, progress
        self._made: dict[tuple[Forced, bool], tuple[Path, str | None]] = {}

    def proof(self, forced: Forced, name: str, base: Forced, base_name: str) -> Proof:
        """How the results with ``forced`` differ from those with ``base``.

        Where they differ, ``base`` is run once more: a script that differs from itself proves nothing.
        """
        runs = ((base, base_name), (forced, name))
        for each, called in runs:
            failure = self._run(each, called)[1]
            if failure is not None:
                return Proof(base=base_name, difference=None, failure=f"{called} on the CPU: {failure}")
        first, second = self._run(*runs[0])[0], self._run(*runs[1])[0]
        found = difference(first, second)
        if not found.losses and not found.gradients and found.same_kind:
            return Proof(
                base=base_name, difference=None, failure="no backward and no torch optimizer's update was seen"
            )
        if not found.equal:
            again, failure = self._run(base, base_name, again=True)
            if failure is not None or not difference(first, again).equal:
                why = (
                    f"two runs of {base_name} on the CPU differ, too: make the script's random numbers those of a seed"
                )
                return Proof(base=base_name, difference=None, failure=why)
        return Proof(base=base_name, difference=found)

    def _run(self, forced: Forced, name: str, *, again: bool = False) -> tuple[Path, str | None]:
        """The file of results, and why there is none."""
        key = forced, again
        if key not in self._made:
            results = self._folder / f"results{len(self._made)}"
            self._made[key] = results, self._make(replace(self._script, forced=forced), name, results)
        return self._made[key]

    def _make(self, script: ScriptOptions, name: str, results: Path) -> str | None:
        recording = results.with_suffix(SUFFIX)
        told = ("--quiet", "-o", str(recording), "--results-into", str(results))
        self._progress.now(f"on the CPU: {name}: starting")
        ended = run_child(
            profile_arguments(script, self._arm, self._seed, *told),
            lambda step: self._progress.now(f"on the CPU: {name}: step {step.done} of {step.wanted}"),
            variables={"CUDA_VISIBLE_DEVICES": ""},
        )
        recording.unlink(missing_ok=True)
        self._progress.stay(f"on the CPU: {name}: {ended.failure or 'done'}")
        return ended.failure


def _on_cpu(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The script's ``arguments`` with cpu for each that is cuda, or a value ``=cuda``."""
    return tuple(re.sub(r"(?a)(^|=)cuda(:\d+)?$", r"\1cpu", argument) for argument in arguments)
