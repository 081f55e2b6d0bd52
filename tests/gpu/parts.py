"""The parts that ``run_all.py`` runs: what each starts, in how many seconds, and what it leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from children import HERE

ENVIRONMENT = """
import importlib, platform, torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
print("cudnn", torch.backends.cudnn.version())
needed, useful = ("pytest", "click", "tabulate", "numpy", "jinja2"), ("pynvml", "triton", "torchvision", "transformers")
for name in (*needed, *useful):
    try:
        print(name, getattr(importlib.import_module(name), "__version__", "is there"))
    except Exception as error:
        print(name, "is not there:", error)
import ampmem
print("ampmem", ampmem.__version__)
print(torch.cuda.get_device_properties(0))
print("allocator", torch.cuda.memory.get_allocator_backend())
print("free and total", *torch.cuda.mem_get_info(0))
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
PRECISIONS = ("fp32", "amp", "amp-nocache")
EMULATED = HERE.parent / "emulated"
SETS = ("large", "optimizers", "recurrent", "op_db")
"""The cases of ``tests/emulated/ops.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``command`` is what Python is given; ``{seconds}`` in it becomes the seconds that are left.

    ``tests`` says that it is pytest, which is started again for what is left when it dies; ``rows`` that it writes its
    own rows. Others pass by ending with ``code`` and having left ``leaves``. ``variables`` are its environment's.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    code: int = 0
    tests: bool = False
    rows: bool = False
    leaves: tuple[Path, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def parts(folder: Path, work: Path, *, device: str = "cuda", quick: bool = False) -> dict[str, Part]:
    """All of them, in order. Tables go to ``folder``, everything else to ``work``."""
    script = work / "oom.py"
    script.write_text(OUT_OF_MEMORY, encoding="utf-8")
    on = ("--device", device, *(("--gpu", "h200") if device == "sim" else ()))
    recordings = tuple(work / f"gpt.{precision}.ampmem" for precision in PRECISIONS)
    oom, compared, died = work / "oom.ampmem", work / "gpt.html", work / "oom.html"
    small = ("--rounds", "2", "--only", "gpu/gpt-amp/", "--only", "gpu/gpt2/3") if quick else ("--rounds", "3")
    every = [
        Part(name="environment", command=("-c", ENVIRONMENT), seconds=60),
        _tests("laws", HERE / "test_laws.py", 300),
        _tests("processes", HERE / "test_processes.py", 240),
        _tests("recorder", EMULATED / "test_recorder.py", 400, {"AMPMEM_RECORDER_ON_GPU": "1"}),
        Part(
            name="compare",
            command=(
                *("-m", "ampmem", "compare", "--force", *on, "-o", str(work / "gpt")),
                *("-m", "ampmem.workloads.gpt", "--preset", "tiny", "--device", "cuda"),
            ),
            seconds=150,
            leaves=recordings,
        ),
        Part(
            name="oom",
            command=("-m", "ampmem", "profile", "--force", *on, "--steps", "99", "-o", str(oom), str(script)),
            seconds=90,
            code=1,
            leaves=(oom,),
        ),
        Part(
            name="pages",
            command=("-c", PAGES, str(compared), *map(str, recordings), "--", str(died), str(oom)),
            seconds=90,
            leaves=(compared, died),
        ),
        Part(name="overhead", command=("tests/benchmarks/overhead.py", "--gpu", *small), seconds=400),
        _own("probes", 400, ("--device", device)),
        _own("truth", 565, ("--device", device, "--out", str(folder / "truth"))),
        _own("workspaces", 565, ("--device", device, "--out", str(folder / "workspaces.json"), "--quiet")),
        _measured("steps", work / "steps.json.gz", ("steps.py", "--gpu", "h100")),
        *(_measured(f"ops-{name}", work / f"ops-{name}.json.gz", ("ops.py", "--set", name)) for name in SETS),
    ]
    return {part.name: part for part in every}


PAGES = """
import sys
from subprocess import run
arguments, failed = sys.argv[1:], 0
while arguments:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    page, *files = arguments[:end]
    arguments = arguments[end + 1:]
    failed |= run([sys.executable, "-m", "ampmem", "report", *files, "-o", page, "--force"]).returncode
sys.exit(bool(failed))
"""


def _tests(name: str, file: Path, seconds: float, variables: Mapping[str, str] | None = None) -> Part:
    """A file of tests; a test may take two minutes, since some compile or start three processes."""
    command = ("-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "one_by_one")
    command += ("--seconds-per-test", "120")
    more = variables or {}
    return Part(name=name, command=(*command, str(file)), seconds=seconds, tests=True, rows=True, variables=more)


def _measured(name: str, file: Path, command: tuple[str, ...]) -> Part:
    """A script of ``tests/emulated`` that measures on the GPU what the emulation and the simulation are to say."""
    script, *options = command
    asked = (str(EMULATED / script), *options, "--real", str(file))
    return Part(name=name, command=asked, seconds=400, leaves=(file,))


def _own(name: str, seconds: float, more: tuple[str, ...]) -> Part:
    """A script of this folder that writes rows of its own, and ends by itself when its seconds are over."""
    command = (str(HERE / f"{name}.py"), "--seconds", "{seconds}", *more)
    return Part(name=name, command=command, seconds=seconds, rows=True)
