"""``ampmem check``: fail where a run takes more memory than its budgets, or than its baseline, allow."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from click.core import ParameterSource

from ampmem.analysis.budgets.budget import (
    Allowance,
    Budget,
    BudgetFile,
    find_budgets,
    merged,
    parse_allowance,
    parse_budget,
)
from ampmem.analysis.budgets.check import CheckResult, check_run, check_schema, not_judged
from ampmem.analysis.budgets.run import (
    OF_SUMMARY,
    JudgedRun,
    RunsOn,
    is_same,
    of_summary,
    read_run,
    require_comparable,
    require_replaceable,
    run_of,
)
from ampmem.analysis.difference.sides import Side, is_json, read_side
from ampmem.cli.options import (
    ScriptCommand,
    ScriptOptions,
    check_dtype,
    precision_option,
    schema_option,
    settled,
    shared_options,
)
from ampmem.cli.processes.children import (
    ProgressLine,
    for_several_runs,
    misplaced,
    profile_arguments,
    run_child,
    say_protected,
)
from ampmem.cli.processes.end_messages import say_if_on_the_cpu
from ampmem.cli.processes.launcher import check_processes
from ampmem.cli.show import is_sound
from ampmem.errors import AmpmemError, UsageError
from ampmem.failure import FailureKind
from ampmem.output import Terminal, check_output, replaced_file, sized, write_text
from ampmem.recording import SUFFIX, rank_file, read, taken_for_script, without_journals
from ampmem.reporters.base import object_or_array
from ampmem.reporters.export.github import commands, harmless, markdown
from ampmem.reporters.text.check import render_checks
from ampmem.reporters.text.layout import layout_for
from ampmem.units import format_apart, format_peak
from ampmem.vocabulary import SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A run to check, or why it cannot be checked; ``script`` is the script, if known."""

    path: Path
    label: str
    script: str | None = None
    run: JudgedRun | None = None
    problem: str | None = None


def is_recorded(path: Path) -> bool:
    """Whether ``path`` is a recording or the JSON of a summary, and so not a script to run."""
    if path.suffix in (SUFFIX, ".json"):
        return True
    return path.is_file() and taken_for_script(path) is not None


def subject_at(path: Path, label: str | None = None) -> Subject:
    """The run in the file at ``path``. A problem with the file is the :attr:`Subject.problem`."""
    name = label or path.name
    try:
        if is_json(path):
            return Subject(path=path, label=name, run=read_run(path, name))
        recording = read(path)
        run = run_of(recording, name)
        return Subject(path=path, label=name, script=recording.run.script, run=run)
    except AmpmemError as error:
        if error.exit_code != 1:
            raise
        return Subject(path=path, label=name, problem=str(error))


_JSON = ".json"


def baseline_of(path: Path, subject: Subject, subjects: Sequence[Subject]) -> Path:
    """The file of the baseline of ``subject``; for one of several ranks, that of the same rank.

    Raises :class:`UsageError` if one rank's file is given for several ranks.
    """
    ranks = {each.run.summary.rank for each in subjects if each.run is not None}
    if subject.run is None or len(ranks) < 2:
        return path
    summary = subject.run.summary
    if path.exists() or path.suffix == _JSON:
        raise UsageError(
            f"--baseline {path} is a single run, and several ranks are checked: give the job's name, such as "
            "main.ampmem; the ranks' files are next to it, such as "
            f"{rank_file(Path('main'), summary.rank, summary.world_size)}"
        )
    return rank_file(path, summary.rank, summary.world_size)


def read_baseline(path: Path) -> Side:
    """The baseline at ``path``. Raises :class:`UsageError` if it is missing or cannot be compared with."""
    if not path.exists():
        raise UsageError(f"the baseline {path} does not exist; --update-baseline writes it from this run")
    try:
        return read_side(path)
    except UsageError:
        raise
    except AmpmemError as error:
        raise UsageError(f"the baseline cannot be used: {error}") from error


