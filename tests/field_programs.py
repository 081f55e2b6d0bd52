"""Ten public training programs, run as they are, without ampmem and under ``ampmem profile``.

::

    PYTHONPATH=$PWD python tests/field_programs.py PYTHON FOLDER

``PYTHON`` is one that has torch, torchvision and what ampmem needs. ``FOLDER`` holds checkouts, none of them changed,
and their data, which nothing here downloads:

- ``examples``: pytorch/examples. In ``examples/data`` MNIST as torchvision lays it out, of any size from 1,000 images;
  in ``examples/word_language_model/data/wikitext-2`` the three text files that come with it. ``gcn`` downloads its
  archive with the package ``requests``: without a network, put a module of that name on PYTHONPATH that hands it out.
- ``nanoGPT``: karpathy/nanoGPT, with what ``data/shakespeare_char/prepare.py`` makes.
- ``minGPT``: karpathy/minGPT, with a text as ``input.txt``.

Each program runs in a fresh copy of its folder, twice: plainly, and recorded to its end. One that would take days is
stopped by ampmem after three steps, and what it printed until then is compared with the beginning of what it prints
plainly. Printed are a table of all programs, and below it, for reading, all that ampmem said about each. The exit code
is 1 when a program's exit code or output was another than without ampmem, a step was not found, or a byte not counted.
``--match "^dcgan"`` runs only the programs whose names match.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

TIMES = (
    r"\d+(\.\d+)? ?m?s\b",
    r"ms/batch +\d+\.\d+",
    r"mfu -?\d+\.\d+%",
    r"(Time|Data) +\d+\.\d+ \( *\d+\.\d+\)",
)
"""What in a program's output is a time, or made from one."""
MNIST = "examples/data"
PATIENCE_S = 900
"""How long one run may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program and how it is run.

    ``folder`` is one in the folder of checkouts. The program runs there, ``script`` lies in it; ``mnist`` is where it,
    seen from there, looks for MNIST.
    ``steps`` is how many training steps there are: a number, or the pattern of what the program prints once for each.
    ``by_chance`` are patterns of output that differs between two plain runs, whose lines then come in any order.
    """

    name: str
    folder: str
    script: str = "main.py"
    arguments: str
    steps: int | str
    mnist: str | None = None
    by_chance: tuple[str, ...] = ()
    endless: bool = False


