"""How ampmem says something of its own: a line on a terminal, a file for a user, a value that shows itself.

Recordings and summaries are values of the lower layers, and what puts them into words lies above those. So a value asks
here for its tables, and the layer above has said who makes them. Where nobody has, the line is all there is.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic, sleep  # taken now: a script may put others in their place
from typing import Any, TextIO, TypeAlias

from ampmem.errors import UsageError
from ampmem.units import format_bytes

# Taken now: a script may put others in their place.
_write, _poll, _size_of, _wrap = os.write, select.poll, os.get_terminal_size, textwrap.wrap

_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")
"""What makes the text after it bold or coloured, or plain again, and nothing else."""


def printable(text: str) -> str:
    """``text`` with a question mark for each character that a terminal might act on, or that has no bytes."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


class Terminal:
    """Speaks on ``stream``, which is ``None`` where Python has found the descriptor closed.

    A line that cannot be said is not an error, and stays in no buffer: Python would try it again at its end, fail, and
    exit with 120.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def say(self, message: str) -> None:
        """One line, whose beginning says that it is ampmem's; on a screen it is :meth:`broken`."""
        self.write("\n".join(self.broken(f"ampmem: {printable(message)}")) + "\n")

    def broken(self, line: str) -> list[str]:
        """``line`` in lines that the screen has room for, as it would break numbers itself; elsewhere whole."""
        width = self._columns()
        if not width or len(line) <= width:
            return [line]
        return _wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)

    def _columns(self) -> int:
        """How wide the screen is; 0 where that is not known, or where there is no screen."""
        try:
            return _size_of(self._stream.fileno()).columns if self._stream is not None and self.is_screen() else 0
        except (OSError, ValueError):
            return 0

    def show(self, text: str) -> None:
        """Lines that need no name before them."""
        self.write(_printable_lines(text) + "\n")

    def show_styled(self, text: str) -> None:
        """The same for a text of ampmem's own making, whose styles are kept."""
        parts = _STYLE.split(text)  # every other one is a style
        self.write("".join(part if i % 2 else _printable_lines(part) for i, part in enumerate(parts)) + "\n")

    def step(self, message: str, *, last: bool) -> None:
        """Over the line before, where there is a screen."""
        if self.is_screen():
            self.write(f"\rampmem: {printable(message)}" + "\n" * last)

    def replace(self, text: str) -> None:
        """On a screen, ``text`` in place of the line that the cursor is on; it is for the next text to go on or not."""
        if self.is_screen():
            self.write(f"\r\x1b[K{printable(text)}")

    def is_screen(self) -> bool:
        """Whether what is written can be written over."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):  # it is closed
            return False

    def write(self, text: str) -> None:
        """``text`` as it is, after all that is on its way there already."""
        stream = self._stream
        if stream is None:
            return
        with suppress(OSError, ValueError):
            stream.flush()
            if _has_descriptor(stream):
                _write_all(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))
            else:
                stream.write(text)


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except OSError:  # a stream in memory; ValueError says that it is closed
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        # Asked first: where the script has SIGPIPE end it, writing for a reader that is gone would.
        asked = _poll()
        asked.register(descriptor, select.POLLOUT)
        if any(state & (select.POLLERR | select.POLLNVAL) for _, state in asked.poll(0)):
            return
        data = data[_write(descriptor, data) :]


_POLL_S = 0.005
_EXISTS = "{path} exists already; give another name with {option}, or {force} to replace it"


def _exists(path: Path, option: str) -> UsageError:
    """``option`` is one of the command line's, or an argument in Python, such as ``output=``."""
    python = option.endswith("=")
    return UsageError(_EXISTS.format(path=path, option=option, force="force=True" if python else "--force"))


