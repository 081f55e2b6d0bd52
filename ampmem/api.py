"""The public face of ampmem in Python: :func:`profile`, :func:`load`, :func:`compare` and :func:`ranks`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ampmem.analysis.compare import Comparison, distinct
from ampmem.analysis.compare import compare as compare_entries
from ampmem.analysis.ranks.arms import merge_all
from ampmem.analysis.ranks.jobs import are_ranks
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.ranks.reading import read_runs
from ampmem.analysis.ranks.runs import RankRun, rank_run_of
from ampmem.analysis.summary import Summary, summarize
from ampmem.errors import NothingRecorded, UsageError
from ampmem.events import Recording
from ampmem.recording import SUFFIX, read, without_journals

if TYPE_CHECKING:
    from ampmem.recorder.models.live import Module, Optimizer
    from ampmem.recorder.session import Session

ENDS_LATER = (
    "the block was left on another thread than it was entered on; the recording ends when that thread next runs a "
    "module, a backward or an optimizer, or is over"
)

__all__ = ["Comparison", "Profile", "Ranks", "Recording", "Summary", "compare", "load", "profile", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookSummary(Summary):
    """A summary that a notebook shows as tables."""

    def _repr_html_(self) -> str:
        from ampmem.reporters.html.page.notebook import render

        return render(self)


def _remove_folder(folder: str, process: int) -> None:
    """``process`` made it: a child that was forked comes here, too, when it ends."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def load(path: str | Path) -> Recording:
    """Read a recording. Needs no torch.

    Raises:
        UsageError: ``path`` does not exist.
        RecordingError: it is not a recording, or one of another format version.
    """
    return read(Path(path))


def compare(*recordings: str | Path | Recording) -> Comparison:
    """Lay recordings, or the files that hold them, side by side. Needs no torch.

    The columns are labelled with the arms; recordings of the same arm get their file's name as well. Of the ranks of a
    job in several arms, the worst rank of each is a column.

    Raises:
        UsageError: no recording is given, or a file does not exist.
        RecordingError: a file is not a recording, or one of another format version.
        NothingRecorded: one has no step, no backward or no model.
    """
    if not recordings:
        raise UsageError("there is nothing to compare: give at least one recording")
    given = _without_journals(recordings)
    runs = _runs(given)
    if are_ranks(runs) and (worst := merge_all(runs).comparison) is not None:
        return worst
    names = ["" if isinstance(item, Recording) else Path(item).name for item in given]
    return compare_entries(distinct([run.column for run in runs], names))


def ranks(*recordings: str | Path | Recording) -> Ranks:
    """Merge the recordings of one job's ranks, or the files that hold them: the worst rank, and why. Needs no torch.

    Raises:
        UsageError: no recording is given, a file does not exist, or they are not the ranks of one job in one arm.
        RecordingError: a file is not a recording, or one of another format version, and no other rank can be shown.
        NothingRecorded: none has a step, a backward or a model.
    """
    if not recordings:
        raise UsageError("there is nothing to merge: give at least one recording")
    jobs = merge_all(_runs(_without_journals(recordings))).jobs
    if len(jobs) > 1:
        arms = ", ".join(job.job.arm.name for job in jobs)
        raise UsageError(f"these are jobs in several precisions ({arms}): merge each by itself, or compare() them")
    return jobs[0]


def _without_journals(recordings: Sequence[str | Path | Recording]) -> Sequence[str | Path | Recording]:
    kept = without_journals([Path(item) for item in recordings if not isinstance(item, Recording)])
    return [item for item in recordings if isinstance(item, Recording) or Path(item) in kept]


def _runs(recordings: Sequence[str | Path | Recording]) -> list[RankRun]:
    files = iter(read_runs([Path(item) for item in recordings if not isinstance(item, Recording)]))
    return [rank_run_of(item, Path()) if isinstance(item, Recording) else next(files) for item in recordings]


