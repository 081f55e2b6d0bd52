"""What recording costs: CPU time of training under ampmem and under its peers, as ratios to plain training.

    python tests/benchmarks/overhead.py [--only cpu/gpt/3]... [--rounds N] [--json FILE] [--write]
    python tests/benchmarks/overhead.py --gpu [--only gpt-amp/20]... [--rounds N]
    python tests/benchmarks/overhead.py --parts [--only emulated/gpt/20]... [--rounds N]
    python tests/benchmarks/overhead.py --long EVENTS [--at-once]

The first measures small models on the CPU, with this Python's torch, and on PyTorch's own CUDA build on the emulated
CUDA runtime (tests/emulated/emulation.py --install makes it), where kernels cost nothing: what recording adds where a
GPU waits for its host. The precisions (plain, PyTorch's own tools, ampmem) take turns in one process, on one model. CPU
time is that of all threads of the process, so what else the machine does matters little; a ratio is the median over the
rounds of (turn / plain turn of the same round). "In the loop" is the steps alone, "with start and end" is from before a
precision's context manager is entered to after its exit. A run is DEVICE/PROGRAM/STEPS, and --only takes a part of
that; `--rounds 2 --only /gpt/` takes a minute of CPU time. --json keeps the turns in FILE as they come, and does not
measure again what FILE has. --write puts the tables into docs/benchmarks.md, with what was not measured, and the range
into README.md.

--gpu measures wall-clock time on the GPU of this Python's torch, with the device waited for. --parts says where
ampmem's time goes, --long what one step of so many allocator events costs, or with --at-once one backward; both with
the extension, if AMPMEM_EXTENSION=on is set.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TURNS = Path(__file__).with_name("overhead_turns.py")
PROGRAMS = ("mlp", "gpt", "gpt-amp", "gpt2", "resnet")
LONG = "gpt2-300ms"
"""A program whose step takes 300 ms on one CPU thread; where kernels cost nothing there is no such step."""
STEPS = (3, 20)
WHERE = {"cpu": "on the CPU", "emulated": "on emulated CUDA", "gpu": "on this GPU"}
AMPMEM, OBSERVED, PLAIN = "ampmem", "ampmem, extension", "plain"
PROFILERS = ("torch.profiler", "torch.profiler, stacks")
TIMES = ("In the loop", "With start and end")
"""What the two times of a turn are of."""
BEGIN, END = "<!-- written by tests/benchmarks/overhead.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The turns of one program on one device: of each precision, seconds in the loop and with start and end."""

    device: str
    program: str
    steps: int
    torch: str
    python: str
    turns: Mapping[str, Sequence[tuple[float, float]]]

    @property
    def key(self) -> str:
        """What --only looks at."""
        return f"{self.device}/{self.program}/{self.steps}"

    def ratios(self, precision: str, of: str, time: int) -> list[float]:
        """One precision's time in that of another, round by round."""
        return [a[time] / b[time] for a, b in zip(self.turns[precision], self.turns[of], strict=True)]

    def ratio(self, precision: str, of: str, time: int) -> float | None:
        """The median of :meth:`ratios`; ``None`` where one of both took no turns."""
        if precision not in self.turns or of not in self.turns:
            return None
        return statistics.median(self.ratios(precision, of, time))


def keys(devices: Sequence[str]) -> list[str]:
    """Every run on these devices."""
    programs = {device: (*PROGRAMS, LONG) if device == "cpu" else PROGRAMS for device in devices}
    return [f"{device}/{program}/{steps}" for device in devices for program in programs[device] for steps in STEPS]


