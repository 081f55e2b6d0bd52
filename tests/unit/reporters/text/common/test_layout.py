"""Texts fit where they are read: a terminal of any width, with or without colour, or a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from support.build import AMP, FP32, Story, precision_run, small_run, write
from support.golden_texts import encoder, three

from ampmem.analysis.comparison import compare, distinct, entry_of
from ampmem.analysis.summary import Summary, summarize
from ampmem.events import Fact, Phase
from ampmem.output import Terminal
from ampmem.reporters.base import EVERYTHING
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.layout import (
    NARROWEST,
    PLAIN,
    WIDEST,
    Layout,
    layout_for,
    number,
    side_by_side,
    table,
    words,
)
from ampmem.reporters.text.plain_text import columns, shorten, wrapped
from ampmem.reporters.text.run import render_next
from ampmem.reporters.text.table import render

WIDTHS = (*range(NARROWEST, WIDEST, 7), 61, 79, 80, 81, 99, WIDEST)
STYLE = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "\x1b[31m" + "x" * 295 + "\n"
WIDE = "模型.编码器." + "层" * 60


def odd(name: str) -> Summary:
    """A run in which everything that has a name is called ``name``."""
    story = Story(weight=7, name=f"{name}.weight")
    story.begin(0)
    for number_of, fact in enumerate(Fact):
        story.enter(Phase.FORWARD if number_of % 2 else Phase.OPTIMIZER)
        story.tensor(
            fact, 0x2000 + number_of, 900 * 2**40, name, module=name, op=name, stack=f"{name}:1 {name}\n{name}:2 f"
        )
    for phase in Phase:
        story.enter(phase)
        story.alloc(0x3000, 2**50, stack=name)
        if phase == Phase.BACKWARD:
            story.tensor(Fact.MASTER_COPY, 0x4000, 2**50, name)
        story.free(0x3000)
    story.end(loss=-1.23456e-300, scale=2.0**128)
    story.enter(Phase.BACKWARD)
    recording = story.recording(precision=replace(AMP, dtype=name), notes=[name])
    return summarize(replace(recording, run=replace(recording.run, script=name, device_name=name, torch=name)))


SUMMARIES = {
    "small": summarize(small_run().recording()),
    "long names": summarize(encoder()),
    "hostile": odd(HOSTILE),
    "ideographs": odd(WIDE),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_no_line_is_wider_than_the_terminal(name: str) -> None:
    summary = SUMMARIES[name]
    for width in WIDTHS:
        text = render(
            summary,
            [name * 4, ""],
            title=name * 4,
            file=name * 4,
            details=EVERYTHING,
            all_steps=True,
            layout=Layout(width=width),
        )
        assert max(map(columns, text.splitlines())) <= width, width
        assert all(character.isprintable() or character == "\n" for character in text)


def test_no_line_of_a_comparison_is_wider_than_the_terminal() -> None:
    runs = [
        precision_run(FP32, plain=(10**15,)),
        precision_run(AMP, script=HOSTILE),
        encoder(),
        small_run().recording(),
    ]
    entries = distinct([*map(entry_of, runs), *three()], [HOSTILE, WIDE, *"abcde"])
    comparison = compare(entries)
    for width in WIDTHS:
        text = render_comparison(comparison, files=[WIDE] * 3, details=EVERYTHING, layout=Layout(width=width))
        assert max(map(columns, text.splitlines())) <= width, width


def test_colour_moves_nothing() -> None:
    summary, comparison = SUMMARIES["long names"], compare(three())
    for width in (60, 100, 160):
        plain, coloured = Layout(width=width), Layout(width=width, colour=True)
        for one in (
            lambda layout: render(summary, ["warning: doubtful"], file="a.ampmem", details=EVERYTHING, layout=layout),
            lambda layout: render_comparison(comparison, files=["a"], details=EVERYTHING, layout=layout),
        ):
            text = one(coloured)
            assert STYLE.search(text)
            assert STYLE.sub("", text) == one(plain)
            assert "\x1b" not in one(plain)


def test_only_headings_totals_and_alprecisions_are_styled() -> None:
    text = render(SUMMARIES["small"], ["warning: doubtful"], layout=Layout(colour=True))
    lines = text.splitlines()
    assert lines[0].startswith("\x1b[1mThe peak is 3.0 KiB, in backward of step 1")
    assert "\x1b[31m\x1b[1mWARNING\x1b[0m  doubtful" in lines
    assert "\x1b[1msteps\x1b[0m" in lines
    assert any(line.startswith("\x1b[1mtotal ") for line in lines)
    assert not any("\x1b" in line for line in lines if line.startswith(("parameters", "script", "note")))


def test_columns_are_left_out_the_highest_rank_first() -> None:
    shown = [words("name", least=6), number("kept"), number("second", rank=1), number("first", rank=2)]
    rows = [["a" * 20, "1", "2", "3"]]

    def heads(width: int) -> list[str]:
        return table(shown, rows, Layout(width=width)).splitlines()[0].split()

    assert heads(60) == ["name", "kept", "second", "first"]
    assert heads(27) == ["name", "kept", "second", "first"]  # the name gives way before a column does
    assert heads(26) == ["name", "kept", "second"]
    assert heads(19) == ["name", "kept"]
    assert table(shown, rows, Layout(width=27)).splitlines()[-1] == "aa…aaa     1       2      3"


def test_recordings_are_parted_only_where_they_do_not_fit() -> None:
    groups = [[number(f"run{i}"), number("B/param", rank=1)] for i in range(4)]
    cells = [[["1234567", "8"]] for _ in groups]

    def tables(width: int) -> list[list[str]]:
        found = side_by_side(words(""), ["row"], groups, cells, Layout(width=width))
        return [text.splitlines()[0].split() for text in found]

    assert tables(100) == [["run0", "B/param", "run1", "B/param", "run2", "B/param", "run3", "B/param"]]
    assert tables(60) == [["run0", "run1", "run2", "run3"]]
    assert tables(30) == [["run0", "run1"], ["run2", "run3"]]


def test_ideographs_take_two_columns() -> None:
    assert columns("ab") == 2 and columns("層a") == 3 and columns("é") == 1
    assert shorten("層層層層", 8) == "層層層層"
    assert shorten("層層層層層", 8) == "層…層層"
    lines = table([words("name"), number("bytes")], [["層", "1"], ["abcd", "2"]], PLAIN).splitlines()
    assert [columns(line) for line in lines] == [11, 11, 11, 11]
    assert max(map(columns, wrapped("層" * 100, 61))) <= 61


def test_a_figure_stays_with_its_unit() -> None:
    assert wrapped("it falls to 12.6 MiB, 26 % less", 14) == ["it falls to", "  12.6 MiB,", "  26 % less"]
    assert wrapped("of 2 bytes", 6) == ["of 2", "  byte", "  s"]


def test_the_next_command_can_be_copied() -> None:
    narrow, usual = Layout(width=60), PLAIN
    assert render_next([], usual) == ""
    assert render_next(["a b.ampmem"], usual).splitlines()[0].startswith("next: ampmem report 'a b.ampmem'")
    assert render_next(["a" * 60], narrow).splitlines() == [
        "next: ampmem report FILE      all of it as a page",
        "      ampmem show --all FILE  every table",
    ]
    assert "FILE..." in render_next(["a\nb", "c"], usual)
    assert "show" not in render_next(["a"], usual, more=False)


class Screen(StringIO):
    """A terminal that says nothing of its size."""

    def isatty(self) -> bool:
        super().isatty()  # which raises where it is closed
        return True


@pytest.mark.parametrize(
    ("environment", "colour"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
    ],
)
def test_colour_is_for_terminals_that_want_it(environment: dict[str, str], colour: bool) -> None:
    assert layout_for(Screen(), environment).colour is colour
    assert layout_for(StringIO(), environment) == PLAIN
    assert layout_for(None, environment) == PLAIN


@pytest.mark.parametrize(("asked", "width"), [("20", 40), ("60", 60), ("99", 99), ("160", 160), ("500", 160)])
def test_columns_say_how_wide_text_is_on_a_terminal_and_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, asked: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert layout_for(Screen()).width == width
    assert layout_for(StringIO()) == Layout(width=width)


@pytest.mark.parametrize("asked", ["", "0", "-1", "wide"])
def test_a_pipe_is_100_columns_wide_if_nobody_says_how_wide(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert layout_for(StringIO()) == PLAIN
    monkeypatch.setenv("COLUMNS", asked)
    assert layout_for(StringIO()) == PLAIN


def test_a_closed_stream_is_no_terminal() -> None:
    closed = Screen()
    closed.close()
    assert layout_for(closed) == PLAIN


def test_the_terminal_keeps_styles_and_nothing_else() -> None:
    stream = StringIO()
    Terminal(stream).show_styled("\x1b[1mbold\x1b[0m\n\x1b[2Jcleared\x07")
    assert stream.getvalue() == "\x1b[1mbold\x1b[0m\n?[2Jcleared?\n"


def on_a_terminal(width: int, environment: dict[str, str], *arguments: str) -> str:
    """What ``ampmem`` prints on a terminal that is so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    kept |= {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"} | environment
    process = subprocess.Popen([sys.executable, "-m", "ampmem", *arguments], stdout=theirs, env=kept)
    os.close(theirs)
    text = "".join(_all_of(ours))
    os.close(ours)
    assert process.wait() == 0
    return text.replace("\r\n", "\n")


def _all_of(descriptor: int) -> Iterator[str]:
    with suppress(OSError):  # Linux says so when the other end is closed
        while data := os.read(descriptor, 65536):
            yield data.decode()


def test_on_a_real_terminal(tmp_path: Path) -> None:
    path = str(write(tmp_path / "run.ampmem", small_run().recording()))
    wide = on_a_terminal(132, {}, "show", "--all", path)
    assert "\x1b[1msteps\x1b[0m" in wide
    narrow = on_a_terminal(72, {"NO_COLOR": "1"}, "show", "--all", path)
    assert "\x1b" not in narrow
    assert 60 < max(map(len, narrow.splitlines())) <= 72 < max(map(len, STYLE.sub("", wide).splitlines())) <= 132
