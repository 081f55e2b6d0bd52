"""CPU time and memory of simulated runs, each in a process of its own, start of Python included.

    python tests/benchmarks/simulated.py [gpt-124m] [decoder-7b] [fsdp-70b]

Exits with 1 when a bar is broken: 8 s and 1 GiB for GPT with 124 M parameters, 30 s and 2 GiB for a decoder of 7 B,
60 s and 4 GiB for one rank of 64 that train 70 B with FSDP2.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

GIB = 1 << 30
LLAMA = Path(__file__).parent / "llama_70b.py"
DECODER = """
from ampmem.workloads import gpt
gpt.PRESETS["full"] = gpt.Sizes(vocabulary=50257, length=2048, layers=32, heads=32, width=4096, batch_size=1)
gpt.main(["--preset", "full", "--device", "cuda", "--precision", "amp"])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run, on which GPU, as one rank of how many, and the bars: CPU time in seconds, resident bytes."""

    gpu: str
    script: tuple[str, ...]
    seconds: float
    memory: int
    ranks: int = 0


CASES = {
    "gpt-124m": Case(
        gpu="a100-80",
        script=("-m", "ampmem.workloads.gpt", "--preset", "full", "--tied", "--device", "cuda"),
        seconds=8,
        memory=GIB,
    ),
    "decoder-7b": Case(gpu="h200", script=("decoder.py",), seconds=30, memory=2 * GIB),
    "fsdp-70b": Case(gpu="h100", script=(str(LLAMA),), seconds=60, memory=4 * GIB, ranks=64),
}


def measure(case: Case, folder: Path) -> tuple[float, int]:
    """Seconds of CPU time and peak resident bytes of recording two steps."""
    (folder / "decoder.py").write_text(DECODER, encoding="utf-8")
    command = [sys.executable, "-m", "ampmem", "profile", "--device", "sim", "--gpu", case.gpu, "--steps", "2"]
    command += ["--world-size", str(case.ranks)] if case.ranks else []
    command += ["--quiet", "-o", "run.ampmem", "--force", *case.script]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    """The command line."""
    rows, broken = [], False
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        with TemporaryDirectory() as folder:
            seconds, memory = measure(case, Path(folder))
        broken |= seconds > case.seconds or memory > case.memory
        rows.append((name, seconds, case.seconds, memory / GIB, case.memory / GIB))
    print(tabulate(rows, ("run", "CPU s", "at most", "GiB", "at most"), floatfmt=".2f"))
    sys.exit(broken)


if __name__ == "__main__":
    main()
