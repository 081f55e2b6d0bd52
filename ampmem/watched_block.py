"""The watching of a block of code: :func:`watch`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ampmem.analysis.watched import WatchedSummary, watched_run
from ampmem.block import command_line, path_of
from ampmem.errors import UsageError
from ampmem.failure import failure_of
from ampmem.output import Terminal, check_output, claim
from ampmem.recorder.options import Asked, asked_in_python, checked_count
from ampmem.recording import SUFFIX, rank_file
from ampmem.recording.bounds import MOST_KEPT
from ampmem.recording.watched import Row
from ampmem.recording.watched_file import read_watched
from ampmem.vocabulary import Device

if TYPE_CHECKING:
    from ampmem.recorder.simulated_block import SimulatedBlock
    from ampmem.recorder.watch.watcher import Watcher

__all__ = ["Watch", "WatchedSummary", "watch"]

LEAST_EVERY = 10


def watch(
    *,
    output: str | Path | None = None,
    every: int = 500,
    keep: int = 3,
    stacks: bool = True,
    force: bool = False,
    device: str = "auto",
    gpu: str | None = None,
    assume: Sequence[str] = (),
    step_on: str | None = None,
) -> Watch:
    """Record all training steps inside a ``with`` block, one row each.

    Args:
        output: the file to write; by default ``train-watch.ampmem`` for ``train.py``, in the current directory, with a
            number where that exists.
        every: record three steps in full after every ``every`` steps; at least 10.
        keep: how many of these full recordings to keep, the last ones; at most 100.
        stacks: record the Python stack of every op in the full recordings.
        force: replace ``output`` when it exists.
        device, gpu, assume, step_on: as :func:`ampmem.profile` has them.

    Returns:
        A context manager: ``watch.summary()`` has the result, inside the block and after it, and ``watch.path`` is the
        file, which can be read at any moment.

    Raises:
        UsageError: at once, when an argument is invalid; on entering, when a recording is active, when ``output``
            exists or cannot be written, or when ``device`` cannot be watched.
    """
    asked = asked_in_python(stacks=stacks, force=force, device=device, gpu=gpu, assume=assume, step_on=step_on)
    return Watch(asked, output=output, every=every, keep=keep)


def check_every(every: object, keep: object) -> None:
    """Raise :class:`UsageError` for invalid values of these arguments of :func:`watch`."""
    checked_count("every", every, LEAST_EVERY, f"of at least {LEAST_EVERY}")
    checked_count("keep", keep, 1, f"from 1 to {MOST_KEPT}", MOST_KEPT)


class Watch:
    """One watched block; made by :func:`watch`."""

    def __init__(
        self,
        asked: Asked,
        *,
        output: str | Path | None,
        every: int,
        keep: int,
        on_step: Callable[[Row], None] | None = None,
    ) -> None:
        """Like :func:`watch`; ``on_step`` gets each row."""
        check_every(every, keep)
        self._asked = asked
        self._output = None if output is None else path_of(output, "output")
        self._every, self._keep, self._on_step = every, keep, on_step
        self._watcher: Watcher | None = None
        self._simulated: SimulatedBlock | None = None
        self._undo = ExitStack()
        self.path = Path()
        """The file, once the block is entered."""

    def __enter__(self) -> Self:
        if self._watcher is not None:
            raise UsageError("this watch has already been used: call ampmem.watch() again, with another file")
        from ampmem.recorder.options import options_of
        from ampmem.recorder.ranks.environment import launched
        from ampmem.recorder.simulated_block import simulated_block
        from ampmem.recorder.watch.watcher import Watcher

        known = launched()
        place = None if known is None else known.place
        script, *arguments = command_line()
        given = self._output
        self.path = self._name(script) if given is None else given.absolute()
        if place is not None and place.world_size > 1:
            self.path = rank_file(self.path, place.rank, place.world_size)
        force = self._asked.force or given is None
        check_output(self.path, force=force, option="output=")
        asked = replace(self._asked, force=force)
        options = options_of(asked, path=self.path, script=script, arguments=tuple(arguments), place=place)
        with ExitStack() as undo:
            simulated = simulated_block(options)
            if simulated is not None:
                undo.callback(simulated.end)
                options = replace(options, device=Device.SIMULATED)
            watcher = Watcher(
                options,
                every=self._every,
                keep=self._keep,
                simulated=None if simulated is None else simulated.device,
                say=Terminal(sys.stderr).say,
                on_step=self._on_step,
            )
            watcher.start()
            self._watcher, self._simulated, self._undo = watcher, simulated, undo.pop_all()
        return self

    @staticmethod
    def _name(script: str) -> Path:
        """An unused file name for this script; the file is created now."""
        stem = f"{Path(script).stem or 'run'}-watch"

        def named(number: int) -> list[Path]:
            return [Path(f"{stem}{SUFFIX}" if number == 1 else f"{stem}.{number}{SUFFIX}").absolute()]

        return named(claim(named))[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watcher = self._running()
        if error is not None:
            watcher.failed(failure_of(error))
        with self._undo:
            watcher.close(error)
        if self._simulated is not None:
            self._simulated.tell_doubts(failed=isinstance(error, Exception))
            self._simulated = None

    def step(self) -> None:
        """End a step here; from the first call on, only these calls end steps. Raises ``UsageError`` outside."""
        self._running().manual_step()

    def summary(self) -> WatchedSummary:
        """The summary so far. Raises :class:`UsageError` before the block is entered."""
        self._running()
        return watched_run(read_watched(self.path))

    def _running(self) -> Watcher:
        if self._watcher is None:
            raise UsageError("this belongs inside the with block: with ampmem.watch() as watch: ...")
        return self._watcher
