"""``ampmem advise``: changes that would make a script fit, each proven by a run of the script with it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import TypeAlias

import click

from ampmem.allocator.settings import text_of_environment
from ampmem.analysis.advise import (
    PROOF_STEPS,
    AdviceDocument,
    Proof,
    advice,
    advise_schema,
    blocks_of_ranks,
    changeable_script,
    different_ranks,
    due,
    how_bad,
    incomparable,
    measured_memory,
    meets,
    most_left,
    name_of,
    needed_at_least,
    proof_base,
    ranked,
    step_time,
    to_prove,
    why_not_run,
    why_unproven,
)
from ampmem.analysis.advised import KIND, EndedRun, identity_in, run_in
from ampmem.analysis.analyse import analyse
from ampmem.analysis.changes import CHANGES, Loop, Script, Trial
from ampmem.analysis.fit import memory_of
from ampmem.analysis.jsonable import Json, like, plain
from ampmem.cli.options import (
    ScriptCommand,
    ScriptOptions,
    check_dtype,
    choices,
    parse_size,
    precision_option,
    schema_option,
    seed_of_runs,
    shared_options_but,
)
from ampmem.cli.processes.children import (
    KILLED,
    STEPS,
    ChildEnd,
    Children,
    CountedRuns,
    ProgressLine,
    default_jobs,
    for_several_runs,
    jobs_option,
    misplaced,
    profile_arguments,
    run_at_once,
    run_child,
    say_context,
    say_protected,
)
from ampmem.cli.processes.launcher import check_processes
from ampmem.cli.processes.messages import StepEnded
from ampmem.cli.processes.starting import Warmed, warmed
from ampmem.errors import AmpmemError, NothingRecorded, RecordingError, UsageError
from ampmem.failure import FailureKind
from ampmem.output import check_output, say_written
from ampmem.recorder.marker import step_on_text
from ampmem.recorder.script import Target, texts_in
from ampmem.recording import SUFFIX, rank_file, read
from ampmem.reporters.text.advise import best_change, render_advice
from ampmem.reporters.text.layout import layout_for
from ampmem.results import results_difference
from ampmem.units import format_bytes
from ampmem.version import __version__
from ampmem.vocabulary import NOTHING_FORCED, Device, Forced

_DEVICES = (Device.SIMULATED, Device.CUDA, Device.CPU)
_ALLOWED = {change.allow: change.about for change in CHANGES}


@click.command(
    "advise", cls=ScriptCommand, context_settings={"allow_interspersed_args": False, "default_map": {"steps": STEPS}}
)
@click.option(
    "--budget",
    metavar="BYTES",
    help="The memory limit, such as 24GiB. On a GPU it covers all memory in use, also outside PyTorch's allocator; on "
    "the CPU it covers the tensors.  [default: the device's memory]",
)
@click.option(
    "--allow",
    "changes",
    default=",".join(_ALLOWED),
    show_default="all of these",
    metavar="CHANGE,...",
    help=f"Which changes to try: {', '.join(f'{name} ({about})' for name, about in _ALLOWED.items())}.",
)
@click.option(
    "--prove",
    is_flag=True,
    help="Also run three real steps on the CPU with the best change and with each change alone, and compare losses "
    "and gradients bit for bit with those of the script as it is. If an argument of the script is cuda, it becomes "
    "cpu.",
)
@precision_option("The precision of every run.")
@seed_of_runs
@jobs_option("; on a real device always one")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save finished runs in FILE, and do not repeat the runs that it has: an interrupted search continues, and a "
    "search with another budget or other changes reuses them.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Also write an HTML page with all runs here, and next to it the pages of the script as it is and with the "
    "best change, such as advise.before.html and advise.after.html.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table, schema ampmem.advise/1.")
@schema_option(advise_schema)
@click.option(
    "--device",
    "device_option",
    type=click.Choice(choices(_DEVICES)),
    default=Device.SIMULATED.value,
    show_default=True,
    help="The device to run on: sim simulates the GPU given by --gpu. On a real GPU or CPU memory is measured, and a "
    "second run with each change times the steps.",
)
@shared_options_but("device", "synchronize", "stacks")  # those have no effect here
def advise(
    budget: str | None,
    changes: str,
    prove: bool,
    jobs: int | None,
    resume: Path | None,
    html: Path | None,
    as_json: bool,
    device_option: str,
    options: ScriptOptions,
) -> None:
    """Find changes that make a script fit, each tested by a run.

    Every change is forced on the unmodified script in its own run, as profile --force-checkpoint does, on a simulated
    GPU or, with --device, on a real device; every peak in the table comes from such a run. Activation checkpointing
    is tried on all blocks of the model, alone and with other changes; if that is enough, ampmem searches for the
    fewest blocks that are enough. The best change comes first; changes of what is computed (precision, batch) come
    after all others. The table goes to stdout, a line for each run to stderr.

    With --world-size the script runs once as each rank of a simulated job, and with --nproc-per-node in N processes
    on a real device; the peaks are those of the worst rank.

    Exit codes: 0 if the script fits, as it is or with a change; 1 if no run fits. Ctrl-C prints the finished runs;
    with --resume they are not repeated.

    \b
    ampmem advise --gpu h100 train.py --batch-size 64
    ampmem advise --gpu h100 --budget 24GiB --allow checkpoint -m my_package.train
    ampmem advise --device cuda --budget 20GiB train.py
    """
    if options.steps < STEPS:
        raise UsageError(
            f"--steps must be at least {STEPS}: the optimizer's state is created at the end of the first step"
        )
    check_dtype(options, options.precision)
    allowed, limit = _allowed(changes), None if budget is None else parse_size(budget, "--budget")
    script = for_several_runs(replace(options, device=Device(device_option), stacks=html is not None, force=False))
    check_processes(script, "advise")
    gpu = script.simulated_gpu
    if gpu is None and jobs is not None and jobs > 1:
        raise UsageError(
            f"--jobs {jobs}: on a real device runs are made one by one, because they would share its "
            "memory; leave --jobs out"
        )
    if gpu is not None and limit is not None and limit > gpu.total_memory:
        raise UsageError(f"--budget {budget} is more memory than {gpu.name} has: choose a larger GPU with --gpu")
    target = options.find()
    if html is not None:
        check_output(html, force=options.force, option="--html")
    say_protected(script)
    if gpu is not None:
        say_context(gpu, gpu.total_memory if limit is None else limit)
    kept = _Kept(resume, _identity(script, target))

    def document() -> AdviceDocument:
        return advice(
            search.trials,
            search.found,
            limit,
            title=script.title,
            steps=script.steps,
            gpu=search.found.device_name if gpu is None else gpu.name,
            total=None if gpu is None else gpu.total_memory,
            world_size=script.nproc_per_node or script.world_size or 1,
            proofs=search.proofs,
        )

    at_once = 1 if gpu is None else jobs or default_jobs()
    with TemporaryDirectory(prefix="ampmem-advise-") as folder:
        search = _Search(script, at_once, kept, Path(folder), loop_of(target.code))
        try:
            search.run(allowed, limit, keep=html is not None)
            if prove:
                search.prove(limit)
        finally:
            if NOTHING_FORCED in search.trials:
                found = document()
                click.echo(found.to_json() if as_json else render_advice(found, layout_for(sys.stdout)))
        if html is not None:
            _write_page(document(), search, limit, html, force=options.force)
    if not any(meets(trial, limit) for trial in search.trials.values()):
        raise click.exceptions.Exit(1)


def _write_page(found: AdviceDocument, search: _Search, budget: int | None, html: Path, *, force: bool) -> None:
    """Write the page of the search, and those of the recordings before and after the best change."""
    from ampmem.reporters.html.write import write_advice

    best = ranked(search.trials, budget)[0]
    after = None if best_change(found) is None else search.recordings[best]
    for path in write_advice(found, html, before=search.recordings[NOTHING_FORCED], after=after, force=force):
        say_written(path)


def _allowed(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in _ALLOWED), None)
    if unknown is not None:
        raise UsageError(f"--allow: unknown change {unknown!r}; choose from {', '.join(_ALLOWED)}")
    return frozenset(names)


def loop_of(code: CodeType) -> Loop:
    """Whose training loop a script with this ``code`` uses, by the names in it."""
    names = set(texts_in(code))
    imported = {name.partition(".")[0] for name in names}
    if imported & {"lightning", "pytorch_lightning"}:
        return Loop.LIGHTNING
    if "transformers" not in imported:
        return Loop.OWN
    return Loop.TRAINER if any(name.endswith("TrainingArguments") for name in names) else Loop.OF_TRANSFORMERS


def _every_rank(script: ScriptOptions) -> tuple[int, ...]:
    """The ranks as which the unchanged script is run, one at a time; empty if it is run as one process."""
    return () if script.rank is not None or (script.world_size or 1) == 1 else tuple(range(script.world_size or 1))


_Part: TypeAlias = tuple[Forced, int | None]
"""A process of a run: its changes, and the simulated rank if there are several."""


class _Search:
    """The runs of the search, ``jobs`` at once; changes are not run twice, nor if ``kept`` has their run.

    In a simulated world a run consists of one process per rank, one after the other or at once.
    """

    def __init__(self, script: ScriptOptions, jobs: int, kept: _Kept, folder: Path, loop: Loop) -> None:
        self._loop = loop
        self._context = click.get_current_context()
        self._script = script
        self._jobs = jobs
        self._kept = kept
        self._folder = folder
        self._numbers = count()
        self._of_ranks: dict[_Part, EndedRun] = {}
        """The ranks that have ended, for runs whose other ranks have not."""
        self.recordings: dict[Forced, Path] = {}
        """The recordings of the unchanged script and of the best run, if :meth:`run` was told to keep them."""
        self.trials: dict[Forced, Trial] = {}
        self.proofs: dict[Forced, Proof] = {}
        self.found = Script(blocks=None, optimizers=(), updated=0)
        """The properties of the script from the first run."""

    def run(self, allowed: frozenset[str], budget: int | None, *, keep: bool = False) -> None:
        """Run the unchanged script, then runs with changes until the search is over. No process is left behind.

        With ``keep`` the recordings of the unchanged script and of the best run are in :attr:`recordings` afterwards.
        """
        with (
            _Progress(lambda: most_left(self.trials, self.found, allowed, budget)) as progress,
            warmed(self._script.device) as forking,
        ):

            def parts() -> list[_Part]:
                due_now = self._due(allowed, budget, progress) or (self._unrecorded(budget) if keep else ())
                return [part for part in self._parts(due_now) if part not in self._of_ranks]

            def note_part(part: _Part, ended: EndedRun) -> None:
                self._of_ranks[part] = ended
                self._note_if_ended(part[0], progress)
                if NOTHING_FORCED in self.trials:
                    kept = {NOTHING_FORCED, ranked(self.trials, budget)[0]} if keep else set()
                    for each in self.recordings.keys() - kept:
                        self.recordings.pop(each).unlink(missing_ok=True)

            run_at_once(self._jobs, parts, partial(self._make, progress, forking), note_part)

    def _parts(self, wanted: Iterable[Forced]) -> list[_Part]:
        """The processes that these runs consist of, each with its simulated rank if there are several."""
        every = _every_rank(self._script)
        some = self.found.ranks if every else ()
        return [(each, rank) for each in wanted for rank in (every if each == NOTHING_FORCED else some) or (None,)]

    def _note_if_ended(self, forced: Forced, progress: _Progress) -> None:
        """Note the result of ``forced`` if the run has ended for all of its ranks."""
        parts = self._parts([forced])
        if all(part in self._of_ranks for part in parts):
            ended = [self._of_ranks.pop(part) for part in parts]
            self._note_result(ended[0] if parts[0][1] is None else _of_worst(ended), progress)

    def _unrecorded(self, budget: int | None) -> list[Forced]:
        """The runs to repeat for their recordings: the file of ``--resume`` has only their results."""
        wanted = dict.fromkeys((NOTHING_FORCED, ranked(self.trials, budget)[0]))
        return [each for each in wanted if each not in self.recordings and self.trials[each].failure is None]

    def _due(self, allowed: frozenset[str], budget: int | None, progress: _Progress) -> list[Forced]:
        """The changes to run now; changes that need no run are settled first."""
        while True:
            first = [] if NOTHING_FORCED in self.trials else [NOTHING_FORCED]
            wanted = first or due(self.trials, self.found, allowed, budget)
            known = [(ended, said) for ended, said in map(self._result_without_run, wanted) if ended is not None]
            if not known:
                return wanted
            for ended, said in known:
                self._note(ended)
                progress.ended(name_of(ended.forced, self.found), said, made=False)

    def _result_without_run(self, forced: Forced) -> tuple[EndedRun | None, str]:
        """The result of ``forced`` if it needs no run, and the words for that."""
        why = why_not_run(forced, self.found)
        if why is not None:
            return EndedRun(forced=forced, trial=Trial(memory=None, failure=why)), f"not tried: {why}"
        ended = self._kept.run_of(forced)
        return ended, "" if ended is None else f"reused: {_result_text(ended.trial, self._script.device)}"

    def _note_result(self, ended: EndedRun, progress: _Progress) -> None:
        self._note(ended)
        if self._kept.run_of(ended.forced) is None:
            self._kept.keep(ended)
        progress.ended(name_of(ended.forced, self.found), _result_text(ended.trial, self._script.device))

    def _note(self, ended: EndedRun) -> None:
        self.trials[ended.forced] = ended.trial
        if ended.recording is not None:
            self.recordings[ended.forced] = ended.recording
        if ended.script is not None:
            self.found = ended.script

    def prove(self, budget: int | None) -> None:
        """Run the changes worth proving on the CPU, and keep the differences of their results."""
        several = "the script runs on several ranks" if self.found.ranks or self._script.world_size else None
        why = several or why_unproven(self.trials, self.found)
        with ProgressLine() as progress:
            proving = _Proving(self._script, self._folder, progress)
            for forced in to_prove(self.trials, budget):
                base = proof_base(forced, self.found)
                name, base_name = name_of(forced, self.found), name_of(base, self.found)
                reason = incomparable(forced) or why
                if reason is None:
                    on_cpu = replace(forced, allocator="", workspace="")
                    self.proofs[forced] = proving.proof(on_cpu, name, base, base_name)
                else:
                    self.proofs[forced] = Proof(base=base_name, difference=None, failure=reason)

    def _make(self, progress: _Progress, forking: Warmed | None, part: _Part, children: Children) -> EndedRun:
        """Make one run, or one rank of it, in a thread."""
        forced, rank = part
        path = self._folder / f"run{next(self._numbers)}{SUFFIX}"
        name = name_of(forced, self.found)
        name += "" if rank is None else f": rank {rank} of {self._script.world_size}"
        progress.doing(f"{name}: starting")
        script = replace(self._script, forced=forced)
        if rank is not None:
            script = replace(script, forced=self._on_rank(forced, rank), rank=rank)
        last = StepEnded(done=0, wanted=script.steps)

        def follow(step: StepEnded) -> None:
            nonlocal last
            last = step
            progress.doing(f"{name}: step {step.done} of {step.wanted}")

        command = profile_arguments(script, "--quiet", "-o", str(path))
        ended = run_child(command, follow, children.started, warmed=forking)
        if script.device is not Device.SIMULATED and ended.failure is None:
            progress.doing(f"{name}: timing")
            timing = profile_arguments(script, "--times-into", str(path))
            timed = run_child(timing, on_start=children.started)
            if timed.failure is not None:
                progress.stay(f"{name}: the timing run failed: {timed.failure}", tail=timed.tail)
        several = (script.nproc_per_node or 1) > 1
        found = (self._outcome_of_processes if several else self._outcome)(path, ended, forced, last.module_flops)
        if rank is not None:
            found = replace(found, trial=replace(found.trial, rank=rank))
        if found.trial.memory is not None:
            kept = {name: getattr(found.trial, name) for name in ("memory", "failure", "step_ns", "rank")}
            found = replace(found, trial=like(Trial, last, **kept))
        if found.trial.failure is not None and forced == NOTHING_FORCED and not children.ended:
            with self._context.scope(cleanup=False):  # of the main thread, for the names of the command's options
                hint = misplaced(script, ended)
            progress.stay(f"{name}: failed: {found.trial.failure}{hint}", tail=ended.tail)
            raise AmpmemError("the unchanged script failed, and not because memory ran out: fix this error first")
        return found

    def _on_rank(self, forced: Forced, rank: int) -> Forced:
        """``forced`` without the blocks of other pipeline stages."""
        stages = self.found.stages
        if not stages or forced == NOTHING_FORCED:
            return forced
        return replace(forced, checkpoint=tuple(name for name in forced.checkpoint if name in stages[rank]))

    def _outcome_of_processes(
        self, path: Path, end: ChildEnd, forced: Forced, module_flops: Mapping[str, int]
    ) -> EndedRun:
        """The result of a run's processes on a real device; a process without a model has recorded nothing."""
        size = self._script.nproc_per_node or 1
        files = {rank: rank_file(path, rank, size) for rank in range(size)}
        ended = {
            rank: self._outcome(file, end, forced, module_flops)
            for rank, file in files.items()
            if rank == 0 or file.exists()
        }
        return _of_worst([replace(each, trial=replace(each.trial, rank=rank)) for rank, each in ended.items()])

    def _outcome(self, path: Path, end: ChildEnd, forced: Forced, module_flops: Mapping[str, int]) -> EndedRun:
        refused = end.said is not None and end.said.kind is FailureKind.REFUSED
        if refused or not path.exists():
            return EndedRun(forced=forced, trial=Trial(memory=None, failure=end.failure or "it left no recording"))
        try:
            recording = read(path)
            script, trial = None, Trial(memory=None)
            if forced == NOTHING_FORCED:
                analysis = analyse(recording)
                script = replace(changeable_script(analysis, module_flops), loop=self._loop)
                trial = Trial(memory=None, needed=needed_at_least(analysis))
            steps = sum(step.finished for step in recording.steps)
            if not recording.ooms and steps < self._script.steps:
                short = f"it ended after {steps} of {self._script.steps} steps; let it train longer"
                trial = Trial(memory=None, failure=end.failure or short)
            elif not recording.ooms:
                simulated = self._script.device is Device.SIMULATED
                memory = memory_of(recording) if simulated else measured_memory(recording)
                trial = Trial(memory=memory, step_ns=step_time(recording))
            return EndedRun(forced=forced, trial=trial, script=script, recording=path)
        except (RecordingError, NothingRecorded) as error:
            trial = Trial(memory=None, failure=end.failure or str(error))
            return EndedRun(forced=forced, trial=trial, recording=path)


