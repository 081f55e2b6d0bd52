"""The same programs recorded on the CPU, whose allocator is a real one, beside the simulated GPU.

Parameters, gradients and the optimizer's state depend on no kernel: they have to be the same to the byte, but for what
the optimizer keeps on the CPU where the model is on a GPU (the step counters of Adam). What an op saves, and what
autocast casts, depends on the device: activations after forward, copies of the weights and the peak are shown, and
not judged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from program import Program
from runs import CPU, Recorded, judge, record

PRECISIONS = ("fp32", "amp")
SAME = ("parameters", "gradients", "optimizer_state")
SHOWN = ("activations", "copies", "peak without workspaces")
HEADINGS = ("program", "precision", "same", *(f"{what}, {on}" for what in SHOWN for on in ("CPU", "sim")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A program in one precision, on the CPU and on the simulated GPU."""

    program: Program
    cpu: Recorded
    simulated: Recorded
    problems: tuple[str, ...]

    @property
    def row(self) -> tuple[str, ...]:
        """The table's row, in bytes."""
        pairs = (
            (found.activations, (found.measured or {}).get("cast_copies", 0), found.peak - found.workspace)
            for found in (self.cpu, self.simulated)
        )
        numbers = [f"{number:,}" for pair in zip(*pairs, strict=True) for number in pair]
        return self.program.name, self.cpu.precision, "NO" if self.problems else "yes", *numbers


def beside(program: Program, simulated: Sequence[Recorded], folder: Path) -> Iterable[Beside]:
    """Record ``program`` on the CPU too, in each of ``simulated`` that can be compared, into ``folder``."""
    if program.stops or program.not_on_cpu:
        return
    for run in simulated:
        if run.precision in PRECISIONS and not run.exit_code:
            cpu = record(program, run.precision, folder, device=CPU)
            found = (*judge(program, cpu, equal=SAME), *differences(cpu, run))
            problems = tuple(f"{run.precision}, CPU: {problem}" for problem in found)
            yield Beside(program=program, cpu=cpu, simulated=run, problems=problems)


def differences(cpu: Recorded, simulated: Recorded) -> list[str]:
    """What is not the same and should be."""
    if cpu.measured is None or simulated.measured is None or simulated.sums is None:
        return []
    elsewhere = {"optimizer_state": simulated.sums["state_elsewhere"]}
    expected = {name: simulated.measured[name] + elsewhere.get(name, 0) for name in SAME}
    return [
        f"{name}: {cpu.measured[name]:,} B, simulated {expected[name]:,} B"
        for name in SAME
        if cpu.measured[name] != expected[name]
    ]
