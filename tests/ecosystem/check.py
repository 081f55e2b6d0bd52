"""What people train with, each for two steps in each precision on a simulated GPU, and a table of what works.

::

    pip install -c constraints.txt -e '.[ecosystem]'
    python tests/ecosystem/check.py [--list] [--only PATTERN] [--precisions fp32,amp,amp-nocache,own] [--against-cpu]
                                    [--json FILE] [--said]

Every program in ``programs/`` runs under ``ampmem profile --device sim --gpu h100`` in FP32, under autocast, and under
autocast without its cache of weights; where its library has a low precision of its own, in that too (``own``;
``--precisions`` leaves the others out, each is a process of some ten seconds). Parameters,
gradients, optimizer state and copies of the weights are compared with sums over the program's tensors, and every note
that ampmem writes is either one that each run has, or expected. A program whose packages are not installed is named,
and left out. ``--against-cpu`` records what can be on the CPU too, in FP32 and under autocast, and compares the two
(``against_cpu.py``). Results come as they are found, then a table. The exit code is 1 when one is not as expected.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from tabulate import tabulate

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import against_cpu  # noqa: E402
import image_programs  # noqa: E402
import text_programs  # noqa: E402
from against_cpu import Beside, beside  # noqa: E402
from program import PRECISIONS, Program  # noqa: E402
from runs import OWN, Outcome, Recorded, outcome  # noqa: E402

PROGRAMS = (*text_programs.PROGRAMS, *image_programs.PROGRAMS)
HEADINGS = ("program", "with", "precisions", "on the simulated GPU", "as expected")


def missing(program: Program) -> list[str]:
    """The packages that ``program`` needs and are not there."""
    return [package for package in program.packages if util.find_spec(package) is None]


def versions(program: Program) -> str:
    """The packages of ``program`` as they are installed."""
    return ", ".join(f"{package} {metadata.version(package)}" for package in program.packages)


def row(found: Outcome) -> tuple[str, ...]:
    """The table's row."""
    precisions = ", ".join(run.precision for run in found.runs)
    return found.program.name, versions(found.program), precisions, found.found, "yes" if found.as_expected else "NO"


def details(found: Outcome, *, said: bool) -> list[str]:
    """What is not as expected, and why something is not compared; with ``said`` all that ampmem said."""
    lines = [f"{found.program.name}: {problem}" for problem in found.problems]
    if said:
        lines += [f"\n== {found.program.name}, {run.precision} ==\n{run.said}" for run in found.runs]
    return lines


def as_json(found: Sequence[Outcome], compared: Sequence[Beside]) -> list[dict[str, object]]:
    """The table as data, with the bytes of every run."""
    return [
        {
            "program": one.program.name,
            "versions": {package: metadata.version(package) for package in one.program.packages},
            "found": one.found,
            "as_expected": one.as_expected,
            "problems": one.problems,
            "runs": [run_as_json(run) for run in one.runs],
            "on_cpu": [
                run_as_json(pair.cpu) | {"problems": pair.problems} for pair in compared if pair.program is one.program
            ],
        }
        for one in found
    ]


def run_as_json(run: Recorded) -> dict[str, object]:
    """The bytes of one run."""
    names = ("precision", "peak", "workspace", "activations", "measured", "sums", "notes", "findings")
    return {name: getattr(run, name) for name in names}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the programs, and run none")
    parser.add_argument("--only", default="", metavar="PATTERN", help="the programs in whose names this is found")
    parser.add_argument("--precisions", default=",".join((*PRECISIONS, OWN)), help="only those of each program's")
    parser.add_argument("--against-cpu", action="store_true", help="record on the CPU too, and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here too, with all bytes")
    parser.add_argument("--said", action="store_true", help="print all that ampmem said about each, to be read")
    return parser.parse_args()


def run(program: Program, given: argparse.Namespace) -> tuple[Outcome, list[Beside]]:
    """One program in all precisions, and on the CPU where that is asked for; what comes of it is said at once."""
    print(program.name, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        one = outcome(program, Path(folder), only=given.precisions.split(","))
        print(*row(one)[2:], *one.problems, sep="\n  ", file=sys.stderr, flush=True)
        compared = list(beside(program, one.runs, Path(folder))) if given.against_cpu else []
    for pair in compared:
        print("  on the CPU too:", *pair.row[1:3], *pair.problems, file=sys.stderr, flush=True)
    return one, compared


def main() -> int:
    """Run what is asked for; returns the exit code."""
    given = options()
    wanted = [program for program in PROGRAMS if re.search(given.only, program.name)]
    if given.list:
        print(*(program.name for program in wanted), sep="\n")
        return 0
    found: list[Outcome] = []
    compared: list[Beside] = []
    for program in wanted:
        if lacks := missing(program):
            print(f"left out: {program.name}, which needs {', '.join(lacks)}", file=sys.stderr)
            continue
        one, pairs = run(program, given)
        found.append(one)
        compared += pairs
        if given.json is not None:  # at once: the list takes half an hour
            given.json.write_text(json.dumps(as_json(found, compared), indent=1) + "\n", encoding="utf-8")
    report(found, compared, said=given.said)
    return int(not (all(one.as_expected for one in found) and not any(pair.problems for pair in compared)))


def report(found: Sequence[Outcome], compared: Sequence[Beside], *, said: bool) -> None:
    """Print the tables, what is not as expected, and how many are."""
    print(tabulate([row(one) for one in found], HEADINGS, tablefmt="github"))
    if compared:
        print("", tabulate([pair.row for pair in compared], against_cpu.HEADINGS, tablefmt="github"), sep="\n")
    lines = [*(line for one in found for line in details(one, said=said))]
    lines += [f"{pair.program.name}: {problem}" for pair in compared for problem in pair.problems]
    runs, good = sum(len(one.runs) for one in found), sum(one.as_expected for one in found)
    lines.append(f"{len(found)} programs in {runs} runs: {good} as expected, {len(found) - good} not.")
    if compared:
        same = sum(not pair.problems for pair in compared)
        lines.append(f"{len(compared)} runs on the CPU too: {same} the same, {len(compared) - same} not.")
    print("", *lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
