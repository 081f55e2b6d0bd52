"""What is said on a terminal: clean, after what was said before, and dropped where nobody can hear it."""

import fcntl
import io
import os
import pty
import struct
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from ampmem.output import Terminal, printable


def test_a_character_that_a_terminal_acts_on_is_a_question_mark() -> None:
    assert printable("a\x1b[2J\r\n\udcff\x9bé ü") == "a?[2J????é ü"


def test_a_line_begins_with_a_name_and_is_one_line() -> None:
    stream = io.StringIO()
    Terminal(stream).say("there\nis \x1b")
    Terminal(stream).show("two\nlines\x07")
    assert stream.getvalue() == "ampmem: there?is ?\ntwo\nlines?\n"


def test_it_comes_after_what_is_on_its_way(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        stream.write("before ")
        Terminal(stream).say("é")
    assert (tmp_path / "log").read_bytes() == b"before ampmem: \\xe9\n"


def test_what_cannot_be_said_is_dropped_and_is_in_no_buffer() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full, read_only = os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_RDONLY)
    for descriptor in (writer, full, read_only):
        with os.fdopen(descriptor, "w") as stream:
            Terminal(stream).say("x" * 10_000)
            stream.flush()  # or this would try it again
        Terminal(stream).say("to a stream that is closed")
        assert not Terminal(stream).is_screen()
    Terminal(None).say("x")
    assert not Terminal(None).is_screen()


def test_a_descriptor_that_is_closed_below_its_stream(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    os.close(stream.fileno())
    Terminal(stream).say("x")
    with pytest.raises(OSError):
        stream.close()


def test_a_line_is_replaced_on_a_screen_only() -> None:
    stream = io.StringIO()
    Terminal(stream).replace("x")
    assert stream.getvalue() == ""
    stream.isatty = lambda: True  # type: ignore[method-assign]
    Terminal(stream).replace("one\x1b")
    Terminal(stream).replace("")
    assert stream.getvalue() == "\r\x1b[Kone?\r\x1b[K"


def _all_of(terminal: int) -> bytes:
    """What was written to a pseudo-terminal whose other end is closed: the kernel may hand it over in parts."""
    said = b""
    with suppress(OSError):  # Linux's end of file here
        while part := os.read(terminal, 4096):
            said += part
    return said


def test_a_screen_breaks_a_line_between_words_and_a_file_does_not(tmp_path: Path) -> None:
    line = "recorded 3 steps in gpt.ampmem, 1,232.5 KiB, at /a/path/that/is/longer/than/a/line-0123456789.ampmem"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as screen:
        Terminal(screen).say(line)
        Terminal(screen).say("short")
    below_an_open_line = " " * 40 + "\r\x1b[K"
    said = _all_of(ours).decode().replace(below_an_open_line, "").split("\r\n")
    os.close(ours)
    assert said == [
        "ampmem: recorded 3 steps in gpt.ampmem,",
        "  1,232.5 KiB, at",
        "  /a/path/that/is/longer/than/a/line-0123456789.ampmem",
        "ampmem: short",
        "",
    ]
    with (tmp_path / "log").open("w") as log:
        Terminal(log).say(line)
    assert (tmp_path / "log").read_text() == f"ampmem: {line}\n"