def _of_worst(ended: Sequence[EndedRun]) -> EndedRun:
    """The result of a run of several ranks: that of the worst rank; the other ranks' recordings are deleted.

    For the unchanged script it has the blocks of all ranks.
    """
    found = max(ended, key=lambda each: how_bad(each.trial))
    for each in ended:
        if each is not found and each.recording is not None:
            each.recording.unlink(missing_ok=True)
    if found.script is None:
        return found
    by_rank = [None if each.script is None else each.script.blocks for each in ended]
    names = tuple(() if blocks is None else blocks.names for blocks in by_rank)
    script = replace(
        found.script,
        blocks=blocks_of_ranks(by_rank),
        ranks=different_ranks((each.trial, each.script) for each in ended),
        stages=names if len(set(names)) > 1 else (),
    )
    return replace(found, script=script)


class _Progress(CountedRuns):
    """Counts the runs as they end; ``most_left`` gives the most that are left."""

    def __init__(self, most_left: Callable[[], int]) -> None:
        super().__init__()
        self._most_left = most_left
        self._made = 0
        self._begun = time.monotonic()

    def ended(self, name: str, said: str, *, made: bool = True) -> None:
        """One line for a run that ended, or that was not ``made``."""
        self._count += 1
        self._made += made
        self._rest = self._left_text()
        self.stay(f"run {self._count}: {name}: {said}", self._rest)

    def _left_text(self) -> str:
        """``; at most 4 left, about 20 s``, from the duration of the runs before."""
        count = self._most_left()
        if not count or not self._made:
            return ""
        seconds = (time.monotonic() - self._begun) / self._made * count
        about = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f"; at most {count} left, about {about}"


