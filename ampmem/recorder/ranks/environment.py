"""The rank of this process by its environment variables, as launchers such as torchrun set them.

It needs no torch: the name of a rank's file is chosen before anything is imported.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ampmem.events import PlaceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process of a job, and the ranks started with it on this machine, including its own."""

    place: PlaceRecord
    here: range


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """The rank according to ``environ``; ``None`` if this is not one of several processes, or values are invalid."""
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or world_size is None or world_size < 2 or rank >= world_size:
        return None
    local_rank, local_size = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    here = range(rank, rank + 1)
    if local_rank is not None and local_size is not None and local_rank < local_size:
        first = rank - local_rank
        if first >= 0 and first + local_size <= world_size:
            here = range(first, first + local_size)
    job = _job(environ) if len(here) > 1 else ""
    place = PlaceRecord(rank=rank, world_size=world_size, local_rank=local_rank, job=job)
    return Launched(place=place, here=here)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _job(environ: Mapping[str, str]) -> str:
    """A text shared by exactly the processes that one launcher started at one time on this machine."""
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file:  # the path is FOLDER/attempt_0/3/error.json; torchrun makes a new FOLDER each time
        return identity(str(Path(error_file).parent.parent))
    names = next((names for names in _SCHEDULERS if all(map(environ.get, names))), ())
    return identity(" ".join(environ[name] for name in names) or start_of(os.getppid()))


_SCHEDULERS = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMIX_NAMESPACE",), ("PALS_APID",), ("PMI_JOBID",))
"""The variables in which a scheduler names one start: of Slurm's srun, PMIx (Open MPI), PALS, and PMI (MPICH, Intel).

Its processes may have a parent each, such as a shell script that sets ``RANK``.
"""


def identity(start: str) -> str:
    """A short hash of a start; processes on other machines may have the same."""
    return sha256(f"{socket.gethostname()} {start}".encode()).hexdigest()[:16]


def start_of(process: int) -> str:
    """An identifier of a process that stays unique when its number is reused."""
    began = ""
    with suppress(OSError, IndexError):
        # Field 22 is the start time. The name, in parentheses, may have spaces and parentheses of its own.
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{process} {began}"
