"""The command line of ``ampmem profile``, and the names of the files that it records to.

All ranks of a job record under one name and one number, each with its own rank in the file's name, without asking each
other. A rank takes the first number with which a file of its job exists, or with which no rank of this machine has a
file, and claims only its own file. The folder is locked meanwhile, so ranks of a job cannot take different numbers,
and two jobs cannot take the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ampmem.cli.options import ScriptOptions, assumed_data, parse_size
from ampmem.cli.processes.protection import UNPROTECTED, Protected, new_folder, protect
from ampmem.errors import UsageError
from ampmem.events import PlaceRecord
from ampmem.output import check_output, claim, lock_file, private_cache, reach_by, remove_empty
from ampmem.recorder.ranks.environment import Launched
from ampmem.recorder.script import Target
from ampmem.recording import (
    SUFFIX,
    claimed_for,
    job_of,
    make_claim,
    rank_file,
    rank_of,
    rank_pattern,
    remove_claim,
    remove_left_over,
)
from ampmem.units import counted
from ampmem.vocabulary import COMPILED

if TYPE_CHECKING:
    from ampmem.recorder.options import Options
    from ampmem.simulator.start import Simulation

_PATIENCE_S = 30.0
"""Seconds that a rank waits for ranks that are choosing their names; each takes milliseconds."""


def place_rank(
    job: Callable[[int], Path],
    launched: Launched,
    *,
    numbered: bool,
    force: bool,
    named: Callable[[Path], Path] = lambda path: path,
) -> tuple[Path, str]:
    """The file of this rank, and a line about it; the file is created now, unless ``force`` is to replace it.

    ``named`` gives the user's name of a file.
    """
    place = launched.place
    if force:
        own, number = rank_file(job(1), place.rank, place.world_size), 1
    else:
        own, number = claim_rank(job, launched, only=not numbered)
    first = rank_file(job(1), place.rank, place.world_size)
    taken = f"; {named(first)} exists already (--force replaces it)" if number > 1 else ""
    return own, f"recording to {named(own)}{taken}"


def all_ranks(own: Path, world_size: int) -> str:
    """A shell pattern for the files of all ranks, where ``own`` is one."""
    found = rank_of(own)
    return rank_pattern(own if found is None else found.job, world_size)


def beside(own: Path, launched: Launched) -> str:
    """The command that shows this job's recordings, ``own`` included; empty if no other is on this machine."""
    found, size = rank_of(own), launched.place.world_size
    if found is None:
        return ""
    names = [rank_file(found.job, rank, size) for rank in launched.here]
    count = sum(name == own or (name.exists() and job_of(name) == launched.place.job) for name in names)
    if count < 2:
        return ""
    whose = "all ranks" if count == size else f"{count} of {size} ranks"
    return f"; the files of {whose}: ampmem show {all_ranks(own, size)}"


def tell_name(file: Path, name: Path) -> None:
    """Note in ``file`` that a rank records to ``name``."""
    line = json.dumps(str(name.absolute())) + "\n"
    with suppress(OSError), file.open("a", encoding="utf-8") as stream:
        stream.write(line)


def names_in(file: Path) -> list[Path]:
    """The recordings of the ranks noted in ``file``, in order; claimed but unused names are removed."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = {Path(json.loads(line)) for line in lines}
    for path in found:
        remove_claim(path)
    names = [_near(path) for path in found]
    return sorted(names, key=lambda name: (0 if (rank := rank_of(name)) is None else rank.rank, name))


def _near(path: Path) -> Path:
    """``path`` relative to the working directory, if it is below."""
    with suppress(OSError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def ranks_left(names: Sequence[Path], protected: Protected = UNPROTECTED) -> list[str]:
    """The lines about the ranks' recordings ``names``: missing ones, and the command that shows the others."""
    there = [protected.named(name) for name in names if name.exists()]
    lines = [f"{protected.named(name)} is missing: that rank left no recording" for name in names if not name.exists()]
    found = rank_of(there[0]) if there else None
    if found is not None:
        lines.append(f"{len(there)} of {len(names)} ranks: ampmem show {all_ranks(there[0], found.world_size)}")
    return lines


