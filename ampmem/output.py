"""Output: lines on a terminal, files for the user, and values that describe themselves.

Recordings and summaries are values of lower layers, and the code that puts them into words is in higher ones. So a
value asks this module for its tables, and a higher layer registers the function that makes them. Without one a value
has only its line.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic, sleep  # imported now: a script may replace them
from typing import Any, TextIO, TypeAlias

from ampmem.errors import UsageError
from ampmem.units import format_bytes

# Looked up now: a script may replace them.
_write, _poll, _size_of, _wrap = os.write, select.poll, os.get_terminal_size, textwrap.wrap

_STDERR = 2
_first: dict[int, tuple[int, int, int]] = {}
"""Standard error when ampmem first wrote to it (:func:`_file_of`), by process: a forked one may have another file."""
_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")
"""An escape code that makes text bold, coloured or plain again."""


def cache_folder(name: str) -> Path:
    """The folder ``name`` of ampmem's in the user's cache folder. A relative ``XDG_CACHE_HOME`` is ignored.

    Raises ``RuntimeError`` without a home folder.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "ampmem" / name


def private_cache(name: str) -> Path:
    """The folder ``name`` of ampmem's cache, made if it is not there.

    Raises ``OSError`` or ``RuntimeError`` if it cannot be made, or if others than this user can read or write it.
    """
    return private_folder(cache_folder(name))


def private_folder(folder: Path) -> Path:
    """``folder``, made if it is not there; raises ``OSError`` if others than this user can read or write it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def printable(text: str) -> str:
    """``text`` with a question mark for each character that would control a terminal or cannot be encoded."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


class Terminal:
    """Writes to ``stream``, which is ``None`` if Python found its descriptor closed.

    A line that cannot be written is not an error, and must not stay in a buffer: Python would write it again at exit,
    fail, and exit with 120. Nothing is written once the stream's descriptor is of another file, such as one of the
    script's that was opened after standard error was closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._file = _file_of(stream)
        if self._file is not None and self._file[0] == _STDERR:  # as it was when ampmem first spoke in this process
            self._file = _first.setdefault(os.getpid(), self._file)

    def say(self, message: str) -> None:
        """Print one line, which begins with ampmem's name; on a screen it is :meth:`broken`, below an open line."""
        self.write(self.line_start() + "\n".join(self.broken(f"ampmem: {printable(message)}")) + "\n")

    def say_above(self, message: str) -> None:
        """Print one line above that of the cursor, so that the script's own line goes on in one piece.

        So does ``tqdm.write`` with a bar. Without a screen the line is printed as by :meth:`say`.
        """
        if not self._drawn_columns():
            self.say(message)
            return
        # The screen scrolls first, as inserted lines push the lowest ones out of it. ESC D goes down in its column,
        # which a newline does not; ESC 7 and 8 keep the place of the cursor.
        lines = self.broken(f"ampmem: {printable(message)}")
        count = len(lines)
        room = "\x1bD" * count + f"\x1b[{count}A\x1b7\r\x1b[{count}L"
        self.write(room + "\r\n".join(lines) + f"\x1b8\x1b[{count}B")

    def line_start(self) -> str:
        """What moves the cursor to an empty line, below a line of the script's that has no end yet.

        Spaces for a whole line stay in an empty line, and run over into the next line from anywhere else.
        """
        return f"{' ' * columns}\r\x1b[K" if (columns := self._drawn_columns()) else ""

    def _drawn_columns(self) -> int:
        """The width of a screen on which the cursor can be moved; else 0."""
        return 0 if os.environ.get("TERM") == "dumb" else self._columns()

    def broken(self, line: str) -> list[str]:
        """``line`` as lines that fit the screen; a single one elsewhere."""
        width = self._columns()
        if not width or len(line) <= width:
            return [line]
        return _wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

    def _columns(self) -> int:
        """The width of the screen; 0 if unknown, or without a screen."""
        try:
            return _size_of(self._stream.fileno()).columns if self._stream is not None and self.is_screen() else 0
        except (OSError, ValueError):
            return 0

    def show(self, text: str) -> None:
        """Print lines without ampmem's name."""
        self.write(_printable_lines(text) + "\n")

    def show_styled(self, text: str) -> None:
        """Print a text of ampmem's own making, keeping its styles."""
        parts = _STYLE.split(text)  # every second part is a style
        self.write("".join(part if i % 2 else _printable_lines(part) for i, part in enumerate(parts)) + "\n")

    def replace(self, text: str) -> None:
        """Replace the line of the cursor by ``text``, if there is a screen; the line stays open."""
        if self.is_screen():
            self.write(f"\r\x1b[K{printable(text)}")

    def is_screen(self) -> bool:
        """Whether the stream is a terminal, so that written text can be overwritten."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):  # the stream is closed
            return False

    def write(self, text: str) -> None:
        """Write ``text`` unchanged, after everything that is still buffered."""
        stream, file = self._stream, _file_of(self._stream)
        if stream is None or file != self._file:
            return
        with suppress(OSError, ValueError):
            stream.flush()
            if file is None:
                stream.write(text)
            else:
                _write_all(file[0], text.encode(stream.encoding, "backslashreplace"))


def _file_of(stream: TextIO | None) -> tuple[int, int, int] | None:
    """The descriptor of ``stream``, and the device and inode of its file; ``None`` if it has none, or is closed."""
    try:
        descriptor = -1 if stream is None else stream.fileno()
        status = os.fstat(descriptor)
    except (AttributeError, OSError, ValueError):
        return None
    return descriptor, status.st_dev, status.st_ino


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        # Polled first: if SIGPIPE ends the script, writing to a reader that has gone would end it.
        asked = _poll()
        asked.register(descriptor, select.POLLOUT)
        if any(state & (select.POLLERR | select.POLLNVAL) for _, state in asked.poll(0)):
            return
        data = data[_write(descriptor, data) :]


_POLL_S = 0.005


def _exists(path: Path, option: str) -> UsageError:
    """The error that ``path`` exists; ``option`` is a command-line option, or a Python argument such as ``output=``."""
    force = "force=True" if option.endswith("=") else "--force"
    return UsageError(f"{path} exists already; give another name with {option}, or {force} to replace it")


def check_output(path: Path, *, force: bool, option: str = "-o", source: Path | None = None) -> None:
    """Raise :class:`UsageError` if ``path``, given with ``option``, cannot become a file; touches nothing.

    It must not be ``source`` either, the file that is read, which ``force`` would replace.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; give a file name with {option}")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"cannot write {path}: it is also the input file; give another name with {option}")
    if path.exists() and not force:
        raise _exists(path, option)
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"cannot write {path}: the directory {parent} does not exist")
    target = path if path.exists() else parent
    if not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; give another path with {option}")


