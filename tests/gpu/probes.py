"""Single questions to a real GPU, each in a process of its own, each answered in one line and with its figures.

    python tests/gpu/probes.py [--seconds 400] [--device cuda|cpu|sim] [PROBE ...]

Without a GPU ``--device cpu`` and ``--device sim`` run those that make sense there; the others are skipped.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Final, TypeAlias

import children
import results
from probing import events, scripts
from results import DIED, FAILED, LATE, NO_TIME, PASSED, REFUSED, SKIPPED, Row

Probe: TypeAlias = Callable[[str, Path], Row]
"""Asks on a device, with a folder for its files."""

PROBES: Final[dict[str, tuple[tuple[str, ...], Probe]]] = {
    "default-device": (("cuda", "cpu"), scripts.default_device),
    "illegal-access": (("cuda",), scripts.illegal_access),
    "record-stream": (("cuda", "sim"), scripts.record_stream),
    "reentrant": (("cuda", "sim", "cpu"), scripts.reentrant),
    "clock": (("cuda",), events.clock),
    "engine-thread": (("cuda",), events.engine_thread),
}
"""Each with the devices on which it can be asked."""
EACH: Final = 120
"""Seconds that one may take."""


def ask(name: str, device: str) -> Row:
    """The answer, or why there is none; never an exception, since the others are to be asked too."""
    devices, probe = PROBES[name]
    if device not in devices:
        return Row(name=name, outcome=SKIPPED, detail=f"needs {' or '.join(devices)}")
    began = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = probe(device, Path(folder))
        except Exception as error:
            row = Row(name=name, outcome=FAILED, detail=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Row(
        name=name,
        outcome=row.outcome,
        seconds=round(monotonic() - began, 1),
        detail=row.detail,
        facts=row.facts,
    )


def say(row: Row) -> None:
    """One line for a person, one for a program."""
    print(f"{row.name}: {row.outcome}: {row.detail}")
    print(f"FACTS {json.dumps({'name': row.name, **row.facts})}", flush=True)


def ask_all(names: Sequence[str], device: str, seconds: float, path: Path) -> list[Row]:
    """Each in a process of its own, whose row is in ``path``; one that ends without leaving it has died."""
    ends = monotonic() + seconds
    for name in names:
        left = min(EACH, ends - monotonic())
        if left <= 0:
            results.append(path, Row(name=name, outcome=NO_TIME))
            continue
        command = (__file__, "--here", "--device", device, name)
        ended = children.follow(command, left, variables={results.FILE: str(path)}, say=print)
        if name not in {row.name for row in results.read(path)}:
            last = next((line for line in reversed(ended.lines) if line.strip()), "")
            outcome = LATE if ended.code is None else DIED
            row = Row(name=name, outcome=outcome, seconds=round(ended.seconds, 1), detail=f"{ended.how}: {last[:200]}")
            results.append(path, row)
            say(row)
    return results.read(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The probes that were asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probes", nargs="*", metavar="PROBE", help=", ".join(PROBES))
    parser.add_argument("--device", choices=("cuda", "cpu", "sim"), default="cuda")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--here", action="store_true", help="ask in this process")
    options = parser.parse_args(arguments)
    strangers = [name for name in options.probes if name not in PROBES]
    if strangers:
        parser.error(f"there is no probe {strangers[0]!r}; there are {', '.join(PROBES)}")
    names = options.probes or list(PROBES)
    if options.here:
        for name in names:
            row = ask(name, options.device)
            results.report(row)
            say(row)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.environ.get(results.FILE) or Path(folder) / "rows.jsonl")
        rows = [row for row in ask_all(names, options.device, options.seconds, path) if row.name in names]
    print("\n" + results.table([[row.name, row.outcome, f"{row.seconds:.0f} s", row.detail] for row in rows]))
    return 0 if all(row.outcome in (PASSED, SKIPPED, REFUSED) for row in rows) else 1


if __name__ == "__main__":
    children.end_with_us()
    sys.exit(main())
