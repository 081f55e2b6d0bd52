"""The most that the door admits, of each kind: files that are sound, and as much work as a file can be.

``python tests/support/hostile/worst.py`` prints what each command takes for each; ``… NAME COMMAND`` one of them.
"""

import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support.hostile.seeds import on_cpu, on_gpu, write_whole

from ampmem.events import Action, Fact, Phase

Rows = Mapping[str, Iterable[tuple[object, ...]]]

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "show": ("show", "FILE"),
    "json": ("show", "--json", "FILE"),
    "check": ("show", "--check", "FILE"),
    "both": ("show", "FILE", "FILE"),
    "report": ("report", "FILE", "-o", "OUT"),
    "csv": ("export", "FILE", "--format", "csv", "-o", "OUT"),
    "perfetto": ("export", "FILE", "--format", "perfetto", "-o", "OUT"),
    "snapshot": ("export", "FILE", "--format", "snapshot", "-o", "OUT"),
}

_LATER = 10_000
"""Nanoseconds; after all that the sound recording has."""


def _step(index: int, start: int, end: int) -> tuple[object, ...]:
    return (index, start, end, 0, 1.0, None, 1, 0, 1, 0, 1)


def _event(
    time: int, action: Action, address: int, *, step: int = 1, op: int = 0, module: int = 0, stack: int = 0
) -> tuple[int, ...]:
    return (time, step, int(Phase.FORWARD), int(action), address, 40, 512, 0, op, module, stack, -1)


def _fact(time: int, address: int, fact: Fact, name: int = 0, module: int = 0) -> tuple[int, ...]:
    return (time, address, int(fact), name, module, 0)


def _parameter(name: str, shape: str = "[10]", kind: str = "Linear") -> tuple[object, ...]:
    return (name, 10, 40, "float32", 1, shape, kind, 0, None, 0)


def _texts(values: Iterable[str]) -> list[tuple[int, str]]:
    return [(1000 + number, value) for number, value in enumerate(values)]


_ONE_STEP: Rows = {"step": [_step(2, _LATER, _LATER + 100_000_000)], "phase": [(_LATER, 2, 3)]}
"""A third step, in which is all that a case adds."""


def _steps(first: int) -> Rows:
    starts = [(2 + x, _LATER + 100 * x) for x in range(29_998)]
    return {
        "step": (_step(x, at, at + 90) for x, at in starts),
        "phase": ((at + 20 * n, x, n + 2) for x, at in starts for n in range(4)),
        "event": (
            _event(at + 10 * n, Action.ALLOC if n < 4 else Action.FREE, 1 << 20 | n % 4 << 12, step=x)
            for x, at in starts
            for n in range(8)
        ),
        "fact": (_fact(at + 10 * n + 1, 1 << 20 | n % 4 << 12, Fact.SAVED) for x, at in starts for n in range(4)),
    }


def _overlapping_steps(first: int) -> Rows:
    return {
        "step": (_step(2 + x, _LATER, _LATER + 10_000_000) for x in range(29_998)),
        "event": (_event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9)) for x in range(200_000)),
    }


def _parameters(first: int) -> Rows:
    names = [f"blocks.{x // 2}.weight{x % 2}" for x in range(99_900)]
    return {
        "text": _texts(names),
        "parameter": map(_parameter, names),
        "event": (_event(20 + 0 * x, Action.BASELINE, (1 << 30) + (x << 9), step=-1) for x in range(len(names))),
        "fact": (_fact(20, (1 << 30) + (x << 9), Fact.PARAMETER, first + x) for x in range(len(names))),
    }


def _modules(first: int) -> Rows:
    names = [f"m{x}" for x in range(99_000)]
    return {
        "text": _texts(names),
        "event": (_event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9), module=first + x) for x in range(len(names))),
        "fact": (_fact(_LATER + x, (1 << 30) + (x << 9), Fact.SAVED, 0, first + x) for x in range(len(names))),
        "step": [_step(2, _LATER, _LATER + 1_000_000)],
        "phase": [(_LATER, 2, 3)],
    }


