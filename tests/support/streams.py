"""Standard streams that are closed, full or without a reader, and disks that fail: a table of cases.

Each is a program that trains, run plain and under ``ampmem profile`` in the same surroundings. Both must end with the
same exit code, write the same to what can be read, and leave the same in the file ``seen``, which the program keeps.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.guest import PROGRAMS, Ended, without_ours
from support.ready_python import ready_python

TIMEOUT_S = 120

PROGRAM = """
import os, pathlib, resource, shutil, signal, sys
import torch
from torch import nn

HERE = pathlib.Path.cwd()
{first}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = (HERE / "seen").open("w")
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
    seen.write(f"{{loss.item()}}\\n")
    seen.flush()
    if step == 1:
        {within}
{last}
seen.write("end\\n")
seen.close()
"""

PLAIN = """
import os, resource, runpy, signal, sys
sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # whatever PYTHONUNBUFFERED says
{before}
sys.argv, sys.path[0] = ["program.py"], os.getcwd()
runpy.run_path(os.path.abspath("program.py"), run_name="__main__")
"""

RECORDED = """
import os, resource, signal, sys
from ampmem.cli.main import main
sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # whatever PYTHONUNBUFFERED says
{before}
sys.argv[:] = ["ampmem", "profile", "--run-to-end", "--steps", "3", *{options!r}, "program.py"]
main()
"""

_STARTED = re.compile(r'^  File "<string>", .*\n', re.MULTILINE)
"""The frame of :data:`PLAIN` in a traceback."""

QUIET = ("--quiet",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case.

    ``before`` is what is done to the process before the program starts; ``first``, ``within`` and ``last`` are what
    the program itself does. Of the streams in ``leaving`` (``out``, ``err``) the reader goes away once it has read the
    line ``ready``; the program waits for that.
    """

    name: str
    before: str = ""
    first: str = ""
    within: str = "pass"
    last: str = ""
    options: tuple[str, ...] = QUIET
    leaving: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """Its source."""
        return PROGRAM.format(first=self.first, within=self.within, last=self.last)


def run(case: Case, folder: Path) -> list[str]:
    """Run ``case`` both ways, in new folders below ``folder``: in what the two differ, one line each."""
    plain = _end(case, folder / "plain", PLAIN.format(before=case.before))
    recorded = _end(case, folder / "recorded", RECORDED.format(before=case.before, options=case.options))
    return [
        f"{what}: plain {before!r}, with ampmem {after!r}"
        for what, before, after in zip(("code", "out", "err", "seen"), plain, recorded, strict=True)
        if before != after
    ]


CLOSED = ("<&- >&- 2>&-", ">&-", "2>&-", "<&-")
"""What a shell closes before it starts a program."""


def run_closed(closed: str, folder: Path) -> list[str]:
    """Once more with a Python that starts so, as the cases only put themselves in its place: what differs."""
    script = str(PROGRAMS / "trains.py")
    ended = []
    for words in ([script], ["-m", "ampmem", "profile", "--run-to-end", "-o", "run.ampmem", script]):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        said = [line for line in done.stderr.splitlines() if not line.startswith(("ampmem: ", " ")) and line]
        ended.append((done.returncode, done.stdout, said if words == [script] else []))
    missing = [] if (folder / "run.ampmem").exists() else ["there is no recording"]
    return missing if ended[0] == ended[1] else [f"plain {ended[0]}, with ampmem {ended[1]}", *missing]


def _end(case: Case, folder: Path, code: str) -> tuple[int, str, str, str]:
    """How the run ``code`` of ``case`` ends in the new ``folder``: exit code, output, errors, and what it has seen."""
    folder.mkdir(parents=True)
    (folder / "program.py").write_text(case.program)
    done = _run([ready_python(to_the_end=True), "-c", code], folder, case.leaving)
    err = _STARTED.sub("", done.err.replace(str(folder), ""))
    seen = folder / "seen"
    return done.code, done.out, err, seen.read_text() if seen.exists() else ""


