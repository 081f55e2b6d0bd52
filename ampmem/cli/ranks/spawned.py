"""The script's own process, where that starts ranks by ``torch.multiprocessing.spawn`` or multiprocessing's ``spawn``.

Each process that is spawned gets a passenger, and is recorded from when it joins a process group on. One that is
forked is not recorded.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import process, spawn
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ampmem.cli.processes.plan import Plan
from ampmem.cli.processes.rank_names import names_in
from ampmem.cli.ranks.passenger import Passenger
from ampmem.patching import Undo, patch
from ampmem.recorder.hooks.children import loads_data
from ampmem.recorder.ranks.environment import identity, start_of

_ROOT = str(Path(__file__).absolute().parents[3])
_NAMES, _JOINING, _STOPPED = "names", "joining", "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What a spawned process is told: the command line, the name of what is run, and a ``folder`` to talk through."""

    plan: Plan
    title: str
    job: str
    folder: Path
    directory: Path
    """Where the recordings are written; the script may change its own."""

    @property
    def names(self) -> Path:
        """The file in which each rank says where it records."""
        return self.folder / _NAMES

    @property
    def joining(self) -> bool:
        """Whether the script's own process waits for those that it spawned, and for nothing that they send."""
        return (self.folder / _JOINING).exists()

    @property
    def stopped(self) -> Path:
        """There once ranks were stopped."""
        return self.folder / _STOPPED


class Spawner:
    """Sends passengers along while the script runs; ``stop`` ends it once ranks that it waited for were stopped."""

    def __init__(self, plan: Plan, title: str, stop: Callable[[], None]) -> None:
        self._plan = plan
        self._title = title
        self._stop = stop
        self._crew: Crew | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._process = os.getpid()
        self._directory = Path.cwd()

    def install(self) -> Undo:
        """From now on; returns what undoes it."""
        with ExitStack() as undo:
            undo.callback(patch(spawn, "get_preparation_data", self._with_passenger))
            undo.callback(patch(process.BaseProcess, "join", self._around_join))
            if (contexts := sys.modules.get("torch.multiprocessing.spawn")) is not None:
                undo.callback(patch(contexts.ProcessContext, "join", self._around_join))
            return undo.pop_all().close

    def end(self) -> list[Path]:
        """The script has ended: where its ranks have recorded."""
        if self._crew is None or self._folder is None or os.getpid() != self._process:
            return []
        names = names_in(self._crew.names)
        with suppress(OSError):
            self._folder.cleanup()
        return names

    def _with_passenger(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(original)
        def get_preparation_data(name: str) -> dict[str, Any]:
            data = original(name)
            if not loads_data(sys._getframe(1)) and os.getpid() == self._process:
                with suppress(Exception):
                    data["ampmem"] = Passenger(_ROOT, self._told())
            return data

        return get_preparation_data

    def _told(self) -> Crew:
        if self._crew is None:
            self._folder = TemporaryDirectory(prefix="ampmem-", ignore_cleanup_errors=True)
            self._crew = Crew(
                plan=self._plan,
                title=self._title,
                job=identity(start_of(self._process)),
                folder=Path(self._folder.name),
                directory=self._directory,
            )
        return self._crew

    def _around_join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def join(waited: Any, *arguments: Any, **options: Any) -> Any:
            crew = self._crew
            if crew is None or os.getpid() != self._process:
                return original(waited, *arguments, **options)
            with suppress(OSError):
                (crew.folder / _JOINING).touch()
            try:
                ended = original(waited, *arguments, **options)
            finally:
                with suppress(OSError):
                    (crew.folder / _JOINING).unlink(missing_ok=True)
            if crew.stopped.exists():
                self._stop()
            return ended

        return join
