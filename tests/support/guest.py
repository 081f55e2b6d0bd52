"""Programs that do what a training script may do, each in ``programs/``: run plain, and under ``ampmem profile``.

Each prints whatever it can see that ampmem could have changed; ``programs/_seen.py`` has what is common to them. The
two runs must end alike: with the same exit code, the same standard output, and the same standard error but for the
lines that ampmem says itself.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.commands import ampmem, python

PROGRAMS = Path(__file__).parents[1] / "integration" / "guest" / "programs"
NAMES = tuple(sorted(path.stem for path in PROGRAMS.glob("[!_]*.py")))
RECORDING = "run.ampmem"
OURS = "ampmem: "
"""What each line begins with that ampmem says."""

WHOLE = (
    *("checkpointed", "compiled", "copied_midway", "copying_loop", "counting_modes", "custom_ops", "defaults"),
    *("distributed", "double_backward", "functional", "hostile_modules", "hostile_objects", "hostile_optimizers"),
    *("hostile_tensors", "inference", "lifetimes", "odd_batches", "overwritten", "own_saved_hooks", "scripted"),
    *("compiled_autograd", "looks_at_its_stack", "strict_warnings", "swaps", "tensor_kinds", "tracers"),
)
"""Programs that are recorded to their end: they do one thing after another."""

OPTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(WHOLE, ("--steps", "1000"))
"""What ``ampmem profile`` is told for a program, where that is more than :data:`ALWAYS`."""

FRESH = frozenset({"goes_deep", "warns_its_caller"})
"""Programs that see how Python itself was started."""

TO_THE_END = frozenset({"exits_at_the_end"})
"""Programs that print something else without ampmem where Python's own end is left out, which takes half a second."""

ALWAYS = ("--run-to-end", "--quiet", "--steps", "2", "-o", RECORDING)
"""Two steps are recorded, then the program goes on alone: what it prints last is seen without ampmem."""

_STARTED = re.compile(r'^[ |]*File "(?:<frozen runpy>".*\n|[^"]*/ready_python\.py".*\n.*\n)', re.MULTILINE)
"""The frames in a traceback that are there because a test runs the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended; ``code`` is negative for the signal that ended it. ``said`` are ampmem's own lines."""

    code: int
    out: str
    err: str
    said: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Both runs of a program, and the recording, which need not be there."""

    plain: Ended
    recorded: Ended
    recording: Path

    def differences(self) -> list[str]:
        """In what the two differ, one line each."""
        pairs = ((what, getattr(self.plain, what), getattr(self.recorded, what)) for what in ("code", "out", "err"))
        return [f"{what}: plain {before!r}, with ampmem {after!r}" for what, before, after in pairs if before != after]


def alone(folder: Path, name: str, *arguments: str, fresh: bool = False) -> Ended:
    """How ``programs/NAME.py`` ends without ampmem, in the new ``folder``."""
    folder.mkdir(parents=True)
    script = str(PROGRAMS / f"{name}.py")
    done = python(folder, script, *arguments, fresh=fresh or name in FRESH, to_the_end=name in TO_THE_END)
    return Ended(code=done.returncode, out=_STARTED.sub("", done.stdout), err=_STARTED.sub("", done.stderr))


def beside(
    folder: Path,
    name: str,
    *options: str,
    arguments: tuple[str, ...] = (),
    fresh: bool = False,
    to_the_end: bool = False,
    plain: Ended | None = None,
) -> Beside:
    """``programs/NAME.py``, run in two new folders below ``folder``; ``options`` come after those it always has.

    ``fresh`` where it matters how Python itself starts, which takes seconds longer; ``to_the_end`` where ampmem could
    have left something that Python's own end meets. ``plain`` is how it ended without ampmem, where that is known.
    """
    script = str(PROGRAMS / f"{name}.py")
    fresh = fresh or name in FRESH
    profiled = folder / "recorded"
    profiled.mkdir(parents=True)
    plain = plain or alone(folder / "plain", name, *arguments, fresh=fresh)
    ours = (*ALWAYS, *OPTIONS.get(name, ()), *options)
    to_the_end = to_the_end or name in TO_THE_END
    recorded = ampmem(profiled, "profile", *ours, script, *arguments, fresh=fresh, to_the_end=to_the_end)
    return Beside(plain=plain, recorded=without_ours(recorded), recording=profiled / RECORDING)


def without_ours(done: subprocess.CompletedProcess[str]) -> Ended:
    """``done``, with ampmem's lines apart."""
    lines = done.stderr.splitlines(keepends=True)
    said = tuple(line.rstrip("\n") for line in lines if line.startswith(OURS))
    err = "".join(line for line in lines if not line.startswith(OURS))
    return Ended(code=done.returncode, out=_STARTED.sub("", done.stdout), err=_STARTED.sub("", err), said=said)
