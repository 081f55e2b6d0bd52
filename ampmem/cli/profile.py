"""``ampmem profile``: run a script or module and record where its memory goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ampmem.cli.assume import assumed_data
from ampmem.cli.options import ScriptCommand, ScriptOptions, check_world, choices, shared_options, simulated_gpu
from ampmem.cli.processes import afterwards
from ampmem.cli.processes.guest import end_as, run_script
from ampmem.cli.processes.messages import Audience, Parent, Person, StepEnded
from ampmem.cli.processes.rank_ends import OfRank, exit_of_rank
from ampmem.cli.processes.rank_names import all_ranks, place_rank, remove_claim
from ampmem.errors import AmpmemError, UsageError
from ampmem.events import PlaceRecord
from ampmem.failure import FailureKind, FailureRecord, failure_of
from ampmem.outputs import check_output, claim, remove_empty, sized
from ampmem.recorder.ranks.environment import Launched, launched
from ampmem.recorder.script import Target
from ampmem.recording import SUFFIX, add_plain_steps, rank_file
from ampmem.vocabulary import Arm, Device

if TYPE_CHECKING:
    from ampmem.recorder.options import Options
    from ampmem.recorder.ranks.together import Together
    from ampmem.recorder.session import Session
    from ampmem.recorder.sources.simulated import SimulatedSource
    from ampmem.recorder.steering.stopping import Stopper
    from ampmem.simulator.start import Simulation


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--arm",
    type=click.Choice(choices(Arm)),
    default=Arm.AS_IS.value,
    show_default=True,
    help="Force a precision on the script: fp32 switches autocast and GradScaler off; amp switches autocast on, "
    "amp-nocache does so without its weight cache.",
)
@click.option("--seed", type=int, help="Seed Python's, numpy's and torch's random numbers before the script starts.")
@click.option(
    "--run-to-end",
    is_flag=True,
    help="Let the script finish, uninstrumented, once the steps are recorded; the exit code is the script's.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"The recording to write.  [default: the script's name with {SUFFIX}, in this directory; with the next "
    f"number where that exists: train.2{SUFFIX}]",
)
@click.option("--html", type=click.Path(path_type=Path), help="Also write the HTML report here.")
@click.option("--quiet", is_flag=True, help="Print no tables.")
@click.option("--report-to", type=click.Path(path_type=Path), hidden=True, help="Say all in this FILE, for ampmem.")
@click.option(
    "--times-into", type=click.Path(path_type=Path), hidden=True, help="Record nothing; time the steps for this FILE."
)
@shared_options
def profile(
    arm: str,
    seed: int | None,
    run_to_end: bool,
    output: Path | None,
    html: Path | None,
    quiet: bool,
    report_to: Path | None,
    times_into: Path | None,
    options: ScriptOptions,
) -> None:
    """Run an unmodified training script and record its memory, step by step.

    The first --steps steps are recorded; then the script is stopped. What ampmem itself has to say,
    the tables too, goes to stderr; stdout is the script's alone. A script that fails keeps its own
    exit code, and the steps that had ended are kept; of one that runs out of memory all is kept.

    \b
    ampmem profile train.py --epochs 1
    ampmem profile --arm amp --dtype bf16 train.py
    ampmem profile --step-on forward generate.py
    ampmem profile --steps 5 -o run.ampmem -m ampmem.workloads.gpt --preset tiny
    """
    plan = _Plan(
        script=options,
        arm=Arm(arm),
        run_to_end=run_to_end,
        output=output,
        html=html,
        quiet=quiet,
        launched=launched(),
    )
    audience = _audience(plan, report_to)
    try:
        _carry_out(plan, audience, seed, times_into)
    except AmpmemError as error:
        if isinstance(audience, OfRank):
            audience.refused(error)
            raise exit_of_rank(error) from error
        if report_to is None:
            raise
        audience.failed(FailureRecord(kind=FailureKind.REFUSED, message=str(error)))
        raise click.exceptions.Exit(error.exit_code) if plan.launched is None else exit_of_rank(error) from error


def _audience(plan: _Plan, report_to: Path | None) -> Audience:
    if report_to is not None:
        return Parent(report_to)
    return Person() if plan.launched is None else OfRank(plan.launched)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The command line."""

    script: ScriptOptions
    arm: Arm
    run_to_end: bool
    output: Path | None
    html: Path | None
    quiet: bool
    launched: Launched | None

    @property
    def place_known(self) -> PlaceRecord | None:
        """Which process of a job this is, as its launcher says, or as the command line has it simulated."""
        if self.launched is not None:
            return self.launched.place
        world_size = self.script.world_size
        return None if world_size is None else PlaceRecord(rank=self.script.rank or 0, world_size=world_size)

    def path(self, target: Target, number: int = 1) -> Path:
        """The recording to write; from the second ``number`` on with that in its name."""
        return self.output or Path(f"{target.title}.{number}{SUFFIX}" if number > 1 else f"{target.title}{SUFFIX}")

    @property
    def numbered(self) -> bool:
        """Whether a recording that is there makes this one take another name."""
        return self.output is None and not self.script.force

    def place(self, target: Target) -> tuple[Path, str]:
        """The recording to write, and a line that says so; a numbered one is there from now on, without a step."""
        if self.launched is not None:
            job, force = partial(self.path, target), self.script.force
            return place_rank(job, self.launched, numbered=self.numbered, force=force)
        number = claim(lambda number: [self.path(target, number)]) if self.numbered else 1
        path = self.path(target, number)
        taken = f"; {self.path(target)} exists already (--force replaces it)" if number > 1 else ""
        return path, f"recording to {path}{taken}"

    def simulate(self) -> Simulation | None:
        """Put the device in place that is to be simulated, if there is one."""
        gpu = simulated_gpu(self.script.device, self.script.gpu)
        assumed = assumed_data(self.script.device, self.script.assume)
        if gpu is None or assumed is None:
            return None
        try:
            from ampmem.simulator.start import Simulation
            from ampmem.simulator.world import World
        except (ImportError, AttributeError) as error:  # a part of torch is not where it was
            from ampmem.simulator.refusal import refusal

            raise refusal(error) from error
        size = self.script.world_size
        world = None if size is None else World(rank=self.script.rank or 0, size=size)
        return Simulation(gpu, assumed=assumed, world=world)

    def options(self, path: Path, *, timed: bool = False) -> Options:
        """What the recorder is told. Importing torch takes seconds: what is wrong is said before that."""
        from ampmem.recorder.marker import step_on_of
        from ampmem.recorder.options import DTYPES, Options

        script = self.script
        return Options(
            path=path.absolute(),
            script=script.name,
            arguments=script.arguments,
            steps=script.steps,
            skip=script.skip,
            timed=timed,
            stacks=script.stacks,
            force=script.force or self.numbered or self.launched is not None,
            baseline=False,
            arm=self.arm,
            dtype=None if script.dtype is None else DTYPES[script.dtype],
            device=script.device,
            synchronize=script.synchronize,
            step_on=step_on_of(script.step_on),
            place=self.place_known,
        )