class _Kept:
    """The file of ``--resume``: a first line that identifies the runs, and a line for each run that has ended.

    Without a file nothing is kept. Raises :class:`UsageError` for a file of other runs.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Json]) -> None:
        self._path = path
        self._runs: dict[Forced, EndedRun] = {}
        if path is None:
            return
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            if not text:
                path.write_text(f"{json.dumps(of)}\n", encoding="utf-8")
                return
            self._check(path, text.splitlines()[0], of)
            if not text.endswith("\n"):  # a killed process has written part of a line
                self._append("\n")
        except (OSError, ValueError) as error:
            raise UsageError(f"--resume {path}: {error}") from error
        self._runs = {ended.forced: ended for line in text.splitlines()[1:] if (ended := run_in(line)) is not None}

    def _check(self, path: Path, line: str, of: Mapping[str, Json]) -> None:
        found = identity_in(line)
        if found is None:
            raise UsageError(f"--resume {path}: ampmem advise did not write this file; name a file that does not exist")
        others = [key for key, value in of.items() if found.get(key) != value]
        if others:
            raise UsageError(
                f"--resume {path}: its runs were made with another {', another '.join(others)}; name a file that does "
                "not exist"
            )

    def run_of(self, forced: Forced) -> EndedRun | None:
        """The run with these changes; ``None`` if there is none."""
        return self._runs.get(forced)

    def keep(self, ended: EndedRun) -> None:
        """Append one run, unless a signal ended it."""
        if not (ended.trial.failure or "").startswith(KILLED):
            self._append(f"{json.dumps(plain(ended))}\n")

    def _append(self, text: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)


def _identity(script: ScriptOptions, target: Target) -> dict[str, Json]:
    """The properties of two runs that must be equal for their results to be; imported modules are not compared."""
    size = script.nproc_per_node or script.world_size or 1
    return {
        KIND: __version__,
        "torch": version("torch"),
        "script": script.title,
        "source": target.sha256,
        "device": script.device,
        "GPU": "" if script.gpu is None else script.gpu.name,
        "precision": f"{script.precision} {script.dtype or ''}".strip(),
        "seed": script.seed,
        "number of steps": f"{script.skip}+{script.steps} {step_on_text(script.step_on) or ''}".strip(),
        "assumption": list(script.assume),
        "rank": f"all of {size}" if _every_rank(script) or script.nproc_per_node else f"{script.rank or 0} of {size}",
        "environment": text_of_environment(os.environ)[1],
        "environment of libraries": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_OF_LIBRARIES)
        },
    }


_OF_LIBRARIES = ("CUBLAS", "CUDNN_", "NCCL_", "TORCH_CUBLAS", "TORCH_CUDNN")
"""The beginnings of the variables that change workspaces and the choice of kernels, such as CUBLAS_WORKSPACE_CONFIG."""


def _result_text(trial: Trial, device: Device) -> str:
    rank = "" if trial.rank is None else f" on rank {trial.rank}"
    if trial.failure is not None:
        return f"refused or failed{rank}: {trial.failure}"
    if trial.memory is None:
        return f"out of memory{rank}"
    peak = f"peak{rank} {format_bytes(trial.memory.allocated)} allocated"
    return peak if device is Device.CPU else f"{peak}, {format_bytes(trial.memory.reserved)} reserved"


class _Proving:
    """The proofs: three real steps on the CPU for each change and for its base; no run is made twice."""

    def __init__(self, script: ScriptOptions, folder: Path, progress: ProgressLine) -> None:
        self._script = replace(
            script,
            device=Device.CPU,
            gpu=None,
            assume=(),
            world_size=None,
            rank=None,
            steps=PROOF_STEPS,
            skip=0,
            stacks=False,
            arguments=_on_cpu(script.arguments),
        )
        self._folder, self._progress = folder, progress
        self._made: dict[tuple[Forced, bool], tuple[Path, str | None]] = {}

    def proof(self, forced: Forced, name: str, base: Forced, base_name: str) -> Proof:
        """The difference between the results with ``forced`` and those with ``base``.

        If they differ, ``base`` is run again: a script that differs from itself proves nothing.
        """
        runs = ((base, base_name), (forced, name))
        for each, called in runs:
            failure = self._run(each, called)[1]
            if failure is not None:
                return Proof(base=base_name, difference=None, failure=f"{called} on the CPU: {failure}")
        first, second = self._run(*runs[0])[0], self._run(*runs[1])[0]
        found = results_difference(first, second)
        if not found.losses and not found.gradients and found.same_kind:
            return Proof(
                base=base_name,
                difference=None,
                failure="neither a backward nor an update of a torch optimizer was seen",
            )
        if not found.equal:
            again, failure = self._run(base, base_name, again=True)
            if failure is not None or not results_difference(first, again).equal:
                why = f"two runs of {base_name} on the CPU differ, too: seed the script's random numbers"
                return Proof(base=base_name, difference=None, failure=why)
        return Proof(base=base_name, difference=found)

    def _run(self, forced: Forced, name: str, *, again: bool = False) -> tuple[Path, str | None]:
        """The file of results, and why there are none."""
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
            profile_arguments(script, *told),
            lambda step: self._progress.now(f"on the CPU: {name}: step {step.done} of {step.wanted}"),
            variables={"CUDA_VISIBLE_DEVICES": ""},
        )
        recording.unlink(missing_ok=True)
        self._progress.stay(f"on the CPU: {name}: {ended.failure or 'done'}")
        return ended.failure


def _on_cpu(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The script's ``arguments`` with cpu in place of cuda, as an argument or as a value after ``=``."""
    return tuple(re.sub(r"(?a)(^|=)cuda(:\d+)?$", r"\1cpu", argument) for argument in arguments)
