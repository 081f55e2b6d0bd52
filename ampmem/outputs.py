"""The one way to open a file that a user has named: refuse, write beside it, rename into place, or remove it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ampmem.errors import UsageError


def check_output(path: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` when ``path`` cannot become a file; touches nothing."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; give a file name with -o")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; give another name with -o, or --force to replace it")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"cannot write {path}: the directory {parent} does not exist")
    target = path if path.exists() else parent
    if not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; give another place with -o")


@contextmanager
def open_output(path: Path, *, force: bool) -> Iterator[TextIO]:
    """Open ``path`` for text; it appears, whole, when the block ends well, and not at all otherwise.

    Raises :class:`UsageError` when ``path`` exists and ``force`` is not set, or cannot be written.
    """
    check_output(path, force=force)
    if _is_special(path):  # a device or a pipe: never replaced by a file
        with path.open("w", encoding="utf-8") as stream:
            yield stream
        return
    with replaced(path, force=force) as half_written, half_written.open("x", encoding="utf-8") as stream:
        yield stream


@contextmanager
def replaced(path: Path, *, force: bool) -> Iterator[Path]:
    """The name of a file to make, which becomes ``path`` when the block ends well, and is removed otherwise.

    Raises :class:`UsageError` as :func:`open_output` does, and when ``path`` is no regular file.
    """
    check_output(path, force=force)
    if _is_special(path):
        raise UsageError(f"cannot write {path}: it is not a file; give a file name with -o")
    target = path.resolve()
    half_written = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield half_written
        half_written.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        half_written.unlink(missing_ok=True)


def make_way(path: Path, *leftovers: Path, force: bool) -> None:
    """Remove the file at ``path``, and ``leftovers`` of it, for one that grows in place from now on.

    Raises :class:`UsageError` as :func:`open_output` does.
    """
    check_output(path, force=force)
    try:
        for file in (path, *leftovers):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def _is_special(path: Path) -> bool:
    """Whether ``path`` is there and neither a file nor a link to one."""
    return path.exists() and not path.is_file()
