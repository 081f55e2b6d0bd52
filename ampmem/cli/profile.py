"""``ampmem profile``: run a script or module and record where its memory goes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ampmem.allocator.settings import with_settings
from ampmem.cli.options import (
    ScriptCommand,
    ScriptOptions,
    check_dtype,
    force_options,
    precision_option,
    settled,
    shared_options,
)
from ampmem.cli.processes import end_messages
from ampmem.cli.processes.children import misplaced_option
from ampmem.cli.processes.launcher import check_ranks, launch_ranks, launches
from ampmem.cli.processes.messages import Audience, OfRank, Parent, Person, StepEnded, exit_of_rank
from ampmem.cli.processes.plan import Plan, beside, forget, ranks_left, tell_name
from ampmem.cli.processes.protection import inherited
from ampmem.cli.processes.script_run import end_as, failure_in_words, run_script, stop_of_simulation, usage_error
from ampmem.cli.processes.spawned import Spawner, may_spawn
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.output import sized
from ampmem.recorder.ranks.environment import launched
from ampmem.recorder.script import Target
from ampmem.recording import SUFFIX, add_plain_steps, rank_file, read
from ampmem.vocabulary import WORKSPACE_CONFIG, Device, Forced, forced_options

if TYPE_CHECKING:
    from ampmem.recorder.evaluation import ThenEvaluation
    from ampmem.recorder.ranks.together import Together
    from ampmem.recorder.session import Session
    from ampmem.recorder.sources.simulated import SimulatedSource
    from ampmem.recorder.steering.stopping import Stopper
    from ampmem.simulator.start import Simulation

_NO_TRITON = (
    "the script needs Triton, which is not installed: pip install triton. On a simulated GPU its kernels do nothing: "
    "no GPU is needed"
)


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
@precision_option(
    "Force a precision on the script: fp32 without autocast and GradScaler, amp with autocast, amp-nocache "
    "with autocast without its weight cache, bf16 with weights and buffers in bfloat16 and without autocast."
)
@click.option("--seed", type=int, metavar="N", help="Seed Python's, numpy's and torch's random numbers first.")
@force_options
@click.option(
    "--run-to-end",
    is_flag=True,
    help="Let the script finish, without instrumentation, once the steps are recorded; the exit code is the script's. "
    f"The first evaluation that comes then is recorded to train.evaluation{SUFFIX}.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"The recording to write.  [default: train{SUFFIX} for train.py, in this directory; train.2{SUFFIX} if that "
    "exists]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write the HTML report here.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    help="Also write a memory snapshot for pytorch.org/memory_viz here.",
)
@click.option("--quiet", is_flag=True, help="Print no tables.")
@click.option("--report-to", type=click.Path(path_type=Path), hidden=True, help="Say all in this FILE, for ampmem.")
@click.option(
    "--times-into", type=click.Path(path_type=Path), hidden=True, help="Record nothing; time the steps for this FILE."
)
@click.option(
    "--names-into", type=click.Path(path_type=Path), hidden=True, help="Say in this FILE where a rank writes."
)
@click.option(
    "--results-into", type=click.Path(path_type=Path), hidden=True, help="Keep losses and gradients in this FILE."
)
@shared_options
def profile(
    run_to_end: bool,
    output: Path | None,
    html: Path | None,
    snapshot: Path | None,
    quiet: bool,
    report_to: Path | None,
    times_into: Path | None,
    names_into: Path | None,
    results_into: Path | None,
    options: ScriptOptions,
) -> None:
    """Run an unmodified training script and record its memory, step by step.

    The first --steps steps are recorded; then the script is stopped, and the files that it had written stay. On a
    simulated GPU the script's writes are gone with the run, and your files are as before (--files). ampmem prints its
    own messages and tables to stderr; stdout has only the script's output. If the script fails, its exit code and all
    finished steps are kept; if memory runs out, the unfinished step is kept, too.

    SCRIPT is what Python runs: a file, - for standard input, a directory or a zip file (app.pyz) with
    a __main__.py.

    \b
    ampmem profile train.py --epochs 1
    ampmem profile --steps 5 -o run.ampmem -m ampmem.workloads.gpt --preset tiny
    """
    plan = Plan(
        script=options,
        run_to_end=run_to_end,
        output=output,
        html=html,
        snapshot=snapshot,
        quiet=quiet,
        report_to=report_to,
        times_into=times_into,
        names_into=names_into,
        results_into=results_into,
        launched=launched(),
        protected=inherited(),
    )
    audience = _audience(plan, report_to)
    audience.reach(plan.protected)
    try:
        _carry_out(plan, audience)
    except AmpmemError as error:
        error.args = (audience.protected.worded(str(error)),)
        if isinstance(audience, OfRank):
            audience.refused(error)
            raise exit_of_rank(error) from error
        if report_to is None:
            raise
        audience.failed(FailureRecord(kind=FailureKind.REFUSED, message=str(error)))
        raise click.exceptions.Exit(error.exit_code) if plan.launched is None else exit_of_rank(error) from error


def _check_forced(script: ScriptOptions) -> None:
    """Raise :class:`UsageError` for changes that contradict each other, or that the device does not support."""
    forced = script.forced
    if forced.fused and forced.foreach is not None:
        raise UsageError("--force-fused and --force-foreach exclude each other: leave one of them out")
    for name, what in (("allocator", "the CUDA caching allocator"), ("workspace", "cuBLAS's workspaces")):
        if getattr(forced, name) and script.device is Device.CPU:
            option = forced_options()[name].words[0]
            raise UsageError(f"{option} sets {what}, which the CPU does not use; leave it out")


def _set_environment(forced: Forced) -> None:
    """Set the environment variables of forced changes."""
    if forced.allocator:
        _set_allocator(forced.allocator)
    if forced.workspace:
        _set_workspace(forced.workspace)


def _set_allocator(settings: str) -> None:
    """Add ``settings`` to the environment, which torch reads when CUDA is first used."""
    try:
        variable, text = with_settings(os.environ, settings)
    except UsageError as error:
        raise UsageError(f"--force-allocator {settings}: {error}") from error
    os.environ[variable] = text


def _set_workspace(config: str) -> None:
    """Add ``config`` to the environment, which PyTorch and cuBLAS read when the first workspace is needed."""
    if not re.fullmatch("(:[0-9]+:[0-9]+)+", config):
        raise UsageError(f"--force-workspace {config}: write :KiB:COUNT, once or several times, such as :4096:2:16:8")
    former = os.environ.get(WORKSPACE_CONFIG)
    if former is not None:
        raise UsageError(f"--force-workspace {config}: {WORKSPACE_CONFIG} is already {former}")
    os.environ[WORKSPACE_CONFIG] = config


def _audience(plan: Plan, report_to: Path | None) -> Audience:
    if report_to is not None:
        return Parent(report_to)
    return Person() if plan.launched is None else OfRank(plan.launched)


def _carry_out(plan: Plan, audience: Audience) -> None:
    if not launches(plan.script):  # each launched process sets its own
        _set_environment(plan.script.forced)
    plan = replace(plan, script=settled(plan.script))
    script = plan.script
    check_dtype(script, script.precision)
    _check_forced(script)
    check_ranks(plan)
    if launches(script):
        launch_ranks(plan)
    target, _ = plan.find()
    if script.seed is not None:
        from ampmem.recorder.comparable import seed_everything

        seed_everything(script.seed)
    if plan.times_into is None:
        _record(plan, target, audience)
    else:
        _time(plan, target, audience, plan.times_into)


def _record(plan: Plan, target: Target, audience: Audience) -> NoReturn:
    from ampmem.recorder.comparable import Results
    from ampmem.recorder.evaluation import ThenEvaluation
    from ampmem.recorder.ranks.together import Together
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper

    together = Together(several=plan.launched is not None)
    simulated = plan.script.device is Device.SIMULATED
    path, greeting = plan.place(target.title, spawns=not simulated and may_spawn(target.code))
    try:
        plan = plan.protect(path)
        audience.reach(plan.protected)
        simulation = plan.simulate()
    except BaseException:
        forget(plan, path)
        raise
    if plan.protected.limits and plan.report_to is None:
        audience.complain(plan.protected.limits)
    end_messages.say_if_on_the_cpu(plan.script, target.code, audience.say)
    if plan.names_into is not None:
        tell_name(plan.names_into, plan.protected.real(path))
    stopper = Stopper(on_give_up=lambda: audience.say(end_messages.cannot_be_stopped(path)))
    spawner = Spawner(plan, target.title, stopper.stop)

    results = None if plan.results_into is None else Results(plan.protected.real(plan.results_into))
    work = _StepWork(simulation)

    def step_ended(done: int) -> None:
        together.step_ended()
        counted = {} if plan.report_to is None else work.taken(session.log.ran())  # nobody else reads the work
        audience.step(StepEnded(done=done, wanted=plan.script.steps, **counted))

    def all_done() -> None:
        if results is not None:
            results.close()
        _stop(stopper, together, simulated=simulation is not None)
        audience.say(end_messages.why_not_stopped(path, stopper))

    try:
        session = Session(
            plan.options(path, target=target),
            source=None if simulation is None else _source_of(simulation),
            on_step=step_ended,
            on_done=(lambda: both.begin()) if plan.run_to_end else all_done,
        )
        both = ThenEvaluation(session, audience.complain, force=plan.script.force)
        if simulation is not None:
            simulation.work.where, simulation.work.computes_again = session.log.running, session.computes_again
        # The script may change the directory.
        page, snapshot = (
            None if output is None else plan.protected.real(output).absolute() for output in (plan.html, plan.snapshot)
        )
        run = _RecordedScript(
            plan=plan,
            path=path,
            target=target,
            audience=audience,
            session=session,
            both=both,
            stopper=stopper,
            page=page,
            snapshot=snapshot,
        )
        arguments = plan.script.arguments
        with ExitStack() as undo:
            if results is not None:
                undo.callback(results.install())
            undo.callback(spawner.install(lambda: _withdraw(session)))
            ended = run_script(target, arguments, both, stopper, audience, greeting, together.over)
    except BaseException:  # the script was not started
        forget(plan, path)
        raise
    if session.forked():
        end_as(ended.failure)
    end_messages.say_of_files(plan, ended.failure, audience)
    try:
        if ended.trouble is not None:
            raise ended.trouble
        run.conclude(simulation, ended.failure, spawner.end())
    except BaseException as trouble:
        if ended.failure is None and not plan.run_to_end:
            raise
        audience.complain(failure_in_words(trouble))
    end_as(ended.failure)


def _source_of(simulation: Simulation) -> SimulatedSource:
    """The recorder's source for a simulated device; only then is the simulation imported."""
    from ampmem.recorder.sources.simulated import SimulatedSource

    return SimulatedSource(simulation.device)


