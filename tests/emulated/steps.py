"""Whole training steps: PyTorch's own CUDA build without a GPU beside ampmem's simulation, with the same torch.

    python tests/emulated/steps.py [--torch 2.14.1] [--gpu a100-80|h100] [--only PROGRAM[/PRECISION]]... [--details]
                                   [--json FILE] [--write] [--compiled]
    python tests/emulated/steps.py --torch VERSION... --simulate-with VERSION|PYTHON... [...]

Each program of programs.py trains three steps in each precision, on the emulated CUDA runtime and on a
simulated GPU, in processes of their own. The table has the peaks of both and their difference to the byte; --details
says of each difference what is alive at the peak on one side only, by category, op and size. The workspaces of
cuBLAS and cuBLASLt are those that PyTorch asks for on both sides; those of cuDNN are 0 on both, since nobody knows
them without a GPU. --json writes the figures, --write puts a short table into docs/simulation.md and the figures into
reports/.

--real FILE trains on the GPU of this Python's torch instead, and writes what that side came to into FILE (without the
programs of several ranks, which one GPU cannot run). --beside FILE takes the side of the GPU from such a file, in place
of the emulated one: cuDNN's workspaces then are those that it chose.

With --simulate-with the simulation runs with another torch: that of another environment, or that of a Python, such as
the CPU build of torch 2.13. Each simulation is then laid beside each emulated torch. So that versions can be compared,
torch 2.15 keeps cuBLAS's workspaces there as all before did (TORCH_CUBLAS_WORKSPACE_CACHE=1). --write puts these pairs
into a table and a file of their own. With --go-on what a side has come to in FOLDER is not run again.

With --compiled torch.compile compiles the forward of each model, and of each block below FSDP2. The emulated side
trains twice, and the second time counts: by then PyTorch's cache says how its kernels are to be tuned. --write puts
these into docs/compiled.md, beside the rows that are there: --only adds rows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

DOCUMENT = ROOT / "docs/simulation.md"
MARKS = ("<!-- steps: made by tests/emulated/steps.py --write -->", "<!-- steps end -->")
MARKS_OF_PAIRS = ("<!-- pairs: made by tests/emulated/steps.py --simulate-with --write -->", "<!-- pairs end -->")
DOCUMENT_OF_COMPILED = ROOT / "docs/compiled.md"
MARKS_OF_COMPILED = ("<!-- compiled: made by tests/emulated/steps.py --compiled --write -->", "<!-- compiled end -->")
COMPILED = "STEPS_COMPILED"
"""The variable that says that models are compiled."""
FIGURES = ROOT / "reports/steps.json"
FIGURES_OF_COMPILED = ROOT / "reports/steps-compiled.json"
FIGURES_OF_PAIRS = ROOT / "reports/steps-versions.json"
KEPT = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
"""With this torch 2.15 keeps cuBLAS's workspaces, as all before it do."""
_NONE = {"CUDNN_WORKSPACE": "0"}
SETTINGS = {
    "a100-80": {"CC": "80", "SMS": "108", "MEMORY": "80G"} | _NONE,
    "h100": {"CC": "90", "SMS": "132", "MEMORY": "80G"} | _NONE,
}
"""The emulated device that is the simulated one."""
REAL, SIMULATED = "real", "simulated"
IMPORTED_ONCE = (
    "programs",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "ampmem.analysis.analyse",
    "ampmem.recorder.session",
    "ampmem.simulator.communication",
    "ampmem.simulator.start",
)
"""What takes seconds to import, before the children are made that would all do so."""