def _run(command: Sequence[str], folder: Path, leaving: Sequence[str]) -> Ended:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            if name in leaving and stream is not None:
                while stream.readline() not in ("ready\n", ""):
                    pass
                stream.close()
        process.stdout = None if "out" in leaving else process.stdout
        process.stderr = None if "err" in leaving else process.stderr
        out, err = process.communicate("go on\n", timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    return without_ours(subprocess.CompletedProcess(command, process.returncode, out or "", err or ""))


_STREAMS = ("stdin", "stdout", "stderr")


def _closed(*descriptors: int) -> str:
    """As Python finds them when it starts, and the shell has closed them."""
    return "\n".join(
        f"os.close({each}); sys.{_STREAMS[each]} = sys.__{_STREAMS[each]}__ = None" for each in descriptors
    )


def _is(file: str, *descriptors: int, flags: str = "os.O_WRONLY") -> str:
    """They are ``file``."""
    return "\n".join(f"os.dup2(os.open({file!r}, {flags}), {each})" for each in descriptors)


def _without_reader(*descriptors: int) -> str:
    return "\n".join(
        f"reader, writer = os.pipe(); os.close(reader); os.dup2(writer, {each}); os.close(writer)"
        for each in descriptors
    )


def _limit(name: str, value: int) -> str:
    return f"resource.setrlimit(resource.{name}, ({value}, {value}))"


_FULL = "/dev/full"
_READ_ONLY = "os.O_RDONLY"
_HUNG_UP = "import pty; ours, theirs = pty.openpty(); os.dup2(theirs, {0}); os.close(theirs); os.close(ours)"
_READY = 'print("ready", flush=True); print("ready", file=sys.stderr, flush=True); sys.stdin.readline()'
_FAILS = 'raise ValueError("mine")'
_EXITS = 'seen.close(); sys.exit("told so")'  # else it may be in ``seen``, whose descriptor is 2 where that was closed
_FLUSHES = "sys.stdout.flush()"
_SAYS = 'print("to stderr", file=sys.stderr)'
_TABLES = ()
_PAGE = ("--quiet", "--html", "page.html")
_ELSEWHERE = ("--quiet", "-o", "there/run.ampmem")
_THERE = 'os.makedirs("there", exist_ok=True)'
_DIES_OF_SIGPIPE = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"

FAST = (
    Case(name="stdin closed", before=_closed(0)),
    Case(name="stdout closed", before=_closed(1)),
    Case(name="stderr closed", before=_closed(2)),
    Case(name="all closed", before=_closed(0, 1, 2)),
    Case(name="stdout full", before=_is(_FULL, 1)),
    Case(name="stderr full", before=_is(_FULL, 2)),
    Case(name="stderr without a reader", before=_without_reader(2)),
    Case(name="stderr closed, fails", before=_closed(2), last=_FAILS),
    Case(name="stderr full, fails", before=_is(_FULL, 2), last=_FAILS),
    Case(name="tables, stderr full", before=_is(_FULL, 2), options=_TABLES),
    Case(name="the reader of stderr leaves", within=_READY, leaving=("err",)),
    Case(name="room for a part of the recording", before=_limit("RLIMIT_FSIZE", 150_000)),
)
SLOW = (
    Case(name="stdin and stdout closed", before=_closed(0, 1)),
    Case(name="stdout and stderr closed", before=_closed(1, 2)),
    Case(name="both full", before=_is(_FULL, 1, 2)),
    Case(name="stdout without a reader", before=_without_reader(1)),
    Case(name="both without a reader", before=_without_reader(1, 2)),
    Case(name="stderr without a reader, fails", before=_without_reader(2), within=_FAILS),
    Case(name="stdout full, flushes", before=_is(_FULL, 1), within=_FLUSHES),
    Case(name="the reader of stdout leaves", within=_READY, leaving=("out",)),
    Case(name="the folder vanishes", before=_THERE, within='shutil.rmtree("there")', options=_ELSEWHERE),
    Case(name="the recording is removed", within='(HERE / "program.ampmem").unlink(missing_ok=True)'),
    Case(name="another folder", first='os.mkdir("sub"); os.chdir("sub")'),
    Case(name="stdin and stderr closed", before=_closed(0, 2)),
    Case(name="stdout closed, fails", before=_closed(1), within=_FAILS),
    Case(name="all closed, fails", before=_closed(0, 1, 2), within=_FAILS),
    Case(name="stderr closed, exits with words", before=_closed(2), last=_EXITS),
    Case(name="stderr full, exits with words", before=_is(_FULL, 2), last=_EXITS),
    Case(name="stderr without a reader, exits with words", before=_without_reader(2), last=_EXITS),
    Case(name="stdout without a reader, flushes", before=_without_reader(1), within=_FLUSHES),
    Case(name="stdout without a reader, fails", before=_without_reader(1), within=_FAILS),
    Case(name="stderr full, speaks", before=_is(_FULL, 2), within=_SAYS),
    Case(name="stderr without a reader, speaks", before=_without_reader(2), within=_SAYS),
    Case(name="stdout read-only", before=_is("/dev/null", 1, flags=_READ_ONLY)),
    Case(name="stderr read-only", before=_is("/dev/null", 2, flags=_READ_ONLY)),
    Case(name="stdin a folder", before=_is(".", 0, flags=_READ_ONLY)),
    Case(name="stdout full, stderr closed", before=f"{_is(_FULL, 1)}\n{_closed(2)}"),
    Case(name="stdout closed, stderr full", before=f"{_closed(1)}\n{_is(_FULL, 2)}"),
    Case(name="stderr a terminal that hung up", before=_HUNG_UP.format(2)),
    Case(name="stdout a terminal that hung up", before=_HUNG_UP.format(1)),
    Case(name="tables, stderr closed", before=_closed(2), options=_TABLES),
    Case(name="tables, stderr without a reader", before=_without_reader(2), options=_TABLES),
    Case(name="a page, all closed", before=_closed(0, 1, 2), options=_PAGE),
    Case(name="the readers of both leave", within=_READY, leaving=("out", "err")),
    Case(name="the readers of both leave at the end", last=_READY, leaving=("out", "err"), options=_TABLES),
    Case(name="SIGPIPE ends it, stderr without a reader", first=_DIES_OF_SIGPIPE, before=_without_reader(2)),
    Case(name="SIGPIPE ends it, stdout without a reader", first=_DIES_OF_SIGPIPE, before=_without_reader(1)),
    Case(name="closes its stdout", within="sys.stdout.close(); sys.stdout = None"),
    Case(name="closes descriptor 2", within="os.close(2)"),
    Case(name="closes descriptor 1", within="os.close(1)"),
    Case(name="has no stderr any more", within="sys.stderr = None"),
    Case(name="puts a full disk in the place of stderr", within=f"os.dup2(os.open({_FULL!r}, os.O_WRONLY), 2)"),
    Case(name="closes what it has not opened", first="os.closerange(20, 60)"),
    Case(name="few descriptors", before=_limit("RLIMIT_NOFILE", 24)),
    Case(name="no room for a step", before=_limit("RLIMIT_FSIZE", 70_000)),
    Case(name="no room left, in the middle", within=_limit("RLIMIT_FSIZE", 1000)),
    Case(name="no room for the page", before=_limit("RLIMIT_FSIZE", 1_000_000), options=_PAGE),
    Case(name="the recording is replaced", within='(HERE / "program.ampmem").write_text("mine")'),
    Case(name="the recording is cut", within="[os.truncate(file, 100) for file in HERE.glob('*.ampmem')]"),
    Case(name="the recording is read-only", within="[file.chmod(0o400) for file in HERE.glob('*.ampmem')]"),
    Case(name="a umask that forbids all", first="os.umask(0o777); (HERE / 'seen').touch(0o600)"),
    Case(
        name="the page's folder vanishes",
        before=_THERE,
        within='shutil.rmtree("there")',
        options=("--quiet", "--html", "there/page.html"),
    ),
    Case(
        name="its own folder is gone",
        before="os.mkdir('sub'); import shutil; shutil.copy('program.py', 'sub'); os.chdir('sub')",
        within="shutil.rmtree(HERE)",
    ),
)
CASES = FAST + SLOW
