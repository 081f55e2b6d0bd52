"""Records a few steps of a training loop or of a Trainer; an error here is reported, and the training goes on."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import time_ns
from typing import Any

from ampmem.analysis.summary import PLACES, PeakPlace, Summary, summarize
from ampmem.api import Profile
from ampmem.errors import AmpmemError, NothingRecorded
from ampmem.events import PlaceRecord, Recording
from ampmem.integrations.loggers import LoggedRow, Logger, logger_of, loggers_of, rows, seen_row
from ampmem.output import Terminal, sized
from ampmem.recorder.options import Asked, asked_in_python, checked_count
from ampmem.recording import SUFFIX, rank_file, rank_of
from ampmem.recording.watched import Row
from ampmem.units import counted, format_peak
from ampmem.watched_block import Watch, check_every


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options for recording a training.

    ``page`` says whether to write the page. With ``watch`` the whole training is recorded, a row for each step, as by
    :func:`ampmem.watch` with ``every`` and ``keep``; otherwise ``asked.steps`` steps after ``asked.skip``.
    """

    asked: Asked
    page: bool = True
    watch: bool = False
    every: int = 500
    keep: int = 3


def wanted_of(
    *,
    skip: int = 2,
    steps: int = 3,
    page: bool = True,
    stacks: bool = True,
    device: str = "auto",
    watch: bool = False,
    every: int = 500,
    keep: int = 3,
) -> Wanted:
    """The arguments of :func:`log_to`, checked. Raises :class:`UsageError` for an invalid one.

    Two steps are skipped by default: the optimizer makes its state in the first one, and DistributedDataParallel
    rebuilds its buckets in the second.
    """
    check_every(every, keep)
    asked = asked_in_python(
        steps=checked_count("steps", steps, 1, "of at least 1"), skip=skip, stacks=stacks, force=True, device=device
    )
    return Wanted(asked=asked, page=page, watch=watch, every=every, keep=keep)


class WholeRun:
    """A training watched from its first step to its end; a replacement of :class:`FewSteps` with the same methods.

    On the rank that logs, ``log`` gets the row of each step, and ``keep`` the page.
    """

    recording = False

    def __init__(
        self, wanted: Wanted, log: Callable[[Sequence[LoggedRow]], None], keep: Callable[[Path], None]
    ) -> None:
        self._wanted, self._log, self._keep = wanted, log, keep
        self._folder: Path | None = None
        self._watch: Watch | None = None

    def training_begins(self, folder: Path, updates: int) -> None:
        """Begin a training; the file goes to ``folder``."""
        self.training_ends()  # a previous training may have ended without a call
        self._folder = folder

    def step_begins(self, updates: int, number: int) -> None:
        """Begin a step of the host's, which it counts as ``number``."""
        folder, self._folder = self._folder, None
        if folder is not None:
            with going_on():
                self._watch = self._begin(folder, number)

    def step_ends(self, updates: int, number: int) -> None:
        """Do nothing: ampmem sees by itself when steps end."""

    def training_ends(self, error: BaseException | None = None) -> None:
        """End the training, with ``error`` if it failed. A second call does nothing."""
        watch, self._watch, self._folder = self._watch, None, None
        with going_on():
            if watch is not None:
                self._finish(watch, error)

    def _begin(self, folder: Path, first_step: int) -> Watch | None:
        """Watch from now on, into a file in ``folder``; ``None`` if this process is being recorded already."""
        from ampmem.recorder.process import active

        if active() is not None:
            say("this process is already being recorded, so this training is not watched")
            return None
        return Watch(
            replace(self._wanted.asked, steps=None, skip=0, first_step=first_step),
            output=_file_in(folder, "memory-watch"),
            every=self._wanted.every,
            keep=self._wanted.keep,
            on_step=self._log_row,
        ).__enter__()

    def _finish(self, watch: Watch, error: BaseException | None) -> None:
        """End the watching, report the result, and keep the page."""
        watch.__exit__(None if error is None else type(error), error, None)
        found = watch.summary()
        if job_place().rank != 0:
            return
        peak = f", {format_peak(found.highest.peak)} at the highest peak" if found.highest is not None else ""
        page = None
        if self._wanted.page and found.rows:
            from ampmem.reporters.html.watched_page import write_watched

            page, *_ = write_watched(watch.path, _page_of(watch.path), force=True)
        where = f"; the page is {page}" if page is not None else ""
        say(f"watched {counted(found.steps, 'step')}{peak}, in {sized(watch.path)}{where}")
        if page is not None:
            self._keep(page)

    def _log_row(self, row: Row) -> None:
        if job_place().rank == 0:
            with going_on():
                self._log([seen_row(row)])


