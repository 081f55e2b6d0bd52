"""Runs the script that is to be judged, in a fresh process, and follows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ampmem.cli.options.shared import ScriptOptions, settled
from ampmem.cli.processes import launch
from ampmem.cli.processes.children import misplaced, profile_arguments
from ampmem.cli.processes.progress import Progress
from ampmem.cli.ranks.launcher import check_processes
from ampmem.errors import UsageError
from ampmem.failure import FailureKind
from ampmem.output.files import check_output
from ampmem.recording import SUFFIX, rank_file
from ampmem.vocabulary import Arm

SIGNALLED = 128
"""What a shell adds to the number of the signal that killed a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What is left of a script: its recordings, one for each rank, and how it ended.

    ``exit_code`` is the script's own where it failed, and ampmem's where that could not record it; ``failure`` says
    why, in one line.
    """

    paths: tuple[Path, ...]
    exit_code: int
    failure: str | None


@contextmanager
def recorded(script: ScriptOptions, arm: Arm, seed: int, output: Path | None) -> Iterator[Recorded]:
    """Run ``script`` and record it at ``output``, or where the recording is removed when the block ends.

    What it prints is not shown, but for the last lines of one that fails. Raises :class:`UsageError` for what cannot
    be run or written.
    """
    if script.dtype is not None and not arm.autocast:
        raise UsageError(f"--dtype is what autocast casts to, so it needs --arm amp or amp-nocache, not {arm}")
    script = settled(script)
    check_processes(script)
    title = script.find().title
    if output is not None:
        check_output(output, force=script.force)
    with nullcontext() if output is not None else TemporaryDirectory(prefix="ampmem-check-") as folder:
        path = output if output is not None else Path(str(folder)) / f"{title}{SUFFIX}"
        yield _run(script, arm, seed, path)


def _run(script: ScriptOptions, arm: Arm, seed: int, path: Path) -> Recorded:
    count = script.nproc_per_node or 1
    files = [path] if count == 1 else [rank_file(path, rank, count) for rank in range(count)]
    with Progress() as progress:
        progress.now(f"{script.name}: starting")
        ended = launch.run(
            profile_arguments(script, arm, seed, "--quiet", "-o", str(path)),
            lambda step: progress.now(f"{script.name}: step {step.done} of {step.wanted}"),
        )
        failure = None if ended.failure is None else f"{ended.failure}{misplaced(script, ended)}"
        if failure is not None:
            refused = ended.said is not None and ended.said.kind is FailureKind.REFUSED
            said = failure if refused else f"{script.name} failed: {failure}"
            progress.stay(f"ampmem: {said}", tail=() if refused else ended.tail)
    code = ended.code if ended.code >= 0 else SIGNALLED - ended.code
    return Recorded(paths=tuple(file for file in files if file.exists()), exit_code=code, failure=failure)
