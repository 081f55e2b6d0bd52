"""The libraries that a published run was made with, in folders of their own; torch is the interpreter's."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

LISTS = Path(__file__).parent / "environments"


class NoEnvironment(Exception):
    """It cannot be made here; the message says why."""


def cache() -> Path:
    """Where the folders are: ``AMPMEM_PUBLISHED_CACHE``, or the user's cache."""
    named = os.environ.get("AMPMEM_PUBLISHED_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "ampmem" / "published"


def folder_of(environment: str) -> Path:
    """Where the libraries of ``environment`` are once they are installed. Its name has the versions of its list and of
    Python. Raises :class:`NoEnvironment` where there is no such list."""
    wanted = LISTS / f"{environment}.txt"
    if not wanted.exists():
        raise NoEnvironment(f"there is no list {wanted.name} of libraries")
    mark = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()[:12]
    return cache() / f"{environment}-{mark}"


def library_path(environment: str) -> str:
    """The folder to put in front of Python's path for ``environment``, made unless it is there; none for ``""``.

    Raises :class:`NoEnvironment`.
    """
    if not environment:
        return ""
    folder = folder_of(environment)
    if not folder.exists():
        _install(LISTS / f"{environment}.txt", folder)
    return str(folder)


def _install(wanted: Path, folder: Path) -> None:
    """By pip, without what the libraries ask for: what they need is on the list, and torch is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
    done = subprocess.run([*command, "-r", str(wanted)], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise NoEnvironment(f"the libraries of {wanted.name} cannot be installed: {last}")
    unfinished.rename(folder)