class FewSteps:
    """Records a few steps of one training of a host, such as a Trainer.

    The host reports the begin and end of each of its steps, and its number of updates; one of its steps may be several
    updates. On the rank that logs, ``log`` gets the rows of the steps, and ``keep`` the page.
    """

    def __init__(
        self, wanted: Wanted, log: Callable[[Sequence[LoggedRow]], None], keep: Callable[[Path], None]
    ) -> None:
        self._wanted, self._log, self._keep = wanted, log, keep
        self._folder: Path | None = None
        self._updates = self._made = 0
        self._profile: Profile | None = None
        self._ended: list[tuple[int, int]] = []
        """The end of each recorded step of the host's in ns, and its number."""

    @property
    def recording(self) -> bool:
        """Whether a recording is running."""
        return self._profile is not None

    def training_begins(self, folder: Path, updates: int) -> None:
        """Begin a training; files go to ``folder``, and ``updates`` were made before if the training was resumed."""
        with going_on():
            self.training_ends()  # a previous training may have ended without a call
        self._folder, self._made, self._updates = folder, 0, updates

    def step_begins(self, updates: int, number: int) -> None:
        """Begin a step of the host's, which it counts as ``number``; ``updates`` have been made."""
        if self._folder is None or self._profile is not None or self._made < self._wanted.asked.skip:
            return
        folder, self._folder = self._folder, None  # whether or not it works, each training is tried once
        self._updates = updates
        with going_on():
            self._ended = []
            self._profile = self._begin(folder, number)

    def step_ends(self, updates: int, number: int) -> None:
        """End the host's step ``number`` if ``updates`` has grown; a host may also call this within a step."""
        if updates > self._updates:
            self._updates = updates
            self._made += 1
            if self._profile is not None:
                self._ended.append((time_ns(), number))
                if len(self._ended) == self._wanted.asked.steps:
                    self.training_ends()

    def training_ends(self, error: BaseException | None = None) -> None:
        """End the recording, or the training, with ``error`` if it failed. A second call does nothing."""
        recorder, self._profile = self._profile, None
        ended, self._ended = self._ended, []
        folder, self._folder = self._folder, None
        with going_on():
            if recorder is not None:
                self._finish(recorder, error, ended)
            elif folder is not None:
                made, skip = counted(self._made, "step"), self._wanted.asked.skip
                say(f"nothing was recorded: the training ended after {made}, and skip={skip} skips the first {skip}")

    def _begin(self, folder: Path, first_step: int, *, counts_steps: bool = False) -> Profile | None:
        """Begin to record to a file in ``folder``; ``None`` if this process is being recorded already.

        With ``counts_steps``, ampmem counts the steps from ``first_step``, skipped ones included; else the recording
        begins at once with that step, and runs until it is ended.
        """
        from ampmem.recorder.process import active

        if active() is not None:
            say("this process is already being recorded, so these steps are not recorded again")
            return None
        asked = replace(self._wanted.asked, first_step=first_step)
        if not counts_steps:
            asked = replace(asked, steps=None, skip=0)
        return Profile(asked, output=_file_in(folder, f"memory-step{first_step + asked.skip}")).__enter__()

    def _finish(self, recorder: Profile, error: BaseException | None, ended: Sequence[tuple[int, int]]) -> None:
        """End the recording and report it; the rank that logs gives the loggers the rows and the page.

        ``ended`` has the end of each recorded step of the host's in ns, and its number.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one line below says that nothing was recorded
            trace = None if error is None else error.__traceback__
            recorder.__exit__(None if error is None else type(error), error, trace)
        try:
            recording = recorder.recording()
            if job_place().rank != 0:
                return
            summary = summarize(recording)
        except NothingRecorded as nothing:
            recorder.path.unlink(missing_ok=True)
            say(str(nothing))
            return
        known = self._numbers(recording, ended)
        if summary.conservation.breach is not None:
            say(f"nothing is logged, because the sums are wrong: {summary.conservation.breach}; see {recorder.path}")
        page = None
        if self._wanted.page:
            from ampmem.reporters.html import write

            page = _page_of(recorder.path)
            write([recorder.path], page, force=True)
        say(_recorded_text(recorder.path, page, summary, self._wanted.asked.steps) + _renumbered(known))
        self._log(rows(summary, known))
        if page is not None:
            self._keep(page)

    def _numbers(self, recording: Recording, ended: Sequence[tuple[int, int]]) -> dict[int, int]:
        """For each recorded step the host's step in which it ended."""
        found = {}
        for step in recording.steps:
            number = next((number for instant, number in ended if step.end_ns <= instant), None)
            if number is not None:
                found[step.index] = number
        return found