@contextmanager
def open_output(path: Path, *, force: bool) -> Iterator[TextIO]:
    """Open ``path`` for text; the file appears as a whole if the block ends well, and not at all otherwise.

    Raises :class:`UsageError` if ``path`` exists without ``force``, or cannot be written.
    """
    check_output(path, force=force)
    if _is_special(path):  # devices and pipes are never replaced by a file
        with path.open("w", encoding="utf-8") as stream:
            yield stream
        return
    with replaced_file(path, force=force) as half, half.open("x", encoding="utf-8") as stream:
        yield stream


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write ``text`` to ``path`` as :func:`open_output` does."""
    with open_output(path, force=force) as stream:
        stream.write(text)


@contextmanager
def replaced_file(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary file, which becomes ``path`` if the block ends well, and is removed otherwise.

    Raises :class:`UsageError` as :func:`open_output` does, and when ``path`` is not a regular file.
    """
    check_output(path, force=force)
    _refuse_special(path)
    half = half_written(path)
    try:
        yield half
        half.replace(path.resolve())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        half.unlink(missing_ok=True)


def half_written(path: Path) -> Path:
    """The hidden name next to ``path`` under which this process writes the file before renaming it to ``path``."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def lock_output(path: Path, *, force: bool) -> int:
    """Lock the file ``path``, existing or new, against every process that would replace it.

    Code that renames another file to ``path`` locks this one first. Closing the returned descriptor releases the lock.
    Raises :class:`UsageError` as :func:`replaced_file` does, and if another process is writing the file.
    """
    check_output(path, force=force)
    _refuse_special(path)
    try:
        return _open_alone(path, force=force)
    except FileExistsError:  # created since the check
        raise _exists(path, "-o") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def lock_file(descriptor: int, *, wait_s: float = 0.0) -> bool | None:
    """Lock an open file or directory for this process; ``False`` while another process holds the lock.

    ``None`` if the file system has no locks.
    """
    until = monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # flock has no time limit, so it is tried again and again.
            if monotonic() >= until:
                return False
            sleep(_POLL_S)
        except OSError:
            return None
        else:
            return True


def being_written(path: Path) -> bool:
    """Whether a process holds the lock of the file at ``path``; false if the file system has no locks."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
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
    """The first number, from 1 on, whose ``files`` do not exist; they are created, empty, for this process.

    Raises :class:`UsageError` if they cannot be created.
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
    raise AssertionError("unreachable")


def remove_empty(files: Sequence[Path]) -> None:
    """Remove those of ``files`` that were claimed but not written."""
    for path in files:
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def sized(path: Path, file: Path | None = None) -> str:
    """``path`` with the size of its file, or of ``file``, the same file under another name.

    Without a regular file it is the name only.
    """
    file = path if file is None else file
    return f"{path}, {format_bytes(file.stat().st_size)}" if file.is_file() else str(path)


_real: list[Callable[[Path], Path]] = [lambda path: path]


def reach_by(real: Callable[[Path], Path]) -> None:
    """Make :func:`reached` map paths by ``real``, in a process whose files are protected from the script."""
    _real[:] = [real]


def reached(path: Path) -> Path:
    """The real path of ampmem's own file ``path``, which differs from ``path`` where files are protected."""
    return _real[0](path)