def check_output(path: Path, *, force: bool, option: str = "-o", source: Path | None = None) -> None:
    """Raise :class:`UsageError` when ``path``, given with ``option``, cannot become a file; touches nothing.

    Nor can it when it is ``source``, the file that is read: ``force`` would replace that by something else.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory; give a file name with {option}")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"cannot write {path}: it is the file to be read; give another name with {option}")
    if path.exists() and not force:
        raise _exists(path, option)
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
    with replaced_file(path, force=force) as half, half.open("x", encoding="utf-8") as stream:
        yield stream


@contextmanager
def replaced_file(path: Path, *, force: bool) -> Iterator[Path]:
    """The name of a file to make, which becomes ``path`` when the block ends well, and is removed otherwise.

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
    """The name under which this process makes the file that is then renamed to ``path``, beside it and hidden."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def lock_output(path: Path, *, force: bool) -> int:
    """Take the name ``path``: the file there, or a new empty one, is refused to every process that would replace it.

    The lock is that of the file: whoever renames another file to ``path`` locks that one first. Closing the returned
    descriptor lets go of it. Raises :class:`UsageError` as :func:`replaced_file` does, and when another process is
    writing the file.
    """
    check_output(path, force=force)
    _refuse_special(path)
    try:
        return _open_alone(path, force=force)
    except FileExistsError:  # since it was looked for
        raise _exists(path, "-o") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def lock_file(descriptor: int, *, wait_s: float = 0.0) -> bool | None:
    """Lock an open file or directory for this process alone; ``False`` while another process holds the lock.

    ``None`` where the file system has no locks.
    """
    until = monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= until:
                return False
            sleep(_POLL_S)
        except OSError:
            return None
        else:
            return True


def being_written(path: Path) -> bool:
    """Whether a process holds the lock of the file at ``path``; no where the file system has no locks."""
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
    raise AssertionError("unreachable")


def remove_empty(files: Sequence[Path]) -> None:
    """Remove those of ``files`` that were claimed and not written."""
    for path in files:
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def sized(path: Path, file: Path | None = None) -> str:
    """``path`` and the size of the file there, or of ``file``, which is the same seen from elsewhere.

    Of what is not a file, and of one that is gone, there is the name alone.
    """
    file = path if file is None else file
    return f"{path}, {format_bytes(file.stat().st_size)}" if file.is_file() else str(path)


def say_written(path: Path) -> None:
    """The line on standard error that every command has for a file that it has written."""
    Terminal(sys.stderr).say(f"wrote {sized(path)}")


def remove(path: Path) -> None:
    """Remove the file at ``path``, if there is one. Raises :class:`UsageError` as :func:`lock_output` does."""
    if path.exists():
        descriptor = lock_output(path, force=True)
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_alone(path: Path, *, force: bool) -> int:
    """Open the file at ``path``, new unless ``force``, and lock it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (0 if force else os.O_EXCL), 0o666)
        locked = lock_file(descriptor)
        if locked is None:
            return descriptor
        if not locked and not _only_looked_at(descriptor):
            os.close(descriptor)
            raise UsageError(
                f"cannot write {path}: another ampmem is writing it; wait for its end, or give another name with -o"
            )
        if locked:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        os.close(descriptor)  # whoever had it before has removed it meanwhile, or looks at it for an instant


def _only_looked_at(descriptor: int) -> bool:
    """Whether the lock of a file is held by those alone who ask whether it is being written, as is over at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _refuse_special(path: Path) -> None:
    if _is_special(path):
        raise UsageError(f"cannot write {path}: it is not a file; give a file name with -o")


def _is_special(path: Path) -> bool:
    """Whether ``path`` is there and neither a file nor a link to one."""
    return path.exists() and not path.is_file()


Bundle: TypeAlias = dict[str, str]
"""One value in several formats, by their MIME types."""

_MOST = 300
"""So many characters of a line, whatever the names in it."""

_tables: list[Callable[[Any], Bundle]] = []


def tables_by(make: Callable[[Any], Bundle]) -> None:
    """From now on ``make`` makes the tables of every :class:`Shown`."""
    _tables[:] = [make]


def one_line(text: str) -> str:
    """``text`` as a line that no terminal acts on."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _MOST else clean[: _MOST - 1] + "…"


def in_short(source: str, device: str, arm: tuple[str, str | None], steps: int, place: tuple[int, int]) -> str:
    """What every line on a run says; ``arm`` is its name and type, ``place`` the rank and of how many."""
    rank, ranks = place
    words = [source, device, " ".join(filter(None, arm)), f"rank {rank} of {ranks}" if ranks > 1 else ""]
    return ", ".join([*filter(None, words), f"{steps} step{'' if steps == 1 else 's'}"])


class Shown:
    """A value that says in one line what it is; ``repr`` of it is short, and never raises."""

    __slots__ = ()

    def _in_short(self) -> str:
        """What to say after the name of the class."""
        raise NotImplementedError

    def __repr__(self) -> str:
        name = type(self).__name__
        try:
            return one_line(f"<{name}: {self._in_short()}>")
        except Exception:  # a value that contradicts itself, or is not whole yet
            return f"<{name}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Bundle:
        """Text and HTML, for IPython and what follows its protocol; the line alone where there are no tables."""
        line = repr(self)
        if not _tables:
            return {"text/plain": line}
        try:
            return _tables[0](self)
        except Exception as error:
            return {"text/plain": f"{line}\n{one_line(str(error))}"}
