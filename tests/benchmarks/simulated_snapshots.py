"""How far simulated runs are from what GPUs did: a row for each recording of a GPU in the folders, none left out.

    python tests/benchmarks/simulated_snapshots.py FOLDER... [--json]

A folder has memory snapshots of PyTorch's own, of which ``SNAPSHOTS`` says what to simulate for them, or recordings
that ampmem made on a GPU (``*.ampmem``), whose own command is simulated, or both. Peaks are the highest of the time
that the recording covers, with what was alive when it began.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np
from published.snapshots import longest_common
from tabulate import tabulate

from ampmem.allocator.gpus import GPUS, find_gpu
from ampmem.allocator.settings import MIB
from ampmem.allocator.snapshot import ALLOC, read_snapshot
from ampmem.events import Action, Recording, SegmentAction
from ampmem.importer.unpickle import load_plain
from ampmem.recording import read
from ampmem.vocabulary import SourceKind

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.replayed import replay

ROOT = Path(__file__).parents[2]
STEP, FORWARD = "step", "forward"
FULL = ("--preset", "full", "--device", "cuda")
LARGE = (*FULL, "--layers", "32", "--heads", "32", "--width", "2560", "--hidden", "10240")


@dataclass(frozen=True, slots=True)
class Traced:
    """What a snapshot is of: the GPU (its cuBLAS workspaces show which), arguments of ``ampmem.workloads.lm``, how
    many steps or forwards ran before the trace began, and with the end of which of the two it ends."""

    gpu: str
    arguments: tuple[str, ...]
    before: int
    until: str


SNAPSHOTS = {
    "lm_medium_ctx128_fp32_step": Traced("a100-80", FULL, 1, STEP),
    "lm_medium_ctx512_bf16_inference": Traced(
        "a100-80", (*FULL, "--context", "512", "--precision", "amp", "--inference"), 1, FORWARD
    ),
    "lm2700m_ctx128_fp32_forward": Traced("h100", LARGE, 0, FORWARD),
    "lm2700m_ctx128_bf16_forward": Traced("h100", (*LARGE, "--precision", "amp"), 0, FORWARD),
    "lm2700m_ctx128_fp32_step": Traced("h100", LARGE, 0, STEP),
}
NOT_SIMULATED = {
    "course_no_time": "needs transformers, peft and bitsandbytes, whose kernels fake tensors cannot run",
    "old_no_free_requested": "made up by its authors, no run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The allocations in order, and the peaks; all in bytes."""

    sizes: list[int]
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run on a GPU, and its simulation; ``common`` is how many allocations are the same in the same order."""

    name: str
    allocations_real: int
    allocations_simulated: int
    common: int
    allocated_real: int
    allocated_simulated: int
    reserved_real: int
    reserved_simulated: int

    @property
    def errors(self) -> tuple[float, float]:
        """Of the peaks allocated and reserved; fractions of what is real."""
        return (
            self.allocated_simulated / self.allocated_real - 1,
            self.reserved_simulated / self.reserved_real - 1,
        )


def compared(name: str, real: Run, simulated: Run) -> Row:
    """The two side by side."""
    return Row(
        name=name,
        allocations_real=len(real.sizes),
        allocations_simulated=len(simulated.sizes),
        common=longest_common(real.sizes, simulated.sizes),
        allocated_real=real.allocated,
        allocated_simulated=simulated.allocated,
        reserved_real=real.reserved,
        reserved_simulated=simulated.reserved,
    )


def of_snapshot(path: Path) -> Run:
    """What the snapshot's trace comes to when it is replayed."""
    snapshot = read_snapshot(load_plain(path))
    played = replay(snapshot)
    return Run(
        sizes=[event.size for event in snapshot.events if event.action == ALLOC],
        allocated=played.counters.allocated_peak,
        reserved=played.recorded_peak_reserved,
    )


def of_recording(recording: Recording) -> Run:
    """What a recording comes to, all its steps together."""
    events, segments = recording.events, recording.segments
    blocks = np.where(events.action == Action.FREE, -events.block_bytes, events.block_bytes)
    extents = np.where(segments.action == SegmentAction.RELEASE, -segments.bytes, segments.bytes)
    return Run(
        sizes=events.bytes[events.action == Action.ALLOC].tolist(),
        allocated=int(blocks.cumsum().max()),
        reserved=int(extents.cumsum().max()),
    )