def _file_in(folder: Path, name: str) -> Path:
    """The path of the file ``name`` in ``folder``, which is created now; a rank's has its number."""
    folder.mkdir(parents=True, exist_ok=True)
    place, file = job_place(), folder / f"{name}{SUFFIX}"
    return rank_file(file, place.rank, place.world_size) if place.world_size > 1 else file


def job_place() -> PlaceRecord:
    """The place of this process in a job, from torch.distributed or else the launcher; rank 0 is the one that logs."""
    from ampmem.recorder.ranks.environment import launched
    from ampmem.recorder.ranks.places import Places

    known = launched()
    return Places(None if known is None else known.place).now() or _ALONE


_ALONE = PlaceRecord(rank=0, world_size=1)


@contextmanager
def going_on() -> Iterator[None]:
    """A block whose errors are reported in one line and do not end the training."""
    try:
        yield
    except AmpmemError as error:
        say(str(error))
    except Exception as error:
        say(f"this failed, and the training continues without it: {type(error).__name__}: {error}")


def say(message: str) -> None:
    """Print a line on stderr; a rank that does not log adds its number."""
    place = _ALONE
    with suppress(Exception):  # the line must not fail
        place = job_place()
    lead = "" if place.rank == 0 else f"rank {place.rank}: "
    # There is no command line here: its options are arguments.
    message = re.sub(r"--device (\w+)(?: \(device='\w+' in Python\))?", r"device='\1'", message).replace(
        "--skip", "skip"
    )
    Terminal(sys.stderr).say(lead + " ".join(message.split()))


def _page_of(file: Path) -> Path:
    """The page for the recording ``file``; a job has one page, as only the rank that logs writes it."""
    ranked = rank_of(file)  # a shell pattern for the ranks' files must match recordings only
    return (file if ranked is None else ranked.job).with_suffix(".html")


def _recorded_text(file: Path, page: Path | None, summary: Summary, wanted: int | None) -> str:
    finished = sum(step.finished for step in summary.steps)
    fewer = f" of {wanted}" if wanted is not None and finished < wanted else ""
    where = f"; the page is {page}" if page is not None else ""
    at = "at the peak" if summary.whole.where is PeakPlace.STEP else f"at the peak, {PLACES[summary.whole.where]}"
    return (
        f"recorded {counted(finished, 'step')}{fewer}, {format_peak(summary.whole.bytes)} {at}, in {sized(file)}{where}"
    )


def _renumbered(numbers: Mapping[int, int]) -> str:
    """``; its steps 0, 1 are steps 4, 6 of the training``; empty if both have the same numbers."""
    if all(index == number for index, number in numbers.items()):
        return ""
    recorded, hosts = (", ".join(map(str, each)) for each in (numbers, numbers.values()))
    return f"; its steps {recorded} are steps {hosts} of the training"