PROGRAMS = (
    Program(
        name="mnist",
        folder="examples/mnist",
        mnist="../data",
        arguments="--epochs 3 --dry-run",
        steps=r"^Train Epoch",
    ),
    Program(
        name="dcgan",
        folder="examples/dcgan",
        arguments="--dataset fake --batchSize 100 --ngf 16 --ndf 16 --workers 1 --niter 1 --manualSeed 1",
        steps=r"Loss_D: ",
    ),
    Program(
        name="vae",
        folder="examples/vae",
        mnist="../data",
        arguments="--epochs 2 --batch-size 500 --log-interval 1",
        steps=r"^Train Epoch",
    ),
    Program(
        name="word_language_model, LSTM",
        folder="examples/word_language_model",
        arguments="--epochs 1 --bptt 200 --emsize 64 --nhid 64 --log-interval 1",
        steps=r"^\| (epoch|end of epoch)",  # it prints nothing for the first
    ),
    Program(
        name="word_language_model, Transformer",
        folder="examples/word_language_model",
        arguments="--model Transformer --use-optimizer --lr 0.001 --epochs 1 --bptt 200 --emsize 64 --nhid 64"
        " --log-interval 1",
        steps=r"^\| (epoch|end of epoch)",
    ),
    Program(name="gcn", folder="examples/gcn", arguments="--epochs 10 --val-every 1", steps=r"^Epoch: "),
    Program(
        name="mnist_forward_forward",
        folder="examples/mnist_forward_forward",
        mnist="data",
        arguments="--epochs 4 --train_size 500 --test_size 200 --log-interval 1",
        steps=r"^Loss: ",
        by_chance=(r"\d+\.\d+",),  # it sets no seed
    ),
    Program(
        name="mnist_hogwild",
        folder="examples/mnist_hogwild",
        mnist="../data",
        arguments="--epochs 1 --batch-size 500 --log-interval 1",
        steps=r"Train Epoch",
        by_chance=(r"^\d+\t", r"\d+\.\d+", r"Accuracy: .*"),  # process numbers, and what the race between them decides
    ),
    Program(
        name="imagenet --dummy",
        folder="examples/imagenet",
        arguments="--dummy --no-accel --seed 1 --epochs 1 --batch-size 8 --workers 2 --print-freq 1",
        steps=3,
        endless=True,
    ),
    Program(
        name="nanoGPT",
        folder="nanoGPT",
        script="train.py",
        arguments="config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 --eval_interval=4"
        " --log_interval=1 --gradient_accumulation_steps=2 --block_size=64 --batch_size=8 --n_layer=2 --n_head=2"
        " --n_embd=64 --max_iters=6 --lr_decay_iters=6",
        steps=r"^iter \d+: loss",
    ),
    Program(
        name="minGPT chargpt",
        folder="minGPT",
        script="projects/chargpt/chargpt.py",
        arguments="--model.model_type=gpt-nano --trainer.max_iters=12 --trainer.batch_size=16 --trainer.num_workers=1",
        steps=12,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A process that has ended: its exit code, ``None`` where it was stopped, and what it printed."""

    exit_code: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A program's two runs, and the summaries of what ampmem recorded of it, one for each process."""

    program: Program
    plain: Ran
    profiled: Ran
    summaries: tuple[dict[str, Any], ...]

    @property
    def same_exit(self) -> bool:
        return self.program.endless or self.plain.exit_code == self.profiled.exit_code

    @property
    def same_output(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> list[str]:
        """The lines that only one of the two printed, at most ten; times and what chance decides do not count."""
        one, other = (comparable(self.program, run.stdout) for run in (self.plain, self.profiled))
        if self.program.endless:
            one = one[: len(other)]
        found = [(a, b) for a, b in zip(pad(one, other), pad(other, one), strict=True) if a != b]
        return [line for a, b in found[:5] for line in (f"plain:  {a}", f"ampmem: {b}")]

    @property
    def steps(self) -> int:
        """How many there were."""
        if isinstance(self.program.steps, int):
            return self.program.steps
        return len(re.findall(self.program.steps, self.plain.stdout, re.MULTILINE))

    @property
    def steps_found(self) -> int:
        return sum(step["finished"] for summary in self.summaries for step in summary["steps"])

    @property
    def residual(self) -> int | None:
        """Bytes that ampmem's categories and the allocator's count are apart, the most of any process."""
        found = [summary["conservation"]["residual_bytes"] for summary in self.summaries]
        return max(found, key=abs, default=None)

    @property
    def holds(self) -> bool:
        """Whether the program works, and ampmem changed nothing, found every step and counted every byte."""
        return (
            not self.plain.exit_code
            and self.same_exit
            and self.same_output
            and self.steps == self.steps_found
            and self.residual == 0
        )


def comparable(program: Program, output: str) -> list[str]:
    """The lines of ``output``, without what differs between two plain runs of ``program``."""
    for pattern in (*TIMES, *program.by_chance):
        output = re.sub(pattern, "#", output, flags=re.MULTILINE)
    lines = output.splitlines()
    return sorted(lines) if program.by_chance else lines


def pad(lines: list[str], other: list[str]) -> list[str]:
    """``lines``, as long as ``other`` at least."""
    return lines + ["(nothing)"] * (len(other) - len(lines))


def copy_of(program: Program, checkouts: Path, place: Path) -> Path:
    """Copy the program's folder and its data below ``place``; returns where it runs."""
    folder = place / program.folder
    shutil.copytree(checkouts / program.folder, folder)
    if program.mnist is not None:
        shutil.copytree(checkouts / MNIST, folder / program.mnist)
    return folder


def run(command: Sequence[str], folder: Path) -> Ran:
    """Run ``command`` in ``folder`` to its end."""
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH")) if part)
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired as stopped:
        return Ran(exit_code=None, stdout=text(stopped.stdout, folder), stderr=text(stopped.stderr, folder))
    return Ran(exit_code=done.returncode, stdout=text(done.stdout, folder), stderr=text(done.stderr, folder))


def begin(command: Sequence[str], folder: Path, lines: int) -> Ran:
    """Run ``command`` until it has printed so many ``lines``, then stop it and every process that it started."""
    printed: list[str] = []
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            printed.append(line)
            if len(printed) == lines:
                os.killpg(running.pid, 9)
    return Ran(exit_code=None, stdout="".join(printed), stderr="")


def text(stream: bytes | None, folder: Path) -> str:
    """What a program that ran in ``folder`` printed; in the other run the folder is another one."""
    return (stream or b"").decode(errors="backslashreplace").replace(f"{folder}/", "")


def outcome(program: Program, python: str, checkouts: Path, work: Path) -> Outcome:
    """Run ``program`` under ampmem, and without it."""
    script = (program.script, *program.arguments.split())
    recorded = ("--steps", "3") if program.endless else ("--steps", "1000", "--run-to-end")
    folder = copy_of(program, checkouts, work / "profiled")
    profiled = run((python, "-m", "ampmem", "profile", *recorded, "-o", "run.ampmem", *script), folder)
    shown = [run((python, "-m", "ampmem", "show", "--json", path.name), folder) for path in folder.glob("run*.ampmem")]
    folder = copy_of(program, checkouts, work / "plain")
    if program.endless:
        # Unbuffered, since a process that is stopped keeps what it has not written yet.
        plain = begin((python, "-u", *script), folder, len(profiled.stdout.splitlines()))
    else:
        plain = run((python, *script), folder)
    summaries = tuple(json.loads(done.stdout) for done in shown if done.exit_code == 0)
    return Outcome(program=program, plain=plain, profiled=profiled, summaries=summaries)


def row(outcome: Outcome) -> tuple[str, ...]:
    """The table's row: of several processes the one with the highest peak."""
    program, codes = outcome.program, (outcome.profiled.exit_code, outcome.plain.exit_code)
    exit_code = "yes" if outcome.same_exit else f"no: {codes[0]}, not {codes[1]}"
    cells = (program.name, f"`{program.arguments}`", f"stopped: {codes[0]}" if program.endless else exit_code)
    cells += ("yes" if outcome.same_output else "no", f"{outcome.steps_found} of {outcome.steps}")
    peaks = [summary["peak"] for summary in outcome.summaries if summary["peak"]]
    if not peaks:
        return (*cells, "-", "-", "-", "-")
    peak = max(peaks, key=lambda peak: int(peak["bytes"]))
    findings = sum(len(summary["findings"]) for summary in outcome.summaries)
    other = f"{100 * peak['categories']['other'] / peak['bytes']:.2f} %"
    return (*cells, f"{peak['bytes']:,}", other, f"{outcome.residual:,}", str(findings))


HEADINGS = (
    "program",
    "arguments",
    "exit code as without",
    "output as without",
    "steps found",
    "peak, bytes",
    "`other` of it",
    "residual, bytes",
    "findings",
)


def details(outcome: Outcome) -> str:
    """What differs between the two runs, and all that ampmem said."""
    heading = f"{outcome.program.name}: exit code {outcome.profiled.exit_code}, without {outcome.plain.exit_code}"
    said = comparable(outcome.program, outcome.plain.stderr)
    own = [line for line in outcome.profiled.stderr.splitlines() if line not in said or not line]
    failed = outcome.plain.stderr.splitlines() if outcome.plain.exit_code else []
    return "\n".join((heading, "=" * len(heading), *failed, *outcome.differences, "", *own, ""))


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", help="with torch, torchvision and what ampmem needs")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the checkouts")
    parser.add_argument("--match", default="", help="run only the programs in whose names this pattern is found")
    given = parser.parse_args()
    outcomes = []
    for program in PROGRAMS:
        if re.search(given.match, program.name):
            print(program.name, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as work:
                outcomes.append(outcome(program, given.python, given.folder.resolve(), Path(work)))
    print(tabulate([row(found) for found in outcomes], HEADINGS, tablefmt="github", disable_numparse=True))
    for found in outcomes:
        print(f"\n{details(found)}")
    return int(not all(found.holds for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