class _StepWork:
    """The computation and copies of each step on a simulated device."""

    def __init__(self, simulation: Simulation | None) -> None:
        self._simulation = simulation
        self._before = {"flops": 0, "recomputed_flops": 0, "moved_bytes": 0}

    def taken(self, ran: Iterable[str]) -> dict[str, Any]:
        """The work since the last call, or the start, with the names of :class:`StepEnded`.

        ``ran`` are the modules that ran so far.
        """
        if self._simulation is None:
            return {"module_flops": dict.fromkeys(ran, 0)}
        before, work = self._before, self._simulation.work
        self._before = {name: getattr(work, name) for name in before}
        modules = {path: work.forward_flops[path] for path in ran}
        work.forward_flops.clear()
        return {name: now - before[name] for name, now in self._before.items()} | {"module_flops": modules}


def _withdraw(session: Session) -> None:
    """Remove the recording's name while the script only spawns processes: if it is killed, no file must be left."""
    if session.writer is not None:
        session.writer.file.withdraw()


def _stop(stopper: Stopper, together: Together, *, simulated: bool) -> None:
    """Stop the script, unless another rank may be waiting for this one."""
    stopper.spared = "" if simulated else together.why_not() or ""
    if not stopper.spared:
        stopper.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedScript:
    """A script that was recorded at ``path``."""

    plan: Plan
    path: Path
    target: Target
    audience: Audience
    session: Session
    both: ThenEvaluation
    stopper: Stopper
    page: Path | None
    snapshot: Path | None

    def conclude(
        self, simulation: Simulation | None, failure: BaseException | None, spawned: Sequence[Path] = ()
    ) -> None:
        """Print and show the result, and what the ranks that it ``spawned`` recorded."""
        try:
            if failure is not None or not spawned or self.session.outcome.recorded:
                self._conclude(simulation, failure)
            else:
                end_messages.discard(self.session)
        finally:
            for line in ranks_left(spawned, self.plan.protected):
                self.audience.say(line)

    def _conclude(self, simulation: Simulation | None, failure: BaseException | None) -> None:
        plan, say = self.plan, self.audience.say
        predicted = None if simulation is None else end_messages.predicted(simulation, self.session.outcome.failure)
        if failure is None:
            self._check(simulation)  # nothing is predicted if nothing was recorded
        if simulation is not None and predicted is not None:
            if plan.quiet or failure is not None:  # else the tables show the doubts
                self._doubt(simulation, failure)
            say(predicted)
        went_on = plan.run_to_end or self.stopper.caught > 0 or bool(self.stopper.spared)
        later = end_messages.complete(self.session, simulation, ran_on=went_on)
        evaluation = self.both.recorded()
        if failure is None:
            self._show()
        else:
            short = evaluation is not None and evaluation.outcome.unfinished is not None
            self._show_failure(failure, later=later and not short)
        if evaluation is not None:
            self._show_evaluation(evaluation, failed=failure is not None)
        if failure is None:
            self.session.check_forced()

    def _check(self, simulation: Simulation | None) -> None:
        """As :func:`end_messages.check_recorded`; doubts about a simulation may explain why nothing was recorded."""
        try:
            end_messages.check_recorded(self.session, self.target)
        except NothingRecorded:
            self._doubt(simulation)
            raise

    def _doubt(self, simulation: Simulation | None, failure: BaseException | None = None) -> None:
        if simulation is None:
            return
        refused = failure is not None and stop_of_simulation(failure) is not None
        if refused and not self.session.outcome.recorded:
            return  # the refusal explains everything
        explained = refused or self.session.outcome.unfinished is not None
        for doubt in simulation.device.doubts(failed=isinstance(failure, Exception) and not explained):
            self.audience.say(doubt)
        if isinstance(failure, ModuleNotFoundError) and (failure.name or "").partition(".")[0] == "triton":
            self.audience.say(_NO_TRITON)

    def _show(self) -> None:
        plan, recording = self.plan, self.session.options.path
        stopper = None if plan.run_to_end else self.stopper
        message = end_messages.what_was_recorded(self.session, self.path, stopper)
        if plan.launched is not None and plan.names_into is None:
            message += beside(self.path, plan.launched)
        self.audience.say(message)
        if not plan.quiet and plan.launched is None:
            end_messages.show_tables(recording, self.path, self.audience)
        self._write_others()

    def _show_evaluation(self, evaluation: Session, *, failed: bool) -> None:
        """Show the evaluation after the recorded steps, or why memory ran out in it."""
        recording, short = evaluation.options.path, evaluation.outcome.unfinished is not None
        self.audience.say(end_messages.what_was_evaluated(evaluation, self.path))
        if not self.plan.quiet and self.plan.launched is None and short >= failed:
            end_messages.show_tables(recording, self.path.with_name(recording.name), self.audience, short=short)

    def _show_failure(self, failure: BaseException, *, later: bool) -> None:
        plan, recording = self.plan, self.session.options.path
        try:
            outcome = self.session.outcome
            short = outcome.unfinished is not None or later
            if short or (outcome.interrupted and outcome.recorded):
                if not plan.quiet:
                    end_messages.show_tables(recording, self.path, self.audience, short=short)
                self._write_others()
        finally:
            why = misplaced_option(plan.script, usage_error(failure)) or end_messages.without_gpu(plan.script, failure)
            self.audience.complain(
                end_messages.left_by_failure(self.session, self.path, self.stopper, later=later) + why
            )

    def _write_others(self) -> None:
        """Write the page and the snapshot, if asked for."""
        recording, force = self.session.options.path, self.plan.script.force
        if self.page is not None:
            from ampmem.reporters.html import write

            write([recording], self.page, force=force)
            self.audience.say(f"wrote {sized(self.plan.html or self.page, self.page)}")
        if self.snapshot is not None:
            from ampmem.analysis.analyse import analyse
            from ampmem.reporters.export.snapshot import write_snapshot

            write_snapshot(analyse(read(recording)), self.snapshot, force=force)
            self.audience.say(f"wrote {sized(self.plan.snapshot or self.snapshot, self.snapshot)}")


def _time(plan: Plan, target: Target, audience: Audience, recording: Path) -> None:
    """Run the recorded steps again without instrumentation, and add their durations to ``recording``."""
    from ampmem.recorder.ranks.together import Together
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper

    plan = plan.protect(recording)
    audience.reach(plan.protected)
    path = plan.protected.real(recording).absolute()
    if plan.launched is not None:
        path = rank_file(path, plan.launched.place.rank, plan.launched.place.world_size)
    stopper, together = Stopper(), Together(several=plan.launched is not None)
    simulated = plan.script.device is Device.SIMULATED
    session = Session(plan.options(path, timed=True), on_done=lambda: _stop(stopper, together, simulated=simulated))
    greeting = f"timing the steps of {path}"
    ended = run_script(target, plan.script.arguments, session, stopper, audience, greeting, together.over)
    if ended.failure is not None or session.forked():
        end_as(ended.failure)
    if ended.trouble is not None:
        raise ended.trouble
    add_plain_steps(path, session.stopwatch.durations_ns[plan.script.skip :])
