import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.hostile.handmade import CASES, WATCHED_CASES, WATCHED_TEXTS, make
from support.hostile.mutations import MEMORY, outcome
from support.hostile.outcomes import SECONDS
from support.hostile.seeds import on_cpu, write_watched, write_whole

from ampmem.errors import RecordingError
from ampmem.recording import read

pytestmark = pytest.mark.slow

SOUND = ("as many steps as there may be, each the whole run", "phases that change without an end")
"""What is unusual, and yet a recording, as is an optimizer for each parameter."""

COMMANDS = {
    "show": ("show", "FILE"),
    "json": ("show", "--json", "FILE"),
    "check": ("show", "--check", "FILE"),
    "both": ("show", "FILE", "FILE"),
    "report": ("report", "FILE", "-o", "OUT"),
    "csv": ("export", "FILE", "--format", "csv", "-o", "OUT"),
    "perfetto": ("export", "FILE", "--format", "perfetto", "-o", "OUT"),
    "snapshot": ("export", "FILE", "--format", "snapshot", "-o", "OUT"),
    "full": ("show", "--full", "0", "FILE"),
    "top": ("top", "--once", "FILE"),
    "tops": ("top", "--once", "FILE", "FILE"),
}
OF_RECORDINGS = ("show", "json", "check", "both", "report", "csv", "perfetto", "snapshot")
OF_REFUSED = ("show", "top")
"""The others read a watched run by the same function."""
OF_WATCHED = (*OF_REFUSED, "report", "full", "json", "both", "tops")


EACH = """
import json, os, resource, sys
from ampmem.cli import export, report, show, top
from ampmem.cli.main import main
from ampmem.reporters import html

memory, seconds, commands = json.loads(sys.argv[1])
for number, arguments in enumerate(commands):
    child = os.fork()
    if not child:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as ended:
            if not isinstance(ended.code, int):
                raise
            sys.stdout.flush()
            os._exit(ended.code)  # taking Python apart takes longer than most commands
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs each command in a process of its own, within limits; what they all import is imported once."""

MOST_IN_A_LINE, MOST_SHOWN = 10_000, 200_000
"""The most characters of a line, and of all that a command prints for people."""

SLOWEST = 3
"""How much longer a slow or busy processor may take: what has no end is caught all the same."""
IMPORTS_S = 1
"""What a process that imports it for itself has less of its time."""


