"""The names of the files that the ranks of one job write, each its own: ``train.rank3-of-8.ampmem``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampmem.recording.layout import SUFFIX

_NAME = re.compile(rf"(?P<job>.+)\.rank(?P<rank>\d+)-of-(?P<world_size>\d+){re.escape(SUFFIX)}", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What the name of a rank's file says: it is rank ``rank`` of ``world_size`` of what ``job`` would name alone."""

    job: Path
    rank: int
    world_size: int


def rank_file(job: Path, rank: int, world_size: int) -> Path:
    """Where rank ``rank`` of ``world_size`` writes when a process alone would write ``job``."""
    return job.with_name(f"{job.name.removesuffix(SUFFIX)}.rank{rank}-of-{world_size}{SUFFIX}")


def rank_pattern(job: Path, world_size: int) -> str:
    """All ranks of ``job``, as a shell takes and finds them: ``'my run'.rank*-of-8.ampmem``."""
    return f"{shlex.quote(str(job.with_name(job.name.removesuffix(SUFFIX))))}.rank*-of-{world_size}{SUFFIX}"


def rank_of(path: Path) -> RankFile | None:
    """What the name of ``path`` says; ``None`` where it is not that of a rank's file."""
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["rank"]) >= int(found["world_size"]):
        return None
    job = path.with_name(f"{found['job']}{SUFFIX}")
    return RankFile(job=job, rank=int(found["rank"]), world_size=int(found["world_size"]))


def without_journals(paths: Sequence[Path]) -> list[Path]:
    """``paths`` without the journals of those among them, which a killed run has left and ``train*`` finds."""
    journals = {path.with_name(f"{path.name}-journal") for path in paths if path.suffix == SUFFIX}
    return [path for path in paths if path not in journals]
