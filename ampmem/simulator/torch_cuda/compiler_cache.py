"""Inductor's cache for code compiled for simulated GPUs: a folder of ampmem's own, never the user's caches.

What is in it was made with made-up answers, so a real GPU must not get it; and it makes a second run cheap. It has a
folder for each torch, GPU and ampmem, and at most :data:`LIMIT` bytes: the oldest files go first. Inductor loads
what it finds there by pickle, so only this user may write it. Processes share it: Inductor puts each file in its place
whole, files are only removed while no other process has the folder in use, and one process compiles at a time, so that
the others find its graphs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from ampmem.allocator.settings import MIB
from ampmem.output import private_cache, private_folder
from ampmem.patching import set_variables
from ampmem.simulator.private import compilation
from ampmem.version import __version__
from ampmem.vocabulary import COMPILED

LIMIT = 2048 * MIB
_LOCK = "lock"


def use(root: Path | None, gpu: str) -> Callable[[], None]:
    """Have Inductor use the folder for ``gpu`` below ``root``, by default the user's; returns the undo.

    If there cannot be such a folder, one for this run alone is used.
    """
    with ExitStack() as undo:
        try:
            root = private_cache(COMPILED) if root is None else private_folder(root)
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, RuntimeError):
            root = Path(tempfile.mkdtemp(prefix="ampmem-compiled-"))
            undo.callback(shutil.rmtree, root, ignore_errors=True)
        else:
            undo.callback(os.close, lock)
            with suppress(OSError):  # others use it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _limit(root)
            fcntl.flock(lock, fcntl.LOCK_SH)
        folder = root / _key(gpu)
        undo.callback(set_variables({compilation.CACHE: str(folder)}))
        undo.callback(compilation.compile_within(_Turn(folder).take))
        return undo.pop_all().close


class _Turn:
    """The turn of a process to compile for the GPU of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = False

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait until no other process compiles, and hold them off meanwhile; compiling a graph may compile others."""
        if self._held:
            yield
            return
        self._folder.mkdir(exist_ok=True)
        with (self._folder / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._held = True
            try:
                yield
            finally:
                self._held = False


def _key(gpu: str) -> str:
    """The name of the folder for this torch, this ampmem and ``gpu``."""
    made_by = Path(compilation.__file__).read_bytes()
    return hashlib.sha256(f"{torch.__version__}\n{__version__}\n{gpu}\n".encode() + made_by).hexdigest()[:16]


def _limit(root: Path) -> None:
    """Remove the oldest files until at most :data:`LIMIT` bytes are left."""
    found = [(path, path.stat()) for path in root.rglob("*") if path.is_file() and path.name != _LOCK]
    total = sum(status.st_size for _, status in found)
    for path, status in sorted(found, key=lambda each: each[1].st_mtime):
        if total <= LIMIT:
            return
        path.unlink()
        total -= status.st_size
