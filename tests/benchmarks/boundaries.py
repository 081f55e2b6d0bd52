"""What `ampmem fit` says is the largest value that fits, beside runs of their own around it: does each agree?

    python tests/benchmarks/boundaries.py GPU [--precision AMP,...] SCRIPT... --vary ARGUMENT=LOW:HIGH

For each precision, runs with the largest value that fits, one above it, the largest with which memory does not run out,
one above that, and twice as much. The verdicts have to be "fits", "may not fit" or "does not fit" in that order, each
with the figures that say so. Prints a row of docs/simulation.md for each precision; exits with 1 where a run disagrees.
A range that has no boundary, because its upper end still fits or nothing does, is not treated: one line says so.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

from ampmem.analysis.estimate import Fit, Prediction, prediction_in
from ampmem.recording import read
from ampmem.units import format_bytes

HEAD = ("GPU", "precision", "largest that fits", "one above", "memory runs out at", "twice the largest", "agree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A run of its own: its ``prediction``, and whether memory ran out in it."""

    prediction: Prediction
    ran_out: bool

    @property
    def consistent(self) -> bool:
        """Whether the verdict is what its figures say."""
        found = self.prediction
        most = found.at_peak_reserved.total if found.highest is None else found.highest.total
        fit = found.fit
        if self.ran_out:
            return fit is Fit.DOES_NOT_FIT
        return (fit is Fit.FITS) == (most <= found.gpu_bytes) and (fit is not Fit.DOES_NOT_FIT)

    def __str__(self) -> str:
        found = self.prediction
        if self.ran_out:
            return "runs out"
        most = found.at_peak_reserved.total if found.highest is None else found.highest.total
        return f"{found.fit.value}: {format_bytes(found.least_total)} to {format_bytes(most)}"


@dataclass(slots=True, kw_only=True)
class Script:
    """One precision of a script on a GPU, run with values of ``argument``."""

    gpu: str
    precision: str
    command: list[str]
    argument: str
    runs: dict[int, Alone] = field(default_factory=dict)

    def run(self, value: int) -> Alone:
        """The run with ``value``, which is made once."""
        if value not in self.runs:
            with TemporaryDirectory() as folder:
                path = Path(folder, "alone.ampmem")
                options = (
                    "--device",
                    "sim",
                    "--gpu",
                    self.gpu,
                    "--precision",
                    self.precision,
                    "--seed",
                    "0",
                    "--quiet",
                )
                where = f"{self.argument}={value}"
                done = ampmem("profile", *options, "-o", str(path), *self.command, where)
                recording = read(path)
                prediction = prediction_in(recording)
                if prediction is None:
                    raise SystemExit(f"{where}: no prediction\n{done.stderr}")
            self.runs[value] = Alone(prediction=prediction, ran_out=bool(recording.ooms))
        return self.runs[value]

    def runs_out(self, fits: int) -> int:
        """The smallest value with which memory runs out; ``fits`` is one with which it does not."""
        above = fits + 1
        while not self.run(above).ran_out:
            fits, above = above, above + max(1, above // 8)
        while above - fits > 1:
            middle = (fits + above) // 2
            fits, above = (fits, middle) if self.run(middle).ran_out else (middle, above)
        return above

    def row(self, largest: int) -> tuple[list[str], bool]:
        """The row of the table, and whether all of it agrees."""
        at, above, out = self.run(largest), self.run(largest + 1), self.runs_out(largest)
        far = self.run(2 * largest)
        agree = at.prediction.fit is Fit.FITS and above.prediction.fit is not Fit.FITS
        agree &= all(run.consistent for run in self.runs.values())
        agree &= all(run.ran_out == (value >= out) for value, run in self.runs.items())
        cells = [
            self.gpu,
            self.precision,
            f"{largest} ({at})",
            str(above),
            str(out),
            str(far),
            "yes" if agree else "NO",
        ]
        return cells, agree


def ampmem(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``ampmem`` with ``arguments``, in a process of its own."""
    command = [sys.executable, "-m", "ampmem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main(gpu: str, *arguments: str) -> int:
    """Print the table; 1 where something disagrees."""
    given = list(arguments)
    precisions = given[1] if given[0] == "--precision" else "fp32,amp,amp-nocache"
    command = given[2:] if given[0] == "--precision" else given
    at = command.index("--vary")
    command, vary = command[:at], command[at + 1]
    fit = ("fit", "--gpu", gpu, "--precision", precisions, "--points", "0", "--jobs", "1", "--json")
    done = ampmem(*fit, *command, "--vary", vary)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)["arms"]
    for precision in found:
        if precision["largest_fitting"] is None or precision["smallest_not_fitting"] is None:
            which = "nothing" if precision["largest_fitting"] is None else "the upper end still"
            raise SystemExit(f"{precision['precision']}: of {vary} {which} fits: there is no boundary to look at")
    rows, agree = [], True
    for precision in found:
        script = Script(gpu=gpu, precision=precision["arm"], command=command, argument=vary.partition("=")[0])
        cells, good = script.row(precision["largest_fitting"])
        rows.append(cells)
        agree &= good
    print(tabulate(rows, HEAD, tablefmt="pipe"))
    return 0 if agree else 1


if __name__ == "__main__":
    if "--help" in sys.argv[1:2]:
        print(__doc__)
        sys.exit()
    sys.exit(main(*sys.argv[1:]))
