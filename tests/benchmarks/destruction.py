"""Testing to destruction: how many tries of each class, and how many of them ended otherwise than they must.

    python tests/benchmarks/destruction.py [--kills 500] [--mutations 2000] [--threads 500] [--seed 0]
        [--sanitize address|thread] [CLASS...]

``kills``: ``ampmem profile`` is killed at a random instant, before a random SQL statement, at a random step of SQLite's
inside one, or in the write that makes a file larger than a random size. Each step that had ended is in the recording,
with the model's parameters and the optimizer. ``watched``: the same for ``ampmem watch``. ``guests``: programs run
plain and under ampmem; exit code, output, losses, random numbers and what is left in torch are the same. ``mutations``
and ``watched-mutations``: damaged and handmade recordings, and watched runs, give a right answer or one clear line.
``streams``: closed and broken streams, full disks and limits; the script ends as it does without ampmem. ``threads``:
four threads train four models, recorded by the C++ extension, to the end or for the first steps; the program ends with
the losses that it has without ampmem. ``--sanitize`` compiles the extension with gcc's sanitizer of that name for it: a
report that names the extension is a failure (``thread`` takes about 15 times as long; torch and Python are not compiled
so, and what happens there alone is left out).

The table is printed; what failed, before it. Exits with 1 when anything did.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

_TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_TESTS))

import click  # noqa: E402
from support import streams  # noqa: E402
from support.guest import NAMES, PROGRAMS, beside  # noqa: E402
from support.hostile import mutations  # noqa: E402
from support.ready_python import ready_python  # noqa: E402
from tabulate import tabulate  # noqa: E402

from ampmem.errors import AmpmemError  # noqa: E402
from ampmem.recorder.sources import extension  # noqa: E402
from ampmem.recording import read  # noqa: E402
from ampmem.recording.watched_file import read_watched  # noqa: E402

TIMEOUT_S = 120
STEPS, WATCHED_STEPS = 6, 40

SCRIPT = f"""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range({STEPS}):
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, flush=True)
"""
PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias")

KILLED = """
import os, resource, signal, sqlite3, sys
how, amount = sys.argv.pop(1), float(sys.argv.pop(1))
if how == "instant":
    signal.setitimer(signal.ITIMER_REAL, amount)  # nobody handles it: the kernel ends the process
elif how == "size":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(amount), int(amount)))
else:
    left, last, connect = int(amount), "", sqlite3.connect

    def count(statement=None):
        global last, left
        table = statement and statement.split()[:3]
        if table is None or table != last:  # of many rows for one table the first
            left, last = left - 1, table
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def killing(*args, **kwargs):
        database = connect(*args, **kwargs)
        database.execute("PRAGMA cache_size = 1")  # so that a transaction is in the file before it ends
        if how == "statement":
            database.set_trace_callback(count)
        else:
            database.set_progress_handler(count, 1)
        return database

    sqlite3.connect = killing
from ampmem.cli.main import main
main()
"""
MOST = {"instant": 2.0, "size": 1.2e5, "statement": 80, "instruction": 4.5e4}
"""The largest amount of each way to be killed: seconds, bytes, SQL statements, steps of SQLite's inside them. Some runs
end before that.
"""


def kills(folder: Path, count: int, seed: int) -> Iterator[Callable[[], list[str]]]:
    """The tries of the class ``kills``."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    chance = random.Random(seed)
    for number in range(count):
        how = list(MOST)[number % len(MOST)]
        amount = chance.uniform(0, MOST[how])
        yield lambda how=how, amount=amount, number=number: _killed(folder / str(number), script, how, amount)  # type: ignore[misc]


def _killed(folder: Path, script: Path, how: str, amount: float) -> list[str]:
    """One run that is killed; what is wrong with the recording that it leaves."""
    folder.mkdir()
    options = ("profile", "--quiet", "--steps", str(STEPS), "-o", "run.ampmem", str(script))
    command = [ready_python(), "-c", KILLED, how, str(amount), *options]
    done = run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    ended, path = len(done.stdout.split()), folder / "run.ampmem"
    where = f"killed by {how} at {amount:.6g}, {ended} steps had ended"
    try:
        recording = read(path)
    except AmpmemError as error:
        return [f"{where}: {error}"] if ended else []
    if len(recording.steps) < ended:
        return [f"{where}: {len(recording.steps)} are there"]
    known = (tuple(record.name for record in recording.parameters), len(recording.optimizers))
    if recording.steps and known != (PARAMETERS, 1):
        return [f"{where}: parameters {known[0]}, {known[1]} optimizers"]
    return []


def watched_kills(folder: Path, count: int, seed: int) -> Iterator[Callable[[], list[str]]]:
    """The tries of the class ``watched``."""
    script = folder / "watch.py"
    script.write_text(SCRIPT.replace(f"range({STEPS})", f"range({WATCHED_STEPS})"))
    chance = random.Random(seed)
    for number in range(count):
        how = list(MOST)[number % len(MOST)]
        amount = chance.uniform(0, MOST[how])
        yield lambda how=how, amount=amount, number=number: _killed_watch(  # type: ignore[misc]
            folder / f"watched-{number}", script, how, amount
        )