def _deep_modules(first: int) -> Rows:
    names = [f"{x}" + ".a" * 2800 for x in range(2)]
    return {
        "text": _texts(names),
        "parameter": (_parameter(f"{name}.weight") for name in names),
        "event": (_event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9), module=first + x % 2) for x in range(1000)),
        "fact": (_fact(_LATER + x, (1 << 30) + (x << 9), Fact.SAVED, 0, first + x % 2) for x in range(1000)),
        "step": [_step(2, _LATER, _LATER + 1_000_000)],
        "phase": [(_LATER, 2, 3)],
    }


def _cast_copies(first: int) -> Rows:
    count = 100_000
    names = [f"blocks.{x // 10}.part{x % 10}.weight" for x in range(20_000)]
    when = [_LATER + 10 * x for x in range(count)]
    return {
        "text": _texts(names),
        "parameter": map(_parameter, names),
        "event": (
            *(_event(at, Action.ALLOC, (1 << 30) + (x << 9), step=2) for x, at in enumerate(when)),
            *(_event(_LATER + 10 * count + x, Action.FREE, (1 << 30) + (x << 9), step=2) for x in range(count)),
        ),
        "fact": (
            (
                at + 1 + use,
                (1 << 30) + (x << 9),
                int(Fact.CAST_USE if use else Fact.CAST_COPY),
                first + x % 20_000,
                0,
                0,
            )
            for x, at in enumerate(when)
            for use in range(3)
        ),
        **_ONE_STEP,
    }


def _phases(first: int) -> Rows:
    return {
        "step": [_step(2, _LATER, _LATER + 100_000_000)],
        "phase": ((_LATER + x, 2, 2 + x % 5) for x in range(600_000)),
        "event": (_event(_LATER + x * 6, Action.ALLOC, (1 << 30) + (x << 9), step=2) for x in range(100_000)),
    }


def _notes(first: int) -> Rows:
    return {"note": ((f"{x} " + "warning: \x1b\u202e" * 200,) for x in range(9_990))}


def _optimizers(first: int) -> Rows:
    settings = "{" + ", ".join(f'"setting{x}": {x}' for x in range(100)) + "}"
    return {
        "optimizer": ((f"Adam{x}", "foreach", '["Adam", "Optimizer"]', settings) for x in range(9_990)),
        "parameter": ((f"b{x}.w", 10, 40, "float32", 1, "[10]", "Linear", x % 9_990, None, 0) for x in range(99_000)),
    }


def _ooms(first: int) -> Rows:
    pack = "[" + ",".join(f"[{x << 16},2048,0,1,0,[0,0],[[512,64,1],[1536,0,0]]]" for x in range(100)) + "]"
    row = (0, 0, "0,0", 8192, 1 << 21, 1 << 30, 100, "aten::mm", "layers.1", "train.py:9 main\n" * 30, pack)
    return {"oom": ((_LATER + x, 2, *row) for x in range(9_990))}


def _long_names(first: int) -> Rows:
    names = [f"{x}".ljust(9_900, "\u202e") for x in range(800)]
    return {
        "text": _texts(names),
        "parameter": (_parameter(f"{name}.weight", kind=name) for name in names),
        "event": (
            _event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9), step=2, module=first + x, op=first + x)
            for x in range(800)
        ),
        "fact": (_fact(_LATER + x, (1 << 30) + (x << 9), Fact.SAVED, first + x, first + x) for x in range(800)),
        **_ONE_STEP,
    }


def _long_stacks(first: int) -> Rows:
    stacks = [f"a{x}.py:1 f\n" + "train.py:9 main\n" * 60_000 for x in range(50)]
    return {
        "text": _texts(stacks),
        "event": (
            _event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9), step=2, stack=first + x % 50) for x in range(20_000)
        ),
        **_ONE_STEP,
    }


def _many_stacks(first: int) -> Rows:
    stacks = ["".join(f"a{x}.py:{n} f\n" for n in range(100)) for x in range(2_500)]
    return {
        "text": _texts(stacks),
        "event": (
            _event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9), step=2, stack=first + x) for x in range(2_500)
        ),
        **_ONE_STEP,
    }


def _layers(first: int) -> Rows:
    return {
        "layers": ((x, "peak", 8600, 9000, 9000, 20000, 30000, 25000) for x in range(119_990)),
        "plain_step": ((100 + x,) for x in range(99_990)),
    }


def _events(first: int) -> Rows:
    return {
        "event": (_event(_LATER + x, Action.ALLOC, (1 << 30) + (x << 9), step=2) for x in range(600_000)),
        **_ONE_STEP,
    }


