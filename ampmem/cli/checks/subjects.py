"""What is judged: recordings and summaries in files, or what a script has just left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampmem.analysis.budgets.run import JudgedRun, read_run, run_of
from ampmem.analysis.difference.sides import is_json
from ampmem.errors import AmpmemError
from ampmem.recording import SUFFIX, read, taken_for_script


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One run that is to be judged, or why it cannot be; ``script`` is what ran, where that is known."""

    path: Path
    label: str
    script: str | None = None
    run: JudgedRun | None = None
    problem: str | None = None


def is_recorded(path: Path) -> bool:
    """Whether ``path`` is to be judged as it is, and not to be run: a recording or the JSON of a summary."""
    if path.suffix in (SUFFIX, ".json"):
        return True
    return path.is_file() and taken_for_script(path) is not None


def subject_at(path: Path, label: str | None = None) -> Subject:
    """The run in the file at ``path``. What is wrong with that is its :attr:`Subject.problem`."""
    name = label or path.name
    try:
        if is_json(path):
            return Subject(path=path, label=name, run=read_run(path, name))
        recording = read(path)
        run = run_of(recording, name)
        return Subject(path=path, label=name, script=recording.run.script, run=run)
    except AmpmemError as error:
        if error.exit_code != 1:
            raise
        return Subject(path=path, label=name, problem=str(error))