def write_baseline(path: Path, subject: Subject) -> str:
    """Write the run of ``subject`` as the baseline ``path``, unless that is equal already; returns a line about it.

    Missing folders are created.

    Raises :class:`UsageError` if the file is not writable or is not a baseline, and for a summary that would have to
    become a recording.
    """
    assert subject.run is not None
    require_replaceable(path)
    side, before = subject.run.side, None
    with suppress(AmpmemError):  # a baseline that cannot be read is replaced
        before = read_side(path) if path.exists() else None
    if before is not None and is_same(before, side):
        return f"{path} was not rewritten: nothing has changed"
    if path.suffix != _JSON and side.groups is None:
        raise UsageError(
            f"{subject.path} is the JSON of a summary, which cannot become a recording; name the baseline main.json"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if path.suffix == _JSON:
        write_text(path, f"{side.summary.to_json()}\n", force=True)
    else:
        with replaced_file(path, force=True) as file:
            shutil.copyfile(subject.path, file)
    return f"wrote {sized(path)}{_changes(before, side)}"


def _changes(before: Side | None, after: Side) -> str:
    """The changes of the peak in words: ``: peak 1.2 GiB, was 1.0 GiB``."""
    if before is None:
        return f": peak {format_peak(after.summary.whole.bytes)}"
    sizes = {key: (of_summary(before.summary, key), of_summary(after.summary, key)) for key in OF_SUMMARY}
    changed = ((key, *format_apart(old, new)) for key, (old, new) in sizes.items() if old != new)
    texts = [f"{key} {new}, was {old}" for key, old, new in changed]
    return f": {'; '.join(texts)}" if texts else ": all sizes are unchanged"


def on_github() -> bool:
    """Whether the command runs in a step of a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def tell_github(results: Sequence[CheckResult]) -> None:
    """On GitHub, append the table to the job's summary and print annotations on stderr."""
    if not on_github():
        return
    terminal = Terminal(sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(f"{markdown(results, workspace)}\n")
        except OSError as error:  # the check itself is done
            terminal.say(f"cannot write the job summary {summary}: {error.strerror}")
    for command in commands(results, workspace):
        terminal.show(command)


SIGNALLED = 128
"""A shell's exit code for a command killed by a signal is this plus the signal's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """The result of a script: its recordings, one per rank, and how it ended.

    ``exit_code`` is the script's own if it failed, or ampmem's if it could not record; ``failure`` is the reason, in
    one line.
    """

    paths: tuple[Path, ...]
    exit_code: int
    failure: str | None


@contextmanager
def recorded_run(script: ScriptOptions, output: Path | None) -> Iterator[ScriptRun]:
    """Run ``script`` and record it at ``output``, or in a temporary file that is deleted when the block ends.

    The script's output is hidden, except the last lines if it fails. Raises :class:`UsageError` if it cannot be run or
    recorded.
    """
    check_dtype(script, script.precision)
    script = for_several_runs(script)
    check_processes(script, "check")
    target = script.find()
    if output is not None:
        check_output(output, force=script.force)
    say_protected(script)
    say_if_on_the_cpu(script, target.code, Terminal(sys.stderr).say)
    with nullcontext() if output is not None else TemporaryDirectory(prefix="ampmem-check-") as folder:
        path = output if output is not None else Path(str(folder)) / f"{target.title}{SUFFIX}"
        yield _run_profile(script, path)


def _run_profile(script: ScriptOptions, path: Path) -> ScriptRun:
    count = script.nproc_per_node or 1
    files = [path] if count == 1 else [rank_file(path, rank, count) for rank in range(count)]
    with ProgressLine() as progress:
        progress.now(f"{script.name}: starting")
        ended = run_child(
            profile_arguments(script, "--quiet", "-o", str(path)),
            lambda step: progress.now(f"{script.name}: step {step.done} of {step.wanted}"),
        )
        failure = None if ended.failure is None else f"{ended.failure}{misplaced(script, ended)}"
        if failure is not None:
            refused = ended.said is not None and ended.said.kind is FailureKind.REFUSED
            said = failure if refused else f"{script.name} failed: {failure}"
            progress.stay(f"ampmem: {said}", tail=() if refused else ended.tail)
    code = ended.code if ended.code >= 0 else SIGNALLED - ended.code
    return ScriptRun(paths=tuple(file for file in files if file.exists()), exit_code=code, failure=failure)


_GIVE = "; give --budget peak=20GiB, or --baseline FILE, or write [tool.ampmem.budgets] in the script's pyproject.toml"
_OF_FILES = {"budgets", "baseline", "allow", "update_baseline", "as_json", "script_or_module", "arguments"}
"""Parameters that do not change how a script is run."""


class CheckCommand(ScriptCommand):
    """A command in which arguments after a script belong to the script, and options after a recording to ampmem."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, after finding out whether a script or a recording is given."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        first = given.get("script_or_module")
        if isinstance(first, str) and not given.get("as_module") and is_recorded(Path(first)):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


@click.command("check", cls=CheckCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="KEY=SIZE",
    help="The most memory that is allowed, such as peak=20GiB, activations=8GiB, modules.encoder.activations=2GiB, or "
    "growth=0B (growth per step). May be given several times; overrides pyproject.toml.",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    help="A recording, or the JSON of ampmem show --json: the peak, each category and the precision copies must not "
    "take more memory than there.",
)
@click.option(
    "--allow", metavar="1%|10MiB", help="How much more memory than the baseline is allowed.  [default: nothing]"
)
@click.option("--update-baseline", is_flag=True, help="Write this run to --baseline instead of comparing with it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; several files give an array.")
@schema_option(check_schema)
@precision_option("Force a precision on the script, as ampmem profile does.")
@click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of the script's random numbers."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Keep the script's recording in this file.  [default: it is deleted]",
)
@shared_options
@click.pass_context
def check(
    context: click.Context,
    /,
    budgets: tuple[str, ...],
    baseline: Path | None,
    allow: str | None,
    update_baseline: bool,
    as_json: bool,
    output: Path | None,
    options: ScriptOptions,
) -> None:
    """Fail if a run takes more memory than its budgets or its baseline.

    Give a script, which runs as with ampmem profile, or files: recordings, also those of several ranks, or summaries
    (ampmem show --json). With --device sim the bytes are the same in every run: such a memory test needs neither a
    GPU nor a tolerance. Budgets are also read from [tool.ampmem.budgets] in the nearest pyproject.toml, from the
    script's folder upwards.

    Exit codes: 0 if all limits are kept; 1 if one is broken, or the run could not be judged; 2 for wrong usage. A
    script that fails keeps its own exit code. Files without a budget and a baseline are checked as by ampmem show
    --check: can the recording be trusted?

    Budgets can limit peak, allocated, reserved, device, growth, precision_copies, every category, and
    modules.NAME.parameters, .activations, .cast_copies, .gradients.

    \b
    ampmem check --gpu h100 --budget peak=20GiB train.py --batch-size 8
    ampmem check --device sim --baseline main.json --allow 1% train.py
    ampmem check train.ampmem --budget activations=8GiB
    """
    asked = _Asked(
        budgets=tuple(map(parse_budget, budgets)),
        baseline=baseline,
        allow=_allowance(allow, baseline),
        update=update_baseline,
    )
    if update_baseline and baseline is None:
        raise UsageError("--update-baseline needs --baseline, the file to write")
    if options.as_module or not is_recorded(Path(options.script_or_module)):
        context.exit(_check_script(asked, options, output, as_json=as_json))
    _refuse_options_of_scripts(context)
    files = without_journals([Path(options.script_or_module), *map(Path, options.arguments)])
    subjects = [subject_at(path) for path in files]
    if not asked.holds(subjects) and not as_json:
        wrong = [said for subject in subjects for said in asked.mistaken(subject.script)]
        if wrong:
            raise UsageError(wrong[0])
        summary = next((subject.label for subject in subjects if subject.run and subject.run.side.groups is None), None)
        if summary is not None:
            raise UsageError(f"no budget and no baseline given for {summary}{_GIVE}")
        context.exit(1 if [path for path in files if not is_sound(path)] else 0)
    context.exit(0 if _judge(asked, subjects, as_json=as_json) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The limits that the command line gives, and the budget files found for the scripts."""

    budgets: tuple[Budget, ...]
    baseline: Path | None
    allow: Allowance
    update: bool
    files: dict[Path, BudgetFile | None] = field(default_factory=dict)
    """The budget files found, by the folder from which the search went upwards."""
    wrong: dict[str | None, tuple[str, ...]] = field(default_factory=dict)
    """The results of :meth:`mistaken` by script, which all ranks share."""

    def budgets_of(self, script: str | None) -> tuple[Budget, ...]:
        """The budgets of ``script``. Raises :class:`UsageError` for a ``pyproject.toml`` that cannot be read."""
        file = self._file(script)
        return merged(() if file is None else file.budgets_of_script(_whole(script)), self.budgets)

    def mistaken(self, script: str | None) -> tuple[str, ...]:
        """A message for each table in the budget file of ``script`` that names no script."""
        file = self._file(script)
        if file is not None and script not in self.wrong:
            self.wrong[script] = tuple(file.misnamed_tables(_whole(script)))
        return self.wrong.get(script, ())

    def _file(self, script: str | None) -> BudgetFile | None:
        """The nearest budget file, from the script's folder upwards.

        Without a script file the search starts in the working directory, in which Python looks for a module first.
        """
        whole = _whole(script)
        folder = Path(whole).parent if whole is not None and Path(whole).is_file() else Path.cwd()
        if folder not in self.files:
            self.files[folder] = find_budgets(folder)
        return self.files[folder]

    def holds(self, subjects: Sequence[Subject]) -> bool:
        """Whether any of ``subjects`` has something to be checked against."""
        return self.baseline is not None or any(self.budgets_of(subject.script) for subject in subjects)


def _whole(script: str | None) -> str | None:
    """``script`` with its full path if the file exists, as recordings have it as it was typed."""
    if script is None or not Path(script).is_file():
        return script
    # The path is not resolved, as it may be a link: the folders above `a/../train.py` are not those above `a`.
    return (Path(script).parent.resolve() / Path(script).name).as_posix()


def _allowance(allow: str | None, baseline: Path | None) -> Allowance:
    if allow is None:
        return Allowance()
    if baseline is None:
        raise UsageError("--allow needs --baseline")
    return parse_allowance(allow)


def _refuse_options_of_scripts(context: click.Context) -> None:
    for param in context.command.params:
        name = param.name or ""
        if name not in _OF_FILES and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{param.opts[-1]} is for running a script, and files are given; leave it out")


def _check_script(asked: _Asked, options: ScriptOptions, output: Path | None, *, as_json: bool) -> int:
    script = options.name if options.as_module else Path(options.script_or_module).absolute().as_posix()
    if not asked.budgets_of(script) and asked.baseline is None:
        wrong = asked.mistaken(script)
        raise UsageError(
            wrong[0] if wrong else f"no budget and no baseline given for {options.name}{_instead(options)}"
        )
    options = settled(options)
    if asked.baseline is not None:
        _require_baseline(asked.baseline, options, update=asked.update)
    with recorded_run(options, output) as run:
        subjects = _subjects(run, options, script)
        if not subjects:
            return run.exit_code or 1
        kept = _judge(asked, subjects, as_json=as_json)
        if output is None and not kept:
            Terminal(sys.stderr).say("-o FILE keeps the recording, for ampmem report and ampmem diff")
        return run.exit_code or (0 if kept else 1)


def _instead(options: ScriptOptions) -> str:
    """The suggestion for a script that has nothing to be checked against."""
    behind = [name for each in options.arguments if (name := each.partition("=")[0]) in ("--budget", "--baseline")]
    if not behind:
        return _GIVE
    return (
        f"; arguments after the script are the script's own: write {behind[0]} before the script: ampmem check "
        f"{behind[0]} … {options.name}"
    )


def _subjects(run: ScriptRun, options: ScriptOptions, script: str) -> list[Subject]:
    """The runs that the script recorded, one per rank, named after the script."""
    ranks = len(run.paths) > 1
    labels = [f"{options.name}, rank {rank}" if ranks else options.name for rank in range(len(run.paths))]
    found = [subject_at(path, label) for path, label in zip(run.paths, labels, strict=True)]
    return [replace(subject, script=script) for subject in found]


def _require_baseline(path: Path, options: ScriptOptions, *, update: bool) -> None:
    """Check for the baseline before the script runs for minutes; a job's baseline has one file per rank."""
    if update:
        require_replaceable(path)
    elif path.exists() or options.nproc_per_node is None:
        side, gpu = read_baseline(path), options.simulated_gpu
        if gpu is not None:
            require_comparable(side, RunsOn(source=SourceKind.SIMULATED, name=gpu.name), options.name)


def _judge(asked: _Asked, subjects: Sequence[Subject], *, as_json: bool) -> bool:
    """Whether all of ``subjects`` keep their limits; prints the results, and writes baselines if asked."""
    results = [_result(asked, subject, subjects) for subject in subjects]
    if asked.update and not any(result.judged or result.problems for result in results):
        pass  # the line about the written baseline says it all
    elif as_json:
        click.echo(object_or_array([result.to_json() for result in results]))
    else:
        text = render_checks(results, layout_for(sys.stdout))
        click.echo(harmless(text) if on_github() else text)
    if asked.update and asked.baseline is not None:
        for subject, result in zip(subjects, results, strict=True):
            _update(asked.baseline, subject, result, subjects)
    tell_github(results)
    return all(result.ok for result in results)


def _result(asked: _Asked, subject: Subject, subjects: Sequence[Subject]) -> CheckResult:
    if subject.run is None:
        return not_judged(subject.label, subject.problem or "")
    baseline = None
    if asked.baseline is not None and not asked.update:
        baseline = read_baseline(baseline_of(asked.baseline, subject, subjects))
    mistaken = asked.mistaken(subject.script)
    return check_run(subject.run, asked.budgets_of(subject.script), baseline, asked.allow, mistaken=mistaken)


def _update(baseline: Path, subject: Subject, result: CheckResult, subjects: Sequence[Subject]) -> None:
    """Write the baseline, unless the run could not be judged; a run over a budget can be a baseline all the same."""
    terminal, path = Terminal(sys.stderr), baseline_of(baseline, subject, subjects)
    if result.problems:
        terminal.say(f"{path} was not updated: {result.label} could not be judged")
    else:
        terminal.say(write_baseline(path, subject))
