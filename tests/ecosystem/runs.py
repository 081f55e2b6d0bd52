"""Runs a program under ``ampmem profile --device sim``, in each precision, and judges what came of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import ASSUMES, FAILS, PRECISIONS, STATIC, STOPS, WORKS, Program

import ampmem
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
STEPS = 2
PATIENCE_S = 600
SIMULATED, CPU = "sim", "cpu"
DEVICES = {SIMULATED: ("--device", "sim", "--gpu", "h100"), CPU: ("--device", "cpu")}
"""ampmem's options for each."""
OWN = "own"
"""The run in which the library itself trains in a low precision."""

ALWAYS = (
    "simulated: no GPU was used",
    "attention ran with the ",
    "not modelled: ",
    "assumed: cuDNN's workspaces in attention are those of cuDNN",
    "the script does not use autocast: ampmem ran each outermost forward and its loss under autocast",
    "a number that the script read from the device was taken as 1.0",  # a loss, or a norm
)
"""How the notes begin that a program which just works may have."""
CONTEXT = " of the device is used outside of the allocator"
"""In one that every run has, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one recorded run left: what ampmem said, its notes, the step's last marks, and the program's own sums."""

    precision: str
    exit_code: int
    said: str
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    steps: int = 0
    residual: int = 0
    peak: int = 0
    workspace: int = 0
    """Of the peak: cuBLAS's and cuDNN's."""
    activations: int = 0
    """At the end of the last step's forward."""
    measured: dict[str, int] | None = None
    sums: dict[str, int] | None = None

    @property
    def taken(self) -> list[str]:
        """The notes that say what was taken for granted, or is doubtful."""
        asked = (note for note in self.notes if "--assume" in note)
        return [*asked, *(note for note in self.notes if not note.startswith(ALWAYS) and CONTEXT not in note)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a program in all precisions; ``found`` is the table's word for it."""

    program: Program
    runs: tuple[Recorded, ...]
    found: str
    problems: tuple[str, ...]

    @property
    def as_expected(self) -> bool:
        return self.found == self.program.expected and not self.problems


def outcome(
    program: Program, folder: Path, only: Collection[str] = (*PRECISIONS, OWN), *, python: str = sys.executable
) -> Outcome:
    """Record ``program`` in each precision, of those in ``only``, and judge it; recordings are left in ``folder``.

    ``python`` is the interpreter that runs it.
    """
    precisions = [*program.precisions, *([OWN] if program.own is not None else [])]
    runs = tuple(record(program, precision, folder, python=python) for precision in precisions if precision in only)
    if program.stops:
        problems = [
            f"{run.precision}: it did not stop so: {program.stops}" for run in runs if not stopped(program, run)
        ]
        return Outcome(program=program, runs=runs, found=FAILS if problems else STOPS, problems=tuple(problems))
    found = ((run, problem) for run in runs for problem in (*judge(program, run), *unexpected(program, run)))
    problems = [f"{run.precision}: {problem}" for run, problem in found]
    missing = [part for part in program.assumes if not any(part in note for run in runs for note in run.taken)]
    problems += [f"nothing says so: {part}" for part in missing]
    works = ASSUMES if any(run.taken for run in runs) else WORKS
    failed = any(run.exit_code or run.steps != STEPS for run in runs)
    return Outcome(program=program, runs=runs, found=FAILS if failed else works, problems=tuple(problems))


def record(
    program: Program, precision: str, folder: Path, *, device: str = SIMULATED, python: str = sys.executable
) -> Recorded:
    """One run in a process of its own."""
    file = folder / f"{precision}.{device}.ampmem"
    command = [python, "-m", "ampmem", "profile", *arguments(program, precision, file, device)]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Recorded(precision=precision, exit_code=1, said=f"it was ended after {PATIENCE_S} s")
    if done.returncode or not file.exists():
        return Recorded(precision=precision, exit_code=done.returncode or 1, said=done.stderr)
    return read(file, precision, said=done.stderr, stdout=done.stdout)


def arguments(program: Program, precision: str, file: Path, device: str) -> list[str]:
    """What ``ampmem profile`` is told, the script and its arguments last."""
    forced = "as-is" if precision == OWN else precision
    own = program.own if precision == OWN else None
    options = [*DEVICES[device], "--precision", forced, "--steps", str(STEPS), "-o", str(file)]
    options += program.options.split() if device == SIMULATED else []
    script = [str(PROGRAMS / program.file), *program.arguments.split(), *(own or "").split()]
    return [*options, *script, *(("--device", "cpu") if device == CPU else ())]


def read(file: Path, precision: str, *, said: str, stdout: str) -> Recorded:
    """What the recording and the program's output say."""
    recording = ampmem.load(file)
    summary = summarize(recording)
    marks = summary.steps[-1].marks
    casts = summary.casts.steps[-1].phases.get("forward")
    measured = {category.value: size for category, size in (marks.after_backward or {}).items()}
    return Recorded(
        precision=precision,
        exit_code=0,
        said=said,
        notes=recording.notes,
        findings=tuple(finding.code for finding in summary.findings),
        steps=len(summary.steps),
        residual=summary.conservation.residual_bytes,
        peak=summary.peak.bytes,
        workspace=summary.peak.categories.get(Category.WORKSPACE, 0),
        activations=(marks.after_forward or {}).get(Category.ACTIVATIONS, 0),
        measured={name: measured[name] for name in STATIC if name in measured}
        | {"cast_copies": casts.bytes if casts is not None else 0},
        sums=sums(stdout),
    )


def sums(stdout: str) -> dict[str, int] | None:
    """The last that ``programs/sums.py`` printed."""
    lines = [line.removeprefix("sums ") for line in stdout.splitlines() if line.startswith("sums ")]
    found: Any = json.loads(lines[-1]) if lines else None
    return found if found is None else {str(name): int(number) for name, number in found.items()}


def stopped(program: Program, run: Recorded) -> bool:
    """Whether it was ended as it is expected, with the line of the script."""
    return (
        run.exit_code != 0 and program.stops in run.said and re.search(rf"{program.file}\W.*\d", run.said) is not None
    )


def judge(program: Program, run: Recorded, equal: Collection[str] | None = None) -> list[str]:
    """What is not as it should be of a run that is to work; ``equal`` instead of the program's."""
    if run.exit_code:
        return [f"exit code {run.exit_code}: {last_line(run.said)}"]
    problems = []
    if run.steps != STEPS:
        problems.append(f"{run.steps} steps, not {STEPS}")
    if run.residual:
        problems.append(f"a residual of {run.residual} B")
    if "no-autocast-effect" in run.findings:
        problems.append("nothing ran in low precision")
    if run.sums is None or run.measured is None:
        return [*problems, "it printed no sums"]
    for name in program.equal if equal is None else equal:
        if run.measured[name] != run.sums[name]:
            problems.append(f"{name}: {run.measured[name]:,} B, the tensors have {run.sums[name]:,} B")
    return problems


def unexpected(program: Program, run: Recorded) -> list[str]:
    """The notes of a run on the simulated GPU that are not expected."""
    return [f"said, and not expected: {note}" for note in run.taken if not any(p in note for p in program.assumes)]


def last_line(said: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(said.splitlines()) if line.strip()), "nothing said")
