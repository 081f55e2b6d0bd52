"""Runs the whole test suite under several versions of torch, each in an environment of its own, and prints one table.

An environment is about 5 GB with the CUDA builds that pip installs by default, which run without a GPU, and takes some
minutes to make; a CPU build is under 1 GB. Which builds are found is pip's own business (PIP_EXTRA_INDEX_URL). The
version `nightly` is the newest development version that pip finds. Exit code 1 when anything failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED_BY_TORCH = ("torch", "setuptools")
"""What each version of torch asks for in versions of its own, so not in those of constraints.txt."""
PYTEST = ("-m", "pytest", "-n", "auto", "--dist", "loadfile")
"""As the README has it."""
_RESULT = re.compile(r"^=* ?(?P<counts>\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s\b")
"""The last line that pytest prints, such as ``2 failed, 1157 passed in 458.31s (0:07:38)``."""
_HEADINGS = ("torch", "Python", "passed", "failed", "skipped", "minutes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many tests passed, failed (in a fixture too) and were skipped."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one version; ``None`` where pytest did not come to its last line."""

    torch: str
    python: str
    counts: Counts | None
    exit_code: int
    seconds: float


def counts_of(lines: Sequence[str]) -> Counts | None:
    """The counts in the last line of results among what pytest printed; ``None`` when there is none."""
    for line in reversed(lines):
        if found := _RESULT.match(line.strip()):
            words = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", found["counts"])}
            failed = sum(words.get(word, 0) for word in ("failed", "error", "errors", "xpassed"))
            return Counts(passed=words.get("passed", 0), failed=failed, skipped=words.get("skipped", 0))
    return None


def table(rows: Sequence[Row]) -> str:
    """The rows under their headings, right-aligned but for the first column."""
    cells = [_HEADINGS]
    for row in rows:
        counts = row.counts
        numbers = ("-",) * 3 if counts is None else tuple(map(str, (counts.passed, counts.failed, counts.skipped)))
        cells.append((row.torch, row.python, *numbers, f"{row.seconds / 60:.1f}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(line)
        ).rstrip()
        for line in (list(zip(row, widths, strict=True)) for row in cells)
    )


def constraints(text: str) -> str:
    """The lines of ``constraints.txt`` that hold for every version of torch."""
    return "".join(line for line in text.splitlines(keepends=True) if line.partition("==")[0] not in PINNED_BY_TORCH)


def make(folder: Path, version: str) -> None:
    """An environment with this torch, ampmem and what the tests need; nothing is left of one that fails."""
    wanted = ["--pre", "torch"] if version == "nightly" else [f"torch=={version}"]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        listed = folder / "constraints.txt"
        listed.write_text(constraints((ROOT / "constraints.txt").read_text(encoding="utf-8")), encoding="utf-8")
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", listed, *wanted, f"{ROOT}[test]"]
        subprocess.run(install, check=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def run_tests(python: Path, version: str, select: Sequence[str]) -> Row:
    """Run pytest there, on this checkout, and show what it prints on stderr."""
    asked = "import platform, torch; print(platform.python_version(), torch.__version__)"
    # The checkout goes before the copy that is installed, in processes that tests start too.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    known = subprocess.run([python, "-c", asked], capture_output=True, text=True, env=environment)
    names = known.stdout.split() if known.returncode == 0 else ["-", version]
    started = time.monotonic()
    command = [str(python), *PYTEST, *select]
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            lines.append(line)
            sys.stderr.write(line)
    seconds = time.monotonic() - started
    return Row(torch=names[1], python=names[0], counts=counts_of(lines), exit_code=running.returncode, seconds=seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", metavar="VERSION", nargs="+", help="such as 2.11.0, or nightly")
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="keep environments as DIR/VERSION, and use those there"
    )
    parser.add_argument("--select", metavar="ARGS", nargs=argparse.REMAINDER, default=[], help="the rest is for pytest")
    options = parser.parse_args(arguments)
    rows = []
    for version in options.versions:
        with tempfile.TemporaryDirectory() as temporary:  # one at a time: they are large
            folder = (options.keep or Path(temporary)).absolute() / version
            if not (folder / "bin" / "python").exists():
                print(f"making an environment with torch {version}: up to 5 GB, some minutes", file=sys.stderr)
                make(folder, version)
            print(f"running the tests with torch {version}", file=sys.stderr)
            rows.append(run_tests(folder / "bin" / "python", version, options.select))
    print(table(rows))
    return int(any(row.exit_code for row in rows))


if __name__ == "__main__":
    sys.exit(main())