class FewStepsCallback:
    """The shared part of the hosts' callbacks; in a subclass it comes before the host's own base class."""

    def __init__(
        self,
        *,
        skip: int = 2,
        steps: int = 3,
        page: bool = True,
        stacks: bool = True,
        device: str = "auto",
        log_to: Any = (),
        watch: bool = False,
        every: int = 500,
        keep: int = 3,
    ) -> None:
        super().__init__()
        self.wanted = wanted_of(
            skip=skip, steps=steps, page=page, stacks=stacks, device=device, watch=watch, every=every, keep=keep
        )
        self.other_loggers = loggers_of(log_to)
        self._start_over()

    def __getstate__(self) -> dict[str, Any]:
        """The options only: a recording stays in its process."""
        return {"wanted": self.wanted, "other_loggers": self.other_loggers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wanted, self.other_loggers = state["wanted"], state["other_loggers"]
        self._start_over()

    def _start_over(self) -> None:
        self._others = WorkingLoggers(self.other_loggers)
        kind = WholeRun if self.wanted.watch else FewSteps
        self.few_steps: FewSteps | WholeRun = kind(self.wanted, self._log, self._keep)
        self.trainer: Any = None

    def _log(self, rows: Sequence[LoggedRow]) -> None:
        """Give all loggers ``rows``."""
        self._others.log(rows)
        self._log_to_host(rows)

    def _keep(self, page: Path) -> None:
        """Store the page with the run, if the loggers take files."""
        self._others.keep(page)
        self._keep_with_host(page)

    def _log_to_host(self, rows: Sequence[LoggedRow]) -> None:
        """Give the host's loggers ``rows``."""
        raise NotImplementedError

    def _keep_with_host(self, page: Path) -> None:
        """Store the page with the host's loggers."""
        raise NotImplementedError


@contextmanager
def log_to(
    *writers: Any,
    folder: str | Path = ".",
    skip: int = 2,
    steps: int = 3,
    first_step: int = 0,
    page: bool = True,
    stacks: bool = True,
    device: str = "auto",
    watch: bool = False,
    every: int = 500,
    keep: int = 3,
) -> Iterator[None]:
    """Record a few steps of the training loop in the ``with`` block, and log the results when it ends.

    If that fails, one line on stderr says so, and the loop goes on.

    Args:
        writers: TensorBoard's ``SummaryWriter``, a run of wandb, ``mlflow``, or any object with ``add_scalar``,
            ``log_metrics``, ``log_metric`` or ``log``.
        folder: the folder of the recording and the page, ``memory-step2.ampmem`` and ``memory-step2.html``.
        skip: let this many steps pass first.
        steps: record this many.
        first_step: the number that the loop gives its first step.
        page: whether to write the page.
        stacks: record the Python stack of every op of the forward pass.
        device: whose memory to record: ``cuda``, ``cpu``, or ``auto`` for the GPU where torch sees one.
        watch: record the whole loop instead, as :func:`ampmem.watch` does, in ``memory-watch.ampmem``, and log each
            step's peak, the bytes allocated and reserved at its end, and the process's memory.
        every, keep: those of :func:`ampmem.watch`.

    Raises:
        UsageError: on entering, when a writer is not a logger, or an argument is invalid.
    """
    loggers = [logger_of(writer) for writer in writers]
    wanted = wanted_of(
        skip=skip, steps=steps, page=page, stacks=stacks, device=device, watch=watch, every=every, keep=keep
    )
    with few_steps_of_loop(wanted, Path(folder), first_step, loggers):
        yield


@contextmanager
def few_steps_of_loop(wanted: Wanted, folder: Path, first_step: int, loggers: Sequence[Logger]) -> Iterator[None]:
    """Record the loop in the block; ampmem finds its steps and counts them from ``first_step``."""
    working = WorkingLoggers(loggers)
    run = (WholeRun if wanted.watch else _CountedSteps)(wanted, working.log, working.keep)
    run.training_begins(folder, 0)
    run.step_begins(0, first_step)
    try:
        yield
    except BaseException as error:
        run.training_ends(error)
        raise
    run.training_ends()


class _CountedSteps(FewSteps):
    """A few steps of a loop without a host: ampmem finds and counts the steps, skipped ones included."""

    def step_begins(self, updates: int, number: int) -> None:
        """Begin to record the loop, whose first step is ``number``."""
        folder, self._folder = self._folder, None
        with going_on():
            self._profile = self._begin(folder or Path(), number, counts_steps=True)

    def _numbers(self, recording: Recording, ended: Sequence[tuple[int, int]]) -> dict[int, int]:
        return {step.index: step.index for step in recording.steps}


class WorkingLoggers:
    """The loggers of one training; a logger that fails is reported and dropped, and the others go on."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        """Give the working loggers ``rows``."""
        self._call_each(lambda logger: logger.log(rows))

    def keep(self, page: Path) -> None:
        """Give the working loggers the page."""
        self._call_each(lambda logger: logger.keep(page))

    def _call_each(self, give: Callable[[Logger], None]) -> None:
        working = []
        for logger in self._loggers:
            with going_on():
                give(logger)
                working.append(logger)
        self._loggers = working
