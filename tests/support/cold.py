"""Commands as a new user runs them: an installed wheel, a bare interpreter, an own folder, a clean environment.

Nothing is imported before them, no PYTHONPATH is set, and nothing of the checkout is on the path. What a command reads
(train.py, recordings of earlier runs) is made once, by the commands of :data:`EARLIER`.

Half of what a command takes that runs a script is the import of torch. So each way of running one is tried in a bare
interpreter once, and what only repeats it, with another option or to make a file, in a Python of the same environment
that has imported torch already: :mod:`ready_python` says what else, and why that hides nothing.
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from support.ready_python import ready_for, ready_python

TRAIN = Path(__file__).parents[1] / "cold" / "train.py"
TIMEOUT_S = 400
SIM = "--device sim --gpu h100"
RANK_OF_8 = f"{SIM} --world-size 8"

PROGRAMS = {
    "python": "",
    "ampmem": "-m ampmem ",
    "pytest": "-m pytest ",
    "torchrun": "-m torch.distributed.run ",
}
"""What commands start, and how Python runs it."""

CHANGED = "sed -i 's/width=64/width=96/; s/torch.relu/nn.functional.gelu/; s/default=64/default=96/' train.py"
"""A change of the script after which it takes other memory."""
ON_A_CPU = "ampmem profile --precision amp train.py --batch-size 8"
"""Under autocast, so that there are copies to ask for."""
EARLIER: Mapping[str, str] = {
    "train.ampmem": ON_A_CPU,
    "run.ampmem": f"ampmem profile {SIM} -o run.ampmem train.py",
    "main.ampmem": f"ampmem check {SIM} --baseline main.ampmem --update-baseline train.py",
    "memory/main.json": f"mkdir memory && ampmem check {SIM} --baseline memory/main.json --update-baseline train.py",
    "now.ampmem": f"{CHANGED} && ampmem profile {SIM} -o now.ampmem train.py",
    "gelu.ampmem": f"{CHANGED} && ampmem profile {SIM} -o gelu.ampmem train.py",
    "snapshot.pickle": f"ampmem profile {SIM} --snapshot snapshot.pickle train.py",
    "run.csv": f"ampmem profile {SIM} -o run.ampmem train.py && ampmem export run.ampmem --format csv -o run.csv",
    "run.pickle": f"ampmem profile {SIM} -o run.ampmem train.py && "
    "ampmem export run.ampmem --format snapshot -o run.pickle",
    "summary.json": f"ampmem profile {SIM} -o run.ampmem train.py && ampmem show --json run.ampmem > summary.json",
    "main.json": "ampmem profile -o first.ampmem train.py && ampmem show --json first.ampmem > main.json",
    "diff.json": f"ampmem profile {SIM} -o main.ampmem train.py && {CHANGED} && "
    f"ampmem profile {SIM} -o now.ampmem train.py && ampmem diff --json main.ampmem now.ampmem > diff.json",
    "fit.json": "ampmem fit --json --gpu h100 --precision as-is --points 0 --vary --batch-size=4:8 train.py > fit.json",
    "ranks.json": "ampmem profile --nproc-per-node 2 train.py && "
    "ampmem show --ranks --json train.rank*.ampmem > ranks.json",
    "train.fp32.ampmem": "ampmem compare --no-times --precision fp32,amp train.py",
    "train.amp.ampmem": "ampmem compare --no-times --precision fp32,amp train.py",
    "train.rank*": "ampmem profile --nproc-per-node 2 train.py",
    "train.*.rank*": "ampmem profile --nproc-per-node 2 --precision fp32 -o train.fp32.ampmem train.py && "
    "ampmem profile --nproc-per-node 2 --precision amp -o train.amp.ampmem train.py",
    "train.rank*-of-8.ampmem": f"ampmem profile {RANK_OF_8} train.py && ampmem profile {RANK_OF_8} --rank 1 train.py",
    "memory-step3.rank*": "ampmem profile --nproc-per-node 2 -o memory-step3.ampmem train.py",
    "train-watch.ampmem": "ampmem watch train.py",
    "base": "mkdir base && cp train.py base",
}
"""What commands of the documents read, as they name it, and the command that makes it in a folder with train.py."""

_WRITTEN = ("-o", "--output", "--html", "--snapshot")


def words_of(command: str) -> list[str]:
    """The words of a command, or of Python: of a text with quotations these too."""
    return shlex.split(command, comments=True)


def outputs_of(command: str) -> list[str]:
    """The files that a command is told to write."""
    words = words_of(command)
    return [word for option, word in pairwise(words) if option in _WRITTEN]


def way_of(command: str) -> str:
    """How the script ran that ``command`` runs, or whose recording it reads."""
    words = words_of(command)
    if any(word == "--world-size" or "-of-8" in word for word in words):
        return "one of eight"
    if any(word in ("torchrun", "accelerate", "--nproc-per-node") or "rank*" in word for word in words):
        return "two ranks"
    if "sim" in words or "--gpu" in words:
        return "simulated"
    ways = {way_of(EARLIER[word]) for word in words if word in EARLIER and EARLIER[word] != command}
    return ways.pop() if len(ways) == 1 else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cold:
    """The environment ``installed`` has the wheel without extras; the folder ``shared`` has what is made once."""

    installed: Path
    shared: Path

    def run(
        self, folder: Path, command: str, *, extras: str = "", ready: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` in bash, in ``folder``; ``extras`` are the packages that it needs beside ampmem.

        With ``ready`` what it calls ``ampmem`` has torch imported already, and so have the processes that it starts.
        """
        # Ranks of a run whose files are protected have to be this process's own, and not started by a server outside.
        protected = re.search(r"\bampmem (compare|check|advise)\b", command) and "--files write" not in command
        ready = ready and not ("--nproc-per-node" in command and protected)
        bins = [(self.with_extras(extras) if extras else self.installed) / "bin"]
        bins = [*([self._ready(command, bins[0] / "python")] if ready else []), *bins]
        home = self.shared / "home"
        home.mkdir(exist_ok=True)
        environment = {
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PATH": os.pathsep.join([*map(str, bins), str(self.installed / "bin"), "/usr/local/bin:/usr/bin:/bin"]),
        }
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def _ready(self, command: str, interpreter: Path) -> Path:
        """A folder with the programs for ``command`` that start a Python; they have torch imported already."""
        kind = ready_for(words_of(command))
        python = Path(ready_python(kind=kind, interpreter=str(interpreter)))
        folder = python.with_name(f"commands of {kind}")
        folder.mkdir(exist_ok=True)
        for name, module in PROGRAMS.items():
            script = folder / name
            if not script.exists():
                script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} {module}"$@"\n')
                script.chmod(0o700)
        return folder

    def provide(self, folder: Path, command: str, train: str) -> None:
        """Put into ``folder`` the script ``train`` as train.py, and what ``command`` reads of earlier runs."""
        (folder / "train.py").write_text(train, encoding="utf-8")
        words, written = words_of(command), outputs_of(command)
        for name, made in EARLIER.items():
            if name in words and name not in written:
                self.copy(folder, made, name, train)

    def copy(self, folder: Path, command: str, pattern: str, train: str = TRAIN.read_text(encoding="utf-8")) -> None:
        """Put into ``folder`` what of the files that ``command`` made is named like ``pattern``, or lies below that."""
        if ".cuda()" in train:  # a CPU does not run it
            command = command.replace(ON_A_CPU, f"ampmem profile {SIM} train.py")
        made = self._made(command, train)
        for path in made.rglob("*"):
            place = path.relative_to(made)
            if path.is_file() and (fnmatch(str(place), pattern) or pattern in map(str, place.parents)):
                (folder / place).parent.mkdir(exist_ok=True)
                shutil.copy(path, folder / place)

    def _made(self, command: str, train: str) -> Path:
        """The folder in which ``command`` ran beside the script ``train``: once, whoever asks first."""
        folder = self.shared / sha256(f"{command}\n{train}".encode()).hexdigest()[:16]
        with self._once(folder) as first:
            if first:
                (folder / "train.py").write_text(train, encoding="utf-8")
                done = self.run(folder, command, ready=True)
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return folder

    def with_extras(self, extras: str) -> Path:
        """An environment that has, beside what is in ``installed``, what pip says that the extras of the wheel need."""
        names, *others = extras.split()
        folder = self.installed.with_name(f"{self.installed.name}-{names.replace(',', '-')}")  # kept for the next run
        with self._once(folder) as first:
            if first:
                subprocess.run([self.installed / "bin" / "python", "-m", "venv", folder], check=True)
                packages = next((folder / "lib").glob("python*")) / "site-packages"
                below = next((self.installed / "lib").glob("python*")) / "site-packages"
                # So that torch is not installed once more; pip sees what is there too, ampmem itself among it.
                (packages / "installed.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
                constraints = Path(__file__).parents[2] / "constraints.txt"
                what = [f"ampmem[{names}]", *others]
                install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", constraints, *what]
                subprocess.run(install, check=True)
        return folder

    @contextmanager
    def _once(self, folder: Path) -> Iterator[bool]:
        """True for the first of all processes that come, which fills the folder; the others wait for it meanwhile."""
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder.with_suffix(".done")
            first = not done.exists()
            if first:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            yield first
            done.touch()

    def execute_notebook(self, notebook: Path, *, extras: str) -> subprocess.CompletedProcess[str]:
        """Run ``notebook`` in place: Jupyter is in another environment, the kernel in the one with ``extras``."""
        environment = self.with_extras(extras)
        done = self.run(
            notebook.parent, f"python -m ipykernel install --prefix {environment} --name cold", extras=extras
        )
        assert done.returncode == 0, done.stderr
        jupyter = "import sys; from nbclient.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", jupyter, "--kernel_name=cold", "--inplace", notebook.name]
        return subprocess.run(
            command,
            cwd=notebook.parent,
            env={
                "HOME": str(self.shared / "home"),
                "PATH": "/usr/bin:/bin",
                "JUPYTER_PATH": str(environment / "share" / "jupyter"),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
