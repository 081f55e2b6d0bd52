"""``ampmem docs``: the documentation that is installed with ampmem, a page or a part of one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

import ampmem
from ampmem.errors import UsageError
from ampmem.names import nearest

_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


@click.command("docs")
@click.argument("topic", required=False)
def docs(topic: str | None) -> None:
    """Print a page of the documentation, or the part about a finding or under a heading.

    \b
    ampmem docs                   # the pages
    ampmem docs advise            # a page
    ampmem docs fp32-activations  # what a finding means, and what to do
    """
    pages = _pages()
    if topic is None:
        widest = max(map(len, pages))
        click.echo("\n".join(f"{name:{widest}}  {next(_headings(text))[1]}" for name, text in pages.items()))
        return
    parts = {part: text for page in pages.values() for part, text in _parts(page)}
    found = pages.get(topic) or parts.get(topic.lower())
    if found is None:
        meant = nearest(topic.lower(), [*pages, *parts]) or "."
        raise UsageError(f"the documentation has no {topic!r:.60}{meant} ampmem docs lists its pages")
    click.echo(found.rstrip())


def _pages() -> Mapping[str, str]:
    """The text of each page by its name: those of the wheel, or of the checkout that is installed in place."""
    package = Path(ampmem.__file__).parent
    folder = next(each for each in (package / "docs", package.parent / "docs") if each.is_dir())
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}


def _headings(text: str) -> Iterator[tuple[int, str, int]]:
    """Level, words and position of each heading outside of code."""
    plain = re.sub(r"^```.*?^```", lambda code: " " * len(code[0]), text, flags=re.MULTILINE | re.DOTALL)
    return ((len(found[1]), found[2], found.start()) for found in _HEADING.finditer(plain))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """What is under each heading, down to the next of its level, by its words and by each `name` in the heading."""
    headings = list(_headings(text))
    for number, (level, words, start) in enumerate(headings):
        end = next((at for other, _, at in headings[number + 1 :] if other <= level), len(text))
        for name in (words.replace("`", ""), *re.findall(r"`(.+?)`", words)):
            yield name.lower(), text[start:end]
