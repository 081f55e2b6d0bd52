"""Lays what PyTorch's CUDA ops allocate on the emulated runtime beside what a simulated device says, case by case.

    python tests/emulated/ops.py [--set large] [--only PATTERN] [--torch 2.14.1] [--gpu a100-80]

Both sides run in the environment that emulation.py made, each in a process of its own, unless --simulate-with names
another Python for the simulated one. Of each phase of a case (forward and backward, or the steps of an optimizer) three
things are compared: the bytes that are kept at its end, the peak of the requested bytes within it, and the sizes of the
allocations in their order. The workspaces of cuBLAS are taken out: :data:`WORKSPACE` gives them a size that nothing
else has. Those of cuDNN are 0 on both sides. --all prints the phases that agree too, --json FILE writes everything
down.

--real FILE measures the cases on the GPU of this Python's torch instead, and writes FILE; nothing is emulated or
simulated then. --beside FILE lays such a file beside both sides: first what the emulated runtime says differently
from the GPU, then what the simulation does. Give the GPU's --torch and --gpu with it.

known_differences.json has what is known to differ, by set. --check compares with it, and fails where a difference is
new or gone; --write puts what differs now in its place, and its table into docs/simulation.md.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KNOWN = HERE / "known_differences.json"
PAGE = ROOT / "docs/simulation.md"
BEGIN, END = "<!-- begin of tests/emulated/ops.py -->", "<!-- end of tests/emulated/ops.py -->"
SETS = {"large": "op_cases", "op_db": "op_db_cases", "optimizers": "optimizer_cases", "recurrent": "recurrent_cases"}
"""The module that has the cases of a set, as ``cases()``."""
EMULATED_SETS = ("large", "recurrent", "op_db", "optimizers")
"""The sets that the emulated runtime can judge."""
SMALL = 2
"""From which factor on the page has a phase of the samples of ``op_db``, which are of a few elements."""
GPU = "a100-80"
WORKSPACE = 7919 << 10
"""Bytes of each workspace of cuBLAS on all sides."""
WORKSPACE_SETTING = f":{WORKSPACE >> 10}:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``run`` prepares, yields the name of the phase that begins, and goes on; a phase without a name is not compared.

    What a phase makes lives as long as the variables of ``run`` hold it. ``precision`` says in which types it computes.
    """

    name: str
    precision: str
    run: Callable[[], Iterator[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Bytes of the allocations of one phase, in order, their highest sum, and what is left of it at the end."""

    sizes: tuple[int, ...]
    peak: int
    kept: int

    @classmethod
    def of(cls, events: Iterable[tuple[bool, int]]) -> Phase:
        """``events`` are allocations (true) and frees with their requested bytes; cuBLAS's workspaces are left out."""
        sizes, live, peak = [], 0, 0
        for made, size in events:
            if size == WORKSPACE:
                continue
            live += size if made else -size
            peak = max(peak, live)
            if made:
                sizes.append(size)
        return cls(sizes=tuple(sizes), peak=peak, kept=live)


Result = dict[str, Phase] | str
"""The phases by name, or why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One phase on both sides. ``factor`` is the simulated peak by the emulated one."""

    name: str
    precision: str
    phase: str
    emulated: Phase
    simulated: Phase

    @property
    def factor(self) -> float:
        """How much too high the simulated peak is."""
        return self.simulated.peak / self.emulated.peak if self.emulated.peak else float(1 + self.simulated.peak)

    @property
    def text(self) -> str:
        """What differs, in a few words: the factor where the peak does, what is kept, or the order alone."""
        words = [] if self.emulated.peak == self.simulated.peak else [f"x{self.factor:.2f}"]
        if self.emulated.kept != self.simulated.kept:
            words.append(f"keeps {self.emulated.kept}->{self.simulated.kept}")
        return " ".join(words) or ("sequence" if self.emulated.sizes != self.simulated.sizes else "equal")


# -- one side ---------------------------------------------------------------------------------------


def cases_of(name: str, only: str) -> list[Case]:
    """The cases of a set whose names and precisions match the pattern."""
    found: Iterable[Case] = import_module(SETS[name]).cases()
    return [case for case in found if re.search(only, f"{case.name} [{case.precision}]")]


def measure(case: Case, take: Callable[[], Iterable[tuple[bool, int]]]) -> Result:
    """Run ``case``; ``take`` gives the events since it was called last."""
    phases: dict[str, Phase] = {}
    try:
        running = case.run()
        name = next(running)
        take()
        while True:
            following = next(running, None)
            if name:
                phases[name] = Phase.of(take())
            if following is None:
                return phases
            name = following
            take()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def emulated_events() -> Callable[[], Iterable[tuple[bool, int]]]:
    """What the real allocator did since the last call, on the emulated runtime."""
    import torch

    ask = {"enabled": "all", "context": None, "max_entries": 1 << 20}

    def take() -> Iterable[tuple[bool, int]]:
        trace = torch.cuda.memory._snapshot()["device_traces"][0] if torch.cuda.is_initialized() else []
        torch.cuda.memory._record_memory_history(enabled=None)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            forget_values()
        torch.cuda.memory._record_memory_history(**ask)
        events = [entry for entry in trace if entry["action"] in ("alloc", "free_requested")]
        return [(entry["action"] == "alloc", entry["size"]) for entry in events]

    return take


def forget_values() -> None:
    """Make free memory zero, as fresh memory is: ops that read a count find none, not what was there before."""
    import run
    import torch

    if run.MARK not in os.environ:
        return  # a GPU's memory is not the host's to write, and its kernels count
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                ctypes.memset(block["address"], 0, block["size"])


def simulated_events(gpu: str) -> Callable[[], Iterable[tuple[bool, int]]]:
    """The same of a simulated device, which is there from now on; as on the emulated one, nothing differs from 0."""
    from ampmem.allocator.gpus import find_gpu
    from ampmem.events import Action
    from ampmem.simulator.assumed import Assumed
    from ampmem.simulator.device import DeviceEvent
    from ampmem.simulator.start import Simulation

    events: list[DeviceEvent] = []
    simulation = Simulation(find_gpu(gpu), assumed=Assumed(fractions={"nonzero": 0.0}))
    simulation.device.recorder = events.append

    def take() -> Iterable[tuple[bool, int]]:
        taken = [(event.action == Action.ALLOC, event.bytes) for event in events]
        events.clear()
        return taken

    take.simulation = simulation  # type: ignore[attr-defined]
    return take


def run_side(side: str, options: argparse.Namespace) -> None:
    """Run the cases from --skip on in this process, and print a line for each."""
    sys.path[:0] = [str(HERE), str(ROOT)]
    import gc

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ops print is not part of the answer
    take = simulated_events(options.gpu) if side == "simulated" else emulated_events()
    import torch

    a = torch.ones(8, 8, device="cuda", requires_grad=True)  # the handles of both threads, and what they keep
    (a @ a).sum().backward()
    del a
    cases = cases_of(options.set, options.only)[options.skip :]
    gc.collect()
    gc.freeze()
    for case in cases:
        torch.manual_seed(0)
        result = measure(case, take)
        gc.collect()
        answer = result if isinstance(result, str) else {name: [p.sizes, p.peak, p.kept] for name, p in result.items()}
        print(json.dumps([case.name, case.precision, answer]), file=out, flush=True)
    out.flush()
    os._exit(0)


# -- both -------------------------------------------------------------------------------------------


def both(options: argparse.Namespace) -> list[tuple[str, str, Result, Result]]:
    """Name, precision and both results of every case."""
    sys.path[:0] = [str(HERE), str(ROOT)]
    import emulation
    import run

    from ampmem.allocator.gpus import find_gpu

    where = emulation.environment(options.torch)
    python = where / "bin/python"
    if not python.exists():
        sys.exit(f"{where} is not there; python tests/emulated/emulation.py --torch {options.torch} --install makes it")
    gpu = find_gpu(options.gpu)
    major, minor = gpu.compute_capability or (8, 0)
    settings = {"CC": f"{major}{minor}", "SMS": str(gpu.sm_count or 108), "CUDNN_WORKSPACE": "0"}
    common = {"CUBLAS_WORKSPACE_CONFIG": WORKSPACE_SETTING, "PYTHONPATH": str(ROOT)}
    sides = {
        "emulated": ([str(python)], run.variables(where, settings) | common),
        "simulated": ([str(Path(options.simulate_with or python).absolute())], {**_without_emulation(), **common}),
    }
    names = names_of_cases(*sides["simulated"], options)
    with tempfile.TemporaryDirectory() as folder:
        started = [_Side(*how, side, options, Path(folder), names) for side, how in sides.items()]
        lines = dict(zip(sides, (side.finish() for side in started), strict=True))
    pairs = zip(lines["emulated"], lines["simulated"], strict=True)
    return [(one[0], one[1], one[2], other[2]) for one, other in pairs]


def real(options: argparse.Namespace) -> None:
    """Measure the cases on the GPU that is here, and write their file: the machine, and what came of each case."""
    import run
    import torch

    seen = torch.cuda.get_device_properties(0)
    machine = {"gpu": seen.name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    how = [sys.executable], run.checkout_first() | {"CUBLAS_WORKSPACE_CONFIG": WORKSPACE_SETTING}
    with tempfile.TemporaryDirectory() as folder:
        side = _Side(*how, "real", options, Path(folder), names_of_cases(*how, options))
        lines = side.finish()
    rows = [
        [
            name,
            precision,
            answer if isinstance(answer, str) else {phase: asdict(each) for phase, each in answer.items()},
        ]
        for name, precision, answer in lines
    ]
    said = json.dumps({"schema": "ampmem.ops/1", "set": options.set, "machine": machine, "rows": rows})
    options.real.write_bytes(gzip.compress(said.encode(), mtime=0))
    print(f"{sum(not isinstance(row[2], str) for row in rows)} of {len(rows)} cases measured on {machine['gpu']}")


def read_real(path: Path) -> dict[tuple[str, str], Result]:
    """What came of each case of a file that --real wrote, by name and precision."""
    rows = json.loads(gzip.decompress(path.read_bytes()))["rows"]
    return {
        (name, precision): answer
        if isinstance(answer, str)
        else {
            phase: Phase(sizes=tuple(each["sizes"]), peak=each["peak"], kept=each["kept"])
            for phase, each in answer.items()
        }
        for name, precision, answer in rows
    }


def beside(options: argparse.Namespace) -> None:
    """Print what differs from the GPU, of the emulated side and of the simulated one."""
    measured = read_real(options.beside)
    results = [each for each in both(options) if each[:2] in measured]
    for place, side in ((2, "emulated"), (3, "simulated")):
        print(f"== {side}, beside the GPU: factor = {side} / real")
        pairs = [
            (name, precision, measured[name, precision], each[place])
            for each in results
            for name, precision in [each[:2]]
        ]
        phases, failed = compared(pairs)
        print("\n".join(report(phases, failed, everything=options.all)))


def _without_emulation() -> dict[str, str]:
    """The variables of this process without those of run.py, under which a test runs."""
    ours = ("EMULATED_", "LD_PRELOAD", "LD_LIBRARY_PATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"OMP_NUM_THREADS": "1"}


class _Side:
    """The processes of one side: a case that ends one of them is noted, and another goes on behind it."""

    def __init__(
        self,
        command: Sequence[str],
        variables: dict[str, str],
        side: str,
        options: argparse.Namespace,
        folder: Path,
        names: Sequence[tuple[str, str]],
    ) -> None:
        self._command = [*command, str(HERE / "ops.py"), "--side", side, "--set", options.set]
        self._command += ["--only", options.only, "--gpu", options.gpu]
        self._variables, self._side, self._folder = variables, side, folder
        self._all = names
        self._lines: list[tuple[str, str, Result]] = []
        self._start()

    def _start(self) -> None:
        self._out, self._error = (self._folder / f"{self._side}.{kind}" for kind in ("out", "error"))
        with self._out.open("w") as out, self._error.open("w") as error:
            command = [*self._command, "--skip", str(len(self._lines))]
            self._process = subprocess.Popen(command, env=self._variables, stdout=out, stderr=error, cwd=self._folder)

    def finish(self) -> list[tuple[str, str, Result]]:
        """The lines of all cases, once they are there."""
        while True:
            code = self._process.wait()
            for line in self._out.read_text().splitlines():
                name, precision, answer = json.loads(line)
                self._lines.append((name, precision, answer if isinstance(answer, str) else _phases(answer)))
            if len(self._lines) >= len(self._all):
                return self._lines
            said = self._error.read_text().splitlines()
            if not self._lines and code and "emulated CUDA" not in " ".join(said):
                sys.exit("\n".join([f"the {self._side} side ended with {code}:", *said[-15:]]))
            told = next((line for line in reversed(said) if "emulated CUDA" in line), said[-1] if said else "")
            self._lines.append((*self._all[len(self._lines)], f"ended the process with {code}: {told}"))
            if len(self._lines) >= len(self._all):
                return self._lines
            self._start()


def names_of_cases(
    command: Sequence[str], variables: dict[str, str], options: argparse.Namespace
) -> list[tuple[str, str]]:
    """The names and precisions of the cases, asked of the environment that has torch where this process has not."""
    if "torch" in sys.modules:
        return [(case.name, case.precision) for case in cases_of(options.set, options.only)]
    asked = [*command, str(HERE / "ops.py"), "--list", "--set", options.set, "--only", options.only]
    done = subprocess.run(asked, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return [tuple(each) for each in json.loads(done.stdout)]


def _phases(answer: dict[str, Any]) -> dict[str, Phase]:
    return {name: Phase(sizes=tuple(sizes), peak=peak, kept=kept) for name, (sizes, peak, kept) in answer.items()}


def compared(results: Iterable[tuple[str, str, Result, Result]]) -> tuple[list[Difference], dict[str, list[str]]]:
    """The phases that both sides have, and what was said of the cases that one of them has not."""
    phases, failed = [], defaultdict(list)
    for name, precision, emulated, simulated in results:
        if isinstance(emulated, str) or isinstance(simulated, str):
            for side, each in (("emulated", emulated), ("simulated", simulated)):
                if isinstance(each, str):
                    failed[f"{side}: {name}: {each}"].append(precision)
            continue
        phases += [
            Difference(
                name=name, precision=precision, phase=phase, emulated=emulated[phase], simulated=simulated[phase]
            )
            for phase in emulated
        ]
    return phases, failed


def report(phases: Sequence[Difference], failed: dict[str, list[str]], *, everything: bool) -> Iterator[str]:
    """The table, the worst first, and the line of counts."""
    rows: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for each in phases:
        if everything or each.text != "equal":
            rows[each.name, each.phase].append(each)

    def badness(differences: Sequence[Difference]) -> float:
        return max(max(each.factor, 1 / each.factor if each.factor else 1e9) for each in differences)

    for (name, phase), differences in sorted(rows.items(), key=lambda row: -badness(row[1])):
        texts = "; ".join(f"{each.precision} {each.text}" for each in differences)
        first = differences[0]
        yield f"{name} {phase}: {texts} | first: {first.emulated.peak} {first.simulated.peak}"
    for text, precisions in failed.items():
        yield f"not compared [{', '.join(precisions)}]: {text}"
    equal = {
        "kept": [each.emulated.kept == each.simulated.kept for each in phases],
        "peak": [each.emulated.peak == each.simulated.peak for each in phases],
        "sequence": [each.emulated.sizes == each.simulated.sizes for each in phases],
        "all three": [each.text == "equal" for each in phases],
    }
    counts = ", ".join(f"{what} equal {sum(values)}" for what, values in equal.items())
    yield f"{len(phases)} phases compared: {counts}; not compared {sum(map(len, failed.values()))} cases"


Known = dict[str, dict[str, str]]
"""By case and phase: what differs in each precision, as :attr:`Difference.text` says it."""


def known(phases: Iterable[Difference]) -> Known:
    """What differs among ``phases``."""
    found: Known = defaultdict(dict)
    for each in phases:
        if each.text != "equal":
            found[f"{each.name} {each.phase}"][each.precision] = each.text
    return dict(found)


def changes(was: Known, phases: Sequence[Difference]) -> list[str]:
    """What is not as known: new differences, other ones, and those that are gone."""
    lines = []
    for each in phases:
        expected = was.get(f"{each.name} {each.phase}", {}).get(each.precision, "equal")
        if expected != each.text:
            sizes = f"emulated {each.emulated.sizes}, simulated {each.simulated.sizes}"
            lines.append(f"{each.name} {each.phase} [{each.precision}]: known as {expected}, is {each.text}: {sizes}")
    return lines


def table(sets: dict[str, Known]) -> list[str]:
    """The known differences of a percent and more in the peak, or in what is kept, as Markdown; the worst first."""
    rows = []
    for each, what in sets.items():
        least = SMALL if each == "op_db" else 1.01
        for name, precisions in what.items():
            told = {
                precision: text
                for precision, text in precisions.items()
                if text != "sequence" and _badness(text) > least
            }
            if told:
                texts = sorted(set(told.values()), key=_badness)
                shown = (
                    texts[-1]
                    if len(texts) == 1
                    else ", ".join(f"{text} ({precision})" for precision, text in told.items())
                )
                rows.append((max(map(_badness, told.values())), f"| {name} | {shown} |"))
    return ["| phase | peak, simulated / emulated |", "|---|---|", *(row for _, row in sorted(rows, reverse=True))]


def _badness(text: str) -> float:
    factor = float(text.split()[0].removeprefix("x")) if text.startswith("x") else 1.0
    return max(factor, 1 / factor if factor else 1e9, 2.0 if "keeps" in text else 1.0)


def write(name: str, phases: Sequence[Difference]) -> None:
    """Put what differs into the file and onto the page."""
    sets = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    sets[name] = known(phases)
    KNOWN.write_text(json.dumps(sets, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *table(sets), "", f"{END}{after}"]), encoding="utf-8")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    sys.path.insert(0, str(HERE))
    import emulation

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="large", choices=SETS)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression, for NAME [AMP]")
    help_torch = f"which environment ({emulation.TORCH})"
    parser.add_argument("--torch", default=emulation.TORCH, metavar="VERSION", help=help_torch)
    parser.add_argument("--gpu", default=GPU, help=f"which GPU is simulated and emulated ({GPU})")
    parser.add_argument("--simulate-with", metavar="PYTHON", help="another Python for the simulated side")
    parser.add_argument("--all", action="store_true", help="print what agrees, too")
    parser.add_argument("--sizes", action="store_true", help="print the sizes of the allocations of what differs")
    parser.add_argument("--check", action="store_true", help="compare with the known differences")
    parser.add_argument("--write", action="store_true", help="replace the known differences of the whole set")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--real", type=Path, metavar="FILE", help="measure on the GPU that is here, into FILE (gzip)")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="compare both sides with what --real wrote")
    parser.add_argument("--side", choices=("emulated", "simulated", "real"), help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both sides, or one of them."""
    options = parsed(arguments)
    if options.list:
        json.dump([(case.name, case.precision) for case in cases_of(options.set, options.only)], sys.stdout)
        return
    if options.side:
        run_side(options.side, options)
        return
    if options.real:
        real(options)
        return
    if options.beside:
        beside(options)
        return
    phases, failed = compared(both(options))
    if options.sizes:
        for each in phases:
            if options.all or each.text != "equal":
                print(f"{each.name} [{each.precision}] {each.phase}: {each.text}")
                print("  emulated ", *each.emulated.sizes)
                print("  simulated", *each.simulated.sizes)
    if options.check:
        different = changes(json.loads(KNOWN.read_text(encoding="utf-8"))[options.set], phases)
        sys.exit("\n".join(different) if different else 0)
    if options.write:
        if options.only:
            sys.exit("--write needs the whole set: leave --only out")
        write(options.set, phases)
    print("\n".join(report(phases, failed, everything=options.all)))
    if options.json:
        rows = [
            {
                "case": f"{each.name} [{each.precision}] {each.phase}",
                "factor": round(each.factor, 4),
                "difference": each.text,
                **{
                    side: {"peak": p.peak, "kept": p.kept, "sizes": p.sizes}
                    for side, p in (("emulated", each.emulated), ("simulated", each.simulated))
                },
            }
            for each in phases
        ]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