def _carry_out(plan: _Plan, audience: Audience, seed: int | None, times_into: Path | None) -> None:
    script = plan.script
    if script.dtype is not None and not plan.arm.autocast:
        raise UsageError(f"--dtype is what autocast casts to, so it needs --arm amp or amp-nocache, not {plan.arm}")
    simulated_gpu(script.device, script.gpu)
    assumed_data(script.device, script.assume)
    check_world(script.device, script.world_size, script.rank)
    if plan.launched is not None:
        _check_ranks(plan)
    try:
        target = script.find()
        if times_into is None:
            check_output(plan.path(target), force=script.force or plan.numbered or plan.launched is not None)
            if plan.html is not None:
                check_output(plan.html, force=script.force)
    except FileNotFoundError as error:
        raise UsageError("the current directory is gone; go to one that is there, or give whole paths") from error
    if seed is not None:
        from ampmem.recorder.seed import seed_everything

        seed_everything(seed)
    if times_into is None:
        _record(plan, target, audience)
    else:
        _time(plan, target, audience, times_into)


def _check_ranks(plan: _Plan) -> None:
    """Raise :class:`UsageError` for what several ranks cannot do."""
    if plan.script.device is Device.SIMULATED:
        raise UsageError(
            "a simulated device needs no other ranks: run the script once, without a launcher, and say how many ranks "
            "there would be with --world-size"
        )
    if plan.html is not None:
        raise UsageError("--html is the page of one process; with several ranks, afterwards: ampmem report")


