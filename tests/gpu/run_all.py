"""Run all that needs a GPU, or some parts of it, and leave figures and small recordings in a folder.

    python tests/gpu/run_all.py FOLDER [PART ...] [--quick]

The parts are environment, laws, processes, compare, oom and overhead. Each leaves a text file of its name in FOLDER;
``compare`` also the three recordings of the tiny GPT, and ``oom`` one of a run that died. ``summary.txt``, which is
printed at the end, has a line per part. A part that fails or takes too long ends none of the others, and all together
take less than ten minutes. Exits with 1 when one did not end as it should.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUDGET = 570
"""Seconds for all parts of one call."""

ENVIRONMENT = """
import importlib, platform, torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_properties(0))
print("allocator", torch.cuda.memory.get_allocator_backend())
for name in ("pytest", "click", "tabulate", "numpy", "jinja2", "plotly", "pynvml", "triton"):
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "is there"))
    except ImportError:
        print(name, "is not there")
import ampmem
print("ampmem", ampmem.__version__)
"""
OUT_OF_MEMORY = """
import torch
torch.cuda.set_per_process_memory_fraction(0.02)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for power in range(6, 40, 2):
    model(torch.randn(2**power, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
"""


class Part(NamedTuple):
    """What a part runs, in how many seconds at most, and the exit code it ends with."""

    command: tuple[str, ...]
    seconds: int
    code: int = 0


def parts(folder: Path, *, quick: bool) -> dict[str, Part]:
    """All of them, in order."""
    pytest = ("-m", "pytest", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider")
    gpt = ("-m", "ampmem.workloads.gpt", "--preset", "tiny")
    compare = ("-m", "ampmem", "compare", "--force", "--device", "cuda", "-o", str(folder / "gpt"))
    profile = ("-m", "ampmem", "profile", "--force", "--device", "cuda", "--steps", "99")
    few = ("--rounds", "2", "--steps", "5", "--preset", "small") if quick else ("--rounds", "3", "--steps", "20")
    return {
        "environment": Part(("-c", ENVIRONMENT), 60),
        "laws": Part((*pytest, "tests/gpu/test_laws.py"), 300),
        "processes": Part((*pytest, "tests/gpu/test_processes.py"), 300),
        "compare": Part((*compare, *gpt), 150),
        "oom": Part((*profile, "-o", str(folder / "oom.ampmem"), str(folder / "oom.py")), 90, code=1),
        "overhead": Part(("tests/benchmarks/gpu_overhead.py", *few), 400),
    }


def run(part: Part, output: Path, seconds: float) -> str:
    """Run it with what it prints in ``output``; how it ended, in a word or two."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with output.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it has started ends with it
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return "timed out"
    return "ok" if code == part.code else f"exit code {code}"


def last_lines(output: Path, count: int) -> list[str]:
    """The end of what a part printed."""
    return output.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


def run_parts(chosen: dict[str, Part], folder: Path, say: Callable[[str], None]) -> list[list[str]]:
    """Each part's name, how it ended, how long it took, and the last line that it printed."""
    ends = monotonic() + BUDGET
    rows = []
    for name, part in chosen.items():
        output = folder / f"{name}.txt"
        began = monotonic()
        if ends <= began:
            rows.append([name, "no time left", "", ""])
            continue
        how = run(part, output, min(part.seconds, ends - began))
        rows.append([name, how, f"{monotonic() - began:.0f} s", *(last_lines(output, 1) or [""])])
        say("\n".join([f"== {name}: {how}", *last_lines(output, 12)]))
    return rows


def main() -> None:
    """The parts that were asked for, one after the other."""
    arguments = [each for each in sys.argv[1:] if each != "--quick"]
    if not arguments:
        sys.exit(__doc__)
    folder = Path(arguments[0]).absolute()
    known = parts(folder, quick="--quick" in sys.argv)
    strangers = [each for each in arguments[1:] if each not in known]
    if strangers:
        sys.exit(f"there is no part {strangers[0]!r}; there are {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "oom.py"
    script.write_text(OUT_OF_MEMORY, encoding="utf-8")
    chosen = {name: part for name, part in known.items() if name in (arguments[1:] or known)}
    rows = run_parts(chosen, folder, lambda text: print(text, flush=True))
    script.unlink()
    summary = "\n".join(f"{name:<12} {how:<14} {took:>6}  {line[:100]}" for name, how, took, line in rows)
    (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    print(f"== summary, in {folder}\n{summary}")
    sys.exit(0 if all(how == "ok" for _, how, _, _ in rows) else 1)


if __name__ == "__main__":
    main()
