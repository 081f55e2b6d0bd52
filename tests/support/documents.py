"""What the documents tell a reader to type: fenced blocks, commands, Python. Parsed by ``unit/``, run by ``cold/``."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("reports/*.md")])

SHELLS = ("sh", "bash", "console", "yaml", "")
"""The languages of blocks that have commands; without a language a block is a transcript, with ``$`` before them."""

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_AMPMEM = re.compile(r"(?:^|(?<=[\s(/]))ampmem [a-z-][^|;&)]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page: its language, its text without indentation, and the line of the page it begins on."""

    language: str
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as a page has it, on which line of it, and whether a sentence names it instead of a block."""

    text: str
    line: int
    in_prose: bool

    @property
    def of_ampmem(self) -> list[str]:
        """The parts of the command that are ``ampmem SUBCOMMAND …``, up to a pipe or the next command."""
        return [found.strip() for found in _AMPMEM.findall(self.text)]


def name_of(page: Path) -> str:
    """The page's path in the checkout."""
    return page.relative_to(ROOT).as_posix()


def prose_of(text: str) -> str:
    """``text`` without its fenced blocks."""
    return _FENCE.sub("", text)


def code_in(text: str) -> list[str]:
    """What stands between single backticks in ``text``."""
    return _INLINE.findall(text)


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, those in lists too."""
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(language=found[2], text=textwrap.dedent(found[3]), line=line)


def commands(text: str) -> Iterator[Command]:
    """Every command of a page that has to do with ampmem: in blocks for a shell, in transcripts, and in sentences."""
    for block in blocks(text):
        if block.language in SHELLS:
            for line, typed in _typed(block):
                if re.search(r"\bampmem\b", typed):
                    yield Command(text=typed, line=line, in_prose=False)
    blanked = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for line, words in enumerate(blanked.splitlines(), 1):
        for code in code_in(words):
            if not code.startswith("%") and _AMPMEM.search(code):
                yield Command(text=code, line=line, in_prose=True)


def _typed(block: Block) -> Iterator[tuple[int, str]]:
    """What a reader types of a block, and on which line; what has an open quotation goes on in the next line."""
    lines = block.text.splitlines()
    if any(line.startswith("$ ") for line in lines) or not block.language:
        lines = [line[2:] if line.startswith("$ ") else "" for line in lines]
    elif block.language == "yaml":
        lines = [line.partition("run: ")[2] if "- run: " in line else "" for line in lines]
    typed = ""
    for number, line in enumerate(lines, block.line):
        typed = f"{typed}\n{line}" if typed else line
        if typed and not _is_open(typed):
            yield number - typed.count("\n"), typed.replace("\\\n", " ")
            typed = ""


def _is_open(typed: str) -> bool:
    try:
        shlex.split(typed, comments=True)
    except ValueError:
        return True
    return typed.endswith("\\")