def _killed_watch(folder: Path, script: Path, how: str, amount: float) -> list[str]:
    """One watched run that is killed; what is wrong with the file that it leaves."""
    folder.mkdir()
    command = [ready_python(), "-c", KILLED, how, str(amount), "watch", "--quiet", "--every", "10", "-o", "run.ampmem"]
    done = run([*command, str(script)], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    ended, path = len(done.stdout.split()), folder / "run.ampmem"
    where = f"killed by {how} at {amount:.6g}, {ended} steps had ended"
    try:
        steps = [row.step for row in read_watched(path).rows]
    except AmpmemError as error:
        return [f"{where}: {error}"] if ended else []
    return [] if len(steps) >= ended and steps == list(range(len(steps))) else [f"{where}: {steps} are there"]


def guests(folder: Path) -> Iterator[Callable[[], list[str]]]:
    """The tries of the class ``guests``."""
    for name in NAMES:
        yield lambda name=name: [f"{name}: {line}" for line in beside(folder / name, name).differences()]  # type: ignore[misc]


def damaged(count: int, seed: int, bases: Sequence[str]) -> Iterator[Callable[[], list[str]]]:
    """The tries of the classes of mutations, which come to be one after the other."""
    for name, path in mutations.tries(count, seed, bases):
        problem = mutations.outcome(path)
        yield lambda name=name, problem=problem: [] if problem is None else [f"{name}: {problem}"]  # type: ignore[misc]


def broken(folder: Path) -> Iterator[Callable[[], list[str]]]:
    """The tries of the class ``streams``."""
    for case in streams.CASES:
        where = folder / f"streams-{case.name}"
        where.mkdir()
        yield lambda case=case, where=where: [f"{case.name}: {line}" for line in streams.run(case, where)]  # type: ignore[misc]
    for closed in streams.CLOSED:
        where = folder / f"streams-closed-{streams.CLOSED.index(closed)}"
        where.mkdir()
        yield lambda closed=closed, where=where: [f"{closed}: {line}" for line in streams.run_closed(closed, where)]  # type: ignore[misc]


THREADED = "trains_on_threads"
RECORDED_STEPS = ("2", "1000")
"""Steps that are recorded: the recording ends while all threads train, or with them."""
SANITIZERS = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS_OF_SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
    "TSAN_OPTIONS": "report_signal_unsafe=0:exitcode=0:history_size=4",
}


def on_threads(folder: Path, count: int, sanitizer: str | None) -> Iterator[Callable[[], list[str]]]:
    """The tries of the class ``threads``; the extension is compiled into ``folder``."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), extension.VARIABLE: "on"}
    python = ready_python()
    if sanitizer is not None:  # it must be there before Python is
        library = run(["gcc", f"-print-file-name={SANITIZERS[sanitizer]}"], capture_output=True, text=True, check=True)
        environment |= {"CXX": f"c++ -g -O1 -fsanitize={sanitizer}", "LD_PRELOAD": library.stdout.strip()}
        environment |= OPTIONS_OF_SANITIZERS
        python = sys.executable
    run([sys.executable, "-m", "ampmem", "extension"], env=environment, capture_output=True, check=True)
    script = str(PROGRAMS / f"{THREADED}.py")
    plain = run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    for number in range(count):
        steps = RECORDED_STEPS[number % len(RECORDED_STEPS)]
        options = ("profile", "--run-to-end", "--quiet", "--steps", steps, "-o", f"threads-{number}.ampmem", script)
        command = [python, "-m", "ampmem", *options]
        yield lambda command=command: _threaded(folder, command, environment, plain)  # type: ignore[misc]


def _threaded(folder: Path, command: list[str], environment: dict[str, str], plain: str) -> list[str]:
    """One run of the program with threads; what is wrong with its end."""
    done = run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    reports = [report for report in done.stderr.split("=" * 18 + "\n") if extension.path().name in report]
    wrong = [] if (done.returncode, done.stdout) == (0, plain) else [f"{done.returncode}: {done.stdout}{done.stderr}"]
    return wrong + reports


def classes(
    folder: Path, wanted: dict[str, int], seed: int, sanitizer: str | None
) -> dict[str, Iterator[Callable[[], list[str]]]]:
    """Every class that there is, by name."""
    return {
        "kills": kills(folder, wanted["kills"], seed),
        "watched": watched_kills(folder, wanted["kills"], seed),
        "guests": guests(folder),
        "mutations": damaged(wanted["mutations"], seed, mutations.RECORDINGS),
        "watched-mutations": damaged(wanted["mutations"], seed, ["watched"]),
        "streams": broken(folder),
        "threads": on_threads(folder, wanted["threads"], sanitizer),
    }


def tried(name: str, tries: Iterator[Callable[[], list[str]]]) -> tuple[int, int]:
    """How many tries there were, and how many failed; prints those."""
    count = failures = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for problems in pool.map(lambda attempt: attempt(), tries):
            count += 1
            failures += bool(problems)
            for problem in problems:
                print(f"{name}: {problem}", flush=True)
    return count, failures


@click.command()
@click.option("--kills", default=500, show_default=True)
@click.option("--mutations", default=2000, show_default=True)
@click.option("--threads", default=500, show_default=True)
@click.option("--sanitize", type=click.Choice(tuple(SANITIZERS)), help="For threads.")
@click.option("--seed", default=0, show_default=True)
@click.argument("names", nargs=-1, metavar="[CLASS]...")
def main(kills: int, mutations: int, threads: int, sanitize: str | None, seed: int, names: tuple[str, ...]) -> None:
    """Try to break it, and count."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and their children
    with TemporaryDirectory() as folder:
        wanted = {"kills": kills, "mutations": mutations, "threads": threads}
        found = classes(Path(folder), wanted, seed, sanitize)
        rows = [(name, *tried(name, tries)) for name, tries in found.items() if not names or name in names]
    print(tabulate(rows, headers=("class", "tries", "failures"), tablefmt="github"))
    sys.exit(any(failures for _, _, failures in rows))


if __name__ == "__main__":
    main()
