"""The process of a script that starts ranks by ``torch.multiprocessing.spawn`` or multiprocessing's ``spawn``.

Each spawned process gets a message, and is recorded once it joins a process group. Forked processes are not recorded.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import process, spawn
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import Any

from ampmem.cli.processes.plan import Orders, Plan, names_in
from ampmem.cli.processes.spawn_message import SpawnMessage
from ampmem.cli.processes.starting import ROOT
from ampmem.patching import Undo, patch
from ampmem.recorder.hooks.children import loads_data
from ampmem.recorder.ranks.environment import identity, start_of

_PREPARED = (spawn, "get_preparation_data")
_JOINED = (process.BaseProcess, "join")


_SPAWNING = frozenset({"spawn", "start_processes"})


def may_spawn(code: CodeType) -> bool:
    """Whether ``code``, or a function in it, spawns processes or passes ``"spawn"`` to multiprocessing."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return bool(_SPAWNING.intersection(code.co_names)) or "spawn" in code.co_consts or any(map(may_spawn, inner))


class Spawner:
    """Sends a message with each process that the script spawns; ``stop`` stops the script after its ranks."""

    def __init__(self, plan: Plan, title: str, stop: Callable[[], None]) -> None:
        self._plan = plan
        self._title = title
        self._stop = stop
        self._on_first: Callable[[], None] = lambda: None
        self._orders: Orders | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._process = os.getpid()
        self._directory = Path.cwd()

    def install(self, on_first: Callable[[], None]) -> Undo:
        """Patch multiprocessing; returns the undo function. ``on_first`` is called before the first process spawns."""
        self._on_first = on_first
        from ampmem.recorder.torch_private.distributed import JOINED

        with ExitStack() as undo:
            undo.callback(patch(*_PREPARED, self._with_message))
            undo.callback(patch(*_JOINED, self._around_join))
            undo.callback(patch(*JOINED, self._around_join))
            return undo.pop_all().close

    def end(self) -> list[Path]:
        """The recordings of the script's ranks, after the script has ended; the folder for messages is removed."""
        if self._orders is None or self._folder is None or os.getpid() != self._process:
            return []
        names = names_in(self._orders.names)
        with suppress(OSError):
            self._folder.cleanup()
        return names

    def _with_message(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(original)
        def get_preparation_data(name: str) -> dict[str, Any]:
            data = original(name)
            # A DataLoader's workers and a Manager are spawned too, and a forked child inherits the patch.
            if not loads_data(sys._getframe(1)) and os.getpid() == self._process:
                with suppress(Exception):
                    data["ampmem"] = SpawnMessage(ROOT, self._orders_made())
            return data

        return get_preparation_data

    def _orders_made(self) -> Orders:
        if self._orders is None:
            self._on_first()
            self._folder = TemporaryDirectory(prefix="ampmem-", ignore_cleanup_errors=True)
            self._orders = Orders(
                plan=self._plan,
                title=self._title,
                job=identity(start_of(self._process)),
                folder=Path(self._folder.name),
                directory=self._directory,
            )
        return self._orders

    def _around_join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def join(waited: Any, *arguments: Any, **options: Any) -> Any:
            orders = self._orders
            if orders is None or os.getpid() != self._process:
                return original(waited, *arguments, **options)
            with suppress(OSError):
                orders.joining.touch()
            try:
                ended = original(waited, *arguments, **options)
            finally:
                with suppress(OSError):
                    orders.joining.unlink(missing_ok=True)
            if orders.stopped.exists():
                self._stop()
            return ended

        return join