def claim_rank(job: Callable[[int], Path], launched: Launched, *, only: bool = False) -> tuple[Path, int]:
    """The file of this rank, which is created now, and its number, which is the same for all ranks.

    ``job`` gives for each number from 1 on the name for a single process; with ``only`` the first number is required.
    Raises :class:`UsageError` if that is taken, or a file cannot be created.
    """
    place = launched.place
    with _alone_in(job(1).absolute().parent):
        for number in count(1):
            names = [rank_file(job(number), rank, place.world_size) for rank in launched.here]
            own = rank_file(job(number), place.rank, place.world_size)
            check_output(own, force=True)
            try:
                taken = _claim(names, own, place.job)
            except OSError as error:
                raise UsageError(f"cannot write {own}: {error.strerror}") from error
            if taken:
                return own, number
            if only:
                there = next((name for name in names if name.exists()), own)
                raise UsageError(f"{there} exists already; give another name with -o, or --force to replace it")
    raise AssertionError("unreachable")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for the block, so that no other rank looks for a name there; without effect if it cannot be."""
    descriptor = None
    with suppress(OSError):  # creating the file will report a missing folder
        descriptor = os.open(folder, os.O_RDONLY)
        lock_file(descriptor, wait_s=_PATIENCE_S)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _claim(names: Sequence[Path], own: Path, job: str) -> bool:
    """Claim ``own``; returns whether that worked: not if another job has one of ``names``, or this rank has ``own``.

    ``names`` are the files of this machine's ranks. Claims of dead ranks are removed.
    """
    # The job that recorded or claimed the file, if known.
    ours = bool(job) and any((claimed_for(name) or job_of(name)) == job for name in names if name.exists())
    for name in names:
        remove_left_over(name)
    if not ours and any(name.exists() for name in names):
        return False
    return make_claim(own, job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The command line; ``launched`` is set if a launcher started this process as one of several."""

    script: ScriptOptions
    run_to_end: bool = False
    output: Path | None = None
    html: Path | None = None
    snapshot: Path | None = None
    quiet: bool = False
    report_to: Path | None = None
    times_into: Path | None = None
    results_into: Path | None = None
    names_into: Path | None = None
    launched: Launched | None = None
    protected: Protected = UNPROTECTED
    """How the user's files are protected from the script by now."""

    @property
    def place_known(self) -> PlaceRecord | None:
        """This process's place in a job, from its launcher or from the simulated rank on the command line."""
        if self.launched is not None:
            return self.launched.place
        world_size = self.script.world_size
        return None if world_size is None else PlaceRecord(rank=self.script.rank or 0, world_size=world_size)

    def path(self, title: str, number: int = 1) -> Path:
        """The recording to write, with the ``number`` in its name from the second on.

        A simulated rank's name has its rank in it, unless ``compare`` or ``fit`` chose the name.
        """
        path = self.output or Path(f"{title}.{number}{SUFFIX}" if number > 1 else f"{title}{SUFFIX}")
        size = self.script.world_size or 1
        if size == 1 or self.report_to is not None or rank_of(path) is not None:
            return path
        return rank_file(path, self.script.rank or 0, size)

    def protect(self, path: Path) -> Plan:
        """Protect the user's files if the command line says so; returns the plan with the protection.

        ``path`` is the recording. The script may continue in a child of this process (:func:`~protection.protect`).
        """
        script = self.script
        if self.protected.active or not script.protects:
            return self
        keep = script.keep_files
        if keep is not None and self.report_to is not None:
            keep = new_folder(keep)
        files = (path, self.html, self.snapshot, self.report_to, self.results_into, self.times_into)
        folders = [each.absolute().parent for each in files if each is not None]
        folders += [] if keep is None else [keep.absolute()]
        claimed = [path.absolute()] if self.numbered else []
        cache = self._compiled()
        own = [] if cache is None else [cache]
        limit = parse_size(script.files_limit, "--files-limit")
        found = protect(tuple(dict.fromkeys(folders)), limit, claimed, keep, own)
        reach_by(found.real)
        return replace(self, protected=found, script=replace(script, keep_files=keep))

    def _compiled(self) -> Path | None:
        """The folder of ``torch.compile``'s cache for simulated GPUs; ``None`` for other devices."""
        if self.script.simulated_gpu is not None:
            with suppress(OSError, RuntimeError):
                return private_cache(COMPILED)
        return None

    def _display_name(self, path: Path) -> Path:
        """The user's name of a file of ampmem's, near the working directory."""
        return _near(self.protected.named(path))

    def keep_written(self) -> str:
        """Copy the files that the script has written to ``--keep-files``; returns a line about the files or their loss.

        A rank does nothing, as its launcher does it.
        """
        protected, keep = self.protected, self.script.keep_files
        if self.launched is not None:
            return ""
        if keep is None:
            return protected.unkept()
        try:
            number = protected.keep(protected.real(keep))
        except OSError as error:
            return f"could not keep all files that the script wrote in {keep}: {error.strerror}"
        return f"kept {counted(number, 'file')} that the script wrote in {keep}" if number else ""

    def find(self, suffix: str = "") -> tuple[Target, str]:
        """The script, and its title with ``suffix``, which names the recording. Checks all files to write."""
        try:
            target = self.script.find()
            title = f"{target.title}{suffix}"
            if self.times_into is None:
                check_output(self.path(title), force=self.script.force or self.numbered or self.launched is not None)
                for output in filter(None, (self.html, self.snapshot)):
                    check_output(output, force=self.script.force)
        except FileNotFoundError as error:
            raise UsageError(
                "the current directory no longer exists; change to another one, or give absolute paths"
            ) from error
        return target, title

    @property
    def numbered(self) -> bool:
        """Whether the recording gets a number in its name if the name is taken: without ``-o`` and ``--force``."""
        return self.output is None and not self.script.force

    def place(self, title: str, *, spawns: bool = False) -> tuple[Path, str]:
        """The recording to write, and a line about it; a numbered one is created now, without a step.

        ``spawns`` says that the script may start ranks itself, and need not train in this process.
        """
        if self.launched is not None:
            force = self.script.force

            def job(number: int) -> Path:
                return self.protected.real(self.path(title, number))

            own, greeting = place_rank(
                job, self.launched, numbered=self.numbered, force=force, named=self._display_name
            )
            return self._display_name(own), greeting
        number = claim(lambda number: [self.path(title, number)]) if self.numbered else 1
        path = self.path(title, number)
        taken = f"; {self.path(title)} exists already (--force replaces it)" if number > 1 else ""
        if spawns:
            return path, (
                f"recording this process to {path} if it trains, and the ranks that it spawns to a file each{taken}"
            )
        return path, f"recording to {path}{taken}"

    def simulate(self) -> Simulation | None:
        """Put the simulated device in place, if there is one."""
        gpu = self.script.simulated_gpu
        assumed = assumed_data(self.script.device, self.script.assume)
        if gpu is None or assumed is None:
            return None
        try:
            from ampmem.simulator.start import Simulation
            from ampmem.simulator.world import World
        except (ImportError, AttributeError) as error:  # a private part of torch is missing
            from ampmem.simulator.refusal import refusal

            raise refusal(error) from error
        size = self.script.world_size
        world = None if size is None else World(rank=self.script.rank or 0, size=size)
        cache = self._compiled()
        cache = None if cache is None else self.protected.real(cache)
        return Simulation(gpu, assumed=assumed, world=world, saves=self.protected.by_kernel, cache=cache)

    def options(
        self,
        path: Path,
        *,
        target: Target | None = None,
        timed: bool = False,
        place: PlaceRecord | None = None,
        baseline: bool = False,
    ) -> Options:
        """The recorder's options. Importing torch takes seconds, so invalid options fail before."""
        from ampmem.recorder.options import options_of

        script = self.script
        force = script.force or self.numbered or place is not None or self.launched is not None
        return options_of(
            replace(script, force=force),
            path=self.protected.real(path).absolute(),
            script=script.name,
            arguments=script.arguments,
            timed=timed,
            baseline=baseline,
            place=place or self.place_known,
            script_sha256="" if target is None else target.sha256,
        )


def forget(plan: Plan, path: Path) -> None:
    """Remove the claim and the empty file of the recording at ``path``, which was not begun."""
    path = plan.protected.real(path)
    remove_empty([path] if plan.numbered else [])
    remove_claim(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The message to a spawned process: the command line, the script's name, and a ``folder`` for communication."""

    plan: Plan
    title: str
    job: str
    folder: Path
    directory: Path
    """The folder of the recordings, as the script may change its directory."""

    @property
    def names(self) -> Path:
        """The file in which each rank notes where it records."""
        return self.folder / "names"

    @property
    def joining(self) -> Path:
        """A file that exists while the script's own process does nothing but wait for its spawned processes."""
        return self.folder / "joining"

    @property
    def stopped(self) -> Path:
        """A file that exists once ranks were stopped."""
        return self.folder / "stopped"