Alive = tuple[str, str, int]
"""Category, op and requested bytes of an allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What a run came to; bytes. ``alive`` is at the peak of what is allocated; ``error`` ends all else."""

    error: str = ""
    allocated: int = 0
    reserved: int = 0
    categories: Mapping[str, int]
    """Of each category at that peak, with the rounding of blocks."""
    alive: Sequence[tuple[Alive, int]]
    """How many of each."""
    sizes: Sequence[int]
    """Of all allocations, in order."""
    ops: Sequence[str]
    """Which op made each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program in one precision, on both sides."""

    program: str
    precision: str
    real: Side
    simulated: Side

    @property
    def failed(self) -> str:
        """Which side failed and how, else nothing."""
        return "; ".join(f"{name}: {side.error}" for name, side in self._sides() if side.error)

    def _sides(self) -> Iterable[tuple[str, Side]]:
        return (REAL, self.real), (SIMULATED, self.simulated)

    @property
    def allocated(self) -> int:
        """By how many bytes the simulated peak is higher."""
        return self.simulated.allocated - self.real.allocated

    @property
    def reserved(self) -> int:
        """The same of what is reserved."""
        return self.simulated.reserved - self.real.reserved

    @property
    def workspace(self) -> int:
        """What libraries keep at the peak on the emulated device."""
        return self.real.categories.get("workspace", 0)

    @property
    def categories(self) -> dict[str, int]:
        """What differs at the peak, by category."""
        names = sorted({*self.real.categories, *self.simulated.categories})
        differences = {
            name: self.simulated.categories.get(name, 0) - self.real.categories.get(name, 0) for name in names
        }
        return {name: difference for name, difference in differences.items() if difference}

    def only(self) -> tuple[Counter[Alive], Counter[Alive]]:
        """What is alive at the peak on the emulated device alone, and on the simulated one alone."""
        real, simulated = (Counter({tuple(key): count for key, count in side.alive}) for _, side in self._sides())
        return real - simulated, simulated - real

    def made(self) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
        """The allocations that one side alone makes in the whole run, by size, with an op that makes such."""
        counted = [Counter(side.sizes) for _, side in self._sides()]
        named = [dict(zip(side.sizes, side.ops, strict=True)) for _, side in self._sides()]

        def surplus(one: int, other: int) -> Counter[tuple[str, int]]:
            return Counter({(named[one][size], size): count for size, count in (counted[one] - counted[other]).items()})

        return surplus(0, 1), surplus(1, 0)


def cases(only: Sequence[str], programs: Iterable[str], precisions: Iterable[str]) -> list[tuple[str, str]]:
    """Programs and precisions that ``only`` names, such as ``gpt`` or ``gpt/amp``; all where it names none."""
    every = [(program, precision) for program in programs for precision in precisions]
    found = [case for case in every if not only or case[0] in only or "/".join(case) in only]
    if not found:
        sys.exit(f"no program is called {', '.join(only)}")
    return found


# -- in the process of one side ----------------------------------------------------------------------------


def train_side(side: str, gpu: str, wanted: Sequence[tuple[str, str]], folder: Path) -> None:
    """Run each of ``wanted`` in a child of its own, which writes its :class:`Side` to ``folder``."""
    for name in IMPORTED_ONCE:
        import_module(name)

    warm = [None] if side == REAL and COMPILED in os.environ else []  # a first run, for PyTorch's cache
    for (program, precision), _ in product(wanted, [*warm, None]):
        child = os.fork()
        if child == 0:
            path = path_of(folder, (program, precision))
            try:
                with tempfile.TemporaryDirectory() as temporary:
                    found = measured(side, gpu, program, precision, Path(temporary) / "run.ampmem")
            except BaseException as error:
                if os.environ.get("STEPS_TRACEBACKS"):
                    traceback.print_exc()
                first = str(error).strip().splitlines() or [""]
                found = Side(error=f"{type(error).__name__}: {first[0]}", categories={}, alive=[], sizes=[], ops=[])
            path.write_text(json.dumps(asdict(found)), encoding="utf-8")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


