"""All that PyTorch's own CUDA build says without a GPU: runs it, prints three tables and writes the report.

    python tests/emulated/all.py [--torch VERSION]... [--install] [--only recorder|ops|steps]...
                                 [--quick] [--jobs 2] [--go-on FOLDER] [--page-only]

- recorder: the tests of this folder and of tests/gpu on each torch; all that emulation.py has installed, unless --torch
  names some. --install makes what is missing, several GB each. --quick leaves out what run.py --quick leaves out;
  --jobs 2 runs two versions at a time. What passed is noted in FOLDER, and is not run again with --go-on FOLDER.
- ops: what each op allocates, beside the simulation (ops.py).
- steps: whole training steps, beside the simulation (steps.py).

A table whose script is not there is skipped, and the reason is printed. reports/emulated.json and reports/emulated.html
get what was run; what was not run this time stays as it was. The exit code is 1 where a test failed or a script ended
with an error; that a simulation differs from PyTorch is a row, not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import emulation
import results

HERE = emulation.HERE
ROOT = HERE.parents[1]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TABLES = ("recorder", "ops", "steps")
REPORT = ROOT / "reports/emulated"
COMMAND = "python tests/emulated/all.py"
SECONDS_PER_TEST = 600
"""One test compiles, which takes minutes where the cores are busy."""

NOTHING_LEFT = 5
"""pytest's exit code where all tests were left out."""

Document = dict[str, Any]


def recorder(version: str, *, quick: bool, folder: Path) -> Document:
    """What came of each test on that torch; ``error`` says why there is nothing more.

    ``folder`` has, or gets, a file with a row for each test; what passed in it is not run again.
    """
    began = monotonic()
    where = emulation.environment(version)
    emulation.build(where)
    path = folder / f"{version}.jsonl"
    kept = [row for row in results.read(path) if row.outcome == results.PASSED]
    path.unlink(missing_ok=True)
    for row in kept:
        results.append(path, row)
    command = [sys.executable, str(HERE / "run.py"), "--torch", version, *(["--quick"] if quick else [])]
    command += ["-q", "-p", "one_by_one", "--seconds-per-test", str(SECONDS_PER_TEST)]
    code = subprocess.run(command, env=os.environ | {results.FILE: str(path)}, check=False).returncode
    rows = results.read(path)
    found: Document = {"torch": version, "cuda": cuda_of(where), "seconds": round(monotonic() - began)}
    found["tests"] = [{"name": row.name, "outcome": row.outcome, "detail": shortened(row.detail)} for row in rows]
    if code not in (0, 1, NOTHING_LEFT):
        found["error"] = f"pytest ended with exit code {code}"
    return found


def shortened(detail: str) -> str:
    """Without the folders of this machine, and without what the outcome says."""
    return re.sub(r"/\S+/", "", detail).removeprefix("Skipped: ")[:200]


