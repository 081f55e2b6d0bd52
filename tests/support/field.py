"""Programs as they are found in the field, each in ``programs/``, run by ``ampmem profile`` as they are.

Each counts for itself what ampmem is to find, over its tensors, and prints that as one line of JSON, its last.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.command_line import ampmem_here
from support.commands import ampmem, python

PROGRAMS = Path(__file__).parents[1] / "integration" / "field" / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What ``ampmem profile`` made of a program: the summary, what the program counted itself, and what was said."""

    exit_code: int
    summary: dict[str, Any]
    counted: Any
    said: str

    @property
    def last(self) -> dict[str, Any]:
        """The marks of the last step."""
        marks: dict[str, Any] = self.summary["steps"][-1]["marks"]
        return marks


def record(
    folder: Path, name: str, *options: str, arguments: tuple[str, ...] = (), how: tuple[str, ...] = ("--run-to-end",)
) -> Ran:
    """``programs/NAME.py`` with ``arguments``, recorded with the ``options`` of ``ampmem profile``.

    It is run to its end, and the exit code is its own; with ``how`` empty ampmem's.
    """
    options = (*how, *options)
    done = ampmem(folder, "profile", "-o", "run.ampmem", *options, str(PROGRAMS / f"{name}.py"), *arguments)
    code, shown, _ = ampmem_here(folder, "show", "--json", "run.ampmem")
    summary = json.loads(shown) if code == 0 else {}
    return Ran(exit_code=done.returncode, summary=summary, counted=_last_line(done.stdout), said=done.stderr)


def plain(folder: Path, name: str, *arguments: str) -> Any:
    """What ``programs/NAME.py`` counts without ampmem."""
    return _last_line(python(folder, str(PROGRAMS / f"{name}.py"), *arguments).stdout)


def _last_line(output: str) -> Any:
    lines = output.splitlines()
    return json.loads(lines[-1]) if lines else None