def started(wanted: Sequence[str], *more: str) -> Iterator[str]:
    """The lines that overhead_turns.py prints for these runs, in one process for each device.

    Raises ``SystemExit`` with what it said when it fails.
    """
    for device in dict.fromkeys(key.partition("/")[0] for key in wanted):
        runs = [key.partition("/")[2] for key in wanted if key.startswith(f"{device}/")]
        emulated = (str(ROOT / "tests/emulated/run.py"), "--python") if device == "emulated" else ()
        command = [sys.executable, *emulated, str(TURNS), device, *runs, *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode:
            sys.exit(f"measuring on {device} failed with exit code {process.returncode}")


def table(runs: Sequence[Run], time: int) -> list[str]:
    """The lines of one table: the median ratios of the runs of one device."""
    precisions = [
        precision
        for precision in dict.fromkeys(precision for run in runs for precision in run.turns)
        if precision != PLAIN
    ]
    beside = [(own, peer) for own in (AMPMEM, OBSERVED) if own in precisions for peer in PROFILERS]
    head = ["program", "steps", "plain, ms a step", *precisions, f"{AMPMEM}, lowest to highest"]
    head += [f"{own} ÷ {peer}" for own, peer in beside]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for run in runs:
        plain = statistics.median(turn[time] for turn in run.turns[PLAIN]) / run.steps * 1e3
        rounds = run.ratios(AMPMEM, PLAIN, time)
        cells = [
            *(run.program, str(run.steps), f"{plain:.1f}"),
            *(_number(run.ratio(precision, PLAIN, time)) for precision in precisions),
            f"{min(rounds):.2f} to {max(rounds):.2f}",
            *(_number(run.ratio(own, peer, time)) for own, peer in beside),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def facts(runs: Sequence[Run]) -> str:
    """What the figures were taken with."""
    torches = "; ".join(dict.fromkeys(f"torch {run.torch} {WHERE[run.device]}" for run in runs))
    rounds = sorted({len(run.turns[PLAIN]) for run in runs})
    taken = " to ".join(str(each) for each in dict.fromkeys((rounds[0], rounds[-1])))
    clock = "wall-clock time" if any(run.device == "gpu" for run in runs) else "CPU time of all threads"
    return (
        f"{torches}; Python {runs[0].python}; {os.cpu_count()} cores, one thread for kernels; {clock}, "
        f"medians of {taken} rounds; {date.today().isoformat()}."
    )


def in_short(runs: Sequence[Run]) -> str:
    """The ranges over all programs, in words, for the devices that were measured."""
    said = {"cpu": "on the CPU", "emulated": "where an emulated GPU waits for its host"}
    loops, blocks = [], []
    for device, where in said.items():
        small = [run for run in runs if run.device == device and run.program != LONG]
        shorts = [run.ratio(AMPMEM, PLAIN, 1) for run in small if run.steps == min(STEPS)]
        if small and shorts:
            loops.append(_loops(small, f" its plain time {where}"))
            blocks.append(f"{_range(shorts)} times")
    long = [run for run in runs if run.program == LONG]
    among_long = f"; a step of 300 ms {_loops(long)}" if long else ""
    return (
        f"Recording costs CPU time: a step of a small model takes {' and '.join(loops)}{among_long}; a block of "
        f"{min(STEPS)} steps, with start and end, {' and '.join(blocks)}"
    )


def _loops(runs: Sequence[Run], of: str = "") -> str:
    """The range of ratios in the loop, ``of`` what, and in brackets that with the extension."""
    observed = [run.ratio(OBSERVED, PLAIN, 0) for run in runs]
    less = f" ({_range(observed)} with `ampmem extension`)" if any(observed) else ""
    return f"{_range([run.ratio(AMPMEM, PLAIN, 0) for run in runs])} times{of}{less}"


def _range(ratios: Sequence[float | None]) -> str:
    found = [ratio for ratio in ratios if ratio is not None]
    digits = 1 if max(found) >= 2 else 2
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def markdown(runs: Sequence[Run]) -> str:
    """All tables, with what they were taken with."""
    lines = [*textwrap.wrap(facts(runs), 120), ""]
    if any(run.device != "gpu" and run.program != LONG for run in runs):
        lines += [*textwrap.wrap(f"{in_short(runs)}.", 120), ""]
    for device, where in WHERE.items():
        here = [run for run in runs if run.device == device]
        for time, name in enumerate(TIMES) if here else ():
            lines += [f"**{name}, {where}:**", "", *table(here, time), ""]
    return "\n".join(lines)


def write(runs: Sequence[Run], docs: Path, readme: Path) -> None:
    """Put the tables between the marks of ``docs``, and the range into the line of ``readme`` that has one.

    Raises ``ValueError`` where a file has no place for it.
    """
    missing = sorted(set(keys(["cpu", "emulated"])) - {run.key for run in runs})
    left_out = textwrap.fill(f"Not measured: {', '.join(missing)}.", 120) + "\n\n" if missing else ""
    places = (
        (docs, re.compile(f"{BEGIN}\n.*?{END}", re.DOTALL), f"{BEGIN}\n\n{markdown(runs)}\n{left_out}{END}"),
        (readme, re.compile(r"- Recording costs CPU time:.*?(?=\n- |\n\n)", re.DOTALL), _bullet(in_short(runs))),
    )
    texts = []
    for path, place, text in places:
        replaced, count = place.subn(lambda _, text=text: text, path.read_text(encoding="utf-8"))
        if count != 1:
            raise ValueError(f"{path} has {count} places for the figures, not 1")
        texts.append((path, replaced))
    for path, replaced in texts:
        path.write_text(replaced, encoding="utf-8")


def _bullet(sentence: str) -> str:
    text = f"- {sentence} ([docs/benchmarks.md](docs/benchmarks.md))."
    return "\n".join(textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def measured(wanted: Sequence[str], rounds: int, file: Path | None) -> list[Run]:
    """The runs that are wanted, in that order; those that ``file`` has are not measured again."""
    there = [] if file is None or not file.exists() else file.read_text(encoding="utf-8").splitlines()
    found = {run.key: run for run in (Run(**json.loads(line)) for line in there)}
    missing = [key for key in wanted if key not in found]
    for line in started(missing, "--rounds", str(rounds)):
        run = Run(**json.loads(line))
        found[run.key] = run
        print(f"{run.key}: {run.ratio(AMPMEM, PLAIN, 0):.2f}, {run.ratio(AMPMEM, PLAIN, 1):.2f}", file=sys.stderr)
        if file is not None:
            file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found.values()), encoding="utf-8")
    return [found[key] for key in wanted]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="runs with this in DEVICE/PROGRAM/STEPS")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each precision; 5 by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the turns here, and do not measure them again")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks.md and README.md")
    parser.add_argument("--gpu", action="store_true", help="measure wall-clock time on this Python's GPU instead")
    parser.add_argument("--parts", action="store_true", help="print where ampmem's time goes instead")
    parser.add_argument("--long", type=int, metavar="EVENTS", help="record one step of so many events instead")
    parser.add_argument("--at-once", action="store_true", help="with --long, one backward of so many events")
    options = parser.parse_args(arguments)
    every = keys(["gpu"] if options.gpu else ["cpu", "emulated"])
    wanted = [key for key in every if not options.only or any(text in key for text in options.only)]
    if not wanted:
        parser.error(f"no run has that in its name; there are {', '.join(every)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.write and not all(f"{device}/{PROGRAMS[0]}/{min(STEPS)}" in wanted for device in ("cpu", "emulated")):
        parser.error(f"--write needs {PROGRAMS[0]}/{min(STEPS)} on the CPU and on the emulated runtime, at least")
    if options.long is not None:
        wanted, more = [f"{'gpu' if options.gpu else 'emulated'}/gpt/3"], ("--long", str(options.long))
        more += ("--at-once",) if options.at_once else ()
    elif options.parts:
        more = ("--parts", "--rounds", str(options.rounds))
    else:
        runs = measured(wanted, options.rounds, options.json)
        print(markdown(runs))
        if options.write:
            write(runs, ROOT / "docs/benchmarks.md", ROOT / "README.md")
        return
    for line in started(wanted, *more):
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