def in_processes(folder: Path, tries: Sequence[tuple[Path, str]]) -> list[tuple[int, str]]:
    """What each command makes of its file within the limits: its exit code, and what it says."""
    commands = [
        [{"FILE": str(path), "OUT": f"{number}.made"}.get(word, word) for word in COMMANDS[command]]
        for number, (path, command) in enumerate(tries)
    ]
    given = json.dumps([MEMORY, SLOWEST * int(SECONDS) - IMPORTS_S, commands])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EACH, given], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    streams = ["out" if command == "check" else "err" for _, command in tries]
    codes = map(int, done.stdout.split())
    return [
        (code, (folder / f"{number}.{stream}").read_text())
        for number, (code, stream) in enumerate(zip(codes, streams, strict=True))
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole") / "whole.ampmem", on_cpu())


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> dict[str, tuple[Path, int, str]]:
    """Of each case the file, and what ``ampmem show`` makes of it."""
    folder = tmp_path_factory.mktemp("shown")
    paths = [make(name, whole, folder / f"hostile{number}.ampmem") for number, name in enumerate(CASES)]
    ended = in_processes(folder, [(path, "show") for path in paths])
    return {name: (path, *each) for name, path, each in zip(CASES, paths, ended, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_recording_is_one_clear_line(shown: dict[str, tuple[Path, int, str]], name: str) -> None:
    path, code, said = shown[name]
    if name in SOUND or name == "an optimizer for each parameter":
        assert (code, said) == (0, "")
        return
    assert code == 1
    assert said.startswith(f"ampmem: {path} is not an ampmem recording, or it is damaged (")
    assert said.rstrip("\n").isprintable()


@pytest.mark.parametrize("name", ["a view without an end", SOUND[1]])
def test_every_command_keeps_within_the_limits(tmp_path: Path, whole: Path, name: str) -> None:
    path = make(name, whole, tmp_path / "hostile.ampmem")
    ended = in_processes(tmp_path, [(path, each) for each in OF_RECORDINGS])
    for command, (code, said) in zip(OF_RECORDINGS, ended, strict=True):
        assert code == (0 if name in SOUND else 1), command
        assert "Traceback" not in said, command
        if name not in SOUND:
            assert str(path) in said, command


Ended = list[tuple[str, int, str, str]]
"""Each command on a file, with its exit code and what it prints to its two streams."""


@pytest.fixture(scope="module")
def of_watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """The folder with a file for each case, by number, and what the commands make of the cases."""
    folder = tmp_path_factory.mktemp("watched")
    whole = write_watched(folder / "whole.ampmem")
    tries = [
        (name, make(name, whole, folder / f"hostile{number}.ampmem"), command)
        for number, name in enumerate((*WATCHED_CASES, *WATCHED_TEXTS))
        for command in (OF_REFUSED if name in WATCHED_CASES else OF_WATCHED)
    ]
    found: dict[str, Ended] = {}
    ended = in_processes(folder, [(path, command) for _, path, command in tries])
    for number, ((name, _, command), (code, said)) in enumerate(zip(tries, ended, strict=True)):
        output = (folder / f"{number}.out").read_text(encoding="utf-8", errors="surrogateescape")
        found.setdefault(name, []).append((command, code, output, said))
    return folder, found


@pytest.mark.parametrize("name", WATCHED_CASES)
def test_a_hostile_watched_run_is_one_clear_line(of_watched: tuple[Path, dict[str, Ended]], name: str) -> None:
    path = of_watched[0] / f"hostile{list(WATCHED_CASES).index(name)}.ampmem"
    for command, code, output, said in of_watched[1][name]:
        assert (code, output) == (1, ""), (command, output[:100])
        assert said.startswith("ampmem: ") and said.count("\n") == 1, command
        assert "damaged" in said and str(path) in said, command
        assert said.rstrip("\n").isprintable(), command


@pytest.mark.parametrize("name", WATCHED_TEXTS)
def test_texts_of_a_hostile_watched_run_neither_control_a_terminal_nor_fill_it(
    of_watched: tuple[Path, dict[str, Ended]], name: str
) -> None:
    for command, code, output, said in of_watched[1][name]:
        assert code == 0, (command, said)
        assert all(line.isprintable() for line in f"{output}{said}".split("\n")), command
        if command not in ("json", "full"):
            assert max(map(len, output.split("\n"))) <= MOST_IN_A_LINE and len(output) < MOST_SHOWN, command
    pages = [page.read_text(encoding="utf-8") for page in of_watched[0].glob("*.made")]
    assert pages and not any(control in page for page in pages for control in "\x1b\x07\x9b\u202e")


def test_a_journal_that_names_another_file_is_not_followed(tmp_path: Path, whole: Path) -> None:
    """SQLite reads the file that a journal says it belongs to, and then deletes it."""
    path, precious = tmp_path / "run.ampmem", tmp_path / "precious"
    path.write_bytes(whole.read_bytes())
    precious.write_text("mine")
    name = str(precious).encode()
    header = bytes.fromhex("d9d505f920a163d7") + bytes(12) + (len(path.read_bytes()) // 4096).to_bytes(4, "big")
    header += (512).to_bytes(4, "big") + (4096).to_bytes(4, "big")
    tail = b"\x00\x00\x00\x00" + name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + header[:8]
    path.with_name("run.ampmem-journal").write_bytes(header.ljust(512, b"\x00") + tail)
    with pytest.raises(RecordingError, match="names another file"):
        read(path)
    assert precious.read_text() == "mine"


def test_holes_are_worth_no_work(tmp_path: Path, whole: Path) -> None:
    """A file of a terabyte that takes a megabyte on the disk: as big a table as it could hold would never end."""
    path = make("a table of pages that hold each other", whole, tmp_path / "run.ampmem")
    pages = (1 << 40) // 4096
    with path.open("r+b") as stream:
        stream.seek(28)
        stream.write(pages.to_bytes(4, "big"))
        stream.truncate(pages * 4096)
    ((code, said),) = in_processes(tmp_path, [(path, "show")])
    assert code == 1
    assert "more rows than a recording, or a file of its size, can have" in said


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ampmem")
    assert outcome(tmp_path / "pipe.ampmem") is None
