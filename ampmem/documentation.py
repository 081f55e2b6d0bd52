"""The documentation that is installed with ampmem: its pages, and the parts under their headings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK_OR_EMPHASIS = re.compile(r"\[([^]]+)\]\([^)]*\)|\*+([^*\s][^*]*)\*+")


@cache
def pages() -> Mapping[str, str]:
    """The text of each page by its name: those of the wheel, or of the checkout that is installed in place."""
    package = Path(__file__).parent
    folder = next((each for each in (package / "docs", package.parent / "docs") if each.is_dir()), package)
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}


@cache
def parts() -> Mapping[str, str]:
    """What is under each heading, by its words and by each `name` in it, in small letters."""
    return {name: text for page in pages().values() for name, text in _parts(page)}


def paragraphs(name: str) -> tuple[str, ...]:
    """The part about ``name`` without its heading, links and emphasis, a line for each paragraph or row of a table."""
    blocks = parts().get(name, "").strip().split("\n\n")[1:]
    lines = [line for block in blocks for line in (block.split("\n") if block.startswith("|") else [block])]
    texts = (" · ".join(each.strip() for each in line.strip("|\n").split("|")) for line in lines if line[:4] != "|---")
    return tuple(_LINK_OR_EMPHASIS.sub(lambda found: found[1] or found[2], " ".join(text.split())) for text in texts)


def headings(text: str) -> Iterator[tuple[int, str, int]]:
    """Level, words and position of each heading outside of code."""
    plain = re.sub(r"^```.*?^```", lambda code: " " * len(code[0]), text, flags=re.MULTILINE | re.DOTALL)
    return ((len(found[1]), found[2], found.start()) for found in _HEADING.finditer(plain))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Each name of a heading, and what is under it, down to the next of its level."""
    found = list(headings(text))
    for number, (level, words, start) in enumerate(found):
        end = next((at for other, _, at in found[number + 1 :] if other <= level), len(text))
        for name in (words.replace("`", ""), *re.findall(r"`(.+?)`", words)):
            yield name.lower(), text[start:end]
