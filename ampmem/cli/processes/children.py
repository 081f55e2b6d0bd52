"""Runs ``ampmem profile`` in child processes and follows them, for the commands that compare, fit, check and advise."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from threading import Lock
from types import MappingProxyType
from typing import IO, Any, Self, TypeVar

import click

from ampmem.allocator.gpus import GpuSpec
from ampmem.cli.options import Decorator, ScriptOptions, check_dtype, settled
from ampmem.cli.processes.messages import Inbox, StepEnded
from ampmem.cli.processes.protection import way_here
from ampmem.cli.processes.starting import Running, Warmed, fresh
from ampmem.errors import UsageError
from ampmem.failure import FailureKind, FailureRecord
from ampmem.output import Terminal, printable
from ampmem.recorder.marker import step_on_text
from ampmem.recorder.script import STDIN, standard_input
from ampmem.reporters.text.plain_text import shorten
from ampmem.units import counted, format_bytes
from ampmem.vocabulary import Device, Files, Precision

STEPS = 2
"""The number of steps to record where only the peak matters: the optimizer state is complete after the first."""

JOBS = 8
"""The default limit of simultaneous runs, each of which takes some hundred MiB."""


def jobs_option(remark: str = "") -> Decorator:
    """``--jobs`` for a command that makes several runs; ``None`` without it. ``remark`` ends its first sentence."""
    return click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"How many runs to make at the same time{remark}.  [default: one per CPU, at most {JOBS}]",
    )


def default_jobs() -> int:
    """The number of simultaneous runs if none is given."""
    return min(os.cpu_count() or 1, JOBS)


_Run = TypeVar("_Run")
_Made = TypeVar("_Made")


class ProgressLine:
    """Progress on stderr: lines that stay and, on a terminal, a changing line below them, removed at the end.

    Several threads may use it.
    """

    def __init__(self) -> None:
        self._terminal = Terminal(sys.stderr)
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.now("")

    def now(self, text: str) -> None:
        """Set the text of the changing line."""
        with self._lock:
            self._terminal.replace(shorten(text, shutil.get_terminal_size().columns - 1))

    def stay(self, text: str, left: str = "", *, tail: Sequence[str] = ()) -> None:
        """Print a line that stays, and below it the last lines that a child printed.

        ``left`` describes the work left, and is appended if there is no changing line.
        """
        said = text if self._terminal.is_screen() else text + left
        lines = [
            *self._terminal.broken(printable(said)),
            *(f"    {shorten(line.expandtabs(), len(line) * 8)}" for line in tail),
        ]
        with self._lock:
            self._terminal.replace("")
            self._terminal.show("\n".join(lines))


class CountedRuns(ProgressLine):
    """The progress of runs that are counted as they end; their total is not known before."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._rest = ""
        """The work left, in words."""

    def doing(self, what: str) -> None:
        """Show how far a run has got."""
        made = f"{counted(self._count, 'run')} made; " if self._count else ""
        self.now(f"{made}{what}{self._rest}")


class TimeLeft:
    """The progress of ``count`` consecutive runs, and the time that is left.

    The time is estimated from the runs before, which are of the same script. ``clock`` gives seconds.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._taken: list[float] = []
        self._begun = 0.0

    def begin(self) -> str:
        """Begin the next run: ``2 of 3``."""
        self._begun = self._clock()
        return f"{len(self._taken) + 1} of {self._count}"

    def end(self) -> None:
        """End the current run."""
        self._taken.append(self._clock() - self._begun)
        self._begun = self._clock()

    def left(self) -> str:
        """``, about 40 s left``; empty before a run has ended, and if less than a second seems to be left."""
        if not self._taken:
            return ""
        each = sum(self._taken) / len(self._taken)
        running = min(each, self._clock() - self._begun)
        seconds = each * (self._count - len(self._taken)) - running
        if seconds < 1:
            return ""
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


LINES = 10
"""The number of last lines of a child's output that are kept for people."""

_LONGEST = 2000
_TAIL_BYTES = 65536
_POLL_S = 0.1
"""The interval in seconds at which a child's messages are read."""