def measured(side: str, gpu: str, program: str, precision: str, path: Path) -> Side:
    """Train and record, on a device of this process's own."""
    import programs
    import torch

    from ampmem.recorder.options import Options
    from ampmem.recorder.session import Session
    from ampmem.vocabulary import Device

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the losses
    options = Options(path=path, script=program, stacks=False, baseline=False, device=Device.CUDA)
    if side == SIMULATED:
        from dataclasses import replace

        from ampmem.allocator.gpus import find_gpu
        from ampmem.recorder.sources.simulated import SimulatedSource
        from ampmem.simulator.start import Simulation
        from ampmem.simulator.world import World

        world = World(size=programs.RANKS) if program in programs.DISTRIBUTED else None
        simulation = Simulation(find_gpu(gpu), world=world, cache=path.parent / "compiled")
        session = Session(replace(options, device=Device.SIMULATED), source=SimulatedSource(simulation.device))
    else:
        session = Session(options)
    session.start()
    with programs.compiled(blocks=program == "fsdp2") if COMPILED in os.environ else nullcontext():
        programs.run(program, precision)
    session.close(None)
    session.check()
    return side_of(path, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def side_of(path: Path, allocated: int, reserved: int) -> Side:
    """What the recording says of the peak of what is allocated."""
    import numpy as np

    from ampmem.analysis.analyse import analyse
    from ampmem.analysis.timeline.categories import CATEGORIES
    from ampmem.analysis.timeline.lifetimes import ALIVE
    from ampmem.recording import read

    analysis = analyse(read(path))
    lives, texts = analysis.lifetimes, analysis.recording.texts
    change = np.zeros(len(analysis.timeline.time_ns) + 1, dtype=np.int64)
    change[lives.born + 1] += lives.block_bytes
    freed = lives.died != ALIVE
    np.add.at(change, lives.died[freed] + 1, -lives.block_bytes[freed])
    alive = lives.alive_at(int(np.argmax(np.cumsum(change))))
    names = [str(CATEGORIES[code]) for code in analysis.classes.category.tolist()]
    ops = [texts[op] for op in lives.op.tolist()]
    categories: Counter[str] = Counter()
    counted: Counter[Alive] = Counter()
    for place in np.flatnonzero(alive).tolist():
        categories[names[place]] += int(lives.block_bytes[place])
        counted[names[place], ops[place], int(lives.bytes[place])] += 1
    return Side(
        allocated=allocated,
        reserved=reserved,
        categories=dict(categories),
        alive=sorted(counted.items(), key=lambda item: -item[0][2]),
        sizes=lives.bytes.tolist(),
        ops=ops,
    )


# -- in the process that asks -------------------------------------------------------------------------------


def rows(
    version: str,
    gpu: str,
    wanted: Sequence[tuple[str, str]],
    kept: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[Row]:
    """Train everything on both sides, in the environment that emulation.py made for torch ``version``.

    ``kept`` as for :func:`pairs`; ``variables`` are set for both.
    """
    python = python_of(version)
    with ThreadPoolExecutor(2) as pool:
        real, simulated = pool.map(lambda side: trained(side, python, gpu, wanted, variables, kept), (REAL, SIMULATED))
    return joined(wanted, real, simulated)


def pairs(
    versions: Sequence[str],
    simulating: Sequence[Path],
    gpu: str,
    wanted: Sequence[tuple[str, str]],
    kept: Path | None = None,
) -> dict[tuple[str, str], list[Row]]:
    """By the torch that simulates and the emulated one: every pair, each side of which trains once.

    ``kept`` is a folder that has, or gets, what each side came to.
    """
    sides = [(SIMULATED, python) for python in simulating] + [(REAL, python_of(version)) for version in versions]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda side: trained(side[0], side[1], gpu, wanted, KEPT, kept), sides))
    simulated = dict(zip(map(torch_of, simulating), found[: len(simulating)], strict=True))
    real = dict(zip(versions, found[len(simulating) :], strict=True))
    return {(one, other): joined(wanted, real[other], simulated[one]) for one in simulated for other in real}


