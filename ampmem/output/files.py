"""The one way to write a file for a user: find it a name, refuse, write beside it, rename into place, and say so."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from ampmem.errors import UsageError
from ampmem.output.terminal import Terminal
from ampmem.units import format_bytes

_EXISTS = "{path} exists already; give another name with {option}, or --force to replace it"


def check_output(path: Path, *, force: bool, option: str = "-o", source: Path | None = None) -> None:
    """Raise :class:`UsageError` when ``path``, given with ``option``, cannot become a file; touches nothing.

    Nor can it when it is ``source``, the file that is read: ``force`` would replace that by something else.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; give a file name with {option}")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"cannot write {path}: it is the file to be read; give another name with {option}")
    if path.exists() and not force:
        raise UsageError(_EXISTS.format(path=path, option=option))
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"cannot write {path}: the directory {parent} does not exist")
    target = path if path.exists() else parent
    if not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; give another place with {option}")


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
    _refuse_special(path)
    target = path.resolve()
    half_written = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield half_written
        half_written.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        half_written.unlink(missing_ok=True)


def make_way(path: Path, *leftovers: Path, force: bool) -> int:
    """Make ``path`` an empty file that grows in place from now on, and remove ``leftovers`` of the one before it.

    Returns a descriptor; until that is closed, the file is refused to every other process that would replace it.
    Raises :class:`UsageError` as :func:`replaced` does, and when another process is writing the file.
    """
    check_output(path, force=force)
    _refuse_special(path)
    try:
        descriptor = _open_alone(path, force=force)
        os.ftruncate(descriptor, 0)
        for file in leftovers:
            file.unlink(missing_ok=True)
    except FileExistsError:  # since it was looked for
        raise UsageError(_EXISTS.format(path=path, option="-o")) from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    return descriptor


def being_written(path: Path) -> bool:
    """Whether somebody has the file at ``path`` from :func:`make_way` and has not closed it; without locks, no."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def claim(files: Callable[[int], Sequence[Path]]) -> int:
    """The first number, from 1 on, of whose ``files`` none is there yet: now they are, empty, and nobody else's.

    Raises :class:`UsageError` when they cannot be made.
    """
    for number in count(1):
        made: list[Path] = []
        try:
            for path in files(number):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                made.append(path)
        except FileExistsError:
            remove_empty(made)
        except OSError as error:
            remove_empty(made)
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        else:
            return number
    raise AssertionError("numbers have no end")


def remove_empty(files: Sequence[Path]) -> None:
    """Remove those of ``files`` that were claimed and not written."""
    for path in files:
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def sized(path: Path, file: Path | None = None) -> str:
    """``path`` and the size of the file there, or of ``file``, which is the same seen from elsewhere.

    Of what is no file, and of one that is gone, there is the name alone.
    """
    file = path if file is None else file
    return f"{path}, {format_bytes(file.stat().st_size)}" if file.is_file() else str(path)


def say_written(path: Path) -> None:
    """The line on standard error that every command has for a file that it has written."""
    Terminal(sys.stderr).say(f"wrote {sized(path)}")


def remove(path: Path) -> None:
    """Remove the file at ``path``, if there is one. Raises :class:`UsageError` as :func:`make_way` does."""
    if path.exists():
        descriptor = make_way(path, force=True)
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_alone(path: Path, *, force: bool) -> int:
    """Open the file at ``path``, new unless ``force``, and lock it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (0 if force else os.O_EXCL), 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(
                f"cannot write {path}: another ampmem is writing it; wait for its end, or give another name with -o"
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # whoever had it before has removed it meanwhile


def _refuse_special(path: Path) -> None:
    if _is_special(path):
        raise UsageError(f"cannot write {path}: it is not a file; give a file name with -o")


def _is_special(path: Path) -> bool:
    """Whether ``path`` is there and neither a file nor a link to one."""
    return path.exists() and not path.is_file()
