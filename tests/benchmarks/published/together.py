"""Simulates published runs, some at a time, each in a process of its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from published.libraries import NoEnvironment, library_path
from published.runs import Peak, PublishedRun, Row, Simulated
from published.snapshots import compared_with_snapshot

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run that was not simulated, and why."""

    key: str
    why: str


def every_row(runs: Iterable[PublishedRun], jobs: int) -> Iterator[Row | LeftOut]:
    """In the order of ``runs``; each as soon as it and those before it are done."""
    runs = tuple(runs)
    missing: dict[str, str] = {}
    for environment in sorted({run.environment for run in runs}):
        try:
            library_path(environment)
        except NoEnvironment as error:
            missing[environment] = str(error)

    with ThreadPoolExecutor(jobs) as pool:
        # What was measured twice of one run is simulated once.
        done = {_what_runs(run): None for run in runs if run.environment not in missing}
        workers = Workers()
        simulated = {each: pool.submit(workers.simulate, each) for each in done}
        for run in runs:
            if run.environment in missing:
                yield LeftOut(key=run.key, why=missing[run.environment])
                continue
            found = simulated[_what_runs(run)].result()
            if isinstance(found, str):
                yield LeftOut(key=run.key, why=found)
            else:
                sequence = compared_with_snapshot(run, found)
                yield Row(run=run, simulated=found, sequence=sequence, day=date.today().isoformat())
        for warm in workers.every:
            warm.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatRuns:
    """What decides how a run goes."""

    gpu: str
    command: tuple[str, ...]
    environment: str
    settings: str
    ranks: int


def _what_runs(run: PublishedRun) -> WhatRuns:
    return WhatRuns(
        gpu=run.gpu, command=run.command, environment=run.environment, settings=run.settings, ranks=run.ranks
    )


class Warm:
    """A process that has imported the libraries of one environment, and makes runs one after another."""

    def __init__(self, environment: str) -> None:
        paths = [library_path(environment), str(ROOT)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH")}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "simulate.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        )

    def simulate(self, run: WhatRuns) -> Simulated | str:
        """In a child of that process; the script's last words where it fails."""
        script, *arguments = run.command
        assert self._process.stdin is not None and self._process.stdout is not None
        with TemporaryDirectory() as folder:
            file = Path(folder) / "simulated.json"
            asked = {"gpu": run.gpu, "ranks": run.ranks, "settings": run.settings, "file": str(file)}
            asked |= {"script": str(HERE / "scripts" / script), "arguments": arguments}
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            words = self._process.stdout.readline()
            if not file.exists():
                return f"its script failed: {words.strip()}"
            return simulated_from(json.loads(file.read_text(encoding="utf-8")))

    def end(self) -> None:
        """Wait for it."""
        self._process.communicate()


class Workers(threading.local):
    """The warm processes of one thread, by environment."""

    every: ClassVar[list[Warm]] = []

    def __init__(self) -> None:
        self._warm: dict[str, Warm] = {}

    def simulate(self, run: WhatRuns) -> Simulated | str:
        """On the one that has the libraries; started now if there is none."""
        warm = self._warm.get(run.environment)
        if warm is None:
            warm = self._warm[run.environment] = Warm(run.environment)
            self.every.append(warm)
        return warm.simulate(run)


def simulated_from(data: dict[str, Any]) -> Simulated:
    """What ``simulate.py`` wrote."""
    peaks = {name: Peak(**data.pop(name)) for name in ("allocated", "reserved", "outside")}
    return Simulated(**peaks, **data | {"sizes": tuple(data["sizes"])})