KILLED = "killed by "
"""The beginning of the failure of a child that a signal killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """The end of a child.

    ``code`` is its exit code, negative for the signal that killed it; ``said`` is the reason that it reported for its
    failure, if any; ``tail`` are the last :data:`LINES` lines of its output, stdout first.
    """

    code: int
    said: FailureRecord | None
    tail: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """The child's failure in one line: ``RuntimeError: out of memory``, ``killed by SIGKILL``, ``exit code 3``."""
        if self.code == 0:
            return None
        if self.code < 0:
            return f"{KILLED}{_signal_name(-self.code)}"
        if self.said is None or self.said.kind is FailureKind.EXITED:
            return f"exit code {self.code}"
        return self.said.traceback_line[:_LONGEST]


def run_child(
    arguments: Sequence[str],
    on_step: Callable[[StepEnded], None] = lambda ended: None,
    on_start: Callable[[Running], None] = lambda child: None,
    variables: Mapping[str, str] = MappingProxyType({}),
    warmed: Warmed | None = None,
) -> ChildEnd:
    """Run ``ampmem profile`` with ``arguments`` and wait for it; ``on_step`` is called for each step that ends.

    ``on_start`` gets the process, so that another thread can end it. ``variables`` are added to its environment;
    without any, the child is forked from the ``warmed`` process if there is one. The child reads only a script from
    stdin, and uses the same hash seed as every other child. Ctrl-C reaches it too, as it is in the same process group:
    it is waited for, and ``KeyboardInterrupt`` is raised. A second Ctrl-C kills it.
    """
    with (
        TemporaryFile() as given,
        TemporaryFile() as output,
        TemporaryFile() as errors,
        NamedTemporaryFile(prefix="ampmem-") as messages,
        Inbox(Path(messages.name)) as inbox,
    ):
        if "--" in arguments and arguments[arguments.index("--") + 1] == STDIN:
            given.write(standard_input())
            given.seek(0)
        command, streams = ["--report-to", messages.name, *arguments], (given, output, errors)
        forked = None if warmed is None or variables else warmed.start(command, streams, on_start)
        child = forked or fresh(command, streams, variables)
        on_start(child)
        code = _wait(child, inbox, on_step)
        tail = (*_last_lines(output), *_last_lines(errors))[-LINES:]
        return ChildEnd(code=code, said=inbox.failure, tail=tail)


LAST_WORDS_S = 5.0
"""The seconds that interrupted children have to end by themselves."""


def run_at_once(
    jobs: int,
    due: Callable[[], Iterable[_Run]],
    make: Callable[[_Run, Children], _Made],
    on_result: Callable[[_Run, _Made], None],
) -> None:
    """Make the runs that ``due`` names, ``jobs`` at once, until it names none; ``on_result`` gets each result.

    ``due`` may name runs that are being made. No process is left behind.
    """
    children, running = Children(), dict[Future[_Made], _Run]()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while True:
                for run in due():
                    if len(running) < jobs and run not in running.values():
                        running[pool.submit(make, run, children)] = run
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    on_result(run, future.result())
        except BaseException:
            children.end(running)
            raise


