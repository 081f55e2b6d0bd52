"""Peaks that a GPU really had beside those that the simulation says, for each model in each precision.

    python tests/gpu/truth.py --out FOLDER/truth [--only CASE,CASE] [--skip-to CASE] [--seconds 560] [--device cuda|sim]
    python tests/gpu/truth.py --join A.json B.json --out truth

Each run is made three times, in processes of their own: as it is, without ampmem's recorder (PyTorch's own
``max_memory_allocated`` and ``max_memory_reserved``, and what the driver says is used beside that); recorded by ampmem;
and simulated on the same GPU, in a process that sees none. The runs on the GPU are made one at a time; simulations run
beside them. ``truth.txt`` and ``truth.json`` are written anew after each row. What there is no time for is named, and
``--skip-to`` goes on there. Out of memory, refused and not installed are rows with that remark.

``--device sim`` simulates all three, to try this out: then nothing may differ.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from time import monotonic
from typing import Final

import children
import results
from measured.case import CASES, TINY
from measured.table import TruthRow, document, row_of, text
from measured.ways import Peaks, Ways
from results import FAILED, NO_TIME, PASSED, REFUSED, Fact, Row

from ampmem.allocator.gpus import GPUS

PRECISIONS: Final = ("fp32", "amp", "amp-nocache")
_MACHINE: Final = """
import json, torch
seen = torch.cuda.get_device_properties(0)
print("MACHINE", json.dumps({
    "gpu": seen.name, "total_memory": seen.total_memory, "sm_count": seen.multi_processor_count,
    "capability": [seen.major, seen.minor], "torch": torch.__version__, "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(),
}))
"""


def chosen(only: str, skip_to: str) -> list[tuple[str, str]]:
    """Cases and precisions, in order. Raises ``ValueError`` for a case that there is not."""
    names = [name for name in CASES if name not in TINY]
    wanted = only.split(",") if only else names
    for name in (*wanted, *([skip_to] if skip_to else [])):
        if name not in CASES:
            raise ValueError(f"there is no case {name!r}; there are {', '.join(CASES)}")
    if skip_to:
        wanted = wanted[wanted.index(skip_to) :] if skip_to in wanted else []
    return [(name, precision) for name in wanted for precision in PRECISIONS]


def machine(device: str) -> dict[str, Fact]:
    """What torch says of the GPU; raises ``RuntimeError`` where there is none."""
    if device == "sim":
        return {"gpu": "simulated, to try this out"}
    ended = children.follow(("-c", _MACHINE), 120)
    found = next((line for line in ended.lines if line.startswith("MACHINE ")), None)
    if found is None:
        raise RuntimeError(f"no GPU can be asked: {' '.join(ended.lines[-1:])}")
    answer: dict[str, Fact] = json.loads(found.removeprefix("MACHINE "))
    return answer


def gpu_of(found: dict[str, Fact]) -> str:
    """What ``--gpu`` is to be: the name of the same GPU, or its memory where ampmem does not know it."""
    names = [name for name, spec in GPUS.items() if spec.name == found["gpu"]]
    return names[0] if names else str(found.get("total_memory", "h200"))


def measure(ways: Ways, runs: Sequence[tuple[str, str]], ends: float) -> Iterable[TruthRow | Row]:
    """A row of the table for each run; a :class:`Row` for one that there was no time for."""
    workers = max(1, min(4, (os.cpu_count() or 1) // 4))
    pool = ThreadPoolExecutor(workers)
    simulations: dict[tuple[str, str], Future[Peaks]] = {run: pool.submit(ways.simulated, *run) for run in runs}
    longest = 0.0
    try:
        for run in runs:
            began = monotonic()
            if began + longest > ends:  # it would be cut off, and tell nothing
                yield Row(name=" ".join(run), outcome=NO_TIME)
                continue
            plain = ways.plain(*run)
            recorded = plain if plain.refused else ways.recorded(*run)
            longest = max(longest, monotonic() - began)
            try:
                simulated = simulations[run].result(max(ends - monotonic(), 1))
            except NotYet:
                simulated = Peaks(why="no time left")
            yield TruthRow(case=run[0], precision=run[1], plain=plain, recorded=recorded, simulated=simulated)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def row_about(row: TruthRow) -> Row:
    """Whether it could be measured: the size of an error is a finding, no failure; a recording that differs is one."""
    measured = row.allocated_error is not None
    ran_out = row.plain.why == "out of memory"
    if row.recorder_differs:
        outcome = FAILED
    elif measured or ran_out:
        outcome = PASSED
    else:
        outcome = REFUSED if row.plain.refused or row.simulated.refused else FAILED
    error = "" if row.allocated_error is None else f"allocated off by {100 * row.allocated_error:+.2f} %"
    detail = "; ".join(each for each in (error, row.remark) if each)
    facts: dict[str, Fact] = {"real": row.plain.allocated, "simulated": row.simulated.allocated}
    seconds = row.plain.seconds + row.recorded.seconds
    return Row(
        name=f"{row.case} {row.precision}", outcome=outcome, seconds=round(seconds, 1), detail=detail, facts=facts
    )


def write(out: Path, rows: Sequence[TruthRow], found: dict[str, Fact]) -> str:
    """Both files, and the text."""
    shown = text(rows, ", ".join(f"{name} {value}" for name, value in found.items()))
    results.replace(out.with_suffix(".txt"), shown)
    results.replace(out.with_suffix(".json"), json.dumps(document(rows, found), indent=1) + "\n")
    return shown


def join(files: Sequence[Path], out: Path) -> str:
    """One table of several runs on the same machine; of a run that is in two, the later one."""
    rows: dict[tuple[str, str], TruthRow] = {}
    found: dict[str, Fact] = {}
    for path in files:
        data = json.loads(path.read_text(encoding="utf-8"))
        if found and data["machine"] != found:
            raise ValueError(f"{path} is of another machine")
        found = data["machine"]
        for each in data["rows"]:
            row = row_of(each)
            rows[(row.case, row.precision)] = row
    return write(out, list(rows.values()), found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="both files, without their suffix")
    parser.add_argument("--only", default="", help="cases, with commas between them")
    parser.add_argument("--skip-to", default="", help="begin with this case")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--join", type=Path, nargs="+", help="files of earlier runs, to be made one table")
    options = parser.parse_args(arguments)
    out: Path = options.out.absolute()
    try:
        if options.join:
            print(join(options.join, out))
            return 0
        runs = chosen(options.only, options.skip_to)
        ends = monotonic() + options.seconds
        found = machine(options.device)
    except (ValueError, RuntimeError) as error:
        print(f"truth.py: {error}", file=sys.stderr)
        return 2
    rows: list[TruthRow] = []
    good = True
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ways = Ways(
            folder=Path(folder), gpu=gpu_of(found) if options.device == "cuda" else "h200", device=options.device
        )
        for each in measure(ways, runs, ends):
            if isinstance(each, TruthRow):
                rows.append(each)
                write(out, rows, found)
                each = row_about(each)
            results.report(each)
            good &= each.outcome not in results.BROKEN
            print(f"{each.name}: {each.outcome}, {each.seconds:.0f} s, {each.detail}", flush=True)
    print("\n" + write(out, rows, found))
    return 0 if good and rows else 1


if __name__ == "__main__":
    children.end_with_us()
    code = main()
    sys.stdout.flush()
    children.end_all()  # simulations that nobody waits for any more
    os._exit(code)