def _record(plan: _Plan, target: Target, audience: Audience) -> NoReturn:
    from ampmem.recorder.ranks.together import Together
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper

    together = Together(several=plan.launched is not None)
    simulation = plan.simulate()
    path, greeting = plan.place(target)
    stopper = Stopper(on_give_up=lambda: audience.say(afterwards.let_go(path)))

    def step_ended(done: int) -> None:
        together.step_ended()
        audience.step(StepEnded(done=done, wanted=plan.script.steps))

    def all_done() -> None:
        _stop(stopper, together, simulated=simulation is not None)
        audience.say(afterwards.spared(path, stopper.spared))

    try:
        session = Session(
            plan.options(path),
            source=None if simulation is None else _source_of(simulation),
            on_step=step_ended,
            on_done=None if plan.run_to_end else all_done,
        )
        page = None if plan.html is None else plan.html.absolute()  # the script may change the directory
        run = _Run(plan=plan, path=path, target=target, audience=audience, session=session, stopper=stopper, page=page)
        arguments = plan.script.arguments
        ended = run_script(target, arguments, session, stopper, audience, greeting, together.over)
    except BaseException:  # it was not started
        remove_empty([path] if plan.numbered else [])
        remove_claim(path)
        raise
    if session.forked():
        end_as(ended.failure)
    try:
        if ended.trouble is not None:
            raise ended.trouble
        run.conclude(simulation, ended.failure)
    except BaseException as trouble:
        if ended.failure is None and not plan.run_to_end:
            raise
        audience.complain(_in_words(trouble))
    end_as(ended.failure)


def _stop(stopper: Stopper, together: Together, *, simulated: bool) -> None:
    """Stop the script, unless another rank may wait for this one."""
    stopper.spared = "" if simulated else together.why_not() or ""
    if not stopper.spared:
        stopper.stop()


def _in_words(trouble: BaseException) -> str:
    """What kept ampmem from its work, where the exit code is the script's."""
    if isinstance(trouble, AmpmemError):
        return str(trouble)
    if isinstance(trouble, KeyboardInterrupt):
        return "interrupted"
    return f"a fault of ampmem's own, and none of the script's: {failure_of(trouble).line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A script that was recorded, at ``path``."""

    plan: _Plan
    path: Path
    target: Target
    audience: Audience
    session: Session
    stopper: Stopper
    page: Path | None

    def conclude(self, simulation: Simulation | None, failure: BaseException | None) -> None:
        """Say and show what came of it."""
        plan, say = self.plan, self.audience.say
        predicted = None if simulation is None else afterwards.predicted(simulation, failed=failure is not None)
        if failure is None:
            afterwards.check(self.session, self.target)  # of what was not recorded nothing is predicted
        if simulation is not None and predicted is not None:
            for doubt in simulation.device.warnings if plan.quiet or failure is not None else ():  # or the tables do
                say(doubt)
            say(predicted)
        if failure is None:
            self._show()
        else:
            self._show_failure()

    def _show(self) -> None:
        plan, recording = self.plan, self.session.options.path
        stopper = None if plan.run_to_end else self.stopper
        message = afterwards.recorded(self.session, self.path, stopper)
        if plan.launched is not None:
            message += f"; the files of all ranks: ampmem show {all_ranks(self.path, plan.launched.place.world_size)}"
        self.audience.say(message)
        if not plan.quiet and plan.launched is None:
            afterwards.show(recording, self.path, self.audience)
        if self.page is not None:
            self._write_page(self.page)

    def _show_failure(self) -> None:
        plan, recording = self.plan, self.session.options.path
        try:
            if self.session.outcome.unfinished is not None:
                if not plan.quiet:
                    afterwards.show_shortage(recording, self.audience)
                if self.page is not None:
                    self._write_page(self.page)
        finally:
            self.audience.complain(afterwards.kept(self.session, self.path, self.stopper))

    def _write_page(self, page: Path) -> None:
        from ampmem.reporters.html import write

        write([self.session.options.path], page, force=self.plan.script.force)
        self.audience.say(f"wrote {sized(self.plan.html or page, page)}")


def _source_of(simulation: Simulation) -> SimulatedSource:
    """What records it."""
    from ampmem.recorder.sources.simulated import SimulatedSource

    return SimulatedSource(simulation.device)


def _time(plan: _Plan, target: Target, audience: Audience, recording: Path) -> None:
    """Run the steps that ``recording`` has once more, without instrumentation, and add their durations to it."""
    from ampmem.recorder.ranks.together import Together
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper

    path = recording.absolute()
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