class Children:
    """The child processes of several threads, which can be ended early."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._living: set[Running] = set()
        self.ended = False
        """Whether the children were ended early."""

    def started(self, child: Running) -> None:
        """Register the running ``child``."""
        with self._lock:
            self._living = {each for each in self._living if each.returncode is None} | {child}
            if self.ended:
                child.kill()

    def end(self, running: Iterable[Future[Any]]) -> None:
        """Interrupt all children, and kill those that ignore it; ``running`` are the threads that wait for them."""
        with self._lock:
            self.ended = True
            living = [child for child in self._living if child.returncode is None]
        try:
            for child in living:
                _signal(child, signal.SIGINT)
            wait(running, timeout=LAST_WORDS_S)
        finally:
            for child in living:
                _signal(child, signal.SIGKILL)


def _signal(child: Running, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        child.send_signal(number)


def _wait(child: Running, inbox: Inbox, on_step: Callable[[StepEnded], None]) -> int:
    """Wait for ``child``, pass on its messages meanwhile, and return its exit code."""
    try:
        while child.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
            for ended in inbox.steps():
                with suppress(OSError):  # a closed terminal is not a reason to stop
                    on_step(ended)
        return child.returncode
    except KeyboardInterrupt:
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
        raise


def _last_lines(output: IO[bytes]) -> list[str]:
    """The last lines that the child wrote to ``output``."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    lines = output.read().decode("utf-8", errors="replace").splitlines()
    return [line.rstrip()[:_LONGEST] for line in lines if line.strip()][-LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


USAGE = 2
"""The exit code for wrong usage of a command line."""


def chosen_precisions(text: str, script: ScriptOptions) -> tuple[Precision, ...]:
    """The precisions in ``--precision``. Raises :class:`UsageError`, also for a ``--dtype`` that none of them uses."""
    names = tuple(name.strip() for name in text.split(","))
    for i, name in enumerate(names):
        if name not in tuple(Precision):
            raise UsageError(f"--precision: unknown precision {name!r}; choose from {', '.join(Precision)}")
        if name in names[:i]:
            raise UsageError(f"--precision: {name} is given twice")
    precisions = tuple(map(Precision, names))
    check_dtype(script, *precisions)
    return precisions


def profile_arguments(script: ScriptOptions, *options: str) -> list[str]:
    """The arguments of ``ampmem profile`` that run ``script``; ``options`` are further ones."""
    given = {
        "--precision": script.precision,
        "--steps": script.steps,
        "--skip": script.skip,
        "--seed": script.seed,
        "--nproc-per-node": script.nproc_per_node,
        "--device": script.device,
        "--step-on": step_on_text(script.step_on),
        "--named": script.named,
        "--gpu": None if script.gpu is None else script.gpu.name,
        "--world-size": script.world_size,
        "--rank": script.rank,
        "--dtype": script.dtype if script.precision.autocast else None,
    }
    arguments = [*options, *(word for name, value in given.items() if value is not None for word in (name, str(value)))]
    arguments += ["--sync" if script.synchronize else "--no-sync", "--stacks" if script.stacks else "--no-stacks"]
    for assumption in script.assume:
        arguments += ["--assume", assumption]
    if script.files is not None:
        arguments += ["--files", script.files, "--files-limit", script.files_limit]
    if script.keep_files is not None:
        arguments += ["--keep-files", str(script.keep_files.absolute())]
    arguments += script.forced.options()
    if script.force:
        arguments.append("--force")
    if script.as_module:
        arguments.append("-m")
    return [*arguments, "--", script.script_or_module, *script.arguments]


def for_several_runs(script: ScriptOptions) -> ScriptOptions:
    """``script`` with its device (:func:`settled`) for several runs: ``--files protect`` is the default then."""
    return settled(replace(script, files=script.files or Files.PROTECT))


def say_protected(script: ScriptOptions) -> None:
    """Say on a real device that files are protected, unlike with ``ampmem profile``, and the protection's limits."""
    if not script.protects:
        return
    if script.device is not Device.SIMULATED:
        Terminal(sys.stderr).say(_PROTECTED)
    if limits := way_here(Path.cwd()).limits:
        Terminal(sys.stderr).say(limits)


def say_context(gpu: GpuSpec, limit: int) -> None:
    """Say so if the CUDA context may take nearly all of ``limit`` bytes: hardly any run surely fits then."""
    most = gpu.context.most
    if 4 * most > 3 * limit:
        name = "" if gpu.chip else "; name the GPU, as in --gpu h100: more is known of its context than of an amount's"
        Terminal(sys.stderr).say(
            f"up to {format_bytes(most)} are assumed for the CUDA context, and the limit is {format_bytes(limit)}, so "
            f"hardly any run surely fits{name}"
        )


_PROTECTED = (
    "the runs leave your files as they are: what the script writes is gone after each run (--files write lets every "
    "run write, --keep-files DIR keeps copies)"
)


def misplaced(script: ScriptOptions, ended: ChildEnd) -> str:
    """The hint of :func:`misplaced_option` for a child that ended with exit code 2; its last line is the reason."""
    return misplaced_option(script, ended.tail[-1]) if ended.code == USAGE and ended.tail else ""


def misplaced_option(script: ScriptOptions, reason: str) -> str:
    """The hint on an option of ampmem's among the script's arguments, which made the script fail.

    It reads ``; --precision is an option of ampmem's: write it before train.py``. ``reason`` is the script's own
    message. Empty unless the message names an option of the running command that is among the script's arguments.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return ""
    options = [param for param in context.command.params if isinstance(param, click.Option) and not param.hidden]
    ours = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    given = {argument.partition("=")[0] for argument in script.arguments if argument.startswith("-")}
    told = (word.strip("'\"[](),.").partition("=")[0] for word in reason.split())
    name = next((word for word in told if word in ours & given), None)
    return "" if name is None else f"; {name} is an option of ampmem: write it before {script.name}"
