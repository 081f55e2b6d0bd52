"""``ampmem docs``: the documentation that is installed with ampmem, a page or a part of one."""

from __future__ import annotations

import click

from ampmem.documentation import headings, pages, parts
from ampmem.errors import UsageError
from ampmem.names import nearest


@click.command("docs")
@click.argument("topic", required=False)
def docs(topic: str | None) -> None:
    """Print a page of the documentation, or the part about a finding or under a heading.

    \b
    ampmem docs                   # the pages
    ampmem docs advise            # a page
    ampmem docs fp32-activations  # what a finding means, and what to do
    """
    if topic is None:
        widest = max(map(len, pages()))
        click.echo("\n".join(f"{name:{widest}}  {next(headings(text))[1]}" for name, text in pages().items()))
        return
    found = pages().get(topic) or parts().get(topic.lower())
    if found is None:
        meant = nearest(topic.lower(), [*pages(), *parts()]) or "."
        raise UsageError(f"the documentation has no {topic!r:.60}{meant} ampmem docs lists its pages")
    click.echo(found.rstrip())
