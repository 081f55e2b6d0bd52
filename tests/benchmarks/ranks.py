"""How long the merged view of 64 ranks takes, each with the recording of a small GPT.

Run it: ``python tests/benchmarks/ranks.py [RECORDING]``. It fails above 10 seconds. Without a recording it makes one,
of three steps of ``ampmem.workloads.gpt``. All ranks get that one, under their own numbers.
"""

import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from ampmem.recording import rank_file, read

RANKS = 64
SECONDS = 10.0
ROOT = Path(__file__).resolve().parents[2]


def record(path: Path) -> None:
    """Three steps of a small GPT."""
    command = [sys.executable, "-m", "ampmem", "profile", "--quiet", "-o", str(path), "-m", "ampmem.workloads.gpt"]
    subprocess.run(command, check=True, env=_environment(), stdout=subprocess.DEVNULL)


def spread(source: Path, folder: Path) -> list[Path]:
    """``source`` as every rank's recording."""
    paths = []
    for rank in range(RANKS):
        path = rank_file(folder / "train.ampmem", rank, RANKS)
        shutil.copyfile(source, path)
        with closing(sqlite3.connect(path)) as database, database:
            (text,) = database.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()
            run = json.dumps({**json.loads(text), "rank": rank, "world_size": RANKS})
            database.execute("UPDATE meta SET value = ? WHERE key = 'run'", (run,))
        paths.append(path)
    return paths


def measure(paths: list[Path]) -> float:
    """Show them once, as a user does, and print the figures."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "ampmem", "show", *map(str, paths)]
    said = subprocess.run(command, check=True, env=_environment(), capture_output=True, text=True).stdout
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not said.startswith(f"All {RANKS} ranks need the same"):
        raise AssertionError(f"equal ranks are not said to be equal: {said[:200]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{RANKS} ranks of {len(read(paths[0]).events):,} events: {seconds:.1f} s, {cpu:.1f} s of CPU time", end="")
    print(f" on {len(os.sched_getaffinity(0))} processors, {after.ru_maxrss >> 10} MiB in the largest process")
    return seconds


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def main() -> None:
    """Make the recordings, and measure."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(name) / "one.ampmem"
        if len(sys.argv) == 1:
            record(source)
        sys.exit(0 if measure(spread(source, Path(name))) < SECONDS else 1)


if __name__ == "__main__":
    main()