def real(path: Path, gpu: str, only: Sequence[str]) -> None:
    """Train everything on the GPU that is here, and write the machine and what each run came to."""
    import programs
    import torch

    seen = torch.cuda.get_device_properties(0)
    wanted = cases(only, [name for name in NAMES if name not in programs.DISTRIBUTED], PRECISIONS)
    sides = trained(REAL, Path(sys.executable), gpu, wanted, emulated=False)
    runs = [[*case, asdict(side)] for case, side in zip(wanted, sides, strict=True)]
    machine = {"gpu": seen.name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    said = json.dumps({"schema": "ampmem.steps-real/1", "machine": machine, "runs": runs})
    path.write_bytes(gzip.compress(said.encode(), mtime=0))
    print(f"{sum(not side.error for side in sides)} of {len(sides)} runs trained on {seen.name}")


def rows_beside(path: Path, version: str, gpu: str, only: Sequence[str]) -> list[Row]:
    """The runs of a file that ``--real`` wrote, and what the simulation says of them with torch ``version``."""
    runs = json.loads(gzip.decompress(path.read_bytes()))["runs"]
    measured = {(program, precision): Side(**side) for program, precision, side in runs}
    wanted = [case for case in cases(only, NAMES, PRECISIONS) if case in measured]
    simulated = trained(SIMULATED, python_of(version), gpu, wanted)
    return joined(wanted, [measured[case] for case in wanted], simulated)


def python_of(version: str) -> Path:
    """The Python of the environment with that torch; a path to a Python is that one."""
    import emulation

    if os.sep in version:
        return Path(version).absolute()
    python = emulation.environment(version) / "bin/python"
    if not python.exists():
        sys.exit(f"{python} is not there; python tests/emulated/emulation.py --torch {version} --install makes it")
    return python


def torch_of(python: Path) -> str:
    """The version of torch that ``python`` has."""
    asked = [str(python), "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return version if version.endswith("+cpu") else version.partition("+")[0]


def trained(
    side: str,
    python: Path,
    gpu: str,
    wanted: Sequence[tuple[str, str]],
    variables: Mapping[str, str] | None = None,
    kept: Path | None = None,
    *,
    emulated: bool = True,
) -> list[Side]:
    """Train everything on one side; what is in ``kept`` is not run again. ``emulated`` is false on a real GPU."""
    import run

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if kept is not None:
            folder = kept / "-".join((side, python.parents[1].name, gpu, *sorted(variables or ())))
            folder.mkdir(parents=True, exist_ok=True)
        left = [case for case in wanted if not path_of(folder, case).exists()]
        command = [str(python), str(HERE / "steps.py"), "--side", side, "--gpu", gpu]
        command += ["--folder", str(folder), "--cases", json.dumps(left)]
        if side == REAL and not emulated:
            environment = run.checkout_first()
        elif side == REAL:
            environment = run.variables(python.parents[1], SETTINGS[gpu])
        else:  # without what run.py has set, where a test of its runs this
            ours = ("EMULATED_", "LD_PRELOAD", "LD_LIBRARY_PATH")
            environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
            environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        if left:
            subprocess.run(command, env=environment | dict(variables or {}), check=False)
        return [loaded(path_of(folder, case)) for case in wanted]


def path_of(folder: Path, case: Sequence[str]) -> Path:
    """The file that a side's process writes."""
    return folder / f"{'-'.join(case).replace(' ', '_')}.json"


def joined(wanted: Sequence[tuple[str, str]], real: Sequence[Side], simulated: Sequence[Side]) -> list[Row]:
    """A row for each case."""
    sides = zip(wanted, real, simulated, strict=True)
    return [
        Row(program=program, precision=precision, real=one, simulated=other)
        for (program, precision), one, other in sides
    ]


def loaded(path: Path) -> Side:
    """A side's file; one that is not there is an error, too."""
    if not path.exists():
        return Side(error="the process ended", categories={}, alive=[], sizes=[], ops=[])
    return Side(**json.loads(path.read_text(encoding="utf-8")))


def table(found: Sequence[Row]) -> list[str]:
    """Markdown, a line for each row."""
    lines = [
        "| program | precision | allocated, emulated | difference | of it | reserved, emulated | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.failed:
            lines.append(f"| {row.program} | {row.precision} | {row.failed} | | | | |")
            continue
        parts = ", ".join(f"{name} {difference:+,}" for name, difference in row.categories.items())
        lines.append(
            f"| {row.program} | {row.precision} | {row.real.allocated:,} | {signed(row.allocated)} | "
            f"{parts if row.allocated or row.categories else ''} | {row.real.reserved:,} | {signed(row.reserved)} |"
        )
    return lines


def signed(difference: int) -> str:
    """Bytes with their sign; of none ``equal``."""
    return f"{difference:+,}" if difference else "equal"


def figures(found: Sequence[Row], version: str, gpu: str) -> dict[str, Any]:
    """The figures of the table, for a file."""
    rows_of = [
        {
            "program": row.program,
            "precision": row.precision,
            "failed": row.failed,
            "allocated": [row.real.allocated, row.simulated.allocated],
            "reserved": [row.real.reserved, row.simulated.reserved],
            "cublas": row.workspace,
            "categories": row.categories,
        }
        for row in found
    ]
    return {"schema": "ampmem.steps/1", "torch": version, "gpu": gpu, "rows": rows_of}


def others(path: Path, wanted: Sequence[tuple[str, str]]) -> list[Row]:
    """The rows of the figures in ``path`` that ran, other than those of ``wanted``."""
    rows_of = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [
        _row_of(row) for row in rows_of if not row["failed"] and (row["program"], row["precision"]) not in set(wanted)
    ]


def _row_of(row: Mapping[str, Any]) -> Row:
    """The row in figures; of categories it knows the workspaces and the differences."""
    workspace = Counter({"workspace": row["cublas"]})
    sides = [
        Side(allocated=allocated, reserved=reserved, categories=categories, alive=[], sizes=[], ops=[])
        for allocated, reserved, categories in zip(
            row["allocated"], row["reserved"], (workspace, workspace + Counter(row["categories"])), strict=True
        )
    ]
    return Row(program=row["program"], precision=row["precision"], real=sides[0], simulated=sides[1])


def short(found: Sequence[Row], version: str, gpu: str) -> str:
    """The table of the documents: a line for each program, a column for each precision."""
    judged = [row for row in found if not row.failed]
    same = sum(not row.allocated for row in judged)
    same_reserved = sum(not row.reserved for row in judged)
    lines = [
        f"On torch {version}, `{gpu}`: what is allocated at the peak is equal to the byte in {same} of {len(found)} "
        f"runs, what is reserved in {same_reserved}.",
        "",
        f"| program | peak in FP32, MiB | {' | '.join(PRECISIONS)} |",
        f"|---|---|{'---|' * len(PRECISIONS)}",
    ]
    for program in dict.fromkeys(row.program for row in found):
        by_precision = {row.precision: row for row in found if row.program == program}
        peak = f"{by_precision['fp32'].real.allocated / (1 << 20):.1f}" if "fp32" in by_precision else ""
        cells = [cell(by_precision[name]) if name in by_precision else "" for name in PRECISIONS]
        lines.append(f"| {program} | {peak} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    """How one run differs."""
    if row.failed:
        return row.failed.partition(":")[0] + " fails"
    parts = []
    if row.allocated:
        parts.append(f"{row.allocated:+,} ({', '.join(row.categories) or 'rounding'})")
    if row.reserved:
        parts.append(f"reserved {row.reserved / (1 << 20):+g} MiB")
    return "; ".join(parts) or "equal"


def written(text: str, made: str, marks: tuple[str, str] = MARKS) -> str:
    """``text`` of the document with the table ``made`` between its marks."""
    before, found, rest = text.partition(marks[0])
    if not found or marks[1] not in rest:
        raise ValueError(f"the document has no {marks[0]}")
    return f"{before}{marks[0]}\n\n{made}\n\n{marks[1]}{rest.partition(marks[1])[2]}"


def table_of_pairs(found: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    """The table of the documents: a line for each program, a column for each pair."""
    columns = list(found)
    lines = [
        f"| program | {' | '.join(f'{one} for {other}' for one, other in columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    counts = []
    for pair in columns:
        runs = found[pair]
        counts.append(f"{sum(not (row.failed or row.allocated) for row in runs)} of {len(runs)}")
    lines.append(f"| all: allocated equal in | {' | '.join(counts)} |")
    for program in dict.fromkeys(row.program for row in next(iter(found.values()))):
        cells = (cell_of_pair([row for row in found[pair] if row.program == program]) for pair in columns)
        lines.append(f"| {program} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell_of_pair(found: Sequence[Row]) -> str:
    """How the precisions of one program differ; precisions that differ alike are named together."""
    by_text: dict[str, list[str]] = {}
    for row in found:
        by_text.setdefault(cell(row), []).append(row.precision)
    if len(by_text) == 1:
        return next(iter(by_text))
    return "<br>".join(f"{', '.join(names)}: {text}" for text, names in by_text.items() if text != "equal")


def details(row: Row) -> Iterable[str]:
    """What each side alone has."""
    yield f"== {row.program} {row.precision}: allocated {row.allocated:+,}, reserved {row.reserved:+,}; {row.failed}"
    for title, pair in (("alive at the peak", row.only()), ("made in the run", row.made())):
        for name, counter in zip((REAL, SIMULATED), pair, strict=True):
            for key, count in sorted(counter.items(), key=lambda item: -item[0][-1] * item[1])[:12]:
                yield f"   {title}, {name} only: {count} x {key[-1]:,} {' '.join(map(str, key[:-1]))}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch", nargs="+", default=["2.14.1"], metavar="VERSION", help="environments of emulation.py"
    )
    parser.add_argument(
        "--simulate-with",
        nargs="+",
        type=python_of,
        metavar="VERSION|PYTHON",
        help="what has the torch that simulates, where that is another one",
    )
    parser.add_argument("--go-on", type=Path, metavar="FOLDER", help="keep what each side came to there")
    parser.add_argument("--gpu", default="a100-80", choices=SETTINGS)
    parser.add_argument("--only", action="append", default=[], metavar="PROGRAM[/PRECISION]")
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the table into docs/simulation.md and reports/")
    parser.add_argument("--compiled", action="store_true", help="compile the models")
    parser.add_argument("--real", type=Path, metavar="FILE", help="train on the GPU that is here, into FILE (gzip)")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="compare with what --real wrote")
    parser.add_argument("--side", choices=(REAL, SIMULATED), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train_side(options.side, options.gpu, json.loads(options.cases), options.folder)
        return
    if options.real:
        real(options.real, options.gpu, options.only)
        return
    wanted = cases(options.only, NAMES, PRECISIONS)
    if options.simulate_with:
        found = pairs(options.torch, options.simulate_with, options.gpu, wanted, options.go_on)
        made, marks, path = table_of_pairs(found), MARKS_OF_PAIRS, FIGURES_OF_PAIRS
        said = document_of_pairs(found, options.gpu)
    elif len(options.torch) > 1:
        parser.error("several versions need --simulate-with")
    else:
        version = options.torch[0]
        every = (
            rows_beside(options.beside, version, options.gpu, options.only)
            if options.beside
            else rows(version, options.gpu, wanted, options.go_on, {COMPILED: "1"} if options.compiled else None)
        )
        found = {(version, version): every}
        marks, path = (MARKS_OF_COMPILED, FIGURES_OF_COMPILED) if options.compiled else (MARKS, FIGURES)
        written_too = [*every, *(others(path, wanted) if options.compiled and options.write else ())]
        written_too.sort(key=lambda row: (NAMES.index(row.program), PRECISIONS.index(row.precision)))
        made = short(written_too, version, options.gpu)
        said = document(figures(written_too, version, options.gpu))
    for (one, other), each in found.items():
        print(
            "\n".join([*([f"simulated with torch {one}, emulated with {other}"] if one != other else []), *table(each)])
        )
        for row in each if options.details else ():
            if row.allocated or row.reserved or row.failed:
                print("\n".join(details(row)))
    if options.json:
        options.json.write_text(said, encoding="utf-8")
    if options.write:
        path.write_text(said, encoding="utf-8")
        page = DOCUMENT_OF_COMPILED if options.compiled else DOCUMENT
        page.write_text(written(page.read_text(encoding="utf-8"), made, marks), encoding="utf-8")


def document(everything: dict[str, Any]) -> str:
    """The figures as JSON, a line for each run."""
    lines = ",\n    ".join(json.dumps(row) for row in everything.pop("rows"))
    return json.dumps(everything, indent=2)[:-2] + f',\n  "rows": [\n    {lines}\n  ]\n}}\n'


def document_of_pairs(found: Mapping[tuple[str, str], Sequence[Row]], gpu: str) -> str:
    """The same of pairs of versions."""
    lines = [
        {"simulated": one, "emulated": other, **row}
        for (one, other), each in found.items()
        for row in figures(each, other, gpu)["rows"]
    ]
    return document({"schema": "ampmem.steps-versions/1", "gpu": gpu, "rows": lines})


NAMES = (
    "gpt",
    "llama",
    "bert",
    "t5",
    "vit",
    "resnet",
    "unet",
    "lstm",
    "gan",
    "lora",
    "fsdp2",
    "ddp",
    "checkpointed",
    "checkpointed gpt",
)
PRECISIONS = ("fp32", "amp", "amp-nocache", "bf16")

if __name__ == "__main__":
    main()
