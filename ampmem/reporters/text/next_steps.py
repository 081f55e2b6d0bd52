"""What one could do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ampmem.output import printable
from ampmem.reporters.text.common.layout import Layout


def render_next(
    files: Sequence[str],
    layout: Layout,
    *,
    more: bool = True,
    pattern: str = "",
    alone: tuple[str, str] | None = None,
) -> str:
    """The commands for a page of ``files`` and, if there is ``more``, for all tables; empty without a file.

    ``pattern`` is what a shell finds those files by, if there is one; ``alone`` is one of them that is worth a look by
    itself, and what it is. A command is never broken or cut, so that it can be copied: where the names are too long, it
    has none.
    """
    if not files:
        return ""
    commands = [("ampmem report", "a page with all of it")]
    if more:
        commands.append(("ampmem show --all", "every table"))
    names = pattern or " ".join(shlex.quote(file) for file in files)
    longest = max(len(f"next: {command} {names}") for command, _ in commands)
    if longest > layout.width or printable(names) != names:
        names = "FILE" if len(files) == 1 else "FILE..."
    lines = [f"{command} {names}" for command, _ in commands]
    if alone is not None:
        line = f"ampmem show {shlex.quote(alone[0])}"
        if len(f"next: {line}") <= layout.width and printable(line) == line:
            lines.append(line)
            commands.append(("", alone[1]))
    width = max(map(len, lines))
    said = [f"{line:<{width}}  {what}" for line, (_, what) in zip(lines, commands, strict=True)]
    if max(map(len, said)) + 6 > layout.width:
        said = lines
    return "\n".join(f"{'next: ' if i == 0 else '      '}{line}" for i, line in enumerate(said))