def cuda_of(where: Path) -> str:
    """The version of CUDA that the torch in ``where`` is for."""
    text = (emulation.packages(where) / "torch/version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda.*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def script(name: str, *arguments: str) -> Any:
    """The JSON that a script of this folder writes; raises ``subprocess.CalledProcessError``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        subprocess.run([sys.executable, str(HERE / name), *arguments, "--json", str(path)], check=True)
        return json.loads(path.read_text(encoding="utf-8"))


def ops(version: str) -> Document:
    """Each set of cases: how many phases agree, and those that do not."""
    sets = []
    for name in import_module("ops").EMULATED_SETS:
        rows = script("ops.py", "--set", name, "--torch", version)
        parts = ("kept", "peak", "sizes")
        equal = {part: sum(row["emulated"][part] == row["simulated"][part] for row in rows) for part in parts}
        differ = [row for row in rows if any(row["emulated"][part] != row["simulated"][part] for part in parts)]
        sets.append(
            {
                "set": name,
                "compared": len(rows),
                "equal": {**equal, "all": len(rows) - len(differ)},
                "differ": [
                    {
                        "case": row["case"],
                        "difference": row.get("difference", ""),
                        "emulated": row["emulated"]["peak"],
                        "simulated": row["simulated"]["peak"],
                    }
                    for row in differ
                ],
            }
        )
    return {"torch": version, "sets": sets}


def steps(version: str) -> Document:
    """The peaks of whole steps in bytes, those of PyTorch first."""
    found = script("steps.py", "--torch", version)
    return {"torch": version, "gpu": found["gpu"], "rows": found["rows"]}


def grouped(versions: Sequence[Document]) -> list[tuple[str, str, list[Counter[str]]]]:
    """File, test function, and the outcomes of its cases on each torch."""
    found: dict[tuple[str, str], list[Counter[str]]] = defaultdict(lambda: [Counter() for _ in versions])
    for place, version in enumerate(versions):
        for test in version["tests"]:
            file, _, name = test["name"].partition("::")
            found[file, name.partition("[")[0]][place][test["outcome"]] += 1
    return [(file, name, counts) for (file, name), counts in sorted(found.items())]


def outcome(counts: Counter[str]) -> str:
    """Such as ``5 passed, 1 failed``."""
    return ", ".join(f"{counts[word]} {word}" for word in sorted(counts, key=lambda word: (word != "passed", word)))


def tables(document: Document) -> Iterable[tuple[str, tuple[str, ...], list[tuple[str, ...]], list[str]]]:
    """Heading, heads of the columns, lines, and what is said below, of each table."""
    found = document["recorder"]
    versions = found.get("versions", [])
    lines = [
        (name.removeprefix("test_").replace("_", " "), *map(outcome, counts)) for _, name, counts in grouped(versions)
    ]
    totals = [outcome(Counter(test["outcome"] for test in each["tests"])) for each in versions]
    notes = [f"torch {each['torch']}: {each['error']}" for each in versions if each.get("error")]
    for each in versions:
        notes += [
            f"torch {each['torch']}: {test['name'].rpartition('::')[2]}: {test['outcome']}: {shortened(test['detail'])}"
            for test in each["tests"]
            if test["outcome"] != results.PASSED
        ]
    heads = ("test", *(f"torch {each['torch']}, CUDA {each['cuda']}" for each in versions))
    lines = [("all", *totals), *lines] if versions else []
    yield "Recorder", heads, lines, notes or _why(found)
    found = document["ops"]
    heads = ("cases", "compared", "kept bytes equal", "peak equal", "sequence equal", "all three equal")
    lines = [
        (each["set"], *map(str, (each["compared"], *(each["equal"][key] for key in ("kept", "peak", "sizes", "all")))))
        for each in found.get("sets", [])
    ]
    yield "Ops", heads, lines, _why(found)
    found = document["steps"]
    heads = ("program", "precision", "PyTorch, bytes", "simulated, bytes", "difference")
    yield "Whole steps", heads, [_step(row) for row in found.get("rows", [])], _why(found)


def _why(part: Document) -> list[str]:
    return [f"not there: {part['skipped']}"] if "skipped" in part else []


def _step(row: Document) -> tuple[str, ...]:
    if row["failed"]:
        return row["program"], row["precision"], "", "", row["failed"]
    real, simulated = row["allocated"]
    difference = simulated - real
    share = f"{difference:+,} ({100 * difference / real:+.2f} %)" if difference else "equal"
    return row["program"], row["precision"], f"{real:,}", f"{simulated:,}", share


def page_of(document: Document) -> str:
    """The report as a page that needs nothing else."""
    from published.page import table, text, whole_page

    versions = document["recorder"].get("versions", [])
    tests = [test for each in versions for test in each["tests"]]
    passed = sum(test["outcome"] == results.PASSED for test in tests)
    broken = sum(test["outcome"] in results.BROKEN for test in tests)
    said = f"{passed:,} tests passed and {broken} failed on {len(versions)} versions of torch."
    cards = [
        "<h1>PyTorch's own CUDA build, without a GPU</h1>\n"
        f"<p>{said} A small library answers PyTorch's calls of the CUDA runtime; so PyTorch's own caching allocator, "
        "autograd engine, profiler, streams and the host side of every op run on any Linux machine. Kernels do "
        "nothing: values, times, the CUDA context and the workspaces that libraries choose remain for a GPU.</p>\n"
        f'<p class="quiet">ampmem {text(document["ampmem"])}, {text(document["date"])}. Made anew by '
        f"<code>{COMMAND}</code>.</p>"
    ]
    captions = {
        "Recorder": "How many of each test passed",
        "Ops": "How many cases are equal",
        "Whole steps": "Peaks of allocated memory",
    }
    introductions = {
        "Recorder": "Under ampmem a program prints what it prints without, makes the same allocations, and the "
        "recording has the peaks of <code>torch.cuda.memory_stats()</code> to the byte, with residual 0.",
        "Ops": "What the simulated GPU says that an op allocates, beside what PyTorch's CUDA build allocates.",
        "Whole steps": "Peaks of allocated memory of whole training programs: PyTorch's CUDA build and the simulated "
        "GPU, with the same torch.",
    }
    for heading, heads, lines, notes in tables(document):
        card = f"<h2>{heading}</h2>\n<p>{introductions[heading]}</p>"
        if lines:
            safe = [tuple(map(text, line)) for line in lines]
            card += "\n" + table(
                captions[heading], heads, safe, numbers=() if heading == "Recorder" else range(1, len(heads))
            )
        if notes:
            card += "\n<ul>" + "".join(f"<li>{text(note)}</li>\n" for note in notes) + "</ul>"
        cards.append(card)
    differ = [row for each in document["ops"].get("sets", []) for row in each["differ"]]
    if differ:
        lines = [
            (text(row["case"]), f"{row['emulated']:,}", f"{row['simulated']:,}", text(row["difference"]))
            for row in differ
        ]
        heads = ("case", "PyTorch, bytes", "simulated, bytes", "what differs")
        cards.append("<h2>Ops that differ</h2>\n" + table("Peaks of ops", heads, lines, numbers=(1, 2)))
    return whole_page("PyTorch's own CUDA build, without a GPU", cards)


def printed(document: Document) -> str:
    """The tables as text."""
    parts = []
    for heading, heads, lines, notes in tables(document):
        body = results.table([heads, *lines]) if lines else ""
        parts.append("\n".join(each for each in (f"== {heading}", body, *notes) if each))
    return "\n\n".join(parts)


def reason_not_to(name: str) -> str:
    """Why a table cannot be made; nothing where it can."""
    if name == "recorder" or (HERE / f"{name}.py").exists():
        return ""
    return f"tests/emulated/{name}.py does not exist"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"of {', '.join(VERSIONS)}, or another")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--only", action="append", choices=TABLES, help="run this alone; may be given several times")
    parser.add_argument("--quick", action="store_true", help="leave out what compiles and what starts fresh processes")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="versions of torch at a time")
    parser.add_argument("--go-on", type=Path, metavar="FOLDER", help="do not run again what passed, by its files")
    parser.add_argument("--page-only", action="store_true", help="run nothing: the page, from the JSON that is there")
    options = parser.parse_args(arguments)
    data = REPORT.with_suffix(".json")
    document: Document = {each: {"skipped": "it has not been run"} for each in TABLES}
    if data.exists():
        document |= json.loads(data.read_text(encoding="utf-8"))
    wanted = [] if options.page_only else options.only or TABLES
    versions = options.torch or [each for each in VERSIONS if options.install or emulation.environment(each).exists()]
    if wanted and not versions:
        sys.exit("no torch is installed: python tests/emulated/emulation.py --install")
    failed = []
    for version in versions if options.install else ():
        emulation.install(emulation.environment(version), version)
    for name in wanted:
        if why := reason_not_to(name):
            print(f"{name}: skipped: {why}")
            document[name] = {"skipped": why}
            continue
        print(f"== {name}", flush=True)
        try:
            if name == "recorder":
                before = {each["torch"]: each for each in document[name].get("versions", [])}
                with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
                    folder = options.go_on or Path(temporary)
                    folder.mkdir(parents=True, exist_ok=True)
                    found = pool.map(partial(recorder, quick=options.quick, folder=folder), versions)
                    before |= dict(zip(versions, found, strict=True))
                document[name] = {"versions": [before[version] for version in sorted(before)]}
                ran = [test for version in versions for test in before[version]["tests"]]
                failed += [name] if results.verdict(results.Row(**test) for test in ran) != "ok" else []
            else:
                chosen = emulation.TORCH if emulation.TORCH in versions else versions[-1]
                document[name] = {"ops": ops, "steps": steps}[name](chosen)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    if wanted:
        from ampmem.version import __version__

        document |= {"schema": "ampmem.emulated/1", "ampmem": __version__, "date": date.today().isoformat()}
        data.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    REPORT.with_suffix(".html").write_text(page_of(document), encoding="utf-8")
    print(printed(document))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