def _one_address(first: int) -> Rows:
    return {
        "event": (_event(_LATER + x, Action.FREE if x % 2 else Action.ALLOC, 1 << 30, step=2) for x in range(600_000)),
        "fact": (_fact(_LATER + x // 2 * 2 + 1, 1 << 30, Fact.SAVED) for x in range(600_000)),
        **_ONE_STEP,
    }


def _facts(first: int) -> Rows:
    return {
        "event": [_event(_LATER, Action.ALLOC, 1 << 30, step=2)],
        "fact": (_fact(_LATER + x, 1 << 30, Fact(1 + x % 19), x % 5, x % 5) for x in range(1_000_000)),
        **_ONE_STEP,
    }


def _segments(first: int) -> Rows:
    return {
        "segment": (
            (_LATER + x, 40 + x, 2 + x // 100_000, (1 << 40) + (x % 100_000 << 13), 8192, 0, 0, 0)
            for x in range(200_000)
        ),
        "event": (_event(_LATER + x, Action.ALLOC, (1 << 40) + (x << 13), step=2) for x in range(200_000)),
        **_ONE_STEP,
    }


def _shapes(first: int) -> Rows:
    return {"parameter": (_parameter(f"b{x}.w", f"[{', '.join(['2'] * 1000)}]") for x in range(20_000))}


def _texts_alone(first: int) -> Rows:
    return {"text": _texts(f"text {x}" for x in range(2_000_000))}


CASES: Mapping[str, tuple[str, Callable[[int], Rows]]] = {
    "steps": ("cpu", _steps),
    "steps, each the whole run": ("cpu", _overlapping_steps),
    "parameters": ("cpu", _parameters),
    "modules": ("cpu", _modules),
    "modules, deep": ("cpu", _deep_modules),
    "cast copies": ("cpu", _cast_copies),
    "phases": ("cpu", _phases),
    "notes": ("cpu", _notes),
    "optimizers": ("cpu", _optimizers),
    "ooms": ("gpu", _ooms),
    "long names": ("cpu", _long_names),
    "long stacks": ("cpu", _long_stacks),
    "many stacks": ("cpu", _many_stacks),
    "layers": ("gpu", _layers),
    "events": ("cpu", _events),
    "events at one address": ("cpu", _one_address),
    "facts of one address": ("cpu", _facts),
    "segments": ("gpu", _segments),
    "shapes": ("cpu", _shapes),
    "texts": ("cpu", _texts_alone),
}


def make(name: str, path: Path) -> Path:
    """The case ``name`` at ``path``."""
    device, rows = CASES[name]
    write_whole(path, on_gpu() if device == "gpu" else on_cpu())
    with closing(sqlite3.connect(path)) as database, database:
        first = database.execute("SELECT count(*) FROM text").fetchone()[0]
        for table, values in rows(first).items():
            columns = database.execute(f"SELECT * FROM {table} LIMIT 0").description
            if table == "text":
                values = ((first + number, value[1]) for number, value in enumerate(values))
            if table == "parameter":
                database.execute("DELETE FROM parameter WHERE rowid > 1")
            database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", values)
    return path


def taken(path: Path, command: str, *, seconds: int, memory: int) -> tuple[int, float, int, str]:
    """What a command makes of ``path`` within the limits: exit code, CPU seconds, bytes at the most, what it says."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        out = f"{folder}/out"
        arguments = [{"FILE": str(path), "OUT": out}.get(word, word) for word in COMMANDS[command]]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        started = subprocess.Popen(
            [sys.executable, "-m", "ampmem", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=said,
            preexec_fn=limited,
        )
        _, status, usage = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        words = said.read().decode(errors="replace")
        return started.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, words


def main() -> None:
    """Print a table of what all of them take, or what one does."""
    commands = [word for word in sys.argv[1:] if word in COMMANDS] or list(COMMANDS)
    names = [word for word in sys.argv[1:] if word in CASES] or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = make(name, Path(folder) / "worst.ampmem")
            print(f"{name} ({path.stat().st_size >> 20} MiB)", flush=True)
            for command in commands:
                code, seconds, memory, said = taken(path, command, seconds=15, memory=4 << 30)
                last = said.strip().rpartition("\n")[2][:150]
                print(f"  {command:9} {code:4} {seconds:6.1f} s {memory >> 20:6} MiB  {last}", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