def copy_with_holes(source: Path, target: Path) -> None:
    """Copy a file; its holes, such as tensors without values, take no space in the copy either."""
    with source.open("rb") as given, target.open("wb") as taken:
        at, size = 0, os.fstat(given.fileno()).st_size
        taken.truncate(size)
        while at < size:
            try:
                at = os.lseek(given.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # only a hole is left
            end = os.lseek(given.fileno(), at, os.SEEK_HOLE)
            os.lseek(taken.fileno(), at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(taken.fileno(), given.fileno(), at, end - at)


def say_written(path: Path) -> None:
    """Print the line about a written file on stderr, as every command does."""
    Terminal(sys.stderr).say(f"wrote {sized(path)}")


def remove(path: Path) -> None:
    """Remove the file at ``path``, if it exists. Raises :class:`UsageError` as :func:`lock_output` does."""
    if path.exists():
        descriptor = lock_output(path, force=True)
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_alone(path: Path, *, force: bool) -> int:
    """Open the file at ``path``, which must be new without ``force``, and lock it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (0 if force else os.O_EXCL), 0o666)
        locked = lock_file(descriptor)
        if locked is None:
            return descriptor
        if not locked and not _only_looked_at(descriptor):
            os.close(descriptor)
            raise UsageError(
                f"cannot write {path}: another ampmem is writing it; wait until it ends, or give another name with -o"
            )
        if locked:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        # Another process has removed the file meanwhile, or holds the lock for an instant to look at it.
        os.close(descriptor)


def _only_looked_at(descriptor: int) -> bool:
    """Whether only readers hold the file's lock: processes that check for a moment whether it is being written."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _refuse_special(path: Path) -> None:
    if _is_special(path):
        raise UsageError(f"cannot write {path}: it is not a file; give a file name with -o")


def _is_special(path: Path) -> bool:
    """Whether ``path`` exists and is not a regular file or a link to one."""
    return path.exists() and not path.is_file()


Bundle: TypeAlias = dict[str, str]
"""A value in several formats, by MIME type."""

_MOST = 300
"""The most characters of a line, whatever names are in it."""

_tables: list[Callable[[Any], Bundle]] = []


def tables_by(make: Callable[[Any], Bundle]) -> None:
    """Register ``make`` as the function that makes the tables of every :class:`Shown`."""
    _tables[:] = [make]


def one_line(text: str) -> str:
    """``text`` as one line without characters that control a terminal."""
    clean = printable(text)
    return clean if len(clean) <= _MOST else clean[: _MOST - 1] + "…"


def in_short(source: str, device: str, precision: tuple[str, str | None], steps: int, place: tuple[int, int]) -> str:
    """The words of every line about a run; ``precision`` is (name, dtype), ``place`` is (rank, world size)."""
    rank, ranks = place
    words = [source, device, " ".join(filter(None, precision)), f"rank {rank} of {ranks}" if ranks > 1 else ""]
    return ", ".join([*filter(None, words), f"{steps} step{'' if steps == 1 else 's'}"])


class Shown:
    """A value that describes itself in one line; its ``repr`` is short, and never raises."""

    __slots__ = ()

    def _in_short(self) -> str:
        """The words after the name of the class."""
        raise NotImplementedError

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            return one_line(f"<{name}: {self._in_short()}>")
        except Exception:  # a value that contradicts itself, or is not complete yet
            return f"<{name}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        """Text and HTML for IPython and compatible tools; only the line if there are no tables."""
        line = repr(self)
        if not _tables:
            return {"text/plain": line}
        try:
            return _tables[0](self)
        except Exception as error:
            return {"text/plain": f"{line}\n{one_line(str(error))}"}
