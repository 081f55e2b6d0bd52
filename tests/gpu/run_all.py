"""Run all that needs a GPU, and leave figures and small recordings in a folder.

    python tests/gpu/run_all.py FOLDER [--quick]

FOLDER gets ``environment.txt``, ``tests.txt``, ``overhead.txt``, ``compare.txt``, the three recordings that
``ampmem compare`` makes of the tiny GPT, and ``oom.ampmem``. Exits with 1 when a part fails; the others run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = """
import platform, torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_properties(0))
print("allocator", torch.cuda.memory.get_allocator_backend())
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


def run(folder: Path, name: str, *command: str, expected: tuple[int, ...] = (0,)) -> bool:
    """Run ``command`` of this Python, with what it prints in the file ``name``; whether it ended as expected."""
    print(f"{name}: {' '.join(command)}", flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with (folder / name).open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    print("\n".join((folder / name).read_text(encoding="utf-8").splitlines()[-15:]), flush=True)
    return done.returncode in expected


def main() -> None:
    """Everything, one after the other."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, quick = Path(sys.argv[1]).absolute(), "--quick" in sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "oom.py"
    script.write_text(OUT_OF_MEMORY, encoding="utf-8")
    overhead = ["--rounds", "2", "--steps", "5", "--preset", "small"] if quick else []
    gpt = ("-m", "ampmem.workloads.gpt", "--preset", "tiny")
    worked = [
        run(folder, "environment.txt", "-c", ENVIRONMENT),
        run(folder, "tests.txt", "-m", "pytest", "-q", "tests/gpu"),
        run(
            folder,
            "compare.txt",
            *("-m", "ampmem", "compare", "--force", "--device", "cuda", "-o", str(folder / "gpt"), *gpt),
        ),
        run(
            folder,
            "oom.txt",
            *("-m", "ampmem", "profile", "--force", "--device", "cuda", "--steps", "99"),
            *("-o", str(folder / "oom.ampmem"), str(script)),
            expected=(1,),
        ),
        run(folder, "overhead.txt", "tests/benchmarks/gpu_overhead.py", *overhead),
    ]
    for leftover in ("oom.py", "oom.txt"):
        (folder / leftover).unlink()
    sys.exit(0 if all(worked) else 1)


if __name__ == "__main__":
    main()