def simulate(gpu: str, before: int, until: str, arguments: list[str]) -> NoReturn:
    """Run ``ampmem.workloads.lm`` on a simulated GPU up to the end of what the snapshot covers, and print the run."""
    from torch.nn.modules.module import register_module_forward_hook

    from ampmem.simulator.start import Simulation
    from ampmem.workloads import lm

    simulation = Simulation(find_gpu(gpu))  # what it put into torch goes with it, so it has a name
    device = simulation.device
    counters = device.allocator.counters
    sizes: list[int] = []
    ended = 0

    def begin() -> None:
        sizes.clear()
        counters.reset_peaks()
        device.recorder = lambda event: sizes.append(event.bytes) if event.action == Action.ALLOC else None

    def end() -> None:
        nonlocal ended
        ended += 1
        if ended == before:
            begin()
        elif ended > before:
            run = Run(sizes=sizes, allocated=counters.allocated_peak, reserved=counters.reserved_peak)
            json.dump(asdict(run), sys.stdout)
            sys.exit()

    build = lm.build

    def build_and_begin(*args: Any, **sizes: Any) -> Any:
        built = build(*args, **sizes)
        if before == 0:
            begin()
        return built

    lm.build = build_and_begin
    lm.report_step = lambda step, loss: end()
    if until == FORWARD:
        register_module_forward_hook(lambda module, inputs, output: end() if isinstance(module, lm.LM) else None)
    lm.main(arguments)
    raise SystemExit("the workload ended before the snapshot does")


def simulated_for_snapshot(traced: Traced) -> Run:
    """The same in a process of its own, as simulations need."""
    command = [sys.executable, __file__, "--simulate", traced.gpu, str(traced.before), traced.until]
    done = subprocess.run([*command, *traced.arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def simulated_again(recording: Recording) -> Run | str:
    """The command of ``recording`` on a simulated GPU of the same kind; why not, where that cannot be."""
    run = recording.run
    gpu = next((key for key, spec in GPUS.items() if spec.name == run.device_name), None)
    if gpu is None:
        return f"ampmem cannot simulate {run.device_name}; it knows {', '.join(GPUS)}"
    with TemporaryDirectory() as folder:
        output = Path(folder) / "run.ampmem"
        command = [sys.executable, "-m", "ampmem", "profile", "--device", "sim", "--gpu", gpu, "--quiet"]
        command += ["--no-stacks", "--steps", str(len(recording.steps)), "--skip", str(recording.steps[0].index)]
        if recording.precision.forced:
            command += ["--precision", recording.precision.name]
            if recording.precision.name != "fp32" and recording.precision.dtype is not None:
                command += ["--dtype", {"bfloat16": "bf16", "float16": "fp16"}[recording.precision.dtype]]
        command += ["-o", str(output), *run.script.split(" ", 1), *run.arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            return f"its simulation failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"
        return of_recording(read(output))


def rows_of(folder: Path) -> Iterator[Row | tuple[str, str]]:
    """A row for every recording in ``folder``, or its name and why there is none."""
    for path in sorted(folder.glob("*.pickle")):
        traced = SNAPSHOTS.get(path.stem)
        if traced is None:
            yield path.stem, NOT_SIMULATED.get(path.stem, "nothing here says what it is of")
        else:
            yield compared(path.stem, of_snapshot(path), simulated_for_snapshot(traced))
    for path in sorted(folder.glob("*.ampmem")):
        recording = read(path)
        # A simulated one must agree with itself.
        if recording.run.source not in (SourceKind.CUDA, SourceKind.SIMULATED):
            yield path.stem, f"recorded on {recording.run.source}"
            continue
        simulated = simulated_again(recording)
        if isinstance(simulated, str):
            yield path.stem, simulated
        else:
            yield compared(path.stem, of_recording(recording), simulated)


def table(rows: list[Row]) -> str:
    """For people; the last two lines are about the errors' absolute values."""
    lines: list[list[Any]] = []
    for row in rows:
        counts = f"{row.allocations_real} / {row.allocations_simulated} / {row.common}"
        cells: list[Any] = [row.name, counts]
        for real, simulated, error in zip(
            (row.allocated_real, row.reserved_real),
            (row.allocated_simulated, row.reserved_simulated),
            row.errors,
            strict=True,
        ):
            cells += [f"{real / MIB:.1f}", f"{simulated / MIB:.1f}", f"{error:+.2%}"]
        lines.append(cells)
    errors = np.abs([row.errors for row in rows])
    for word, values in (("median", [median(column) for column in errors.T]), ("worst", errors.max(axis=0))):
        lines.append([word, "", "", "", f"{values[0]:.2%}", "", "", f"{values[1]:.2%}"])
    peaks = ("allocated real", "simulated", "error", "reserved real", "simulated", "error")
    headers = ("MiB", "allocs real / simulated / common", *peaks)
    return tabulate(lines, headers, disable_numparse=True, colalign=("left", *["right"] * 7))


def main() -> None:
    """The command line."""
    if "--help" in sys.argv[1:2]:
        print(__doc__)
        return
    if sys.argv[1:2] == ["--simulate"]:
        gpu, before, until, *arguments = sys.argv[2:]
        simulate(gpu, int(before), until, arguments)
    folders = [Path(each) for each in sys.argv[1:] if each != "--json"]
    if not folders:
        sys.exit(__doc__)
    found = [each for folder in folders for each in rows_of(folder)]
    rows = [each for each in found if isinstance(each, Row)]
    left_out = dict(each for each in found if not isinstance(each, Row))
    if "--json" in sys.argv:
        json.dump({"rows": [asdict(row) for row in rows], "left_out": left_out}, sys.stdout)
        return
    if rows:
        print(table(rows))
    for name, why in left_out.items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    main()