def profile(
    model: Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    output: str | Path | None = None,
    steps: int | None = None,
    skip: int = 0,
    stacks: bool = True,
    force: bool = False,
    device: str = "auto",
    step_on: str | None = None,
) -> Profile:
    """Record the training steps inside a ``with`` block.

    Args:
        model: the root module; models are found by themselves when it is left out.
        optimizer: an optimizer whose updates end steps; found by itself too.
        output: the recording to write; by default it lives as long as the returned object.
        steps: record this many steps, then let the block run on uninstrumented; all by default.
        skip: let this many steps pass first.
        stacks: record the Python stack of every op of the forward pass.
        force: replace ``output`` when it exists.
        device: whose memory to record: ``cuda``, ``cpu``, or ``auto`` for the GPU where torch sees one.
        step_on: what ends a step: ``backward``, ``optimizer``, ``forward`` for inference, or each return of a function,
            as ``FILE.py:FUNCTION`` or ``MODULE.FUNCTION``; found by itself when it is left out.

    Raises:
        UsageError: on entering, when another ``profile`` is active, when ``output`` cannot be
            written, when ``device`` cannot be recorded, when ``step_on`` says nothing that there is, or when
            torch.profiler is running.
    """
    return Profile(
        model,
        optimizer,
        output=output,
        steps=steps,
        skip=skip,
        stacks=stacks,
        force=force,
        device=device,
        step_on=step_on,
    )


class Profile:
    """One recording in the making; made by :func:`profile`."""

    def __init__(
        self,
        model: Module | None,
        optimizer: Optimizer | None,
        *,
        output: str | Path | None,
        steps: int | None,
        skip: int,
        stacks: bool,
        force: bool,
        device: str = "auto",
        step_on: str | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._steps = steps
        self._skip = skip
        self._stacks = stacks
        self._force = force
        self._device = device
        self._step_on = step_on
        if output is None:
            folder = tempfile.mkdtemp(prefix="ampmem-")
            weakref.finalize(self, _remove_folder, folder, os.getpid())
            output = Path(folder) / f"profile{SUFFIX}"
        self.path = Path(output).absolute()
        """The recording."""
        self._session: Session | None = None
        self._failure: NothingRecorded | None = None

    def __enter__(self) -> Self:
        from ampmem.recorder.marker import step_on_of
        from ampmem.recorder.options import Options, device_named
        from ampmem.recorder.ranks.environment import launched
        from ampmem.recorder.session import Session

        known = launched()
        options = Options(
            path=self.path,
            script=sys.argv[0] if sys.argv else "",
            arguments=tuple(sys.argv[1:]),
            steps=self._steps,
            skip=self._skip,
            stacks=self._stacks,
            force=self._force,
            device=device_named(self._device),
            step_on=step_on_of(self._step_on),
            place=None if known is None else known.place,
        )
        session = self._session = Session(options)
        try:
            if self._model is not None:
                session.add_model(self._model)
            if self._optimizer is not None:
                session.add_optimizer(self._optimizer)
            self._model = self._optimizer = None  # the recording must not keep them alive
            session.start()
        except BaseException as error:
            session.close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from ampmem.recorder.process.active import active

        session = self._running()
        session.close(error)
        if active() is session:
            warnings.warn(f"ampmem: {ENDS_LATER}", RuntimeWarning, stacklevel=2)
            return
        try:
            session.check()
        except NothingRecorded as nothing:
            self._failure = nothing
            if error is None:
                warnings.warn(f"ampmem: {nothing}", RuntimeWarning, stacklevel=2)

    def step(self) -> None:
        """End a step here; from the first call on, only these calls end steps.

        Raises:
            UsageError: outside the ``with`` block, or before any model ran forward.
        """
        self._running().manual_step()

    def recording(self) -> Recording:
        """What was recorded. Raises :class:`NothingRecorded` when there is no whole step."""
        if self._failure is not None:
            raise self._failure
        return load(self.path)

    def summary(self) -> Summary:
        """The summary of the recording. Raises :class:`NothingRecorded` when there is no whole step."""
        summed_up = summarize(self.recording())
        return NotebookSummary(**{item.name: getattr(summed_up, item.name) for item in fields(summed_up)})

    def report(self, path: str | Path, *, force: bool = False) -> None:
        """Write the HTML report to ``path``. Raises :class:`UsageError` when it exists, unless ``force``."""
        from ampmem.reporters.html import write

        self.recording()
        write([self.path], Path(path), force=force)

    def _running(self) -> Session:
        if self._session is None:
            raise UsageError("this belongs inside the with block: with ampmem.profile() as prof: ...")
        return self._session
