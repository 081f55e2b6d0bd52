"""The files of the ranks of one job, one per rank: ``train.rank3-of-8.ampmem``.

A rank claims its file's name before it records: the claim is a file of one line, the job, whose lock the rank holds
until a recording replaces it. The lock ends with the process, so a claim without a lock is a leftover.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ampmem.output import half_written, lock_file
from ampmem.recording.database import SUFFIX

_CLAIM = "the recording of a rank begins here: "
_LONGEST_CLAIM = 1000
"""Maximum size of a claim in bytes."""
_held: dict[Path, int] = {}
"""The descriptors that hold the locks of this process's claims, by absolute path."""

_NAME = re.compile(rf"(?P<job>.+)\.rank(?P<rank>\d+)-of-(?P<world_size>\d+){re.escape(SUFFIX)}", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The parts of a rank's file name: rank ``rank`` of ``world_size`` of the recording ``job``."""

    job: Path
    rank: int
    world_size: int


def rank_file(job: Path, rank: int, world_size: int) -> Path:
    """The file that rank ``rank`` of ``world_size`` writes instead of ``job``."""
    return job.with_name(f"{job.name.removesuffix(SUFFIX)}.rank{rank}-of-{world_size}{SUFFIX}")


def evaluation_file(steps: Path, number: int = 1) -> Path:
    """The file for the evaluation after the recorded ``steps``: ``train.evaluation.ampmem`` beside ``train.ampmem``.

    From the second on, its name has the ``number``.
    """
    rank = rank_of(steps)
    if rank is not None:
        return rank_file(evaluation_file(rank.job, number), rank.rank, rank.world_size)
    return steps.with_name(f"{steps.name.removesuffix(SUFFIX)}.evaluation{f'.{number}' * (number > 1)}{SUFFIX}")


def rank_pattern(job: Path, world_size: int) -> str:
    """The files of all ranks of ``job`` as a shell pattern: ``'my run'.rank*-of-8.ampmem``."""
    return f"{shlex.quote(str(job.with_name(job.name.removesuffix(SUFFIX))))}.rank*-of-{world_size}{SUFFIX}"


def rank_of(path: Path) -> RankFile | None:
    """The parts of the name of ``path``; ``None`` if it is not a rank's file."""
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["rank"]) >= int(found["world_size"]):
        return None
    job = path.with_name(f"{found['job']}{SUFFIX}")
    return RankFile(job=job, rank=int(found["rank"]), world_size=int(found["world_size"]))


def without_journals(paths: Sequence[Path]) -> list[Path]:
    """``paths`` without journals of other paths, which a killed run leaves and ``train*`` matches."""
    journals = {path.with_name(f"{path.name}-journal") for path in paths if path.suffix == SUFFIX}
    return [path for path in paths if path not in journals]


def make_claim(path: Path, job: str) -> bool:
    """Claim ``path`` for this process and ``job``; ``False`` if there is a file already.

    The claim appears complete and locked. Raises :class:`OSError` if a file cannot be created.
    """
    half = half_written(path)
    descriptor = os.open(half, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    made = False
    try:
        os.write(descriptor, (_CLAIM + job).encode())
        lock_file(descriptor)
        made = _name_new(half, path)
    finally:
        half.unlink(missing_ok=True)
        if not made:
            os.close(descriptor)
    if made:
        _held[path.absolute()] = descriptor
    return made


def _name_new(half: Path, path: Path) -> bool:
    """Rename the file ``half`` to ``path``, unless that exists."""
    try:
        os.link(half, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if path.exists():
            return False
        half.replace(path)
    return True


def claimed_for(path: Path) -> str | None:
    """The job of the claim at ``path``, leftover or not; ``None`` if there is no claim."""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= _LONGEST_CLAIM:
            content = path.read_bytes().decode("utf-8", errors="replace")
            return content.removeprefix(_CLAIM) if content.startswith(_CLAIM) else None
    return None


def lock_of_claim(path: Path) -> int | None:
    """The descriptor of this process's claim of ``path``, for the caller to close; ``None`` if there is none."""
    descriptor = _held.pop(path.absolute(), None)
    if descriptor is None:
        return None
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)  # the name belongs to another file by now
    return None


def remove_claim(path: Path) -> None:
    """Remove the claim at ``path`` if it is this process's own, or a leftover."""
    descriptor = lock_of_claim(path)
    if descriptor is None:
        remove_left_over(path)
        return
    path.unlink(missing_ok=True)
    os.close(descriptor)


def remove_left_over(path: Path) -> None:
    """Remove the claim at ``path`` if its process has ended; does nothing on file systems without locks."""
    if claimed_for(path) is None:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            # A recording may have replaced the claim before the file was opened, or before it was locked.
            beginning = os.pread(descriptor, len(_CLAIM), 0) if lock_file(descriptor) else b""
            if beginning == _CLAIM.encode() and os.path.samestat(os.fstat(descriptor), path.stat()):
                path.unlink()
        finally:
            os.close(descriptor)
