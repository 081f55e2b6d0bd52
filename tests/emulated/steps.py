"""Whole training steps: PyTorch's own CUDA build without a GPU beside ampmem's simulation, with the same torch.

    python tests/emulated/steps.py [--torch 2.14.1] [--gpu a100-80|h100] [--only PROGRAM[/PRECISION]]... [--details]
                                   [--json FILE] [--write]

Each program of programs.py trains three steps in each precision, on the emulated CUDA runtime and on a
simulated GPU, in processes of their own. The table has the peaks of both and their difference to the byte; --details
says of each difference what is alive at the peak on one side only, by category, op and size. The workspaces of
cuBLAS and cuBLASLt are those that PyTorch asks for on both sides; those of cuDNN are 0 on both, since nobody knows
them without a GPU. --json writes the figures, --write puts a short table into docs/simulation.md and the figures into
reports/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

DOCUMENT = ROOT / "docs/simulation.md"
MARKS = ("<!-- steps: made by tests/emulated/steps.py --write -->", "<!-- steps end -->")
FIGURES = ROOT / "reports/steps.json"
_NONE = {"CUDNN_WORKSPACE": "0", "CUDNN_DROPOUT": "0"}
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

    for place, (program, precision) in enumerate(wanted):
        child = os.fork()
        if child == 0:
            try:
                found = measured(side, gpu, program, precision, folder / f"{side}-{place}.ampmem")
            except BaseException as error:
                if os.environ.get("STEPS_TRACEBACKS"):
                    traceback.print_exc()
                first = str(error).strip().splitlines() or [""]
                found = Side(error=f"{type(error).__name__}: {first[0]}", categories={}, alive=[], sizes=[], ops=[])
            (folder / f"{side}-{place}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
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
        simulation = Simulation(find_gpu(gpu), world=world)
        session = Session(replace(options, device=Device.SIMULATED), source=SimulatedSource(simulation.device))
    else:
        session = Session(options)
    session.start()
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


def rows(version: str, gpu: str, wanted: Sequence[tuple[str, str]]) -> list[Row]:
    """Train everything on both sides, in the environment that emulation.py made for torch ``version``."""
    import emulation
    import run

    where = emulation.environment(version)
    if not (where / "bin/python").exists():
        sys.exit(f"{where} is not there; python tests/emulated/emulation.py --torch {version} --install makes it")
    with tempfile.TemporaryDirectory() as temporary:
        started = []
        for side in (REAL, SIMULATED):
            command = [str(where / "bin/python"), str(HERE / "steps.py"), "--side", side, "--gpu", gpu]
            command += ["--folder", temporary, "--cases", json.dumps(wanted)]
            environment = run.variables(where, SETTINGS[gpu])
            if side == SIMULATED:
                del environment["LD_PRELOAD"]
                environment["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
                environment |= {"CUDA_VISIBLE_DEVICES": ""}
            started.append(subprocess.Popen(command, env=environment))
        for each in started:
            each.wait()
        found = []
        for place, (program, precision) in enumerate(wanted):
            real, simulated = (loaded(Path(temporary) / f"{side}-{place}.json") for side in (REAL, SIMULATED))
            found.append(Row(program=program, precision=precision, real=real, simulated=simulated))
        return found


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


def written(text: str, made: str) -> str:
    """``text`` of the document with the table ``made`` between its marks."""
    before, found, rest = text.partition(MARKS[0])
    if not found or MARKS[1] not in rest:
        raise ValueError(f"{DOCUMENT} has no {MARKS[0]}")
    return f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


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
    parser.add_argument("--torch", default="2.14.1", metavar="VERSION", help="which environment of emulation.py")
    parser.add_argument("--gpu", default="a100-80", choices=SETTINGS)
    parser.add_argument("--only", action="append", default=[], metavar="PROGRAM[/PRECISION]")
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the table into docs/simulation.md and reports/")
    parser.add_argument("--side", choices=(REAL, SIMULATED), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train_side(options.side, options.gpu, json.loads(options.cases), options.folder)
        return
    found = rows(options.torch, options.gpu, cases(options.only, NAMES, PRECISIONS))
    print("\n".join(table(found)))
    if options.details:
        for row in found:
            if row.allocated or row.reserved or row.failed:
                print("\n".join(details(row)))
    if options.json:
        options.json.write_text(document(found, options) + "\n", encoding="utf-8")
    if options.write:
        FIGURES.write_text(document(found, options) + "\n", encoding="utf-8")
        made = short(found, options.torch, options.gpu)
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), made), encoding="utf-8")


def document(found: Sequence[Row], options: argparse.Namespace) -> str:
    """The figures as JSON, a line for each run."""
    everything = figures(found, options.torch, options.gpu)
    lines = ",\n    ".join(json.dumps(row) for row in everything.pop("rows"))
    return json.dumps(everything, indent=2)[:-2] + f',\n  "rows": [\n    {lines}\n  ]\n}}'


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
