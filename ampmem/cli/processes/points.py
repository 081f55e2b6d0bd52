"""Makes the runs of ``ampmem fit``: simulated, several at once, each a process of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TypeAlias

from ampmem.analysis.fit import Memory, memory_of
from ampmem.cli.options.shared import ScriptOptions
from ampmem.cli.options.vary import VariedArguments
from ampmem.cli.processes import launch
from ampmem.cli.processes.children import misplaced, profile_arguments
from ampmem.cli.processes.progress import Progress
from ampmem.errors import AmpmemError, RecordingError
from ampmem.recording import SUFFIX, read
from ampmem.units import format_bytes
from ampmem.vocabulary import Arm

LAST_WORDS_S = 5.0
"""How long runs that are interrupted may take to end by themselves."""

Run: TypeAlias = tuple[Arm, int]
"""An arm and a value."""

Found: TypeAlias = Mapping[Arm, Mapping[int, Memory | None]]
"""What came of the runs so far."""


class RunFailed(AmpmemError):
    """A run ended by itself, and not because the device was full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run is made of, but for its arm and its value; ``jobs`` of them are made at once."""

    script: ScriptOptions
    varied: VariedArguments
    seed: int
    jobs: int

    def arguments(self, run: Run, path: Path) -> list[str]:
        """The arguments of ``ampmem profile`` that make ``run`` and record it at ``path``."""
        arm, value = run
        script = replace(self.script, arguments=self.varied.at(value))
        return profile_arguments(script, arm, self.seed, "--quiet", "-o", str(path))

    def name(self, run: Run) -> str:
        """``amp --batch-size=8``."""
        arm, value = run
        return f"{arm} {self.varied.vary.shown(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """``memory`` is ``None`` where it ran out; ``failure`` is another reason why there is none."""

    memory: Memory | None
    notes: tuple[str, ...]
    failure: str | None
    ended: launch.Ended


def run_points(
    plan: RunPlan, arms: Sequence[Arm], wanted: Callable[[Found], list[Run]], left: Callable[[Found], str]
) -> tuple[dict[Arm, dict[int, Memory | None]], tuple[str, ...], bool]:
    """Run what is ``wanted``, given what there is, until that is nothing; the points of each arm, and all notes.

    The last of the three says whether Ctrl-C ended it before: the runs that had ended are there. ``left`` has words for
    what is left to do. Raises :class:`RunFailed` when a script fails for another reason than memory. No run is left
    behind, however it ends.
    """
    points: dict[Arm, dict[int, Memory | None]] = {arm: {} for arm in arms}
    notes: dict[str, None] = {}
    with (
        TemporaryDirectory(prefix="ampmem-fit-") as folder,
        _Counted(plan.script, left) as progress,
        ThreadPoolExecutor(plan.jobs) as pool,
    ):
        children = _Children()
        running: dict[Future[_Outcome], Run] = {}
        try:
            while True:
                for run in wanted(points):
                    if len(running) < plan.jobs and run not in running.values():
                        running[pool.submit(_make, plan, Path(folder), children, progress, run)] = run
                if not running:
                    return points, tuple(notes), False
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run, outcome = running.pop(future), future.result()
                    points[run[0]][run[1]] = outcome.memory
                    progress.ended(plan.name(run), outcome, points)
                    notes |= dict.fromkeys(outcome.notes)
        except KeyboardInterrupt:
            children.end(running)
            return points, tuple(notes), True
        except BaseException:
            children.end(running)
            raise


class _Children:
    """The processes that run, to be ended before their time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._living: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def started(self, child: subprocess.Popen[bytes]) -> None:
        """``child`` runs from now on."""
        with self._lock:
            self._living = {each for each in self._living if each.returncode is None} | {child}
            if self._ended:
                child.kill()

    def end(self, running: Mapping[Future[_Outcome], Run]) -> None:
        """Interrupt them all, and kill those that do not mind."""
        with self._lock:
            self._ended = True
            living = [child for child in self._living if child.returncode is None]
        try:
            for child in living:
                _signal(child, signal.SIGINT)
            wait(running, timeout=LAST_WORDS_S)
        finally:
            for child in living:
                _signal(child, signal.SIGKILL)


class _Counted(Progress):
    """The runs are counted as they end; how many there will be is not known before."""

    def __init__(self, script: ScriptOptions, left: Callable[[Found], str]) -> None:
        super().__init__()
        self._script = script
        self._left = left
        self._count = 0
        self._rest = ""

    def doing(self, what: str) -> None:
        """How far one of those has got that run."""
        made = f"{self._count} run{'' if self._count == 1 else 's'} made; " if self._count else ""
        self.now(f"{made}{what}{self._rest}")

    def ended(self, name: str, outcome: _Outcome, found: Found) -> None:
        """One line for a run that ended. Raises :class:`RunFailed`."""
        self._count += 1
        if outcome.failure is not None:
            why = f"{outcome.failure}{misplaced(self._script, outcome.ended)}"
            self.stay(f"run {self._count}: {name}: failed: {why}", tail=outcome.ended.tail)
            raise RunFailed(f"{name} failed, and not for want of memory, so it cannot be said what fits")
        self._rest = self._left(found)
        self.stay(f"run {self._count}: {name}: {_said(outcome.memory)}", self._rest)


def _said(memory: Memory | None) -> str:
    if memory is None:
        return "does not fit"
    fits = "fits" if memory.surely else "may not fit"
    return f"{fits}, peak {format_bytes(memory.allocated)} allocated, {format_bytes(memory.reserved)} reserved"


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        child.send_signal(number)


def _make(plan: RunPlan, folder: Path, children: _Children, progress: _Counted, run: Run) -> _Outcome:
    """Make one run, in a thread."""
    name = plan.name(run)
    path = folder / f"{'.'.join(map(str, run))}{SUFFIX}"
    progress.doing(f"{name}: starting")
    ended = launch.run(
        plan.arguments(run, path),
        lambda step: progress.doing(f"{name}: step {step.done} of {step.wanted}"),
        children.started,
    )
    try:
        return _outcome(path, ended, plan.script.steps)
    finally:
        path.unlink(missing_ok=True)


def _outcome(path: Path, ended: launch.Ended, steps: int) -> _Outcome:
    memory, failure = None, ended.failure
    notes: tuple[str, ...] = ()
    if path.exists():
        try:
            recording = read(path)
            notes = recording.remarks
            ended_steps = sum(step.finished for step in recording.steps)
            if recording.ooms:
                failure = None  # whatever the script made of it
            elif ended_steps >= steps:
                failure = None  # of a script that caught the stop, and went on without what it missed
                memory = memory_of(recording)
            elif failure is None:
                failure = f"it ended after {ended_steps} of {steps} steps; let it train for longer"
        except RecordingError as error:
            failure = failure or str(error)
    return _Outcome(memory=memory, notes=notes, failure=failure, ended=ended)
